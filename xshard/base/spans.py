"""The parts of a process's time: what its threads do, and what they wait for.

`xshard.base.span_file` writes the parts that take long to a file. The parts are:

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
import threading
import time
from collections.abc import Iterator

DATA = "data"
STEP = "step"
CHECKPOINT = "checkpoint"
SAVE = "save"
EVALUATION = "evaluation"
TRACE = "trace"
AGREE = "agree"
WRITE = "write"
# The thread that writes checkpoints has this name.
BACKGROUND = "checkpoint"

# Shorter spans are in no file, only in the shares. A step of some milliseconds
# would otherwise fill the file in minutes.
_SHORT_SECONDS = 0.02
_NAMES = (DATA, STEP, CHECKPOINT, SAVE, EVALUATION, TRACE, AGREE, WRITE)


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
# begin and end, by the monotonic clock.
LONG: collections.deque[tuple[str, str, float, float]] = collections.deque(
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
            LONG.append((track.name, self._name, self._begin, end))


def current_track() -> Track:
    """Returns the track of the calling thread."""
    return _THREAD.track


def background_seconds() -> float:
    """Returns the seconds for which this process has written checkpoints."""
    track = _TRACKS.get(BACKGROUND)
    return track.seconds[WRITE] if track is not None else 0.0


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Adds the long spans of all threads that end in its body to `LONG`."""
    global _is_recorded
    _is_recorded = True
    try:
        yield
    finally:
        _is_recorded = False
