"""The parts of a process's time: what its threads do, and what they wait for.

Each part that takes long is a span in a file of the process, which Perfetto reads
(https://ui.perfetto.dev, "Open trace file"), and so are the shares of all parts:

    WORKDIR/spans/process_0.json

The parts are:

data        waits for a batch
step        dispatches a step to the devices, or waits for them. The devices of a step
            wait for one another, so this contains the wait for slower processes
checkpoint  saves: copies the state to the host
save        waits until the save before has been written, in the background
evaluation  evaluates
trace       begins or writes a profile of some steps
agree       waits for values of the other processes
write       writes a checkpoint in the background, beside the parts above
"""

import collections
import contextlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

DATA = "data"
STEP = "step"
CHECKPOINT = "checkpoint"
SAVE = "save"
EVALUATION = "evaluation"
TRACE = "trace"
AGREE = "agree"
WRITE = "write"
FOLDER = "spans"
# The thread that writes checkpoints has this name.
BACKGROUND = "checkpoint"

# Shorter spans are not in the file, only in the shares. A step of some milliseconds
# would otherwise fill the file in minutes.
_SHORT_SECONDS = 0.02
# How often the file gets the shares of all parts.
_SHARES_SECONDS = 10.0
# The largest size of a file. The one before is kept, so a process has twice as much.
_MOST_BYTES = 4 << 20
_NAMES = (DATA, STEP, CHECKPOINT, SAVE, EVALUATION, TRACE, AGREE, WRITE)
# Of the monotonic clock, in which spans are measured, to the time of day.
_TO_TIME_OF_DAY = time.time() - time.monotonic()


class Track:
    """What the threads of one name have spent their time with, one thread at a time.

    One thread changes it, and any thread may read it.

    Attributes:
      name: the name of the threads.
      seconds: the seconds of each part, without those of parts inside it.
      covered: the seconds in any part.
    """

    def __init__(self, name: str):
        self.name = name
        self.seconds = dict.fromkeys(_NAMES, 0.0)
        self.covered = 0.0


class _Thread(threading.local):
    """The track of a thread, and the parts that it is in, the innermost last."""

    def __init__(self) -> None:
        name = threading.current_thread().name
        self.track = _TRACKS.setdefault(name, Track(name))
        self.inside: list[Span] = []


_TRACKS: dict[str, Track] = {}
_THREAD = _Thread()
# The long spans that are not in a file yet: the name of the thread, the part, and its
# begin and end.
_NEW: collections.deque[tuple[str, str, float, float]] = collections.deque(
    maxlen=100_000
)
_is_recorded = False


class Span:
    """A context whose time counts as a part. It costs about a microsecond.

    >>> with Span(CHECKPOINT):
    ...     with Span(SAVE):
    ...         pass
    """

    __slots__ = ("_begin", "_inner_seconds", "_name")

    def __init__(self, name: str):
        """Names the part, one of those that the module lists."""
        self._name = name
        self._inner_seconds = 0.0
        self._begin = 0.0

    def __enter__(self) -> None:
        _THREAD.inside.append(self)
        self._begin = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        end = time.monotonic()
        seconds = end - self._begin
        track = _THREAD.track
        inside = _THREAD.inside
        inside.pop()
        track.seconds[self._name] += seconds - self._inner_seconds
        if inside:
            inside[-1]._inner_seconds += seconds
        else:
            track.covered += seconds
        if seconds > _SHORT_SECONDS and _is_recorded:
            _NEW.append((track.name, self._name, self._begin, end))


def current_track() -> Track:
    """Returns the track of the calling thread."""
    return _THREAD.track


def background_seconds() -> float:
    """Returns the seconds for which this process has written checkpoints."""
    track = _TRACKS.get(BACKGROUND)
    return track.seconds[WRITE] if track is not None else 0.0


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
        global _is_recorded
        _is_recorded = True
        try:
            yield
        finally:
            self.flush(is_last=True)
            _is_recorded = False

    def flush(self, *, is_last: bool = False) -> None:
        """Appends what is new to the file; may be called from any thread.

        Args:
          is_last: whether the run ends, so that the shares until now are written.
        """
        with self._lock:
            events = []
            while _NEW:
                events.append(self._span(*_NEW.popleft()))
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
