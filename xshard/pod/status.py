"""The status of a run's processes, in a file that other programs can read, and the
state of the run that follows from it.
"""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from xshard import errors
from xshard.base import clock, formatting
from xshard.files import disk, jsonfile
from xshard.pod import exit_codes

FILE = "status.json"

# The phases that have a name here; there are others, such as 'compiling'.
STARTING = "starting"
TRAINING = "training"
EVALUATING = "evaluating"
# While the first batches are read, which a stream that yields nothing may never end.
READING = "reading training data"
READING_EVALUATION = "reading evaluation data"
# The phases in which a process must make progress. The others have their own time
# limits, or no known bound, as compilation.
BOUNDED = (TRAINING, EVALUATING, READING, READING_EVALUATION)

# The last phase of a process that ended by itself begins with one of these.
DONE = "done"
STOPPED = "stopped"
FAILED = "failed"
NOT_FINITE = "failed: not finite"

# The states of a run that are not the last phase of a process.
RUNNING = "running"
SILENT = "silent"
UNKNOWN = "unknown"
# A process says its status twice a second, and process 0 writes those of all within a
# few seconds. So after this time without one a process is not running.
_SILENT_SECONDS = 10.0
# How many processes' rows process 0 writes in a second, at about that rate.
_WRITTEN_PER_SECOND = 256
_RATE_ROWS = 60


class _Row(msgspec.Struct, frozen=True):
    """The status of a process in the file; `Status.row` describes it."""

    doing: str
    step: float | None
    steps: float | None
    begun: float
    first: float | None
    trained: float
    seconds: dict[str, float]
    rate: float | None
    time: float
    host: str
    pid: int
    # An earlier version wrote none.
    running: float | None = None
    boot: str = ""
    up: float = 0.0
    # Only of a run that goes on without the members that it loses.
    generation: int | None = None
    members: int | None = None
    takeovers: int | None = None


