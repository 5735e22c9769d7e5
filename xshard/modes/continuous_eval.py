"""A job that evaluates a run's checkpoints as they appear: `--mode=eval`.

It works during the run or after it. The job writes to the folder `eval` of the run's
work directory, and only reads the rest. It logs a row for each checkpoint to
metrics.jsonl and to the other `config.writers`, and lists the best checkpoints in
best.json. If the config keeps best checkpoints, the job pins those that it ranks best,
so that the run does not delete them.
"""

import contextlib
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections

from xshard import checkpoint, errors, hooks
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard.files import disk, jsonfile, results, workdir
from xshard.files import identity as identity_lib
from xshard.metrics import log, terminal, writers
from xshard.metrics import rows as rows_lib
from xshard.metrics import writer as writer_lib
from xshard.pod import exit_codes, host_collectives, request
from xshard.pod import watchdog as watchdog_lib
from xshard.run import ending, evaluation, preflight, saving, states

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
        self._services = writers.services(wings)
        writers.check(config.writers, self._services)
        self._config = config
        mesh = experiment_lib.mesh_of(config)
        experiment = experiment_lib.of_config(config)
        self._run = workdir.Workdir(directory)
        self._output = workdir.Workdir(self._run.path / FOLDER)
        example = experiment_lib.example(experiment)
        self._states = states.States(experiment, mesh, example, self._run)
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
        self._writers: list[writers.Writer] | None = None
        self._best: _Best | None = None
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
        """Returns the oldest step to be evaluated; None if there is none.

        If the job keeps best checkpoints, the step is pinned, so that the run cannot
        delete it during the evaluation.
        """
        if self._writers is None:
            if not disk.exists(self._run.config):
                self._say(
                    f"waiting for a run in {self._run.path}: it has no config.json yet"
                )
                return None
            self._begin()
        self._check_same_run()
        for step in self._checkpoints.all_steps():
            if step <= self._last_evaluated:
                continue
            if self._best is None:
                return step
            self._best.pin(step)
            # The run may have deleted the checkpoint before it was pinned.
            if step in self._checkpoints.all_steps():
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
        path = self._output.metrics
        # A row is written after its step is evaluated, so the last complete row names
        # the last evaluated step.
        self._last_evaluated = max(
            (row["step"] for row in rows_lib.read(path)), default=-1
        )
        part = writers.Part(
            directory=self._output.path,
            step=self._last_evaluated,
            config=identity_lib.plain(self._config),
            rows=lambda: rows_lib.read(path),
            claim=self._output.claim,
        )
        self._writers = writers.open_all(self._config.writers, part, self._services)
        self._resources.push(self._close_writers)
        best_path = self._output.path / "best.json"
        keep = states.keep(self._config.checkpoint)
        # An old best.json is opened even if the config no longer keeps best
        # checkpoints, so that its pins are removed.
        if keep.best or disk.exists(best_path):
            self._best = _Best(best_path, keep, self._checkpoints, path)

    def _close_writers(
        self, kind: type[BaseException] | None, e: BaseException | None, *_: Any
    ) -> None:
        """Tells the writers how the job ended, an exception included, and closes them.

        It is the exit of a context.
        """
        del kind
        assert self._writers is not None
        if e is None:
            writers.close(self._writers, ending.outcome(self._stop))
            return
        # The exception must not be replaced by one from closing a writer.
        with contextlib.suppress(OSError, ValueError):
            writers.close(self._writers, writer_lib.outcome_of(e))

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
            if step in self._checkpoints.on_process_0(self._checkpoints.all_steps):
                raise
            # The checkpoint is damaged, or was deleted while it was read. Neither must
            # stop the job.
            self._say(f"step {step} is skipped: {e}")
            self._last_evaluated = step
            if self._best is not None:
                self._best.unpin_others()
            return
        self._evaluation.check(state, self._config.checkpoint)
        for values in self._evaluation.by_batch(state):
            if values is None and not self._should_continue():
                return
        assert values is not None
        self._last_evaluated = step
        # best.json is written before the row. After a kill in between, the step has no
        # row and is evaluated again.
        if self._best is not None:
            self._best.add(step, values)
        row, text = log.evaluation(step, values)
        self._say(text)
        for writer in self._writers or []:
            writer.write(row)

    def _say(self, message: str) -> None:
        """Prints a message, unless it is the same as the one before."""
        if message != self._last_message:
            self._terminal.say(message)
        self._last_message = message


class _Ranked(NamedTuple):
    """A checkpoint in best.json."""

    step: int
    value: float


class _Record(NamedTuple):
    """The content of best.json."""

    metric: str | None = None
    mode: str | None = None
    best: tuple[_Ranked, ...] = ()
    pinned: tuple[int, ...] = ()


