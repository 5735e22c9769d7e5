"""The training loop: resume, train, evaluate, stop.

A run that is stopped at any instant and restarted ends with the same bits as an
uninterrupted one: everything that determines the next step is in the checkpointed
`TrainState`, or a function of it.
"""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections

from xshard import callbacks, checkpoint, evaluation, hooks, logical, spans, validation
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard import step as step_lib
from xshard.files import compile_cache, workdir
from xshard.files import results as results_lib
from xshard.metrics import clock as clock_lib
from xshard.metrics import deferred, overview, writers
from xshard.metrics import log as log_lib
from xshard.metrics import rows as rows_lib
from xshard.metrics import terminal as terminal_lib
from xshard.metrics import writer as writer_lib
from xshard.pod import exit_codes, host_collectives, status
from xshard.pod import origin as origin_lib
from xshard.pod import request as request_lib
from xshard.pod import watchdog as watchdog_lib
from xshard.run import (
    dispatch,
    ending,
    group_keys,
    nonfinite,
    preflight,
    profiles,
    replication,
    resuming,
    roll_backs,
    saving,
)
from xshard.run import schedule as schedule_lib

# How long the processes wait for process 0, which reads and writes the run's files.
_FILES_SECONDS = 1800.0


class _Dispatched(NamedTuple):
    """Steps that were dispatched at once, which the host has not read.

    Attributes:
      chunk: the steps.
      newest: one of their results.
      fetched: what each hook will read of them.
    """

    chunk: step_lib.Chunk
    newest: jax.Array
    fetched: list[Any]


