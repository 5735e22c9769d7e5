"""The file of a process's long spans, and of the shares of all parts of its time.

Perfetto reads it (https://ui.perfetto.dev, "Open trace file"):

    WORKDIR/spans/process_0.json

The parts are those of `xshard.base.spans`.
"""

import contextlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from xshard.base import spans

FOLDER = "spans"

# How often the file gets the shares of all parts.
_SHARES_SECONDS = 10.0
# The largest size of a file. The one before is kept, so a process has twice as much.
_MOST_BYTES = 4 << 20
# Of the monotonic clock, in which spans are measured, to the time of day.
_TO_TIME_OF_DAY = time.time() - time.monotonic()


class File:
    """The file of a process, which grows to a bounded size."""

    def __init__(
        self,
        directory: pathlib.Path,
        index: int,
        host: str,
        parts: Callable[[], Mapping[str, float]],
        say: Callable[[str], None],
    ):
        """Prepares the file; `opened` opens it.

        Args:
          directory: the work directory.
          index: the process's index.
          host: the name of its host.
          parts: returns the seconds of each part so far; empty before there are any.
          say: prints a line.
        """
        self._path = directory / FOLDER / f"process_{index}.json"
        self._index = index
        self._host = host
        self._parts = parts
        self._say = say
        self._has_failed = False
        self._lock = threading.Lock()
        # The numbers by which the file names threads.
        self._threads: dict[str, int] = {}
        # How many of these names the file has; None: not even the process's.
        self._num_named: int | None = None
        self._shares_at = time.monotonic()
        self._parts_before: Mapping[str, float] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Records the long spans of all threads, and writes the last ones at the end.

        An earlier start of the run may have written to the file; this one appends.
        """
        with spans.recorded():
            try:
                yield
            finally:
                self.flush(is_last=True)

    def flush(self, *, is_last: bool = False) -> None:
        """Appends what is new to the file; may be called from any thread.

        Args:
          is_last: whether the run ends, so that the shares until now are written.
        """
        with self._lock:
            events = []
            while spans.LONG:
                events.append(self._span(*spans.LONG.popleft()))
            now = time.monotonic()
            if is_last or now >= self._shares_at + _SHARES_SECONDS:
                events += self._shares(now)
            if events:
                self._append(events)

    def _span(self, thread: str, name: str, begin: float, end: float) -> dict[str, Any]:
        """Returns a complete event of Chrome's trace format, in microseconds."""
        return {
            "name": name,
            "ph": "X",
            "ts": _microseconds(begin),
            "dur": round(1e6 * (end - begin)),
            "pid": self._index,
            "tid": self._threads.setdefault(thread, len(self._threads)),
        }

    def _shares(self, now: float) -> list[dict[str, Any]]:
        """Returns a counter of the share of each part since the last one."""
        before = self._parts_before
        seconds = now - self._shares_at
        parts = self._parts()
        self._parts_before = parts
        self._shares_at = now
        if not before or seconds <= 0:
            return []
        shares = {}
        for name, value in parts.items():
            shares[name] = round((value - before.get(name, 0.0)) / seconds, 4)
        event = {"name": "shares", "ph": "C", "ts": _microseconds(now)}
        return [{**event, "pid": self._index, "args": shares}]

    def _append(self, events: list[dict[str, Any]]) -> None:
        # Missing spans are no reason to end a run.
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                size = _complete_lines(file.fileno(), self._path)
                if size > _MOST_BYTES:
                    self._path.replace(self._path.with_suffix(".previous.json"))
                    size = 0
                    self._num_named = None
            with self._path.open("ab") as file:
                # The format allows an array without its end.
                lines = [] if size else ["["]
                for event in [*self._names(), *events]:
                    lines.append(json.dumps(event, separators=(",", ":")) + ",")
                file.write(("\n".join(lines) + "\n").encode())
        except OSError as e:
            if not self._has_failed:
                self._say(f"spans are lost: {self._path}: {e.strerror or e}")
            self._has_failed = True

    def _names(self) -> list[dict[str, Any]]:
        """Returns the names that the file lacks, as events."""
        names = []
        base = {"ph": "M", "pid": self._index}
        if self._num_named is None:
            process = f"process {self._index} on {self._host}"
            names.append({**base, "name": "process_name", "args": {"name": process}})
        threads = list(self._threads.items())
        for thread, number in threads[self._num_named or 0 :]:
            named = {**base, "name": "thread_name", "args": {"name": thread}}
            names.append({**named, "tid": number})
        self._num_named = len(threads)
        return names


def _microseconds(monotonic: float) -> int:
    return round(1e6 * (monotonic + _TO_TIME_OF_DAY))


def _complete_lines(fd: int, path: pathlib.Path) -> int:
    """Cuts off the end of a line that a killed process wrote in part; returns the size
    of the file.
    """
    size = os.fstat(fd).st_size
    if not size:
        return 0
    with path.open("rb") as file:
        file.seek(max(0, size - 4096))
        tail = file.read()
    end = size - len(tail) + tail.rfind(b"\n") + 1
    if end < size:
        os.truncate(path, end)
    return end
