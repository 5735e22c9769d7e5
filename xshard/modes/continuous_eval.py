"""A job that evaluates a run's checkpoints as they appear, during the run or after it:
`--mode=eval`.

The job writes to the folder `eval` of the run's work directory, and only reads the
rest. It logs a row for each checkpoint to metrics.jsonl and to the other
`config.writers`, and lists the best checkpoints in best.json. If the config keeps best
checkpoints, the job pins those that it ranks best, so that the run does not delete
them.
"""

import contextlib
import pathlib
import time
from collections.abc import Callable
from typing import Any

import ml_collections

from xshard import checkpoint, errors, evaluation
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard.files import disk, jsonfile, results, workdir
from xshard.files import identity as identity_lib
from xshard.metrics import log, terminal, writers
from xshard.metrics import rows as rows_lib
from xshard.pod import notice, processes
from xshard.pod import watchdog as monitor_lib
from xshard.run import saving, states

FOLDER = "eval"
# How often to look for a new checkpoint: on a disk, and in remote storage, where each
# look costs money.
_POLL_SECONDS, _REMOTE_POLL_SECONDS = 1.0, 10.0


class ContinuousEvaluator:
    """Evaluates the checkpoints of a run. With several processes, each of them creates
    one.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: str,
        watch: monitor_lib.Watchdog | None = None,
        sleep: Callable[[float], None] = time.sleep,
        show: terminal.Show = terminal.Show.NORMAL,
    ):
        """Prepares the evaluation; the run need not exist yet.

        Args:
          config: the run's config; it may differ in the values that may change when a
            run is resumed.
          directory: the run's work directory.
          watch: the watch that may stop the job; None if nothing does.
          sleep: waits for a number of seconds.
          show: how much the job prints.

        Raises:
          ValueError: with the key, its value and the fix, if something does not fit.
        """
        config_lib.check(config)
        writers.check(config.writers)
        self._config = config
        mesh = experiment_lib.mesh_of(config)
        experiment = experiment_lib.load(config.experiment)(config)
        self._run = workdir.Workdir(directory)
        self._own = workdir.Workdir(self._run.path / FOLDER)
        example = experiment_lib.example(experiment)
        self._checkpoints = states.StateManager(experiment, mesh, example, self._run)
        self._evaluation = evaluation.Evaluation(
            experiment, mesh, config.eval_batch_size
        )
        processes.check_equal_data({"evaluation": self._evaluation.summary})
        self._evaluation.check(self._checkpoints.target, config.checkpoint)
        self._watch = watch
        self._sleep = sleep
        self._terminal = terminal.Terminal(config.steps, show)
        self._stop: notice.Notice | None = None
        self._last_message = ""
        self._judged = -1
        self._writers: list[writers.Writer] | None = None
        self._best: _Best | None = None
        # The run's ID, empty before the job begins, or for a run of an older version.
        self._run_id = ""
        self._resources = contextlib.ExitStack()

    def last_step(self) -> int:
        """Returns the last step that was evaluated, -1 if there is none. All processes
        must call it.
        """
        return self._checkpoints.on_process_0(lambda: self._judged)

    def follow(self) -> notice.Notice | None:
        """Evaluates checkpoints, the oldest first, up to the run's last; returns the
        notice that stopped it, if any.
        """
        with self._resources:
            self._judge_all()
        return self._stop

    def _judge_all(self) -> None:
        while self._should_continue():
            step = self._checkpoints.on_process_0(self._next_step)
            if step is not None:
                self._judge(step)
            elif self._checkpoints.on_process_0(self._is_over):
                break
            elif self._checkpoints.store.path is not None:
                self._sleep(_POLL_SECONDS)
            else:
                self._sleep(_REMOTE_POLL_SECONDS)

    def _is_over(self) -> bool:
        """Returns whether no more checkpoints will appear: the last step was evaluated,
        or the run ended earlier.
        """
        why = results.nonfinite_reason(self._run.path)
        if why:
            self._say(f"the run has ended, since it is not finite: {why}")
            return True
        early, reason = results.callback_stop(self._run.path) or (None, "")
        if early is not None and self._judged >= early:
            self._say(f"the run has ended at step {early}: {reason}")
            return True
        end = (jsonfile.read_if_exists(self._run.config) or {}).get(
            "steps", self._config.steps
        )
        if end <= self._judged < self._config.steps:
            self._say(
                f"the run ends at step {end}, which is evaluated; waiting for step {self._config.steps}, as this job's "
                f"config says; with --config.steps={end} the job ends too"
            )
        return self._judged >= self._config.steps

    def _should_continue(self) -> bool:
        if self._watch is not None:
            asked = self._watch.poll()
            if asked is not None and asked.kind == notice.STOP:
                self._stop = asked
        return self._stop is None

    def _next_step(self) -> int | None:
        """Returns the oldest step to be evaluated, pinned so that the run cannot delete
        it; None if there is none.
        """
        # Only process 0 calls this and uses the files; the other processes need not
        # even have access to them.
        if self._writers is None:
            if not disk.exists(self._run.config):
                self._say(
                    f"waiting for a run in {self._run.path}: it has no config.json yet"
                )
                return None
            self._begin()
        self._check_same_run()
        for step in self._checkpoints.all_steps():
            if step > self._judged and (self._best is None or self._best.hold(step)):
                return step
        if self._judged < 0:
            self._say(f"waiting for the first checkpoint in {self._checkpoints.store}")
        return None

    def _begin(self) -> None:
        """Opens the run's directory, and continues after the last step that this job
        evaluated.
        """
        # The run's config is compared before anything is written: a config that is
        # refused must leave no trace.
        for change in self._run.check(self._config):
            self._say(f"differs from the run: {change}")
        self._check_owner()
        self._resources.enter_context(self._own.opened(self._config))
        rows = self._own.metrics
        # A row is written after its step is evaluated, so the last complete row names
        # the last evaluated step.
        self._judged = max((row["step"] for row in rows_lib.read(rows)), default=-1)
        config = identity_lib.plain(self._config)
        part = writers.Part(
            self._own.path, self._judged, config, lambda: rows_lib.read(rows)
        )
        self._writers = writers.open_all(self._config.writers, part)
        for writer in self._writers:
            self._resources.callback(writer.close)
        path = self._own.path / "best.json"
        keep = states.keep(self._config.checkpoint)
        # An old best.json is opened even if the config no longer keeps best
        # checkpoints, so that its pins are removed.
        if keep.best or disk.exists(path):
            self._best = _Best(path, keep, self._checkpoints, rows)

    def _check_owner(self) -> None:
        identity = self._run.identity()
        self._run_id = identity.id if identity else ""
        store = self._checkpoints.store
        owner = checkpoint.read_owner(store)
        if identity is not None and owner is not None and owner.id != identity.id:
            raise errors.UserError(
                f"{store} holds the checkpoints of run {owner.id} ({owner.workdir}), and --workdir={self._run.path} "
                f"holds run {identity.id}: give the run's own checkpoint.directory."
            )

    def _check_same_run(self) -> None:
        """Raises UserError if the run was removed or set aside, since the rows so far
        are not of the run in its place.
        """
        now = self._run.identity()
        if self._run_id and (now is None or now.id != self._run_id):
            has = f"run {now.id}" if now else "no run"
            raise errors.UserError(
                f"--workdir={self._run.path} now holds {has} instead of run {self._run_id}, which this job evaluates: give "
                "the same command again to evaluate the run that is there."
            )

    def _judge(self, step: int) -> None:
        try:
            state = self._checkpoints.restore_state(step, fits=True).state
        except checkpoint.CheckpointError as e:
            if step in self._checkpoints.on_process_0(self._checkpoints.all_steps):
                raise
            # The checkpoint is damaged, or was deleted while it was read. Neither must
            # stop the job.
            self._say(f"step {step} is skipped: {e}")
            self._judged = step
            if self._best is not None:
                self._best.release()
            return
        self._evaluation.check(state, self._config.checkpoint)
        for values in self._evaluation.by_batch(state):
            if values is None and not self._should_continue():
                return
        assert values is not None
        self._judged = step
        # best.json is written before the row. After a kill in between, the step has no
        # row and is evaluated again.
        if self._best is not None:
            self._best.judged(step, values)
        row, text = log.evaluation(step, values)
        self._say(text)
        for writer in self._writers or []:
            writer.write(row)

    def _say(self, message: str) -> None:
        if message != self._last_message:
            self._terminal.say(message)
        self._last_message = message


class _Best:
    """The best checkpoints, recorded in best.json and pinned so that the run keeps
    them.
    """

    def __init__(
        self,
        path: pathlib.Path,
        keep: checkpoint.Keep,
        manager: checkpoint.Manager,
        rows: pathlib.Path,
    ):
        self._path = path
        self._keep = keep
        self._manager = manager
        before = _read_best(path)
        self._pinned = set(before["pinned"])
        # The values of the metric, by best step.
        self._values: dict[int, float] = {}
        if (before["metric"], before["mode"]) == (keep.metric, keep.mode):
            for entry in before["best"]:
                self._values[entry["step"]] = entry["value"]
        elif keep.best:
            # The metric or the mode changed. The checkpoints that were evaluated and
            # still exist are ranked anew.
            self._rank(_judged(rows, f"eval/{keep.metric}", manager.all_steps()))
            for step in list(self._values):
                if not self.hold(step):
                    del self._values[step]
        self._rank(self._values)
        self.release()

    def hold(self, step: int) -> bool:
        """Pins a step during its evaluation; returns False if its checkpoint no longer
        exists.
        """
        # The pin is recorded before it is set. Otherwise a kill in between would leave
        # a pin that nothing removes.
        is_pinned = step in self._pinned
        self._pinned.add(step)
        self._write()
        try:
            # `pin` returns False if the checkpoint was pinned already. The job must not
            # remove a pin of the user.
            is_own = self._manager.pin(step) or is_pinned
        except checkpoint.CheckpointError:
            self._check_gone(step)
            is_own = False
        if not is_own:
            self._pinned.discard(step)
        return step in self._manager.all_steps()

    def _check_gone(self, step: int) -> None:
        """Re-raises the exception that is being handled, unless the cause is that the
        checkpoint no longer exists.
        """
        if step in self._manager.all_steps():
            raise

    def judged(self, step: int, values: dict[str, Any]) -> None:
        """Ranks an evaluated step, and unpins the checkpoints that are not among the
        best.
        """
        if self._keep.best:
            self._rank({**self._values, step: saving.number(values[self._keep.metric])})
        self.release()

    def _rank(self, values: dict[int, float]) -> None:
        saved = [checkpoint.Saved(step, value) for step, value in values.items()]
        self._values = {step: values[step] for step in self._keep.best_steps(saved)}

    def release(self) -> None:
        """Unpins all checkpoints that are not among the best, so that the run may
        delete them.
        """
        for step in self._pinned - self._values.keys():
            try:
                self._manager.unpin(step)
            except checkpoint.CheckpointError:
                self._check_gone(step)
        self._pinned &= self._values.keys()
        self._write()

    def _write(self) -> None:
        content = {
            "metric": self._keep.metric,
            "mode": self._keep.mode,
            "best": [
                {"step": step, "value": value} for step, value in self._values.items()
            ],
            "pinned": sorted(self._pinned),
        }
        jsonfile.write(self._path, content)


def run(
    config: ml_collections.ConfigDict,
    directory: str,
    command: str,
    watch: monitor_lib.Watchdog | None,
    show: terminal.Show = terminal.Show.NORMAL,
) -> int:
    """Evaluates the checkpoints of a run to its end, or until the job is told to stop;
    returns the exit code.
    """
    follower = ContinuousEvaluator(config, directory, watch, show=show)
    stop = follower.follow()
    own = workdir.Workdir(directory).path / FOLDER
    if stop is not None:
        print(
            f"{stop.why}: stopped; the results so far are in {own}\nto resume: {command}"
        )
        return stop.code
    print(
        f"all checkpoints to step {follower.last_step()} are evaluated; the results are in {own}"
    )
    return notice.DONE


def _read_best(path: pathlib.Path) -> dict[str, Any]:
    """Reads best.json, with empty lists if there is no file; raises UserError if this
    job cannot have written it.
    """
    content: dict[str, Any] = {"metric": None, "mode": None, "best": [], "pinned": []}
    content |= jsonfile.read_if_exists(path) or {}
    if not _is_best(content["best"], content["pinned"]):
        raise errors.UserError(
            f"{path} was not written by this job; delete it, and the job ranks the checkpoints again."
        )
    return content


def _is_best(best: Any, pinned: Any) -> bool:
    if not isinstance(best, list) or not isinstance(pinned, list):
        return False
    steps = list(pinned)
    for entry in best:
        if not isinstance(entry, dict) or not jsonfile.is_number(entry.get("value")):
            return False
        steps.append(entry.get("step"))
    # Not isinstance, because a bool is an int too.
    return all(type(step) is int for step in steps)


def _judged(path: pathlib.Path, name: str, saved: list[int]) -> dict[int, float]:
    """Returns the finite values of a metric in the rows of the saved steps, by step."""
    values = {}
    for row in rows_lib.read(path):
        if name in row:
            values[row["step"]] = row[name]
    known = {}
    for step, value in values.items():
        # With several groups the value is a list, one entry for each group.
        numbers = value if isinstance(value, list) else [value]
        if step in saved and numbers and all(map(jsonfile.is_number, numbers)):
            known[step] = saving.number(value)
    return known