class Status:
    """The status of one process."""

    def __init__(self, host: str, standing: Callable[[], Mapping[str, int]] = dict):
        """Begins with the first phase.

        Args:
          host: the host's name.
          standing: returns what `xshard.pod.members.Members.standing` has.
        """
        self._host = host
        self._standing = standing
        # The fields of `_Row` that the training changes. It replaces them all at once,
        # because another thread reads them meanwhile.
        self._changing: dict[str, Any] = {
            "doing": STARTING,
            "step": None,
            "steps": None,
            "first": None,
            "trained": 0,
        }
        self._begun = time.time() - clock.age()
        self._seconds: Callable[[], dict[str, float]] = dict
        self._rate = clock.Rate(_RATE_ROWS)

    def set_phase(
        self,
        phase: str,
        *,
        step: int | None = None,
        steps: int | None = None,
        seconds: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """Sets the phase, and what else is given.

        It is called with each dispatch, so everything that can wait is left to `row`.

        Args:
          phase: what the process does from here on.
          step: the last step that it has begun; without any, the one that it goes on
            from.
          steps: the number of steps of the run.
          seconds: returns the seconds spent in each phase of `xshard.base.clock`.
        """
        changed = dict(self._changing)
        changed["doing"] = phase
        if step is not None:
            if changed["first"] is None:
                changed["first"] = step
            elif phase == TRAINING:
                changed["trained"] += step - changed["step"]
            changed["step"] = step
        if steps is not None:
            changed["steps"] = steps
        if seconds is not None:
            self._seconds = seconds
        self._changing = changed

    def now(self) -> tuple[str, int | None]:
        """Returns the phase, and the step that the process began last."""
        changing = self._changing
        return changing["doing"], changing["step"]

    def row(self) -> dict[str, Any]:
        """Returns the status as a JSON value.

        Returns:
          doing: the phase.
          step, steps: the step that the process began last, and the number of steps of
            the run; None if unknown.
          begun: when the process began, in seconds since 1970.
          first, trained: the step that it started from, None before it is known; and
            the number of steps that it began.
          seconds: the seconds spent in each phase of `xshard.base.clock`.
          rate: the steps per second over the last rows; None if unknown.
          time: the time now, in seconds since 1970.
          host, pid: where the process runs.
          running: the seconds since the process began, whatever the wall clock says.
          boot, up: the ID of the machine's present boot, and the seconds since then.
          generation, members, takeovers: only in a run that goes on without the members
            that it loses: their generation, their number, and how many were lost.
        """
        changing = self._changing
        if changing["step"] is not None:
            self._rate.add(time.monotonic(), changing["step"])
        boot, up = clock.boot()
        return {
            **changing,
            "begun": self._begun,
            "seconds": self._seconds(),
            "rate": self._rate.value(),
            "time": time.time(),
            "host": self._host,
            "pid": os.getpid(),
            "running": round(clock.age(), 3),
            "boot": boot,
            "up": round(up, 3),
            **self._standing(),
        }


def last_phase(exit_code: int, stop_reason: str) -> str:
    """Returns the last phase of a process that ends with an exit code.

    Args:
      exit_code: the exit code.
      stop_reason: why it was to stop, if it was.
    """
    phases = {exit_codes.DONE: DONE, exit_codes.NONFINITE: NOT_FINITE}
    return phases.get(exit_code, f"{STOPPED}: {stop_reason}")


def read(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the status of all processes, process 0 first.

    Raises:
      UserError: if there is no status file, or if a run cannot have written it.
    """
    path = directory / FILE
    rows = jsonfile.read(path, list)
    try:
        if not rows:
            raise ValueError("it is empty")
        for row in rows:
            check_row(row)
    except ValueError as e:
        raise errors.UserError(f"{path} was not written by a run: {e}.") from e
    return rows


def read_if_exists(directory: pathlib.Path) -> list[dict[str, Any]] | None:
    """Returns the status of all processes as `read` does; None if there is no file."""
    if not disk.exists(directory / FILE):
        return None
    return read(directory)


def check_row(row: Any) -> None:
    """Raises ValueError if a JSON value is not a status as `Status.row` returns it."""
    parsed = jsonfile.parse(row, _Row)
    # A process that trained knows the step it started from.
    if parsed.trained and (parsed.first is None or parsed.step is None):
        raise ValueError(f"first is {parsed.first} and step {parsed.step}")


def write(directory: pathlib.Path, rows: Sequence[Any]) -> None:
    """Writes the status of all processes, if the directory exists."""
    write_texts(directory, [jsonfile.dumps(row) for row in rows])


def write_texts(directory: pathlib.Path, texts: Sequence[str]) -> None:
    """Writes the status of all processes, each given as JSON, if the directory
    exists.
    """
    # A full disk must not end a run because of its status.
    with contextlib.suppress(OSError):
        if directory.is_dir():
            content = f"[{', '.join(texts)}]".encode()
            disk.replace(directory / FILE, content, durably=False)


def seconds_between_writes(count: int) -> float:
    """Returns the time between two writes of the file, for a number of processes.

    The file of a thousand processes has 700 kB. It is written more rarely, so that
    process 0, for whose interpreter all others wait, has time for the training. The
    rows of running processes stay younger than `_SILENT_SECONDS`.
    """
    return min(count / _WRITTEN_PER_SECOND, _SILENT_SECONDS / 2.5)


# What follows from the status of processes.


def has_ended(row: Mapping[str, Any]) -> bool:
    """Returns whether a process has ended by itself, from its last status."""
    return row["doing"].startswith((DONE, STOPPED, FAILED))


def silent_seconds(row: Mapping[str, Any]) -> float:
    """Returns for how long a process has been silent that should write its status; 0 if
    it has ended, or is running.
    """
    age = time.time() - row["time"]
    if has_ended(row) or age <= _SILENT_SECONDS:
        return 0.0
    return age


class RunState(NamedTuple):
    """What has become of a run.

    Attributes:
      name: `RUNNING`, `SILENT`, `STOPPED`, `FAILED`, `DONE` or `UNKNOWN`.
      doing: the phase of the process that speaks for the run, or the state in words.
    """

    name: str
    doing: str


def run_state(
    rows: Sequence[Mapping[str, Any]], results: Mapping[str, Any]
) -> RunState:
    """Returns the state of a run.

    Args:
      rows: the status of its processes; empty if there is no status file.
      results: the content of results.json; empty if there is none. They may be of an
        earlier end of the run, from before it was resumed with more steps.
    """
    is_finite = results.get("finite") is not False
    if not rows:
        if not results:
            return RunState(UNKNOWN, f"not known: there is no {FILE}")
        return RunState(DONE, DONE) if is_finite else RunState(FAILED, NOT_FINITE)
    # A process that failed speaks for the run, else process 0 does.
    failed = [row for row in rows if row["doing"].startswith(FAILED)]
    speaker = [*failed, *rows][0]
    doing = speaker["doing"]
    seconds = silent_seconds(speaker)
    if seconds:
        age = formatting.age(seconds)
        return RunState(SILENT, f"gone, or silent for {age}; was {doing}")
    if not has_ended(speaker):
        return RunState(RUNNING, doing)
    if doing.startswith(STOPPED):
        return RunState(STOPPED, STOPPED)
    if not is_finite:
        return RunState(FAILED, NOT_FINITE)
    if failed:
        return RunState(FAILED, doing)
    return RunState(DONE, DONE)
