"""The status of processes, for whoever asks from outside of the run."""

import collections
import contextlib
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from xshard import errors
from xshard.files import disk, jsonfile

FILE = "status.json"
STARTING = "starting"
# What the last word of a process begins with.
ENDS = ("done", "stopped", "failed")
# A process says what it is doing twice a second.
SILENT_SECONDS = 10.0
_RATE_ROWS = 60


class Status:
    """The status of one process."""

    def __init__(self, host: str):
        self._said: dict[str, Any] = {"doing": STARTING, "step": None, "steps": None}
        self._host = host
        self._made: collections.deque[tuple[float, int]] = collections.deque(maxlen=_RATE_ROWS)

    def doing(self, what: str, **more: Any) -> None:
        """Takes what it is doing, and where it is: `step`, `steps`."""
        self._said.update(doing=what, **more)

    def row(self) -> dict[str, Any]:
        """Returns what it is doing; 'rate' is of the last rows, in steps a second, 'time' that of the epoch."""
        now, said = time.monotonic(), dict(self._said)
        if said["step"] is not None:
            self._made.append((now, said["step"]))
        made = list(self._made) or [(now, 0)]
        (begin, first), (end, last) = made[0], made[-1]
        said["rate"] = (last - first) / (end - begin) if last > first else None
        return {**said, "time": time.time(), "host": self._host, "pid": os.getpid()}


def read(directory: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of all processes, that of process 0 first.

    Raises:
      UserError: if there is no such file, or it is not what a run writes.
    """
    path = directory / FILE
    rows = jsonfile.read(path, list)
    if not rows or not all(_is_row(row) for row in rows):
        raise errors.UserError(f"{path} is not what a run writes.")
    return rows


def read_if_exists(directory: pathlib.Path) -> list[dict[str, Any]] | None:
    """The rows of all processes, as `read`; None if there is no file."""
    return read(directory) if disk.exists(directory / FILE) else None


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    texts = [row.get(name) for name in ("doing", "host")]
    numbers = [row.get(name) for name in ("step", "steps", "rate")]
    known = [row.get("time"), row.get("pid"), *(one for one in numbers if one is not None)]
    return all(isinstance(text, str) for text in texts) and all(map(jsonfile.is_number, known))


def write(directory: pathlib.Path, rows: Sequence[Any]) -> None:
    """Writes the rows of all processes, if there is such a directory and room in it."""
    # A full disk is not what a run should end of here.
    with contextlib.suppress(OSError):
        if directory.is_dir():
            content = jsonfile.dumps(list(rows)).encode()
            disk.replace(directory / FILE, content, durably=False)
