"""The training loop: resume, train, evaluate, stop.

A run that is stopped at any instant and restarted ends with the same bits as an
uninterrupted one: everything that determines the next step is in the checkpointed
`TrainState`, or a function of it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import ml_collections

from xshard import callbacks, checkpoint, evaluation, logical
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.files import compile_cache, workdir
from xshard.metrics import clock as clock_lib
from xshard.metrics import log as log_lib
from xshard.metrics import overview, writers
from xshard.metrics import rows as rows_lib
from xshard.metrics import terminal as terminal_lib
from xshard.pod import notice as notice_lib
from xshard.pod import origin as origin_lib
from xshard.pod import processes, status
from xshard.pod import watchdog as monitor_lib
from xshard.run import (
    ending,
    nonfinite,
    preflight,
    replication,
    resuming,
    roll_backs,
    saving,
)
from xshard.run import schedule as schedule_lib


class Run:
    """A run of an experiment in a work directory. The constructor checks everything it
    can without writing there.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: str,
        init: checkpoint.Source | None = None,
        watch: monitor_lib.Watchdog | None = None,
        show: terminal_lib.Show = terminal_lib.Show.NORMAL,
        set_aside: str = "",
    ):
        """Checks the config and the directory's contents. With several processes, each
        of them creates one.

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
        self.clock, self.terminal = (
            clock_lib.Clock(),
            terminal_lib.Terminal(config.steps, show),
        )
        self.workdir, self._watch = workdir.Workdir(directory), watch
        self.mesh = experiment_lib.mesh_of(config)
        # Frozen already, so that what the constructor reads is recorded too.
        self.experiment = experiment_lib.load(config.experiment)(
            config_lib.ReadConfig(config)
        )
        self.doing(status.READING)
        self.batches = preflight.train_batches(self.experiment, self.mesh)
        self.doing(status.READING_EVALUATION)
        self._evaluation = evaluation.Evaluation(
            self.experiment, self.mesh, config.eval_batch_size
        )
        self.doing(status.STARTING)
        self._open(init, set_aside)
        self._check_programs()
        self._resources = (
            contextlib.ExitStack()
        )  # Open from the first step to the results.
        self._stop: notice_lib.Notice | None = None
        self._schedule = schedule_lib.Schedule.of(config)
        self._save_now, self.step = False, -1
        self._evaluated: tuple[int, dict[str, Any]] = (-1, {})

    def _open(self, init: checkpoint.Source | None, set_aside: str) -> None:
        """Identifies the run, and checks that it can begin, or resume from its
        checkpoints.
        """
        config, self._init = self.config, init
        self._first = (
            jax.process_index() == 0
        )  # Only process 0 needs to see the work directory.
        self._run = resuming.identify(config, self.workdir, set_aside)
        module = type(self.experiment).__module__
        self.origin = origin_lib.origin(
            module, self.batches.summary(), self._evaluation.summary()
        )
        self.changes = [*self._run.changes]
        if self._first and not self._run.sets_aside:
            self.changes += self.workdir.check_origin(
                self.origin, exact=logical.is_exact(config)
            )
        run, say = self._run, self.terminal.say
        self.checkpoints = saving.Checkpoints(
            self.experiment,
            self.mesh,
            self.workdir,
            run,
            self.batches,
            say,
            self.origin,
        )
        self.checkpoints.check_can_start(init)
        manager, self._target = self.checkpoints.manager, self.checkpoints.states.target
        self.roll_backs = roll_backs.RollBacks(
            config, self.workdir, manager, self.batches, self._target, say, self.doing
        )

    def _check_programs(self) -> None:
        """Traces every program that the run will use, so that mistakes surface before
        training.
        """
        inputs = self._target, self.batches.shapes(), self.batches.rehearsal()
        train_step, predict = preflight.programs(self.experiment, self.mesh, *inputs)
        # With several processes, one that compiles longer than the others for this
        # would keep them waiting in a collective.
        if isinstance(train_step, logical.Program) and jax.process_count() == 1:
            train_step.compare_first_call(self.terminal.say)
        self.train_step = processes.compiled_by_all(train_step, "the training step")
        self.predict = evaluation.predictions(predict, self.mesh)
        self._copies = replication.ReplicaCheck(self.experiment, self.mesh)
        metrics = self._evaluation.check(self._target, self.config.checkpoint)
        # A separate exchange: the checkpoint manager's is used by background saves.
        meet = processes.Exchange("what the callbacks say", callbacks.SECONDS)
        self._evaluations = callbacks.Evaluations(
            self.experiment.callbacks, metrics, meet
        )

    def train(self) -> tuple[state_lib.TrainState, notice_lib.Notice | None]:
        """Trains to the last step, or until a callback ends the run or a notice stops
        it.

        Each call starts from the newest checkpoint and discards later progress.

        Returns:
          The state; and the notice that stopped the run before its end, or None.

        Raises:
          NonfiniteError: of `nonfinite` or `checkpoint`, if the run ends because values
            are not finite.
        """
        begin = self._begin()
        state, start, log = begin.state, self.step, self._log
        schedule = self._schedule
        by_clock = clock_lib.Every(60 * self.config.checkpoint.every_minutes)
        self.doing("compiling", step=start, steps=self.config.steps)
        # An evaluation that a stop interrupted is run now, unless another stop
        # interrupts it again.
        self._run_missed_evaluation(begin, start)
        if not begin.folder and self.roll_backs.is_ready:
            self._save(start, state, evaluation_due=False)
        due = schedule.next_due(start)
        for step in range(
            start + 1, (start if self._is_over() else self.config.steps) + 1
        ):
            if self.roll_backs.is_before(step):
                log.write_ahead(self.roll_backs.row(step))
                state = self.roll_backs.with_back_off(step, state)
            if step == start + 1:
                self.doing(status.READING)
            with self.clock.waiting(log.newest):
                batch = self.batches.batch_for_step(step, self.predict, state)
            if step == start + 1:
                self.doing("compiling")
            state, values, observed, fingerprints_before = self.train_step(state, batch)
            self.step = step
            log.push(step, values | self._copies.push(step, fingerprints_before, state))
            self._finite.push(step, observed)
            self.doing(status.TRAINING, step=step)
            self._poll()
            # Clocks differ, so only process 0's decides; the others are told.
            if self._first and by_clock.has_passed():
                self._ask_for_save()
            if step == due or self._stop is not None or self._save_now:
                self._after_due_step(step, state)
                if self._is_over():
                    break
                due = schedule.next_due(step)
            self.checkpoints.check()
        self._flush()
        self.terminal.close()
        return state, self._stop

    def _after_due_step(self, step: int, state: state_lib.TrainState) -> None:
        """Evaluates, samples and saves after a step, as far as the schedule, a stop or
        a request for a save says so.
        """
        evaluation_due = self._schedule.evaluation(step)
        if self._stop is None and evaluation_due:
            self._evaluate(step, state)
        if self._schedule.samples(step) and not self._is_over():
            self._sample(step, state)
        if self._is_over() or self._save_now or self._schedule.save(step):
            self._save(step, state, evaluation_due=evaluation_due)

    def _begin(self) -> resuming.StartState:
        """Restores the newest checkpoint, or creates a first state, and opens the log.
        Also runs after a roll-back.
        """
        # After a roll-back the previous log is still open.
        self._resources.close()
        self._copies.forget()
        say = self.terminal.say
        self.doing("restoring")
        # 1. The restored state determines the step, and with it all later batches and
        # keys.
        self.roll_backs.begin()
        begin = self.resume_or_init()
        start, checkpoints = int(begin.state.step), self.checkpoints.manager
        self._copies.begin(begin.state, begin.fingerprints, str(checkpoints.store))
        self.checkpoints.record_restored_step(begin)
        self._evaluated = (-1, {})
        learners = state_lib.learners(self._target)
        self._finite = nonfinite.NonfiniteCheck(
            self.config, self.mesh, learners, say, begin.watched
        )
        self._evaluations.begin(
            lambda: rows_lib.evaluations(self.workdir.metrics, start)
        )
        if self.step < 0:
            params, whole = state_lib.params(begin.state), self.terminal.verbose
            say(
                overview.begin(
                    self.config, self.mesh, params, self.changes, whole=whole
                )
            )
            for line in preflight.warnings(self.experiment, self.config, self._target):
                say(line)
        say(
            overview.plan(
                start, self.config.steps, checkpoints.store, self._evaluations.end
            )
        )
        self.step = start
        goes_on = start < self.config.steps and not self._is_over()
        self._failure = checkpoints.agree(lambda: self.workdir.failure(goes_on))
        # 2. The log drops rows after the checkpoint, because the run repeats their
        # steps.
        run = self.experiment, self.mesh, self.batches, self.clock, self.terminal
        self._log = self._resources.enter_context(
            log_lib.Log(self.workdir, start, *run)
        )
        self.checkpoints.check_rows(begin, self._log)
        return begin

    def _is_over(self) -> bool:
        """Returns whether training is over: a notice stopped the run, or a callback
        ended it.
        """
        return self._stop is not None or bool(self._evaluations.end)

    def _flush(self) -> None:
        """Writes the rows of all steps so far, and checks that replicas agree and that
        the steps are finite.
        """
        self._log.flush()
        # Replicas are compared first: a flipped bit may also be non-finite, and then a
        # roll-back must not skip the data.
        self._copies.flush()
        self._finite.flush()

    def _run_missed_evaluation(self, begin: resuming.StartState, start: int) -> None:
        """Runs the evaluation and the sampling that are due at the restored step,
        unless their rows exist already.
        """
        if start and not begin.evaluated:
            metrics = self.checkpoints.find_late_evaluation(start)
            if metrics is None:
                self._evaluate(start, begin.state)
            else:
                self._evaluated = start, metrics
            if self._stop is None:
                self.checkpoints.add_late_evaluation(
                    start, self._evaluated[1], self._log
                )
        is_due = start and self._schedule.samples(start) and not self._is_over()
        if is_due and self.checkpoints.manager.agree(self._log.sampled) < start:
            self._sample(start, begin.state)

    def resume_or_init(self) -> resuming.StartState:
        """Restores the newest checkpoint, or creates a new state."""
        return self.checkpoints.resume_or_init(self._init)

    def evaluate(self, state: state_lib.TrainState) -> dict[str, Any] | None:
        """Evaluates a state: metrics by name, with several groups as lists; None if a
        stop interrupts the evaluation.
        """
        step = int(state.step)
        if self._evaluated[0] != step:
            self.doing(status.EVALUATING)
            with self.clock.phase(clock_lib.EVALUATION):
                values = self._evaluation(state, self._poll)
            if values is None:
                return None
            self._evaluated = step, values
        return self._evaluated[1]

    def _poll(self) -> bool:
        """Handles a notice that all processes agreed on; all poll at the same points.
        Returns whether to continue.
        """
        notice = None if self._watch is None else self._watch.poll()
        if notice is not None and notice.kind == notice_lib.STOP:
            self._stop = notice
        elif notice is not None:
            self._save_now = True
        return self._stop is None

    def doing(self, what: str, **more: int) -> None:
        """Publishes the run's current activity in its status."""
        if self._watch is not None:
            self._watch.doing(what, seconds=self.clock.seconds, **more)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Claims the work directory and the checkpoints for this run; at the end, waits
        for the last save.
        """
        with contextlib.ExitStack() as held:
            if self._first:
                identity, aside = self._run.identity, self._run.sets_aside
                held.enter_context(
                    self.workdir.opened(self.config, identity, self.origin, aside)
                )
            held.enter_context(
                compile_cache.enabled(self.workdir.path, self.terminal.say)
            )
            held.enter_context(self.checkpoints.opened())
            if self._watch is not None:
                self._watch.publish()
            held.enter_context(self._resources)
            yield

    def complete(
        self,
    ) -> "tuple[state_lib.TrainState, notice_lib.Notice | None, dict[str, Any]]":
        """Trains, evaluates the last state and writes the results. Returns the results
        of `train`, and those written.
        """
        results: dict[str, Any] = {}
        state, stop = self.train()
        if stop is None:
            # The last checkpoint is being written in the background.
            values = self.evaluate(state)
            results = ending.results(
                self.mesh, self.step, state, values, self._evaluations.end
            )
        self.doing("saving")
        if self._stop is None:
            self.checkpoints.wait()
            why = (
                self.checkpoints.nonfinite(self.step)
                or self._finite.failure()
                or self._failure
                or ending.nonfinite_metrics(self.step, results["eval"])
            )
            results |= {"finite": not why, "why": why}
            try:
                results["samples"] = (
                    "" if why else self._sample(self.step, state, last=True)
                )
            finally:
                # Results are written even if sampling fails.
                if self._first:
                    self.workdir.write_results(results)
        with self.roll_backs.tolerate_nonfinite_save(is_stopped=self._stop is not None):
            self.checkpoints.wait()
        return state, self._stop, results

    def _sample(
        self, step: int, state: state_lib.TrainState, *, last: bool = False
    ) -> str:
        with self.clock.phase(clock_lib.EVALUATION):
            row, text = evaluation.sample(self.experiment, self.predict, step, state)
        if row["samples"]:
            self._log.write_samples(row)
            if not last:
                self.terminal.say(f"step {step}  samples:\n{text}")
        return text

    def _evaluate(self, step: int, state: state_lib.TrainState) -> None:
        self._flush()
        values = self.evaluate(state)
        if values is not None:
            self._log.write_evaluation(step, values)
            self._evaluations.add(step, values)

    def _ask_for_save(self) -> None:
        """Asks all processes for a save, by process 0's clock, at a step that they
        agree on.
        """
        if jax.process_count() == 1:
            self._save_now = True
        elif self._watch is not None:
            self._watch.ask(notice_lib.BY_CLOCK)

    def _save(
        self, step: int, state: state_lib.TrainState, *, evaluation_due: bool
    ) -> None:
        # Resuming keeps the rows up to the checkpoint, so they must be on disk before
        # the checkpoint is committed.
        self._flush()
        self._save_now = False
        is_evaluated = self._evaluated[0] == step
        values = self._evaluated[1] if is_evaluated else {}
        with self.clock.phase(clock_lib.CHECKPOINT):
            noted = {
                "evaluated": is_evaluated or not evaluation_due,
                "watched": self._finite.get_state(),
                "fingerprint": self._copies.of_state(state),
            }
            self.checkpoints.save(step, state, values, noted, self._log)


def run(
    config: ml_collections.ConfigDict,
    directory: str,
    command: str,
    init: checkpoint.Source | None = None,
    watch: monitor_lib.Watchdog | None = None,
    show: terminal_lib.Show = terminal_lib.Show.NORMAL,
    set_aside: str = "",
) -> int:
    """Runs an experiment, from its newest checkpoint if there is one, to its end or
    until a notice stops it.

    Args:
      config: a run's config, locked.
      directory: the work directory.
      command: the command that resumes the run, to print.
      init: the checkpoint that initializes a new run.
      watch: reports requests to stop or save; required with several processes.
      show: how much to print.
      set_aside: as in `Run`.

    Returns:
      The process's exit code: 0 done; 3 not finite; otherwise the code of the notice
      that stopped it, the state saved.
    """
    current = Run(config, directory, init, watch, show, set_aside)
    with current.opened():
        try:
            state, stop, results = current.roll_backs.retry(current.complete)
        except (nonfinite.NonfiniteError, checkpoint.NonfiniteError) as e:
            current.terminal.close()
            ending.fail(
                current.step, str(e), current.checkpoints.kept(), current.workdir
            )
            return notice_lib.NONFINITE
    saved = current.checkpoints.manager.store
    if stop is not None:
        return ending.stopped(stop, int(state.step), saved, command)
    return ending.announce(results, current.workdir, saved, config.steps, command)
