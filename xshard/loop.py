"""The training loop: resume, train, evaluate, stop.

A run that is stopped at any instant and restarted ends with the same bits as an
uninterrupted one: everything that determines the next step is in the checkpointed
`TrainState`, or a function of it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from xshard import callbacks, checkpoint, hooks, logical
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard.base import clock as clock_lib
from xshard.base import places, spans
from xshard.files import claim as claim_lib
from xshard.files import compile_cache, workdir
from xshard.files import results as results_lib
from xshard.learners import learner, validation
from xshard.metrics import deferred, overview, writers
from xshard.metrics import log as log_lib
from xshard.metrics import rows as rows_lib
from xshard.metrics import terminal as terminal_lib
from xshard.metrics import writer as writer_lib
from xshard.pod import exit_codes, host_collectives, status
from xshard.pod import members as members_lib
from xshard.pod import origin as origin_lib
from xshard.pod import request as request_lib
from xshard.pod import watchdog as watchdog_lib
from xshard.run import (
    checkpoints,
    dispatch,
    ending,
    evaluation,
    group_keys,
    nonfinite,
    preflight,
    replication,
    resuming,
    roll_backs,
)
from xshard.run import schedule as schedule_lib
from xshard.training import state as state_lib
from xshard.training import step as step_lib

# How long the processes wait for process 0, which reads and writes the run's files.
_FILES_SECONDS = 1800.0
# How many values of a batch members compare.
_NOTED_VALUES = 1000
# What a wing may recover a run from.
_TROUBLE = (nonfinite.NonfiniteError, replication.ReplicaDivergenceError)


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
      past: the run's roll-backs.
      target: the shapes of the run's state.
      log: the run's log.
      members: the members of the run, one of which leads.
      channel: the processes' channel about the run's files.
      watch: reports requests to stop or save; None if there are none.
      provenance: the data, the code and the machine of the run as they are now.
      changes: a line for each change since the run was started.
      dispatches: how the run dispatches its steps.
      train_step: the compiled program of its steps.
      predict: the compiled prediction, from host to host.
      clock: the clock of this process.
      terminal: the output to stdout.
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
        wings: Sequence[type[hooks.Wing]] = (),
        members: members_lib.Members | None = None,
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
          wings: what the run has beside its core, such as
            `xshard.wings.installed.WINGS`.
          members: the members of the run; by default the processes that JAX has joined.

        Raises:
          ValueError: if a value does not fit; the message has the key, its value and
            the fix.
        """
        config_lib.check(config)
        self._wing_names = [wing.name for wing in wings]
        measures = [measure.name for measure in learner.MEASURES]
        config_lib.check_wings(config, [*self._wing_names, *measures])
        writers.check(config.writers, wings)
        self.config = config
        self.clock = clock_lib.Clock()
        self.terminal = terminal_lib.Terminal(config.steps, show)
        self.workdir = workdir.Workdir(directory)
        self.mesh = experiment_lib.mesh_of(config)
        # The experiment gets a copy that records what is read, from its constructor on.
        self.experiment = experiment_lib.of_config(config)
        self._init = init
        self.watch = watch
        self._place = places.own()
        self.members = members or members_lib.Members()
        # Only process 0 needs to see the work directory. The others learn from it what
        # is there. A save in the background has a channel of its own.
        self.channel = self.members.channel("the run's files", _FILES_SECONDS)

        self._read_data()
        self._identify(set_aside)
        self._find_checkpoints()
        self._wings = [wing(self) for wing in wings]
        self._trace_programs()
        self._prepare_hooks()
        # Open from the first step to the results.
        self._resources = contextlib.ExitStack()

        # How far the run is, and the step that the present attempt began with.
        self.step = -1
        self._start = -1
        self._hooks: Sequence[hooks.Hook] = ()
        # The step after which each of them acts next.
        self._dues: list[int] = []
        self._last_evaluated: tuple[int, dict[str, Any]] = (-1, {})
        self._stop: request_lib.Request | None = None
        # The number of rows before the last save.
        self._rows_saved = 0
        self._is_save_requested = False
        # Whether processes wait for a place, and whether they have one.
        self._has_arrivals = False
        self._begins_again = False

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
        self._plan = resuming.identify(
            self.config, self.workdir, set_aside, self.channel
        )
        self.provenance = origin_lib.find_provenance(
            type(self.experiment).__module__,
            self.batches.summary(),
            self._evaluation.summary(),
            self.members.channel("comparing the data", _FILES_SECONDS),
        )
        self.changes = list(self._plan.changes)
        if self.members.leads and not self._plan.sets_aside:
            self.changes += self.workdir.check_provenance(
                self.provenance, exact=logical.is_exact(self.config)
            )

    def _find_checkpoints(self) -> None:
        """Finds the checkpoints that the run resumes or begins from."""
        self.checkpoints = checkpoints.Checkpoints(
            experiment=self.experiment,
            mesh=self.mesh,
            directory=self.workdir,
            run=self._plan,
            batches=self.batches,
            notify=self.terminal.say,
            provenance=self.provenance,
            members=self.members,
        )
        self.checkpoints.check_can_start(self._init)
        # The shapes of the run's state.
        self.target = self.checkpoints.target
        self.past = roll_backs.Past(
            directory=self.workdir,
            manager=self.checkpoints.manager,
            batches=self.batches,
            channel=self.channel,
            announce=self._write_ahead,
        )

    def _trace_programs(self) -> None:
        """Traces every program that the run will use, so that mistakes surface before
        training.
        """
        asks: list[preflight.PredictionCaller] = []
        for wing in self._wings:
            asks += wing.predictions()
        programs = preflight.programs(
            experiment=self.experiment,
            mesh=self.mesh,
            state=self.target,
            batch=self.batches.shapes(),
            act=self.batches.rehearsal(),
            asks=asks,
            step_program=self.checkpoints.step_program(),
            waits=not all(self.channel.gather(self.batches.draws_many)),
            exchange=self.members.exchange,
        )
        self.dispatches = programs.plan
        # With several processes, one that compiles longer than the others for this
        # would keep them waiting in a collective.
        train_step = programs.train_step
        if isinstance(train_step, logical.Program) and self._place.count == 1:
            train_step.compare_first_call(self.terminal.say)
        self.train_step = host_collectives.compiled_by_all(
            train_step, "the training step"
        )
        self.predict = evaluation.predictions(programs.predict, self.mesh)
        self._metrics = self._evaluation.check(self.target, self.config.checkpoint)

    def _prepare_hooks(self) -> None:
        """Prepares what the run does beside its steps."""
        self._schedule = schedule_lib.Schedule.of(self.config)
        self._queue: deferred.Queue[_Dispatched] = deferred.Queue()
        self._replica_check = replication.ReplicaCheck(self.experiment, self.mesh)
        self._nonfinite_check = self._new_nonfinite_check()
        self.log = log_lib.Log(
            directory=self.workdir,
            experiment=self.experiment,
            mesh=self.mesh,
            batches=self.batches,
            clock=self.clock,
            terminal=self.terminal,
            members=self.members,
            wings=self._wings,
        )
        # The callbacks may be slow, so their channel has a name of its own.
        decisions = self.members.channel("what the callbacks say", callbacks.SECONDS)
        self._evaluations = callbacks.Evaluations(
            self.experiment.callbacks,
            self._metrics,
            decisions.on_process_0,
            may_decide=self.members.may_lead,
        )
        where = validation.describe_method(self.experiment.hooks)
        self._own_hooks = hooks.check(where, self.experiment.hooks())
        self._spans = clock_lib.SpanFile(
            directory=self.workdir.path,
            index=self.members.number,
            clock=self.clock,
            say=self.terminal.say,
        )

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Claims the work directory and the checkpoints for this run.

        At the end it waits for the last save.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.members.while_leading(self._claim))
            stack.enter_context(self._compile_cache())
            stack.enter_context(self.checkpoints.opened())
            if self.watch is not None:
                stack.enter_context(self.members.while_leading(self._published))
                self.watch.in_each_tick(self._spans.flush)
                stack.callback(self._spans.flush, is_last=True)
            for wing in self._wings:
                wing.opened()
            stack.enter_context(self._resources)
            yield
            if self.log.outcome is None:
                # The caller has only made steps.
                self.end(ending.outcome(self._stop))

    def _claim(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the work directory is this process's."""
        return self.workdir.opened(
            self.config,
            identity=self._plan.identity,
            provenance=self.provenance,
            set_aside=self._plan.sets_aside,
            step_program=self.dispatches.program,
        )

    @contextlib.contextmanager
    def _published(self) -> Iterator[None]:
        """Lets the watch write the status into the work directory."""
        if self.watch is not None:
            self.watch.publish()
        yield

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
            is_seen=bool(shared) or self._do_all_see_the_directory(),
        )

    def _do_all_see_the_directory(self) -> bool:
        """Returns whether all processes see the work directory, which process 0 has
        claimed.
        """

        def holder() -> str:
            return claim_lib.holder(self.workdir.path)

        # It is new in each start, so a copy of the directory has another.
        claimed = self.channel.on_process_0(holder)
        return all(self.channel.gather(holder() == claimed != ""))

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
                    for wing in self._wings:
                        results |= wing.results(self.step, state)
            finally:
                # Results are written even if a wing, such as the samples, fails.
                self.members.by_leader(
                    "the results", lambda: self._write_results(results)
                )
        try:
            self.checkpoints.wait()
        except checkpoint.NonfiniteError as e:
            # The resumed run makes these steps again, and then recovers as a run that
            # was never stopped.
            if self._stop is None or not self._recovers_from(nonfinite.NonfiniteError):
                raise
            self.terminal.say(
                f"not saved: {e}; the run resumes from the checkpoint before"
            )
        self.end(ending.outcome(self._stop, results))
        return state, self._stop, results

    def _write_results(self, results: dict[str, Any]) -> None:
        """Writes the results, if this process leads."""
        if self.members.leads:
            results_lib.write(self.workdir, results)

    def complete_or_recover(
        self,
    ) -> tuple[state_lib.TrainState, request_lib.Request | None, dict[str, Any]]:
        """Completes the run, in further attempts if a wing recovers it from an error.

        Returns:
          What `complete` returns.

        Raises:
          NonfiniteError: of `nonfinite`, if no wing recovers it from a step that is not
            finite, or from a state that is not.
          ReplicaDivergenceError: if none recovers it from replicas that differ.
        """
        while True:
            trouble: Exception
            # The traceback of an exception keeps the arrays of the attempt alive.
            try:
                return self.complete()
            except checkpoint.NonfiniteError as e:
                # Its losses are finite, so only saves detect it. One outside the
                # schedule detects it earlier; all count as the next in the schedule.
                step = self._schedule.scheduled_save(e.step)
                trouble = nonfinite.NonfiniteError(str(e), step)
            except _TROUBLE as e:
                trouble = e.with_traceback(None)
            if not any(wing.recover(trouble) for wing in self._wings):
                raise trouble

    def _recovers_from(self, error: type[Exception]) -> bool:
        """Returns whether a wing may recover the run from errors of a type."""
        return any(wing.recovers_from(error) for wing in self._wings)

    def note(self, error: Exception) -> None:
        """Lets wings add notes to an error that ends the run."""
        for wing in self._wings:
            wing.note(error)

    def end(self, outcome: writer_lib.Outcome) -> None:
        """Notes how the run ends, which the writers are told when they are closed."""
        self.log.outcome = outcome

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
        while self.step < self.config.steps and not self.is_over:
            first = self.step + 1
            for hook in self._hooks:
                state = hook.prepare(first, state)
            steps = range(first, self._last_to_dispatch() + 1)
            if newest is None:
                self.set_phase(status.READING)
            with self.clock.waiting(newest):
                batch, count = self._draw(steps, state)
            if self.members.exchange is not None:
                _note(self.members, batch)

            # The host only dispatches the steps, and does not wait for them.
            if first == self._start + 1:
                self.set_phase("compiling")
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
            if self._begins_again:
                self._begins_again = False
                state = self._begin()
                newest = None
        for wing in self._wings:
            wing.finish(state)
        self.flush(state)
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
            self.past,
            # Replicas are compared first: a flipped bit may also be non-finite, and
            # then a roll-back must not skip the data.
            self._replica_check,
            self.log,
            self._nonfinite_check,
            *self._wings,
            *self._own_hooks,
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
            self.flush(state)
            raise

    def _act(self, state: state_lib.TrainState) -> None:
        """Acts after the steps dispatched so far, in the order of causes."""
        step = self.step
        self.terminal.progress(step)
        self.set_phase(status.TRAINING, step=step)
        # Requests are not taken where no position in the data can be saved.
        if not self.batches.holds_batch:
            self._take_requests()
        if self._stop is None and self._schedule.evaluation(step):
            self._evaluate_and_log(step, state)
        for hook, due in zip(self._hooks, self._dues, strict=True):
            if due != step:
                continue
            shown = state
            if hook in self._own_hooks:
                # Nobody is shown a state after a step in trouble.
                self.flush(state)
                # What a user's code writes into containers must not train.
                shown = jax.tree.map(lambda x: x, state)
            hook.act(step, shown)
        is_save_asked = self._is_save_requested or self.is_over
        if is_save_asked or self._schedule.save(step):
            self._save(step, state)
        # Raises if the last save in the background has failed.
        self.checkpoints.check()
        if self._has_arrivals and not self.is_over and step < self.config.steps:
            self._admit(step)

    def _last_to_dispatch(self) -> int:
        """Returns the last step that may be dispatched with the next one."""
        for index, hook in enumerate(self._hooks):
            # A hook is asked again once it has acted, and not after each dispatch, so
            # that it acts after the same steps however many are dispatched at once.
            if self._dues[index] <= self.step:
                self._dues[index] = hooks.next_due(hook, self.step)
        return min(
            *self._dues,
            self._schedule.next_evaluation(self.step),
            self._schedule.next_save(self.step),
            self.batches.next_boundary(self.step + 1),
            self.step + self.dispatches.most,
        )

    def _note_compiled(self, state: state_lib.TrainState) -> None:
        """Starts the clock after the first dispatch, which has compiled the program."""
        self.clock.started()
        self.terminal.start(self._start)
        self._replica_check.compile_ahead(state)

    def _take_requests(self) -> None:
        """Takes a request, if any, and requests a save if the clock says so."""
        self._take_request()
        # Clocks differ, so only process 0's decides; the others are told.
        if self.members.leads and self._save_interval.has_passed():
            self._request_save()

    def _admit(self, step: int) -> None:
        """Lets processes join the run, which all members begin again from here."""
        self._has_arrivals = False
        self.checkpoints.wait()
        self.members.admit(step)
        self._begins_again = True

    def _compile_ahead(self) -> None:
        """Compiles what the steps and the evaluation need, while others make them."""
        self.set_phase("compiling")
        if isinstance(self.train_step, logical.Program):
            self.train_step.lower(self.target, self.batches.shapes()).compile()
        self._evaluation.compile(self.target)

    def resume_or_init(self) -> resuming.Point:
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
            with spans.Span(spans.EVALUATION):
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
        if self.watch is not None:
            self.watch.set_phase(phase, seconds=self.clock.seconds, **more)

    def _begin(self) -> state_lib.TrainState:
        """Restores the newest checkpoint, or creates a first state, and opens the log.

        It also begins again after a roll-back.
        """
        # After a roll-back the previous log is still open, and the steps in flight will
        # be made again.
        self._resources.close()
        self._queue.flush()
        if self.members.is_outside:
            self._compile_ahead()
            self.set_phase("waiting for a place")
            self.members.enter()
        self.set_phase("restoring")
        # Roll-backs come first, since they give up checkpoints.
        self.past.begin()
        # The restored state determines the step, and with it all later batches and
        # keys.
        begin = self.resume_or_init()
        start = int(begin.state.step)
        store = self.checkpoints.manager.store
        if begin.fingerprint is not None:
            self._replica_check.check_restored(
                begin.state, begin.fingerprint, str(store)
            )
        self.checkpoints.record_restored_step(begin)
        self._last_evaluated = (-1, {})
        self._nonfinite_check = self._new_nonfinite_check(begin.watched)
        for wing in self._wings:
            wing.restored(begin.watched or {})
        self._evaluations.begin(
            lambda: rows_lib.evaluations(self.workdir.metrics, start)
        )
        if self.step < 0:
            self._print_overview(begin.state)
        self.terminal.say(
            overview.plan(start, self.config.steps, store, self._evaluations.end)
        )
        self.step = start
        if start < self.config.steps and not self.is_over:
            self.channel.on_process_0(
                lambda: results_lib.discard_early_end(self.workdir)
            )
        # The log drops rows after the checkpoint, because the run repeats their steps.
        self._resources.enter_context(self.log.opened(start))
        for wing in self._wings:
            self._resources.callback(wing.close)
        self.checkpoints.check_rows(begin, self.log)
        self._hooks = self._make_hooks()
        self._dues = [start] * len(self._hooks)
        self._start = start
        self._save_interval = clock_lib.Every(60 * self.config.checkpoint.every_minutes)
        self.set_phase("compiling", step=start, steps=self.config.steps)
        self._make_up_for_stop(begin)
        may_recover = any(map(self._recovers_from, _TROUBLE))
        if not begin.folder and may_recover:
            # The first recovery may go back to the beginning.
            self._save(start, begin.state, is_evaluation_due=False)
        return begin.state

    def _new_nonfinite_check(self, saved: Any = None) -> nonfinite.NonfiniteCheck:
        """Returns the check of a new run, or of one that resumes with a saved state."""
        learners = state_lib.learners(self.target)
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
            self.experiment, self.config, self.target, self._metrics, self._wing_names
        )
        for line in warnings:
            self.terminal.say(line)
        example = self.batches.example
        for line in group_keys.notes(self.experiment, state, example):
            self.terminal.say(line)

    def _make_up_for_stop(self, begin: resuming.Point) -> None:
        """Makes the evaluation that is due at the restored step, and lets wings do so.

        A stop left it out when the step was saved. Its row may exist already, from an
        earlier start.
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
                    step, self._last_evaluated[1], self.log
                )
        if self.is_over:
            return
        for wing in self._wings:
            wing.make_up(step, begin.state)

    def _earlier_failure(self) -> str:
        """Returns why an earlier start ended the run as not finite; empty if none did.

        A run that has made steps since has discarded the earlier results.
        """
        return self.channel.on_process_0(
            lambda: results_lib.nonfinite_reason(self.workdir.path)
        )

    @property
    def is_over(self) -> bool:
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
        self.flush(newest)
        self.log.write_ahead(row)

    def flush(self, newest: state_lib.TrainState) -> None:
        """Reads all steps so far; waits for them."""
        self._read(self._queue.flush(), newest)
        self.log.flush()

    def _take_request(self) -> None:
        """Takes the request, if any, that all processes act on at this point.

        All processes call it at the same points of the run.
        """
        if self.watch is None:
            return
        request = self.watch.poll()
        if request is None:
            return
        if request.kind == request_lib.STOP:
            self._stop = request
        elif request.kind == request_lib.SAVE:
            self._is_save_requested = True
        elif request.kind == request_lib.ADMIT:
            self._is_save_requested = True
            self._has_arrivals = True
        else:
            for wing in self._wings:
                wing.receive(self.step + 1, request)
            # It may change when they act.
            self._dues = [self.step] * len(self._hooks)

    def _request_save(self) -> None:
        """Requests a save by this process's clock.

        It is made at a step that all processes agree on.
        """
        if self._place.count == 1 and self.members.exchange is None:
            self._is_save_requested = True
        elif self.watch is not None:
            self.watch.ask(request_lib.BY_CLOCK)

    def _evaluate_and_log(self, step: int, state: state_lib.TrainState) -> None:
        self.flush(state)
        metrics = self.evaluate(state)
        if metrics is not None:
            self.log.write_evaluation(step, metrics)
            # A process whose callbacks are slow keeps the others waiting.
            with spans.Span(spans.EVALUATION):
                self._evaluations.add(step, metrics)

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
        self.flush(state)
        self._is_save_requested = False
        is_evaluated = self._last_evaluated[0] == step
        metrics: dict[str, Any] = {}
        if is_evaluated:
            metrics = self._last_evaluated[1]
        with spans.Span(spans.CHECKPOINT):
            watched = self._nonfinite_check.get_state()
            for wing in self._wings:
                watched |= wing.get_state()
            point = resuming.Point(
                state=state,
                evaluated=is_evaluated or not is_evaluation_due,
                watched=watched,
                fingerprint=self._replica_check.fingerprints_of(state),
                step_program=self.dispatches.program,
                rows=self.log.rows,
                data=self.batches.position(step),
            )
            self.checkpoints.save(step, point, metrics=metrics, log=self.log)
        # The save before this one has ended, and made the rows before it durable.
        self.log.forget(self._rows_saved)
        self._rows_saved = self.log.rows


def _note(members: members_lib.Members, batch: dict[str, jax.Array]) -> None:
    """Notes some values of a batch, which all members must have alike."""
    for name in sorted(batch):
        for shard in batch[name].addressable_shards:
            values = np.asarray(shard.data).reshape(-1)
            every = max(1, len(values) // _NOTED_VALUES)
            members.note(values[::every].tobytes())


def run(
    config: ml_collections.ConfigDict,
    directory: str,
    command: str,
    init: checkpoint.Source | None = None,
    watch: watchdog_lib.Watchdog | None = None,
    show: terminal_lib.Show = terminal_lib.Show.NORMAL,
    set_aside: str = "",
    wings: Sequence[type[hooks.Wing]] = (),
    members: members_lib.Members | None = None,
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
      wings: as in `Run`.
      members: as in `Run`.

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
        wings=wings,
        members=members,
    )
    with current.opened():
        try:
            state, stop, results = current.complete_or_recover()
        except nonfinite.NonfiniteError as e:
            current.end(ending.nonfinite_outcome(str(e)))
            current.terminal.close()
            kept = current.checkpoints.kept()
            ending.fail(
                e.step,
                str(e),
                kept,
                current.workdir,
                writes=current.members.leads,
            )
            return exit_codes.NONFINITE
        except jax.errors.JaxRuntimeError as e:
            current.note(e)
            raise
    store = current.checkpoints.manager.store
    if stop is not None:
        return ending.stopped(stop, int(state.step), store, command)
    return ending.announce(
        results,
        directory=current.workdir,
        store=store,
        config=config,
        command=command,
    )