class Run:
    """A run of an experiment in a work directory.

    The constructor checks everything that it can without writing there. With several
    processes, each of them creates one and makes the same calls.

    Attributes:
      config: the run's config.
      workdir: the work directory.
      mesh: the mesh of all devices.
      experiment: the experiment.
      batches: the training batches.
      checkpoints: the run's checkpoints.
      roll_backs: the run's roll-backs.
      provenance: the data, the code and the machine of the run as they are now.
      changes: a line for each change since the run was started.
      dispatches: how the run dispatches its steps.
      train_step: the compiled program of its steps.
      predict: the compiled prediction, from host to host.
      clock: the clock of this process.
      terminal: the output to stdout.
      tracer: traces steps, if a user asks for it.
      step: the number of steps made; -1 before there is a state.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: str,
        init: checkpoint.Source | None = None,
        watch: watchdog_lib.Watchdog | None = None,
        show: terminal_lib.Show = terminal_lib.Show.NORMAL,
        set_aside: str = "",
    ):
        """Checks the config and the directory's contents, and traces all programs.

        Args:
          config: a run's config; see `configs/digits.py` for the keys.
          directory: the work directory, which need not exist.
          init: the checkpoint that initializes a new run.
          watch: reports requests to stop or save; several processes agree on them
            through it.
          show: how much to print.
          set_aside: the ID of a run to move aside, if the directory holds that run.

        Raises:
          ValueError: if a value does not fit; the message has the key, its value and
            the fix.
        """
        config_lib.check(config)
        writers.check(config.writers)
        self.config = config
        self.clock = clock_lib.Clock()
        self.terminal = terminal_lib.Terminal(config.steps, show)
        self.workdir = workdir.Workdir(directory)
        self.mesh = experiment_lib.mesh_of(config)
        # The experiment gets a copy that records what is read, from its constructor on.
        self.experiment = experiment_lib.of_config(config)
        self._init = init
        self._watch = watch
        self._is_process_0 = jax.process_index() == 0
        # Only process 0 needs to see the work directory. The others learn from it what
        # is there. A save in the background has exchanges of its own.
        self._exchange = host_collectives.Exchange("the run's files", _FILES_SECONDS)

        self._read_data()
        self._identify(set_aside)
        self._find_checkpoints()
        self._trace_programs()
        self._prepare_hooks()
        # Open from the first step to the results.
        self._resources = contextlib.ExitStack()

        # How far the run is, and the step that the present attempt began with.
        self.step = -1
        self._start = -1
        self._hooks: Sequence[hooks.Hook] = ()
        self._last_evaluated: tuple[int, dict[str, Any]] = (-1, {})
        self._stop: request_lib.Request | None = None
        self._is_save_requested = False

    def _read_data(self) -> None:
        """Opens the training and the evaluation data."""
        self.set_phase(status.READING)
        self.batches = preflight.train_batches(self.experiment, self.mesh)
        self.set_phase(status.READING_EVALUATION)
        self._evaluation = evaluation.Evaluation(
            self.experiment, self.mesh, self.config.eval_batch_size
        )
        self.set_phase(status.STARTING)

    def _identify(self, set_aside: str) -> None:
        """Finds out which run this is, and whether it may begin or resume here."""
        self._plan = resuming.identify(self.config, self.workdir, set_aside)
        self.provenance = origin_lib.find_provenance(
            type(self.experiment).__module__,
            self.batches.summary(),
            self._evaluation.summary(),
        )
        self.changes = list(self._plan.changes)
        if self._is_process_0 and not self._plan.sets_aside:
            self.changes += self.workdir.check_provenance(
                self.provenance, exact=logical.is_exact(self.config)
            )

    def _find_checkpoints(self) -> None:
        """Finds the checkpoints that the run resumes or begins from."""
        self.checkpoints = saving.Checkpoints(
            experiment=self.experiment,
            mesh=self.mesh,
            directory=self.workdir,
            run=self._plan,
            batches=self.batches,
            notify=self.terminal.say,
            provenance=self.provenance,
        )
        self.checkpoints.check_can_start(self._init)
        # The shapes of the run's state.
        self._target = self.checkpoints.manager.target
        self.roll_backs = roll_backs.RollBacks(
            config=self.config,
            directory=self.workdir,
            manager=self.checkpoints.manager,
            batches=self.batches,
            target=self._target,
            log=self.terminal.say,
            set_phase=self.set_phase,
            exchange=self._exchange,
            announce=self._write_ahead,
        )

    def _trace_programs(self) -> None:
        """Traces every program that the run will use, so that mistakes surface before
        training.
        """
        programs = preflight.programs(
            experiment=self.experiment,
            mesh=self.mesh,
            state=self._target,
            batch=self.batches.shapes(),
            larger=[self.batches.shapes(size) for size in self.batches.sizes.others],
            act=self.batches.rehearsal(),
            step_program=self.checkpoints.step_program(),
            waits=self._waits_for_batches(),
        )
        self.dispatches = programs.plan
        # With several processes, one that compiles longer than the others for this
        # would keep them waiting in a collective.
        train_step = programs.train_step
        if isinstance(train_step, logical.Program) and jax.process_count() == 1:
            train_step.compare_first_call(self.terminal.say)
        self.train_step = host_collectives.compiled_by_all(
            train_step, "the training step"
        )
        self.predict = evaluation.predictions(programs.predict, self.mesh)
        self._metrics = self._evaluation.check(self._target, self.config.checkpoint)

    def _waits_for_batches(self) -> bool:
        """Returns whether any of several processes draws its data batch by batch."""
        if jax.process_count() == 1:
            return False
        return not all(self._exchange.gather(self.batches.draws_many))

    def _prepare_hooks(self) -> None:
        """Prepares what the run does beside its steps."""
        self._schedule = schedule_lib.Schedule.of(self.config)
        self._queue: deferred.Queue[_Dispatched] = deferred.Queue()
        self._replica_check = replication.ReplicaCheck(self.experiment, self.mesh)
        self._nonfinite_check = self._new_nonfinite_check()
        self._log = log_lib.Log(
            directory=self.workdir,
            experiment=self.experiment,
            mesh=self.mesh,
            batches=self.batches,
            clock=self.clock,
            terminal=self.terminal,
        )
        # The callbacks may be slow, so their exchanges have a name of their own.
        decisions = host_collectives.Exchange(
            "what the callbacks say", callbacks.SECONDS
        )
        self._evaluations = callbacks.Evaluations(
            self.experiment.callbacks, self._metrics, decisions.gather
        )
        self.tracer = profiles.Tracer(
            self.workdir.path,
            self.terminal.say,
            self.set_phase,
            lambda: self.clock.phase(clock_lib.TRACE),
        )
        where = validation.describe_method(self.experiment.hooks)
        self._own_hooks = hooks.check(where, self.experiment.hooks())
        self._spans = spans.File(
            directory=self.workdir.path,
            index=jax.process_index(),
            host=socket.gethostname(),
            parts=self.clock.parts,
            say=self.terminal.say,
        )

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Claims the work directory and the checkpoints for this run.

        At the end it waits for the last save.
        """
        with contextlib.ExitStack() as stack:
            if self._is_process_0:
                claim = self.workdir.opened(
                    self.config,
                    identity=self._plan.identity,
                    provenance=self.provenance,
                    set_aside=self._plan.sets_aside,
                    step_program=self.dispatches.program,
                )
                stack.enter_context(claim)
            stack.enter_context(self._compile_cache())
            stack.enter_context(self.checkpoints.opened())
            if self._watch is not None:
                self._watch.publish()
                self.tracer.watch_file(self._watch)
                self._watch.in_each_tick(self._spans.flush)
                stack.enter_context(self._spans.opened())
            stack.enter_context(self._resources)
            yield
            if self._log.outcome is None:
                # The caller has only made steps.
                self.end(ending.outcome(self._stop))

    def _compile_cache(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which compiled programs are cached."""
        shared = self.config.get("compiled", {}).get("directory", "")
        own = self.workdir.path / compile_cache.FOLDER
        return compile_cache.enabled(
            checkpoint.Store(shared or own, is_optional=True),
            self.terminal.say,
            flags=self.provenance.flags,
            chip=self.provenance.chip,
            is_shared=bool(shared),
        )

    def complete(
        self,
    ) -> tuple[state_lib.TrainState, request_lib.Request | None, dict[str, Any]]:
        """Trains, evaluates the last state and writes the results.

        Returns:
          The results of `train`, and those written; empty if a request stopped the run.
        """
        state, stop = self.train()
        metrics = None
        if stop is None:
            # The last checkpoint is being written in the background meanwhile.
            metrics = self.evaluate(state)
        results: dict[str, Any] = {}
        self.set_phase("saving")
        if metrics is not None:
            self.checkpoints.wait()
            why = (
                self.checkpoints.nonfinite(self.step)
                or self._nonfinite_check.failure()
                or self._earlier_failure()
                or ending.nonfinite_metrics(self.step, metrics)
            )
            results = ending.results(
                mesh=self.mesh,
                step=self.step,
                state=state,
                metrics=metrics,
                end=self._evaluations.end,
            )
            results["finite"] = not why
            results["why"] = why
            try:
                if not why:
                    results["samples"] = self._sample(self.step, state, is_last=True)
            finally:
                # Results are written even if sampling fails.
                if self._is_process_0:
                    results_lib.write(self.workdir, results)
        with self.roll_backs.tolerate_nonfinite_save(is_stopped=self._stop is not None):
            self.checkpoints.wait()
        self.end(ending.outcome(self._stop, results))
        return state, self._stop, results

    def end(self, outcome: writer_lib.Outcome) -> None:
        """Notes how the run ends, which the writers are told when they are closed."""
        self._log.outcome = outcome

    def train(self) -> tuple[state_lib.TrainState, request_lib.Request | None]:
        """Trains to the last step, or until a callback or a request ends it earlier.

        Each call starts from the newest checkpoint and discards later progress.

        Returns:
          The state; and the request that stopped the run before its end, or None.

        Raises:
          NonfiniteError: of `nonfinite` or `checkpoint`, if the run ends because values
            are not finite.
          ReplicaDivergenceError: if it ends because replicas differ.
        """
        state = self._begin()
        newest: jax.Array | None = None
        while self.step < self.config.steps and not self._is_over():
            first = self.step + 1
            for hook in self._hooks:
                state = hook.prepare(first, state)
            if newest is None:
                self.set_phase(status.READING)
            with self.clock.waiting(newest):
                batch, count = self._draw(range(first, self._next_due() + 1), state)

            # The host only dispatches the steps, and does not wait for them.
            self._announce(first)
            with spans.Span(spans.STEP):
                chunk = dispatch.dispatch(
                    self.dispatches, self.train_step, first, count, state, batch
                )
            state = chunk.stepped.state
            newest = next(iter(chunk.stepped.metrics.values()), None)
            if newest is None:
                # The steps log nothing. The next one donates their state.
                newest = jnp.copy(state.step)
            self.step = chunk.last
            if first == self._start + 1:
                self._note_compiled(state)

            # What the host reads of these steps is on its way. It reads earlier ones.
            fetched = [hook.fetch(chunk) for hook in self._hooks]
            dispatched = _Dispatched(chunk, newest, fetched)
            self._read(self._queue.push(dispatched, count), state)
            self._act(state)
        self.tracer.finish(newest)
        self._flush(state)
        self.terminal.close()
        return state, self._stop

    def dispatch_step(self, step: int, state: state_lib.TrainState) -> step_lib.Chunk:
        """Dispatches one step, and nothing that a run does beside it.

        Args:
          step: the number of the step.
          state: the state before it, which is donated.
        """
        steps = range(step, step + 1)
        batch, count = dispatch.draw(
            self.dispatches, steps, self.batches, self.predict, state
        )
        return dispatch.dispatch(
            self.dispatches, self.train_step, step, count, state, batch
        )

    def _make_hooks(self) -> list[hooks.Hook]:
        """Returns what the run does beside its steps, in the order of causes."""
        return [
            # Replicas are compared first: a flipped bit may also be non-finite, and
            # then a roll-back must not skip the data.
            self._replica_check,
            self._log,
            self._nonfinite_check,
            # After steps have been dispatched.
            hooks.Call(self._note_progress, is_due=lambda step: True),
            hooks.Call(self._take_requests, is_due=self._may_stop_after),
            hooks.Call(
                self._evaluate_and_log,
                next_due=self._schedule.next_evaluation,
                is_due=self._is_evaluation_due,
            ),
            hooks.Call(
                self._sample,
                next_due=self._schedule.next_samples,
                is_due=self._is_sample_due,
            ),
            *self._own_hooks,
            hooks.Call(
                self._save, next_due=self._schedule.next_save, is_due=self._is_save_due
            ),
            # Raises if the last save in the background has failed.
            hooks.Call(lambda *_: self.checkpoints.check(), is_due=lambda step: True),
            # Before further steps are dispatched.
            self.roll_backs,
            self.tracer,
        ]

    def _draw(
        self, steps: range, state: state_lib.TrainState
    ) -> tuple[dict[str, jax.Array], int]:
        """Returns the batches of steps, and for how many of them they are."""
        try:
            return dispatch.draw(
                self.dispatches, steps, self.batches, self.predict, state
            )
        except Exception:
            # The steps that have been made have their rows, whatever became of the
            # data.
            self._flush(state)
            raise

    def _act(self, state: state_lib.TrainState) -> None:
        """Lets the hooks act that are due after the steps dispatched so far."""
        for hook in self._hooks:
            if not hook.is_due(self.step):
                continue
            if hook in self._own_hooks:
                # Nobody is shown a state after a step in trouble.
                self._flush(state)
            hook.act(self.step, state)

    def _next_due(self) -> int:
        """Returns the last step that may be dispatched with the next one."""
        due = min(hooks.next_due(hook, self.step) for hook in self._hooks)
        due = min(due, self.batches.next_boundary(self.step + 1))
        return min(due, self.step + self.dispatches.most, self.config.steps)

    def _announce(self, first: int) -> None:
        """Tells what the run does before it dispatches steps."""
        has_grown = self.batches.sizes.changes_at(first)
        if has_grown:
            size = self.batches.sizes.at(first)
            self.terminal.say(f"step {first}: batches of {size} examples from here")
        if has_grown or first == self._start + 1:
            self.set_phase("compiling")

    def _note_compiled(self, state: state_lib.TrainState) -> None:
        """Starts the clock after the first dispatch, which has compiled the program."""
        self.clock.started()
        self.terminal.start(self._start)
        self._replica_check.compile_ahead(state)

    def _note_progress(self, step: int, state: state_lib.TrainState) -> None:
        del state
        self.terminal.progress(step)
        self.set_phase(status.TRAINING, step=step)

    def _may_stop_after(self, step: int) -> bool:
        """Returns whether requests are taken after a step.

        They are not where no position in the data can be saved.
        """
        del step
        return not self.batches.holds_batch

    def _take_requests(self, step: int, state: state_lib.TrainState) -> None:
        """Takes a request, if any, and requests a save if the clock says so."""
        del step, state
        self._take_request()
        # Clocks differ, so only process 0's decides; the others are told.
        if self._is_process_0 and self._save_interval.has_passed():
            self._request_save()

    def _is_evaluation_due(self, step: int) -> bool:
        return self._stop is None and self._schedule.evaluation(step)

    def _is_sample_due(self, step: int) -> bool:
        return self._schedule.samples(step) and not self._is_over()

    def _is_save_due(self, step: int) -> bool:
        is_asked = self._is_save_requested or self._is_over()
        return is_asked or self._schedule.save(step)

    def resume_or_init(self) -> resuming.StartState:
        """Restores the newest checkpoint, or creates a new state."""
        return self.checkpoints.resume_or_init(self._init)

    def evaluate(self, state: state_lib.TrainState) -> dict[str, Any] | None:
        """Evaluates a state, unless it is the one that was evaluated last.

        Returns:
          The metrics by name, as lists if there are several groups; None if a stop
          interrupts the evaluation.
        """
        step = int(state.step)
        if self._last_evaluated[0] != step:
            self.set_phase(status.EVALUATING)
            with self.clock.phase(clock_lib.EVALUATION):
                for metrics in self._evaluation.by_batch(state):
                    if metrics is not None:
                        self._last_evaluated = (step, metrics)
                        continue
                    self._take_request()
                    if self._stop is not None:
                        return None
        return self._last_evaluated[1]

    def set_phase(self, phase: str, **more: int) -> None:
        """Publishes what the run does now in its status."""
        if self._watch is not None:
            self._watch.set_phase(
                phase, seconds=self.clock.seconds, parts=self.clock.parts, **more
            )

    def _begin(self) -> state_lib.TrainState:
        """Restores the newest checkpoint, or creates a first state, and opens the log.

        It also begins again after a roll-back.
        """
        # After a roll-back the previous log is still open, and the steps in flight will
        # be made again.
        self._resources.close()
        self._queue.flush()
        self.set_phase("restoring")
        # Roll-backs come first, since they give up checkpoints.
        self.roll_backs.begin()
        # The restored state determines the step, and with it all later batches and
        # keys.
        begin = self.resume_or_init()
        start = int(begin.state.step)
        store = self.checkpoints.manager.store
        if begin.fingerprints is not None:
            self._replica_check.check_restored(
                begin.state, begin.fingerprints, str(store)
            )
        self.checkpoints.record_restored_step(begin)
        self._last_evaluated = (-1, {})
        self._nonfinite_check = self._new_nonfinite_check(begin.watched)
        self._evaluations.begin(
            lambda: rows_lib.evaluations(self.workdir.metrics, start)
        )
        if self.step < 0:
            self._print_overview(begin.state)
        self.terminal.say(
            overview.plan(start, self.config.steps, store, self._evaluations.end)
        )
        self.step = start
        if start < self.config.steps and not self._is_over():
            self._exchange.on_process_0(
                lambda: results_lib.discard_early_end(self.workdir)
            )
        # The log drops rows after the checkpoint, because the run repeats their steps.
        self._resources.enter_context(self._log.opened(start))
        self._resources.callback(self.tracer.cut_short)
        self.checkpoints.check_rows(begin, self._log)
        self._hooks = self._make_hooks()
        self._start = start
        self._save_interval = clock_lib.Every(60 * self.config.checkpoint.every_minutes)
        self.set_phase("compiling", step=start, steps=self.config.steps)
        self._make_up_for_stop(begin)
        if not begin.folder and self.roll_backs.may_roll_back:
            # The first roll-back may go back to the beginning.
            self._save(start, begin.state, is_evaluation_due=False)
        return begin.state

    def _new_nonfinite_check(self, saved: Any = None) -> nonfinite.NonfiniteCheck:
        """Returns the check of a new run, or of one that resumes with a saved state."""
        learners = state_lib.learners(self._target)
        return nonfinite.NonfiniteCheck(
            config=self.config,
            mesh=self.mesh,
            learners=learners,
            log=self.terminal.say,
            saved=saved,
        )

    def _print_overview(self, state: state_lib.TrainState) -> None:
        text = overview.begin(
            self.config,
            self.mesh,
            state_lib.params(state),
            self.changes,
            whole=self.terminal.verbose,
        )
        self.terminal.say(text)
        self.terminal.say(str(self.dispatches))
        warnings = preflight.warnings(
            self.experiment, self.config, self._target, self._metrics
        )
        for line in warnings:
            self.terminal.say(line)
        example = self.batches.example
        for line in group_keys.notes(self.experiment, state, example):
            self.terminal.say(line)

    def _make_up_for_stop(self, begin: resuming.StartState) -> None:
        """Makes the evaluation and the samples that are due at the restored step.

        A stop left them out when the step was saved. Their rows may exist already, from
        an earlier start.
        """
        step = self.step
        if step == 0:
            return
        if not begin.evaluated:
            metrics = self.checkpoints.find_late_evaluation(step)
            if metrics is None:
                self._evaluate_and_log(step, begin.state)
            else:
                self._last_evaluated = (step, metrics)
            if self._stop is None:
                self.checkpoints.add_late_evaluation(
                    step, self._last_evaluated[1], self._log
                )
        if not self._schedule.samples(step) or self._is_over():
            return
        if self._exchange.on_process_0(self._log.sampled) < step:
            self._sample(step, begin.state)

    def _earlier_failure(self) -> str:
        """Returns why an earlier start ended the run as not finite; empty if none did.

        A run that has made steps since has discarded the earlier results.
        """
        return self._exchange.on_process_0(
            lambda: results_lib.nonfinite_reason(self.workdir.path)
        )

    def _is_over(self) -> bool:
        """Returns whether a request stopped the run, or a callback ended it."""
        return self._stop is not None or bool(self._evaluations.end)

    def _read(
        self, dispatches: Sequence[_Dispatched], newest: state_lib.TrainState
    ) -> None:
        """Lets the hooks read steps, in the order of the steps.

        Args:
          dispatches: the steps, which are no longer to stay in flight.
          newest: the state after the step that was dispatched last.
        """
        for dispatched in dispatches:
            # One program computes all results, so waiting for one of them is enough.
            with spans.Span(spans.STEP):
                dispatched.newest.block_until_ready()
            chunk = dispatched.chunk
            pairs = zip(self._hooks, dispatched.fetched, strict=True)
            readers = [(hook, x) for hook, x in pairs if x is not None]
            for step in chunk.steps:
                place = chunk.place(step)
                for hook, fetched in readers:
                    hook.read(step, place, fetched, newest)

    def _write_ahead(self, row: rows_lib.Row, newest: state_lib.TrainState) -> None:
        """Writes a row about the next step, after those of all earlier steps."""
        self._flush(newest)
        self._log.write_ahead(row)

    def _flush(self, newest: state_lib.TrainState) -> None:
        """Reads all steps so far; waits for them."""
        self._read(self._queue.flush(), newest)
        self._log.flush()

    def _take_request(self) -> None:
        """Takes the request, if any, that all processes act on at this point.

        All processes call it at the same points of the run.
        """
        if self._watch is None:
            return
        request = self._watch.poll()
        if request is None:
            return
        if request.kind == request_lib.STOP:
            self._stop = request
        elif request.kind == request_lib.PROFILE:
            self.tracer.ask(self.step + 1, request.steps)
        else:
            self._is_save_requested = True

    def _request_save(self) -> None:
        """Requests a save by this process's clock.

        It is made at a step that all processes agree on.
        """
        if jax.process_count() == 1:
            self._is_save_requested = True
        elif self._watch is not None:
            self._watch.ask(request_lib.BY_CLOCK)

    def _evaluate_and_log(self, step: int, state: state_lib.TrainState) -> None:
        self._flush(state)
        metrics = self.evaluate(state)
        if metrics is not None:
            self._log.write_evaluation(step, metrics)
            # A process whose callbacks are slow keeps the others waiting.
            with self.clock.phase(clock_lib.EVALUATION):
                self._evaluations.add(step, metrics)

    def _sample(
        self, step: int, state: state_lib.TrainState, *, is_last: bool = False
    ) -> str:
        """Logs the samples of a state; returns them as text."""
        # None are shown of a state after a step in trouble.
        self._flush(state)
        with self.clock.phase(clock_lib.EVALUATION):
            row, text = evaluation.sample(self.experiment, self.predict, step, state)
        if row["samples"]:
            self._log.write_samples(row)
            # The last ones are printed with the results.
            if not is_last:
                self.terminal.say(f"step {step}  samples:\n{text}")
        return text

    def _save(
        self,
        step: int,
        state: state_lib.TrainState,
        *,
        is_evaluation_due: bool | None = None,
    ) -> None:
        """Checks the steps so far, and begins to save the state in the background."""
        if is_evaluation_due is None:
            is_evaluation_due = self._schedule.evaluation(step)
        # A resumed run keeps the rows up to the checkpoint, so they are written first.
        # The save makes them durable before it commits.
        self._flush(state)
        self._is_save_requested = False
        is_evaluated = self._last_evaluated[0] == step
        metrics: dict[str, Any] = {}
        if is_evaluated:
            metrics = self._last_evaluated[1]
        with self.clock.phase(clock_lib.CHECKPOINT):
            noted = {
                "evaluated": is_evaluated or not is_evaluation_due,
                "watched": self._nonfinite_check.get_state(),
                "fingerprint": self._replica_check.fingerprints_of(state),
                saving.STEP_PROGRAM: self.dispatches.program,
            }
            self.checkpoints.save(
                step, state, metrics=metrics, noted=noted, log=self._log
            )


def run(
    config: ml_collections.ConfigDict,
    directory: str,
    command: str,
    init: checkpoint.Source | None = None,
    watch: watchdog_lib.Watchdog | None = None,
    show: terminal_lib.Show = terminal_lib.Show.NORMAL,
    set_aside: str = "",
) -> int:
    """Runs an experiment to its end, from its newest checkpoint if there is one.

    Args:
      config: a run's config, locked.
      directory: the work directory.
      command: the command that resumes the run, to print.
      init: the checkpoint that initializes a new run.
      watch: reports requests to stop or save; required with several processes.
      show: how much to print.
      set_aside: as in `Run`.

    Returns:
      The process's exit code: 0 done; 3 not finite; otherwise the code of the request
      that stopped it, the state saved.
    """
    current = Run(
        config,
        directory,
        init=init,
        watch=watch,
        show=show,
        set_aside=set_aside,
    )
    with current.opened():
        try:
            state, stop, results = current.roll_backs.retry(current.complete)
        except (nonfinite.NonfiniteError, checkpoint.NonfiniteError) as e:
            current.end(ending.nonfinite_outcome(str(e)))
            current.terminal.close()
            kept = current.checkpoints.kept()
            ending.fail(e.step, str(e), kept, current.workdir)
            return exit_codes.NONFINITE
        except jax.errors.JaxRuntimeError as e:
            profiles.note_memory(current.workdir.path, e)
            raise
    store = current.checkpoints.manager.store
    if stop is not None:
        return ending.stopped(stop, int(state.step), store, command)
    return ending.announce(
        results,
        directory=current.workdir,
        store=store,
        steps=config.steps,
        command=command,
    )
