"""The training loop: resume, train, evaluate, stop.

A run that was stopped at any instant and started again ends in the same bits as one that was not:
everything that decides the next step is in the checkpointed `TrainState`, or a function of it.
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
from xshard.files import cache, workdir
from xshard.metrics import clock as clock_lib
from xshard.metrics import log as log_lib
from xshard.metrics import overview, writers
from xshard.metrics import terminal as terminal_lib
from xshard.pod import notice as notice_lib
from xshard.pod import origin as origin_lib
from xshard.pod import processes, status
from xshard.pod import watch as watch_lib
from xshard.run import due as due_lib
from xshard.run import ending, nonfinite, preflight, replication, resuming, roll_backs, saving
from xshard.stored import storage


class Run:
    """An experiment in a work directory, checked as far as that can be done without touching it."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: str,
        init: checkpoint.Source | None = None,
        watch: watch_lib.Watch | None = None,
        show: terminal_lib.Show = terminal_lib.Show.NORMAL,
        set_aside: str = "",
    ):
        """Checks a config and what is in the directory. With several processes, all of them make one.

        Args:
          config: a run's config; see `configs/digits.py` for the keys.
          directory: the work directory, which need not exist.
          init: what a new run begins with.
          watch: what may stop the run; with several processes, how they agree on it.
          show: how much is printed.
          set_aside: the ID of a run that is put away, if it is the one that is in the directory.

        Raises:
          ValueError: with the key, its value and the fix, if something does not fit.
        """
        config_lib.check(config)
        writers.check(config.writers)
        self.config = config
        self.clock, self.terminal = clock_lib.Clock(), terminal_lib.Terminal(config.steps, show)
        self.mesh = experiment_lib.mesh_of(config)
        self.experiment = experiment_lib.load(config.experiment)(config)
        self.batches = preflight.train_batches(self.experiment, self.mesh)
        self._evaluation = evaluation.Evaluation(self.experiment, self.mesh, config.eval_batch_size)
        self.workdir, self._watch = workdir.Workdir(directory), watch
        self._open(init, set_aside)
        self._check_programs()
        self._held = contextlib.ExitStack()  # Open from the first step to the results.
        self._stop: notice_lib.Notice | None = None
        self._save_now, self.step = False, -1
        self._evaluated: tuple[int, dict[str, Any]] = (-1, {})

    def _open(self, init: checkpoint.Source | None, set_aside: str) -> None:
        """Finds out which run it is, and sees that it can begin, or go on from its checkpoints."""
        config, self._init = self.config, init
        self._first = jax.process_index() == 0  # The directory is its: others need not even see it.
        self._run = resuming.identify(config, self.workdir, set_aside)
        module = type(self.experiment).__module__
        self.origin = origin_lib.origin(module, self.batches.summary(), self._evaluation.summary())
        self.changes = [*self._run.changes]
        if self._first and not self._run.sets_aside:
            self.changes += self.workdir.check_origin(self.origin, exact=logical.is_exact(config))
        run, say = self._run, self.terminal.say
        self.checkpoints = saving.Checkpoints(
            self.experiment, self.mesh, self.workdir, run, self.batches, say, self.origin
        )
        self.checkpoints.check_begin(init)
        manager, self._target = self.checkpoints.manager, self.checkpoints.states.target
        self.roll_backs = roll_backs.RollBacks(
            config, self.workdir, manager, self.batches, self._target, say, self.doing
        )

    def _check_programs(self) -> None:
        """Traces all that the run will run."""
        stored = storage.as_stored(self.experiment, self.mesh, self._target)
        inputs = stored, self.batches.shapes(), self.batches.rehearsal()
        train_step, predict = preflight.programs(self.experiment, self.mesh, *inputs)
        self.train_step = processes.compiled_by_all(train_step, "the training step")
        self.predict = evaluation.predictions(predict, self.mesh)
        self._copies = replication.Watch(self.experiment, self.mesh)
        metrics = self._evaluation.check(stored, self.config.checkpoint)
        # Of its own: the manager's is that of its saves in the background.
        meet = processes.Exchange("what the callbacks say", callbacks.SECONDS)
        self._evaluations = callbacks.Evaluations(self.experiment.callbacks, metrics, meet)

    def train(self) -> tuple[state_lib.TrainState, notice_lib.Notice | None]:
        """Trains from where the run stands to its last step, or until a callback ends it or it is told to stop.

        When it is called again it begins again: from the newest checkpoint, with nothing that it has come to since.

        Returns:
          The state, and what has stopped the run before its end.

        Raises:
          NonfiniteError: of `nonfinite` or of `checkpoint`, if the run ends with what is not finite.
        """
        begin = self._begin()
        state, start, log = begin.state, self.step, self._log
        due = due_lib.Due.of(self.config)
        by_clock = clock_lib.Every(60 * self.config.checkpoint.every_minutes)
        self.doing("compiling", step=start, steps=self.config.steps)
        # What a stop has cut short is made now, if no other stop does the same.
        self._make_up_for(begin, start)
        if not begin.folder and self.roll_backs.is_ready:
            self._save(start, state, evaluation_due=False)
        for step in range(start + 1, (start if self._is_over() else self.config.steps) + 1):
            log.write_ahead(self.roll_backs.row(step))
            state = self.roll_backs.backed_off(step, state)
            with self.clock.waiting(log.newest):
                batch = self.batches.of_step(step, self.predict, state)
            state, values, observed, begun = self.train_step(state, batch)
            self.step = step
            log.push(step, {**values, **self._copies.push(step, begun, state)})
            self._finite.push(step, observed)
            self.doing(status.TRAINING, step=step)
            self._poll()
            if self._stop is None and due.evaluation(step):
                self._evaluate(step, state)
            if due.samples(step) and not self._is_over():
                self._sample(step, state)
            if self._first and by_clock.has_passed():
                self._ask_for_save()
            if self._is_over() or self._save_now or due.save(step):
                self._save(step, state, evaluation_due=due.evaluation(step))
            if self._is_over():
                break
            self.checkpoints.check()
        self._flush()
        self.terminal.close()
        return state, self._stop

    def _begin(self) -> resuming.Begin:
        """Restores where the run stands, after a roll-back too, and opens its log."""
        self._held.close()
        self._copies.forget()
        say = self.terminal.say
        self.doing("restoring")
        # 1. The state decides the step, and with it the batches and keys that follow.
        self.roll_backs.begin()
        begin = self.resume_or_init()
        start, checkpoints = int(begin.state.step), self.checkpoints.manager
        self._copies.begin(begin.state, begin.fingerprints, str(checkpoints.store))
        self.checkpoints.go_on_from(begin)
        self._evaluated = (-1, {})
        learners = state_lib.learners(self._target)
        self._finite = nonfinite.Watch(self.config, self.mesh, learners, say, begin.watched)
        self._evaluations.begin(lambda: writers.evaluations(self.workdir.metrics, start))
        if self.step < 0:
            params, whole = state_lib.params(begin.state), self.terminal.verbose
            say(overview.begin(self.config, self.mesh, params, self.changes, whole=whole))
        say(overview.plan(start, self.config.steps, checkpoints.store, self._evaluations.end))
        self.step = start
        goes_on = start < self.config.steps and not self._is_over()
        self._failure = checkpoints.agree(lambda: self.workdir.failure(goes_on))
        # 2. Rows after the checkpoint are dropped: their steps will be made again.
        run = self.experiment, self.mesh, self.batches, self.clock, self.terminal
        self._log = self._held.enter_context(log_lib.Log(self.workdir, start, *run))
        self.checkpoints.check_rows(begin, self._log)
        return begin

    def _is_over(self) -> bool:
        """Returns whether no more steps are to be made: something has stopped the run, or a callback has ended it."""
        return self._stop is not None or bool(self._evaluations.end)

    def _flush(self) -> None:
        """Writes the rows of all steps so far, and checks that replicas were alike, and the steps finite."""
        self._log.flush()
        # First: what a device has flipped may not be finite, and its data is not to be passed.
        self._copies.flush()
        self._finite.flush()

    def _make_up_for(self, begin: resuming.Begin, start: int) -> None:
        """Makes the evaluation and the samples that are due at the first state, unless their rows have been written."""
        if start and not begin.evaluated:
            metrics = self.checkpoints.late_evaluation(start)
            if metrics is None:
                self._evaluate(start, begin.state)
            else:
                self._evaluated = start, metrics
            if self._stop is None:
                self.checkpoints.evaluated_late(start, self._evaluated[1], self._log)
        is_due = start and due_lib.Due.of(self.config).samples(start) and not self._is_over()
        if is_due and self.checkpoints.manager.agree(self._log.sampled) < start:
            self._sample(start, begin.state)

    def resume_or_init(self) -> resuming.Begin:
        """The newest checkpoint's state or a new one."""
        return self.checkpoints.resume_or_init(self._init)

    def evaluate(self, state: state_lib.TrainState) -> dict[str, Any] | None:
        """The means over all evaluation examples, of several groups lists; None if the run is told to stop meanwhile."""
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
        """Hears what all processes are to do, at the same points on all of them; returns whether to go on."""
        notice = None if self._watch is None else self._watch.poll()
        if notice is not None and notice.kind == notice_lib.STOP:
            self._stop = notice
        elif notice is not None:
            self._save_now = True
        return self._stop is None

    def doing(self, what: str, **more: int) -> None:
        """Says what the run is doing, to whoever watches it."""
        if self._watch is not None:
            self._watch.doing(what, seconds=self.clock.seconds(), **more)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Makes the directories this run's meanwhile, and waits for the last save at the end."""
        with contextlib.ExitStack() as held:
            if self._first:
                identity, aside = self._run.identity, self._run.sets_aside
                held.enter_context(self.workdir.opened(self.config, identity, self.origin, aside))
            held.enter_context(cache.kept(self.workdir.path, self.terminal.say))
            held.enter_context(self.checkpoints.opened())
            if self._watch is not None:
                self._watch.publish()
            held.enter_context(self._held)
            yield

    def complete(self) -> "tuple[state_lib.TrainState, notice_lib.Notice | None, dict[str, Any]]":
        """Trains, evaluates the last state and writes the results; returns what `train` does, and the results."""
        results: dict[str, Any] = {}
        state, stop = self.train()
        if stop is None:
            # While the last checkpoint is written.
            values = self.evaluate(state)
            results = ending.results(self.mesh, self.step, state, values, self._evaluations.end)
        self.doing("saving")
        if self._stop is None:
            self.checkpoints.wait()
            why = self.checkpoints.nonfinite(self.step) or self._finite.at_end() or self._failure
            results |= {"finite": not why, "why": why}
            try:
                results["samples"] = "" if why else self._sample(self.step, state, last=True)
            finally:
                # Of which samples are the least.
                if self._first:
                    self.workdir.write_results(results)
        with self.roll_backs.left_undecided(is_stopped=self._stop is not None):
            self.checkpoints.wait()
        return state, self._stop, results

    def _sample(self, step: int, state: state_lib.TrainState, *, last: bool = False) -> str:
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
        """Has all processes save by the clock of the first, at a step that they agree on."""
        if jax.process_count() == 1:
            self._save_now = True
        elif self._watch is not None:
            self._watch.ask(notice_lib.BY_CLOCK)

    def _save(self, step: int, state: state_lib.TrainState, *, evaluation_due: bool) -> None:
        # What has been logged when a checkpoint counts is what resuming keeps.
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
    watch: watch_lib.Watch | None = None,
    show: terminal_lib.Show = terminal_lib.Show.NORMAL,
    set_aside: str = "",
) -> int:
    """Runs an experiment from wherever it stands to its end, or until it is told to stop.

    Args:
      config: a run's config, locked.
      directory: the work directory.
      command: what the user can run to go on, to be printed.
      init: what a new run begins with of another's checkpoint.
      watch: what may stop the run; several processes need it.
      show: how much is printed.
      set_aside: as in `Run`.

    Returns:
      The process's exit code: 0 done; 3 not finite; else that of the notice that has stopped it, the state saved.
    """
    current = Run(config, directory, init, watch, show, set_aside)
    with current.opened():
        try:
            state, stop, results = current.roll_backs.repeated(current.complete)
        except (nonfinite.NonfiniteError, checkpoint.NonfiniteError) as e:
            current.terminal.close()
            ending.fail(current.step, str(e), current.checkpoints.kept(), current.workdir)
            return notice_lib.NONFINITE
    saved = current.checkpoints.manager.store
    if stop is not None:
        return ending.stopped(stop, int(state.step), saved, command)
    return ending.announce(results, current.workdir, saved, config.steps, command)
