"""A job that judges a run's checkpoints as they come, beside the run or after it: `--mode=eval`.

It only reads the run's directory. What it writes is in the folder `eval` of it: a row for each checkpoint in
metrics.jsonl, and where else `config.writers` has rows go; and best.json, which names the best ones. Where the
config keeps best checkpoints, those that this job finds are pinned, so that the run does not delete them.
"""

import contextlib
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from xshard import checkpoint, errors, evaluation
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard.files import disk, jsonfile, workdir
from xshard.files import identity as identity_lib
from xshard.metrics import log, terminal, writers
from xshard.pod import notice, processes
from xshard.pod import watch as watch_lib
from xshard.run import saving, states
from xshard.stored import storage

FOLDER = "eval"
# How often to look for a new checkpoint: on a disk, and where each look costs money.
_POLL_SECONDS, _REMOTE_POLL_SECONDS = 1.0, 10.0


class Follower:
    """Judges the checkpoints of a run. With several processes, all of them make one."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: str,
        watch: watch_lib.Watch | None = None,
        sleep: Callable[[float], None] = time.sleep,
        show: terminal.Show = terminal.Show.NORMAL,
    ):
        """Makes what judges; the run need not be there yet.

        Args:
          config: the run's config; what may change between two parts of a run may differ.
          directory: the run's work directory.
          watch: what may stop the job.
          sleep: waits for so many seconds.
          show: how much is printed.

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
        self._states = states.States(experiment, mesh, example, self._run)
        self._checkpoints = self._states.manager
        self._evaluation = evaluation.Evaluation(experiment, mesh, config.eval_batch_size)
        processes.check_equal_data({"evaluation": self._evaluation.summary})
        stored = storage.as_stored(experiment, mesh, self._states.target)
        self._evaluation.check(stored, config.checkpoint)
        self._watch = watch
        self._sleep = sleep
        self._terminal = terminal.Terminal(config.steps, show)
        self._stop: notice.Notice | None = None
        self._last_message = ""
        self._judged = -1
        self._writers: list[writers.Writer] | None = None
        self._best: _Best | None = None

    def last_step(self) -> int:
        """The last step that has been judged, -1 if there is none; every process calls it alike."""
        return self._checkpoints.agree(lambda: self._judged)

    def follow(self) -> notice.Notice | None:
        """Judges checkpoints, the oldest first, until the run's last; or what has stopped the job."""
        # The files are process 0's: the others need not even see them.
        first = jax.process_index() == 0
        with self._own.opened(self._config) if first else contextlib.nullcontext():
            try:
                self._judge_all()
            finally:
                for writer in self._writers or []:
                    writer.close()
        return self._stop

    def _judge_all(self) -> None:
        while self._go_on():
            step = self._checkpoints.agree(self._next_step)
            if step is not None:
                self._judge(step)
            elif self._checkpoints.agree(self._is_over):
                break
            elif self._checkpoints.store.path is not None:
                self._sleep(_POLL_SECONDS)
            else:
                self._sleep(_REMOTE_POLL_SECONDS)

    def _is_over(self) -> bool:
        """Returns whether there will be no more: the last step has been evaluated, or the run has ended before it."""
        why = workdir.not_finite(self._run.path)
        if why:
            self._say(f"the run has ended, since it is not finite: {why}")
            return True
        early, reason = workdir.ended(self._run.path) or (None, "")
        if early is not None and self._judged >= early:
            self._say(f"the run has ended at step {early}: {reason}")
            return True
        end = (jsonfile.read_if_exists(self._run.config) or {}).get("steps", self._config.steps)
        if end <= self._judged < self._config.steps:
            self._say(
                f"the run ends at step {end}, which has been judged; waiting for step {self._config.steps}, as this "
                f"job's config says: with --config.steps={end} it ends"
            )
        return self._judged >= self._config.steps

    def _go_on(self) -> bool:
        if self._watch is not None:
            asked = self._watch.poll()
            if asked is not None and asked.kind == notice.STOP:
                self._stop = asked
        return self._stop is None

    def _next_step(self) -> int | None:
        """The oldest step that is to be judged; held, so that it is not deleted meanwhile."""
        if self._writers is None:
            if not disk.exists(self._run.config):
                self._say(f"waiting for a run in {self._run.path}: it has no config.json yet")
                return None
            self._begin()
        for step in self._checkpoints.all_steps():
            if step > self._judged and (self._best is None or self._best.hold(step)):
                return step
        if self._judged < 0:
            self._say(f"waiting for the first checkpoint in {self._checkpoints.store}")
        return None

    def _begin(self) -> None:
        """Finds the run in its directory, and goes on where this job was."""
        for change in self._run.check(self._config):
            self._say(f"other than in the run: {change}")
        self._check_owner()
        rows = self._own.metrics
        # The last whole row is of the last step that was judged.
        self._judged = max((row["step"] for row in writers.read_steps(rows)), default=-1)
        config = identity_lib.plain(self._config)
        part = writers.Part(self._own.path, self._judged, config, lambda: writers.read(rows))
        self._writers = writers.open_all(self._config.writers, part)
        path = self._own.path / "best.json"
        keep = states.keep(self._config.checkpoint)
        # Also where no best ones are kept any more, to leave those of before to the run's rules.
        if keep.best or disk.exists(path):
            self._best = _Best(path, keep, self._checkpoints, rows)

    def _check_owner(self) -> None:
        identity = self._run.identity()
        store = self._checkpoints.store
        owner = checkpoint.read_owner(store)
        if identity is not None and owner is not None and owner.id != identity.id:
            raise errors.UserError(
                f"{store} holds the checkpoints of run {owner.id} ({owner.workdir}), and --workdir={self._run.path} "
                f"holds run {identity.id}: give the run's own checkpoint.directory."
            )

    def _judge(self, step: int) -> None:
        try:
            state = self._states.restore(step, fits=True).state
        except checkpoint.CheckpointError as e:
            if step in self._checkpoints.agree(self._checkpoints.all_steps):
                raise
            # Damaged, or deleted while it was read.
            self._say(f"step {step} is left out: {e}")
            self._judged = step
            if self._best is not None:
                self._best.release()
            return
        self._evaluation.check(state, self._config.checkpoint)
        values = self._evaluation(state, self._go_on)
        if values is None:
            return
        self._judged = step
        # Before the row, after which nobody judges it again.
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
    """The best checkpoints, which survive a restart of the job and the rules of the run."""

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
        # The metric of each of the best steps.
        self._values: dict[int, float] = {}
        if (before["metric"], before["mode"]) == (keep.metric, keep.mode):
            for entry in before["best"]:
                self._values[entry["step"]] = entry["value"]
        elif keep.best:
            # By another metric than before: of what has been judged, and is there.
            self._rank(_judged(rows, f"eval/{keep.metric}", manager.all_steps()))
            for step in list(self._values):
                if not self.hold(step):
                    del self._values[step]
        self._rank(self._values)
        self.release()

    def hold(self, step: int) -> bool:
        """Pins a step while it is judged; False if it is there no more."""
        # Noted first: a pin that nobody remembers would stay for ever.
        is_pinned = step in self._pinned
        self._pinned.add(step)
        self._write()
        try:
            # A pin that somebody else has made is not this job's to take away.
            is_own = self._manager.pin(step) or is_pinned
        except checkpoint.CheckpointError:
            self._check_gone(step)
            is_own = False
        if not is_own:
            self._pinned.discard(step)
        return step in self._manager.all_steps()

    def _check_gone(self, step: int) -> None:
        """Raises the error that is being handled, unless it is that the step is there no more."""
        if step in self._manager.all_steps():
            raise

    def judged(self, step: int, values: dict[str, Any]) -> None:
        """Keeps the best, and leaves the others to the run's rules."""
        if self._keep.best:
            self._rank({**self._values, step: saving.number(values[self._keep.metric])})
        self.release()

    def _rank(self, values: dict[int, float]) -> None:
        saved = [checkpoint.Saved(step, value) for step, value in values.items()]
        self._values = {step: values[step] for step in self._keep.best_steps(saved)}

    def release(self) -> None:
        """Leaves what is not among the best to the run's rules."""
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
            "best": [{"step": step, "value": value} for step, value in self._values.items()],
            "pinned": sorted(self._pinned),
        }
        jsonfile.write(self._path, content)


