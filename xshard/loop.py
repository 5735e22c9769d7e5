"""The training loop: resume, train, evaluate, stop.

A run that was stopped at any instant and started again ends in the same bits as one that was not:
everything that decides the next step is in the checkpointed `TrainState`, or a function of it.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import ml_collections

from xshard import (
    batches,
    checkpoint,
    cli,
    evaluation,
    nonfinite,
    preflight,
    resuming,
    saving,
)
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.files import workdir
from xshard.metrics import clock as clock_lib
from xshard.metrics import log as log_lib
from xshard.metrics import overview, rows, writers
from xshard.metrics import terminal as terminal_lib
from xshard.pod import fingerprint, processes
from xshard.pod import notice as notice_lib
from xshard.pod import watch as watch_lib


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
        self.clock = clock_lib.Clock()
        self.terminal = terminal_lib.Terminal(config.steps, show)
        self.mesh = experiment_lib.mesh_of(config)
        self.experiment = experiment_lib.load(config.experiment)(config)
        sizes = {key: config[key] for key in ("batch_size", "seed", "micro_batches")}
        self.batches = batches.TrainBatches(self.experiment.train_batches, self.mesh, **sizes)
        self._evaluation = evaluation.Evaluation(self.experiment, self.mesh, config.eval_batch_size)
        self.workdir = workdir.Workdir(directory)
        # The directory is process 0's: the others need not even see it.
        self._first = jax.process_index() == 0
        self._run = resuming.identify(config, self.workdir, set_aside)
        data = self.batches.summary(), self._evaluation.summary()
        self.origin = fingerprint.origin(type(self.experiment).__module__, *data)
        self.changes = [*self._run.changes]
        if self._first and not self._run.sets_aside:
            self.changes += self.workdir.check_origin(self.origin)
        self._watch = watch
        self._stop: notice_lib.Notice | None = None
        self._save_now = False
        self._init_args = (self.experiment, self.mesh, config.seed, self.batches.example)
        self._target = state_lib.abstract_state(*self._init_args, whole=True)
        self._init = init
        storage = state_lib.Storage(self.experiment, self.mesh)
        kept = self.batches, storage, self.terminal.say, self.origin
        self.checkpoints = saving.Checkpoints(config, self.workdir, self._run, *kept)
        self.checkpoints.check_begin(self._target, init)
        self._finite = nonfinite.Watch(config, self.mesh, self._target.params, self.terminal.say)
        self._evaluated: tuple[int, dict[str, Any]] = (-1, {})
        self._check_programs()

    def _check_programs(self) -> None:
        """Traces all that the run will run."""
        stored = state_lib.as_stored(self.experiment, self.mesh, self._target)
        inputs = stored, self.batches.shapes()
        train_step, self._predict = preflight.programs(self.experiment, self.mesh, *inputs)
        self.train_step = processes.compiled_by_all(train_step, "the training step")
        self._evaluation.check(stored, self.config.checkpoint)

    def train(self) -> tuple[state_lib.TrainState, notice_lib.Notice | None]:
        """Trains from where the run stands to its last step, or until it is told to stop.

        Returns:
          The state, and what has stopped the run before its end.

        Raises:
          NonfiniteError: of `nonfinite` or of `checkpoint`, if the run ends with what is not finite.
        """
        # 1. The state decides the step, and with it the batches and keys that follow.
        self.doing("restoring")
        begin = self.resume_or_init()
        state, start = begin.state, int(begin.state.step)
        self.checkpoints.go_on_from(begin)
        self._say_start(start, state)
        self._made, goes_on = start, start < self.config.steps
        self._failure = self.checkpoints.manager.agree(lambda: self.workdir.failure(goes_on))
        # 2. Rows after the checkpoint are dropped: their steps will be made again.
        kept = self.batches.shapes(), self.clock, self.terminal
        with log_lib.begin(
            self.workdir, start, self.config, self.experiment, self.mesh, *kept
        ) as log:
            self.checkpoints.check_rows(begin, log)
            due = config_lib.Due.of(self.config)
            by_clock = clock_lib.Every(60 * self.config.checkpoint.every_minutes)
            # 3. An evaluation that a stop has cut short is made now, if no other stop does the same.
            self.doing("compiling", step=start, steps=self.config.steps)
            if start and not begin.evaluated:
                self._evaluate_late(start, state, log)
            for made in range(start + 1, (start if self._stop else self.config.steps) + 1):
                with self.clock.waiting(log.newest):
                    batch = next(self.batches)
                state, values, observed = self.train_step(state, batch)
                self._made = made
                log.push(made, values)
                self._finite.push(made, observed)
                self.doing("training", step=made)
                self._poll()
                if self._stop is None and due.evaluation(made):
                    self._evaluate(made, state, log)
                # Each process has a clock of its own: that of process 0 counts, for all.
                if self._first and by_clock.has_passed():
                    self._ask_for_save()
                if self._stop is not None or self._save_now or due.save(made):
                    self._save(made, state, log, evaluation_due=due.evaluation(made))
                if self._stop is not None:
                    break
                self.checkpoints.check()
            self._flush(log)
        return state, self._stop

    def _flush(self, log: log_lib.Log) -> None:
        """Writes the rows of all steps so far, and checks that the steps were finite."""
        log.flush()
        self._finite.flush()

    def _evaluate_late(self, start: int, state: state_lib.TrainState, log: log_lib.Log) -> None:
        """Makes the evaluation that is due at the first state, unless its row has been written."""
        found = self.checkpoints.late_evaluation(start)
        if found is None:
            self._evaluate(start, state, log)
        else:
            self._evaluated = start, found
        if self._stop is None:
            self.checkpoints.evaluated_late(start, self._evaluated[1], log)

    def resume_or_init(self) -> resuming.Begin:
        """The newest checkpoint's state or a new one."""
        init = lambda: state_lib.init(*self._init_args)
        older = lambda: state_lib.abstract_state(*self._init_args, whole=True, all_slots=True)
        return self.checkpoints.resume_or_init(self._target, init, self._init, older)

    def evaluate(self, state: state_lib.TrainState) -> dict[str, Any] | None:
        """The means over all evaluation examples; lists where there are several groups.

        None if the run is told to stop meanwhile.
        """
        made = int(state.step)
        if self._evaluated[0] != made:
            self.doing("evaluating")
            with self.clock.phase(clock_lib.EVALUATION):
                values = self._evaluation(state, self._goes_on)
            if values is None:
                return None
            self._evaluated = made, values
        return self._evaluated[1]

    def _goes_on(self) -> bool:
        """Returns whether nothing has stopped the run by now."""
        self._poll()
        return self._stop is None

    def _poll(self) -> None:
        """Hears what all processes are to do; at the same points on all of them."""
        notice = None if self._watch is None else self._watch.poll()
        if notice is None:
            return
        if notice.kind == notice_lib.STOP:
            self._stop = notice
        else:
            self._save_now = True

    def doing(self, what: str, **more: int) -> None:
        """Says what the run is doing, to whoever watches it."""
        if self._watch is not None:
            self._watch.doing(what, **more)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Makes the directories this run's meanwhile, and waits for the last save at the end."""
        with contextlib.ExitStack() as held:
            if self._first:
                whose = self._run.identity, self.origin, self._run.sets_aside
                held.enter_context(self.workdir.opened(self.config, *whose))
            held.enter_context(self.checkpoints.opened())
            if self._watch is not None:
                self._watch.publish()
            yield

    def finish(
        self, state: state_lib.TrainState
    ) -> tuple[dict[str, Any], notice_lib.Notice | None]:
        """Evaluates the last state and writes the results; or what has stopped the run before that."""
        values = self.evaluate(state)
        applied = rows.to_number(mesh_lib.replicate(self.mesh, state.global_step))
        results = {"step": self._made, "global_step": applied, "eval": values, "samples": ""}
        if self._stop is None:
            self.checkpoints.wait()
            why = self.checkpoints.nonfinite(self._made) or self._finite.at_end() or self._failure
            results |= {"finite": not why, "why": why}
            try:
                results["samples"] = "" if why else self._samples(state)
            finally:
                # Of which samples are the least.
                if self._first:
                    self.workdir.write_results(results)
        return results, self._stop

    def fail(self, why: str) -> None:
        """Ends a run of which a step was not finite: says so, in the results too."""
        message = f"{nonfinite.message(why)} {self.checkpoints.kept()}"
        results = {"step": self._made, "eval": {}, "samples": "", "finite": False, "why": why}
        if self._first:
            self.workdir.write_results(results)
        print(message, file=sys.stderr, flush=True)

    def _samples(self, state: state_lib.TrainState) -> str:
        predict = evaluation.predictor(self._predict, self.mesh, state)
        return self.experiment.samples(predict, preflight.samples_key(self.experiment))

    def _evaluate(self, made: int, state: state_lib.TrainState, log: log_lib.Log) -> None:
        self._flush(log)
        values = self.evaluate(state)
        if values is not None:
            log.write_evaluation(made, values)

    def _ask_for_save(self) -> None:
        """Has all processes save, at a step that they agree on."""
        if jax.process_count() == 1:
            self._save_now = True
        elif self._watch is not None:
            self._watch.ask(notice_lib.BY_CLOCK)

    def _save(
        self, made: int, state: state_lib.TrainState, log: log_lib.Log, *, evaluation_due: bool
    ) -> None:
        # What has been logged when a checkpoint counts is what resuming keeps.
        self._flush(log)
        self._save_now = False
        evaluated = self._evaluated[0] == made
        values = self._evaluated[1] if evaluated else {}
        with self.clock.phase(clock_lib.CHECKPOINT):
            self.checkpoints.save(
                made, state, values, evaluated=evaluated or not evaluation_due, log=log
            )

    def _say_start(self, start: int, state: state_lib.TrainState) -> None:
        say, whole = self.terminal.say, self.terminal.verbose
        say(overview.model(self.config, self.mesh, state.params, whole=whole))
        for change in self.changes:
            say(f"changed since the run was started: {change}")
        if start:
            say(f"resumed from the checkpoint of step {start} in {self.checkpoints.manager.store}")
        say(overview.plan(start, self.config.steps))


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
    results: dict[str, Any] = {}
    with current.opened():
        try:
            state, stop = current.train()
            if stop is None:
                # While the last checkpoint is written.
                results, stop = current.finish(state)
            current.doing("saving")
            current.checkpoints.wait()
        except (nonfinite.NonfiniteError, checkpoint.NonfiniteError) as e:
            current.fail(str(e))
            return notice_lib.NONFINITE
    saved, count = current.checkpoints.manager.store, jax.process_count()
    each = f", by each of {count} processes" if count > 1 else ""
    if stop is not None:
        print(f"{stop.why}: stopped at step {int(state.step)}, state saved in {saved}")
        print(f"to go on{each}: {command}")
        return stop.code
    print(overview.results(results))
    print(f"  in {current.workdir.results}; metrics of the run in {current.workdir.metrics}")
    print(f"checkpoints: {saved}")
    if not results["finite"]:
        print(nonfinite.message(results["why"]), file=sys.stderr, flush=True)
        return notice_lib.NONFINITE
    more = cli.with_flag(command, "config.steps", 2 * max(config.steps, results["step"]))
    print(f"to train on{each}: {more}")
    return notice_lib.DONE
