"""The status of a run's processes, in a file that other programs can read."""

import contextlib
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from xshard import errors
from xshard.files import disk, jsonfile
from xshard.metrics import clock

FILE = "status.json"
STARTING, TRAINING, EVALUATING = "starting", "training", "evaluating"
# While the first batches are read, which a stream that yields nothing may never end.
READING, READING_EVALUATION = "reading training data", "reading evaluation data"
# The phases in which a process must make progress. The others have their own time
# limits, or no known bound, as compilation.
BOUNDED = (TRAINING, EVALUATING, READING, READING_EVALUATION)
# The last status of a process that ended by itself begins with one of these.
DONE = "done"
ENDS = (DONE, "stopped", "failed")
# A process writes its status twice a second, so after this time without one it is not
# running.
SILENT_SECONDS = 10.0
_RATE_ROWS = 60


class _Row(NamedTuple):
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


class Status:
    """The status of one process."""

    def __init__(self, host: str):
        self._host = host
        self._row: dict[str, Any] = {"doing": STARTING, "step": None, "steps": None}
        # `xshard.pod.attempts` reads these fields.
        begun = time.time() - clock.age()
        self._row |= {"begun": begun, "first": None, "trained": 0, "seconds": dict}
        self._rate = clock.Rate(_RATE_ROWS)

    def doing(self, what: str, **more: Any) -> None:
        """Sets the phase, and other fields: `step`, `steps`, and `seconds`, a function
        as `xshard.metrics.clock` has it.

        It is called after each step, so everything that can wait is left to `row`.
        """
        row = self._row
        if row["first"] is None:
            more["first"] = more.get("step")
        if what == TRAINING:
            more["trained"] = row["trained"] + 1
        row.update(doing=what, **more)

    def now(self) -> tuple[str, int | None]:
        """Returns the phase, and the step that the process began last."""
        row = self._row
        return row["doing"], row["step"]

    def row(self) -> dict[str, Any]:
        """Returns the status; 'rate' is in steps per second over the last rows, 'time'
        in seconds since 1970.
        """
        # A copy, because another thread may change the status meanwhile.
        row = dict(self._row)
        row["seconds"] = row["seconds"]()
        if row["step"] is not None:
            self._rate.add(time.monotonic(), row["step"])
        row["rate"] = self._rate.value()
        return row | {"time": time.time(), "host": self._host, "pid": os.getpid()}


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
    parsed = jsonfile.parse(row, _Row, extra_keys=True)
    # A process that trained knows the step it started from.
    if parsed.trained and (parsed.first is None or parsed.step is None):
        raise ValueError(f"first is {parsed.first} and step {parsed.step}")


def write(directory: pathlib.Path, rows: Sequence[Any]) -> None:
    """Writes the status of all processes, if the directory exists."""
    # A full disk must not end a run because of its status.
    with contextlib.suppress(OSError):
        if directory.is_dir():
            content = jsonfile.dumps(list(rows)).encode()
            disk.replace(directory / FILE, content, durably=False)