class _Best:
    """The best checkpoints, in best.json, and pinned so that the run keeps them.

    best.json also lists the checkpoints that this job has pinned. A pin is listed
    before it is set and until it is removed: otherwise a kill in between would leave a
    pin that nothing removes. Pins of the user are not listed, so they stay.
    """

    def __init__(
        self,
        path: pathlib.Path,
        keep: checkpoint.Keep,
        manager: checkpoint.Manager,
        rows: pathlib.Path,
    ):
        """Reads best.json, and removes the pins of a job that was killed.

        Args:
          path: the path of best.json.
          keep: how many checkpoints are kept, by which metric.
          manager: the run's checkpoints.
          rows: the path of the rows that this job logged.
        """
        self._path = path
        self._keep = keep
        self._manager = manager
        before = _read_best(path)
        self._pinned: set[int] = set(before.pinned)
        # The values of the metric, by best step.
        self._values: dict[int, float] = {}
        if (before.metric, before.mode) == (keep.metric, keep.mode):
            values = {entry.step: entry.value for entry in before.best}
            self._values = self._best_of(values)
        elif keep.best:
            self._rank_logged(rows)
        self.unpin_others()

    def _rank_logged(self, rows: pathlib.Path) -> None:
        """Ranks the checkpoints that were evaluated and still exist, and pins the best.

        It is called when the metric or the mode has changed.
        """
        logged = _logged_values(rows, self._keep.metric, self._manager.all_steps())
        self._values = self._best_of(logged)
        for step in self._values:
            self.pin(step)
        # The run may have deleted some of them before they were pinned.
        saved = self._manager.all_steps()
        self._values = {step: x for step, x in self._values.items() if step in saved}

    def pin(self, step: int) -> None:
        """Pins a step, unless its checkpoint no longer exists."""
        is_ours = step in self._pinned
        self._pinned.add(step)
        self._write()
        try:
            # `pin` returns False if the checkpoint was pinned already: by this job, or
            # by the user, whose pin the job must not remove.
            is_new = self._manager.pin(step)
        except checkpoint.CheckpointError:
            self._reraise_if_exists(step)
            is_new = False
            is_ours = False
        if not is_new and not is_ours:
            self._pinned.discard(step)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Ranks an evaluated step, and unpins what is no longer among the best.

        Args:
          step: the step.
          values: the metrics of its evaluation, by name.
        """
        if self._keep.best:
            value = saving.number(values[self._keep.metric])
            self._values = self._best_of({**self._values, step: value})
        self.unpin_others()

    def unpin_others(self) -> None:
        """Unpins all checkpoints that are not among the best."""
        for step in self._pinned - self._values.keys():
            try:
                self._manager.unpin(step)
            except checkpoint.CheckpointError:
                self._reraise_if_exists(step)
        self._pinned &= self._values.keys()
        self._write()

    def _best_of(self, values: Mapping[int, float]) -> dict[int, float]:
        """Returns the values of the best steps, best first."""
        saved = [checkpoint.Saved(step, value) for step, value in values.items()]
        return {step: values[step] for step in self._keep.best_steps(saved)}

    def _reraise_if_exists(self, step: int) -> None:
        """Raises the exception being handled again, if the checkpoint still exists.

        Otherwise the run has deleted the checkpoint, which is no error.
        """
        if step in self._manager.all_steps():
            raise

    def _write(self) -> None:
        best = []
        for step, value in self._values.items():
            best.append({"step": step, "value": value})
        content = {
            "metric": self._keep.metric,
            "mode": self._keep.mode,
            "best": best,
            "pinned": sorted(self._pinned),
        }
        jsonfile.write(self._path, content)


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
        print(f"to resume: {command}")
        return stop.code
    print(
        f"all checkpoints to step {evaluator.last_step()} are evaluated; the results "
        f"are in {output}"
    )
    return exit_codes.DONE


def _read_best(path: pathlib.Path) -> _Record:
    """Reads best.json; an empty record if there is no file.

    Raises:
      UserError: if this job cannot have written it.
    """
    content = jsonfile.read_if_exists(path) or {}
    try:
        return jsonfile.parse(content, _Record, extra_keys=True)
    except ValueError as e:
        raise errors.UserError(
            f"{path} was not written by this job ({e}); delete it, and the job ranks "
            "the checkpoints again."
        ) from e


def _logged_values(
    path: pathlib.Path, metric: str, saved: list[int]
) -> dict[int, float]:
    """Returns the finite values of a metric in a file of rows, by saved step.

    If a step has several rows, the last one counts.
    """
    name = f"{rows_lib.OF_EVALUATION}{metric}"
    logged = {}
    for row in rows_lib.read(path):
        if rows_lib.kind(row) == rows_lib.EVALUATION and name in row:
            logged[row["step"]] = row[name]
    values = {}
    for step, value in logged.items():
        # With several groups the value is a list, one entry for each group.
        numbers = value if isinstance(value, list) else [value]
        if step in saved and numbers and all(map(jsonfile.is_number, numbers)):
            values[step] = saving.number(value)
    return values
