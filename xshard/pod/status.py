"""The status of processes, for whoever asks from outside of the run."""

import contextlib
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from xshard import errors
from xshard.files import disk, jsonfile
from xshard.metrics import clock

FILE = "status.json"
STARTING, TRAINING, EVALUATING = "starting", "training", "evaluating"
# What the last word of a process begins with.
DONE = "done"
ENDS = (DONE, "stopped", "failed")
# A process says what it is doing twice a second.
SILENT_SECONDS = 10.0
_RATE_ROWS = 60


class Status:
    """The status of one process."""

    def __init__(self, host: str):
        self._host = host
        self._row: dict[str, Any] = {"doing": STARTING, "step": None, "steps": None}
        # For `xshard.pod.attempts`.
        begun = time.time() - clock.age()
        self._row |= {"begun": begun, "first": None, "trained": 0, "seconds": {}}
        self._rate = clock.Rate(_RATE_ROWS)

    def doing(self, what: str, **more: Any) -> None:
        """Takes what it is doing, and where it is: `step`, `steps`, and `seconds` as `xshard.metrics.clock` has them."""
        row = self._row
        if row["first"] is None:
            more["first"] = more.get("step")
        if what == TRAINING:
            more["trained"] = row["trained"] + 1
        row.update(doing=what, **more)

    def now(self) -> tuple[str, int | None]:
        """Returns what it is doing, and the step that it has begun last."""
        row = self._row
        return row["doing"], row["step"]

    def row(self) -> dict[str, Any]:
        """Returns what it is doing; 'rate' is of the last rows, in steps a second, 'time' that of the epoch."""
        # A copy, since another thread may say meanwhile what it does.
        row = dict(self._row)
        if row["step"] is not None:
            self._rate.add(time.monotonic(), row["step"])
        row["rate"] = self._rate.value()
        return row | {"time": time.time(), "host": self._host, "pid": os.getpid()}


def read(directory: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of all processes, that of process 0 first.

    Raises:
      UserError: if there is no such file, or it is not what a run writes.
    """
    path = directory / FILE
    rows = jsonfile.read(path, list)
    if not rows or not all(is_row(row) for row in rows):
        raise errors.UserError(f"{path} is not what a run writes.")
    return rows


def read_if_exists(directory: pathlib.Path) -> list[dict[str, Any]] | None:
    """The rows of all processes, as `read`; None if there is no file."""
    if not disk.exists(directory / FILE):
        return None
    return read(directory)


def is_row(row: Any) -> bool:
    """Returns whether a JSON value is what a process writes of itself; one of an earlier version has no 'begun'."""
    if not isinstance(row, dict):
        return False
    for name in ("doing", "host"):
        if not isinstance(row.get(name), str):
            return False
    for name in ("step", "steps", "rate", "first"):
        if row.get(name) is not None and not jsonfile.is_number(row[name]):
            return False
    numbers = [row.get("time"), row.get("pid")]
    if "begun" in row:
        if not isinstance(row.get("seconds"), dict):
            return False
        numbers += [row["begun"], row.get("trained"), *row["seconds"].values()]
        # Steps are counted from the first on.
        if row["trained"] and (row.get("first") is None or row.get("step") is None):
            return False
    return all(map(jsonfile.is_number, numbers))


def write(directory: pathlib.Path, rows: Sequence[Any]) -> None:
    """Writes the rows of all processes, if there is such a directory and room in it."""
    # A full disk is not what a run should end of here.
    with contextlib.suppress(OSError):
        if directory.is_dir():
            content = jsonfile.dumps(list(rows)).encode()
            disk.replace(directory / FILE, content, durably=False)
