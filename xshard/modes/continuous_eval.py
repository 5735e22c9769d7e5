"""A job that evaluates a run's checkpoints as they appear: `--mode=eval`.

It works during the run or after it. The job logs a row for each checkpoint to
metrics.jsonl and to the other `config.writers`, in the folder `eval` of the run's work
directory. It adds the metrics to the checkpoint itself, by which the run chooses the
best ones that it keeps, and only reads the rest.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections

from xshard import checkpoint, errors, hooks
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard.base import flag_words
from xshard.files import disk, jsonfile, results, workdir
from xshard.files import identity as identity_lib
from xshard.metrics import log, terminal, writers
from xshard.metrics import rows as rows_lib
from xshard.metrics import writer as writer_lib
from xshard.pod import exit_codes, host_collectives, request
from xshard.pod import watchdog as watchdog_lib
from xshard.run import checkpoints, ending, evaluation, preflight

FOLDER = "eval"
# How often to look for a new checkpoint: on a disk, and in remote storage, where each
# look costs money.
_POLL_SECONDS = 1.0
_REMOTE_POLL_SECONDS = 10.0


class ContinuousEvaluator:
    """Evaluates the checkpoints of a run.

    With several processes, each of them creates one. All of them evaluate; only process
    0 looks at the run's files and writes, so the others need no access to the files
    beside the checkpoints.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: str,
        watch: watchdog_lib.Watchdog | None = None,
        sleep: Callable[[float], None] = time.sleep,
        show: terminal.Show = terminal.Show.NORMAL,
        wings: Sequence[type[hooks.Wing]] = (),
    ):
        """Prepares the evaluation; the run need not exist yet.

        Args:
          config: the run's config; it may differ in the values that may change when a
            run is resumed.
          directory: the run's work directory.
          watch: the watch that may stop the job; None if nothing does.
          sleep: waits for a number of seconds.
          show: how much the job prints.
          wings: those that bring writers.

        Raises:
          UserError: with the key, its value and the fix, if something does not fit.
        """
        config_lib.check(config)
        writers.check(config.writers, wings)
        self._config = config
        self._wings = wings
        mesh = experiment_lib.mesh_of(config)
        experiment = experiment_lib.of_config(config)
        self._run = workdir.Workdir(directory)
        self._output = workdir.Workdir(self._run.path / FOLDER)
        example = experiment_lib.example(experiment)
        self._states = checkpoints.States(experiment, mesh, example, self._run)
        self._checkpoints = self._states.manager
        self._evaluation = evaluation.Evaluation(
            experiment, mesh, config.eval_batch_size
        )
        host_collectives.check_equal_data({"evaluation": self._evaluation.summary})
        metrics = self._evaluation.check(self._states.target, config.checkpoint)
        self._notes = [
            *preflight.evaluation_notes(experiment, self._states.target, metrics)
        ]
        self._watch = watch
        self._sleep = sleep
        self._terminal = terminal.Terminal(config.steps, show)
        self._stop: request.Request | None = None
        self._last_message = ""
        # What follows is known on process 0 only, and only once the run exists.
        self._last_evaluated = -1
        self._run_id = ""
        self._writers: writers.Writers | None = None
        self._resources = contextlib.ExitStack()

    def last_step(self) -> int:
        """Returns the last step that was evaluated; -1 if there is none.

        All processes must call it.
        """
        return self._checkpoints.on_process_0(lambda: self._last_evaluated)

    def follow(self) -> request.Request | None:
        """Evaluates checkpoints, the oldest first, up to the run's last one.

        Returns:
          The request that stopped the job; None if it came to the run's end.
        """
        with self._resources:
            self._evaluate_all()
        return self._stop

    def _evaluate_all(self) -> None:
        while self._should_continue():
            step = self._checkpoints.on_process_0(self._next_step)
            if step is not None:
                self._evaluate(step)
            elif self._checkpoints.on_process_0(self._is_over):
                break
            elif self._checkpoints.store.path is not None:
                self._sleep(_POLL_SECONDS)
            else:
                self._sleep(_REMOTE_POLL_SECONDS)

    def _should_continue(self) -> bool:
        """Takes a request, if there is one; returns whether the job continues."""
        received = None if self._watch is None else self._watch.poll()
        if received is not None and received.kind == request.STOP:
            self._stop = received
        return self._stop is None

    def _next_step(self) -> int | None:
        """Returns the oldest step to be evaluated; None if there is none."""
        if self._writers is None:
            if not disk.exists(self._run.config):
                self._say(
                    f"waiting for a run in {self._run.path}: it has no config.json yet"
                )
                return None
            self._begin()
        self._check_same_run()
        for step in self._checkpoints.all_steps():
            if step > self._last_evaluated:
                return step
        if self._last_evaluated < 0:
            self._say(f"waiting for the first checkpoint in {self._checkpoints.store}")
        return None

    def _begin(self) -> None:
        """Opens the output, and continues after the last step that was evaluated."""
        # The run's config is compared before anything is written: a config that is
        # refused must leave no trace.
        for change in self._run.check(self._config):
            self._say(f"differs from the run: {change}")
        for note in self._notes:
            self._say(note)
        self._run_id = self._run.run_id()
        self._check_owner()
        self._resources.enter_context(self._output.opened(self._config))
        # A row is written after its step is evaluated, so the last complete row names
        # the last evaluated step.
        self._last_evaluated = max(
            (row["step"] for row in rows_lib.read(self._output.metrics)), default=-1
        )
        part = writers.Part(
            directory=self._output.path,
            step=self._last_evaluated,
            config=identity_lib.plain(self._config),
            claim=self._output.claim,
        )
        self._writers = writers.Writers(self._config.writers, part, self._wings)
        self._resources.push(self._close_writers)

    def _close_writers(
        self, kind: type[BaseException] | None, e: BaseException | None, *_: Any
    ) -> None:
        """Tells the writers how the job ended, an exception included, and closes them.

        It is the exit of a context.
        """
        del kind
        assert self._writers is not None
        if e is None:
            self._writers.close(ending.outcome(self._stop))
        else:
            self._writers.close(writer_lib.outcome_of(e))

    def _check_owner(self) -> None:
        """Raises UserError if the checkpoints are those of another run."""
        store = self._checkpoints.store
        owner = checkpoint.read_owner(store)
        if owner is not None and owner.id != self._run_id:
            raise errors.UserError(
                f"{store} holds the checkpoints of run {owner.id} ({owner.workdir}), "
                f"and --workdir={self._run.path} holds run {self._run_id}: give the "
                "run's own checkpoint.directory."
            )

    def _check_same_run(self) -> None:
        """Raises UserError if the run was removed, or another one is in its place.

        The rows so far are not of that run.
        """
        present = self._run.run_id()
        if present != self._run_id:
            has = f"run {present}" if present else "no run"
            raise errors.UserError(
                f"--workdir={self._run.path} now holds {has} instead of run "
                f"{self._run_id}, which this job evaluates: give the same command "
                "again to evaluate the run that is there."
            )

    def _is_over(self) -> bool:
        """Returns whether no more checkpoints will appear, and prints why."""
        reason = results.nonfinite_reason(self._run.path)
        if reason:
            self._say(f"the run has ended, since it is not finite: {reason}")
            return True
        stop = results.callback_stop(self._run.path)
        if stop is not None:
            step, reason = stop
            if self._last_evaluated >= step:
                self._say(f"the run has ended at step {step}: {reason}")
                return True
        steps = self._config.steps
        run_config = jsonfile.read_if_exists(self._run.config) or {}
        end = run_config.get("steps", steps)
        if end <= self._last_evaluated < steps:
            self._say(
                f"the run ends at step {end}, which is evaluated; waiting for step "
                f"{steps}, as this job's config says; with --config.steps={end} the "
                "job ends too"
            )
        return self._last_evaluated >= steps

    def _evaluate(self, step: int) -> None:
        """Evaluates a step on all processes; process 0 logs the result."""
        try:
            state = self._states.restore_state(step, fits=True).state
        except checkpoint.CheckpointError as e:
            if self._exists(step):
                raise
            # The checkpoint is damaged, or was deleted while it was read. Neither must
            # stop the job.
            self._say(f"step {step} is skipped: {e}")
            self._last_evaluated = step
            return
        self._evaluation.check(state, self._config.checkpoint)
        for values in self._evaluation.by_batch(state):
            if values is None and not self._should_continue():
                return
        assert values is not None
        self._last_evaluated = step
        # The checkpoint gets the metrics before the row is written. After a kill in
        # between, the step has no row and is evaluated again.
        try:
            self._checkpoints.add_metrics(step, checkpoints.numbers(values))
        except checkpoint.CheckpointError:
            if self._exists(step):
                raise
            self._say(
                f"step {step} was deleted during its evaluation; a larger "
                "checkpoint.keep_last of the run keeps it longer"
            )
        row, text = log.evaluation(step, values)
        self._say(text)
        if self._writers is not None:
            self._writers.write(row)

    def _exists(self, step: int) -> bool:
        """Returns whether a step has a checkpoint that counts, on all processes."""
        return self._checkpoints.on_process_0(
            lambda: step in self._checkpoints.all_steps()
        )

    def _say(self, message: str) -> None:
        """Prints a message, unless it is the same as the one before."""
        if message != self._last_message:
            self._terminal.say(message)
        self._last_message = message


def run(
    config: ml_collections.ConfigDict,
    directory: str,
    command: str,
    watch: watchdog_lib.Watchdog | None,
    show: terminal.Show = terminal.Show.NORMAL,
    wings: Sequence[type[hooks.Wing]] = (),
) -> int:
    """Evaluates the checkpoints of a run to its end, or until the job is stopped.

    Args:
      config: the run's config.
      directory: the run's work directory.
      command: the command that resumes the job, to print.
      watch: the watch that may stop the job; None if nothing does.
      show: how much the job prints.
      wings: those that bring writers.

    Returns:
      The exit code.
    """
    evaluator = ContinuousEvaluator(config, directory, watch, show=show, wings=wings)
    stop = evaluator.follow()
    output = workdir.Workdir(directory).path / FOLDER
    if stop is not None:
        print(f"{stop.why}: stopped; the results so far are in {output}")
        print(f"to resume: {flag_words.shown(command)}")
        return stop.code
    print(
        f"all checkpoints to step {evaluator.last_step()} are evaluated; the results "
        f"are in {output}"
    )
    return exit_codes.DONE