def run(
    config: ml_collections.ConfigDict,
    directory: str,
    command: str,
    watch: watch_lib.Watch | None,
    show: terminal.Show = terminal.Show.NORMAL,
) -> int:
    """Follows a run to its end, or until the job is told to stop; returns the exit code."""
    follower = Follower(config, directory, watch, show=show)
    stop = follower.follow()
    own = workdir.Workdir(directory).path / FOLDER
    if stop is not None:
        print(f"{stop.why}: stopped; what has been judged is in {own}\nto go on: {command}")
        return stop.code
    print(f"all checkpoints to step {follower.last_step()} have been judged; in {own}")
    return notice.DONE


def _read_best(path: pathlib.Path) -> dict[str, Any]:
    """Reads a best.json, of no checkpoints if there is none; raises UserError if it is not what this job writes."""
    content: dict[str, Any] = {"metric": None, "mode": None, "best": [], "pinned": []}
    content |= jsonfile.read_if_exists(path) or {}
    if not _is_best(content["best"], content["pinned"]):
        raise errors.UserError(
            f"{path} is not what this job writes; delete it, and the best are chosen again."
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
    # Not isinstance: True is an int to Python.
    return all(type(step) is int for step in steps)


def _judged(path: pathlib.Path, name: str, saved: list[int]) -> dict[int, float]:
    """The values of a metric in rows of these steps, but for those that are not finite: rows have no such."""
    values = {}
    for row in writers.read_steps(path):
        if name in row:
            values[row["step"]] = row[name]
    known = {}
    for step, value in values.items():
        # Of several groups it is a list.
        numbers = value if isinstance(value, list) else [value]
        if step in saved and numbers and all(map(jsonfile.is_number, numbers)):
            known[step] = saving.number(value)
    return known
