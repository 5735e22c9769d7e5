"""A clock of where a process's seconds go: into training steps, or into what keeps its devices from them.

A host runs ahead of its devices, so that what it does is not what they wait for. What counts as what:

start       from the begin of the process until the first training step has been dispatched, that is imports,
            reading data, restoring, and compiling that step.
data        the host waits for a batch and the devices have nothing left to do. A wait beside which they
            compute the steps before costs nothing, and counts as training.
checkpoint  the host saves: it has waited for all steps before, which is training. What is written in the
            background does not count.
evaluation  the same, for an evaluation, its compilation included.
training    all the rest.

With several processes each has its own, and they differ little: they meet in every step.
"""

import collections
import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

START, DATA, CHECKPOINT, EVALUATION, TRAINING = PHASES = (
    "start",
    "data",
    "checkpoint",
    "evaluation",
    "training",
)


# Some times as long as it takes to hand something to a thread and back.
_SHORT_SECONDS = 1e-3


class Every:
    """Says once every so many seconds that they have passed; if 0, never."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._clock = clock
        self._due = clock() + seconds

    def has_passed(self) -> bool:
        """Returns whether it is the first call since so many seconds have passed."""
        now = self._clock()
        if not self._seconds or now < self._due:
            return False
        self._due = now + self._seconds
        return True


class Rate:
    """The steps a second, over the last times that it was told of a step."""

    def __init__(self, times: int):
        self._steps: collections.deque[tuple[float, int]] = collections.deque(maxlen=times)

    def add(self, now: float, step: int) -> None:
        """Takes the step that a run is at."""
        self._steps.append((now, step))

    def value(self) -> float | None:
        """The rate; None while no step has been made between the times."""
        if not self._steps:
            return None
        (begin, first), (end, last) = self._steps[0], self._steps[-1]
        if last <= first:
            return None
        return (last - first) / (end - begin)


class Clock:
    """Counts the seconds of each phase, from the begin of the process on; for one thread."""

    def __init__(self, begin: float | None = None, now: Callable[[], float] = time.monotonic):
        """Begins in the phase of the start.

        Args:
          begin: when the process began, as `now` tells it; by default as the system says.
          now: the time in seconds.
        """
        self._now = now
        if begin is None:
            # In this order no time counts before the begin: what passes between the two is left out.
            already = age()
            begin = now() - already
        self._since = begin
        self._phase = START
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._waiting = _Waiting(self)

    def seconds(self) -> dict[str, float]:
        """The seconds of each phase until now."""
        self._enter(self._phase)
        return dict(self._seconds)

    def started(self) -> None:
        """Ends the start, if it has not ended."""
        self._enter(TRAINING)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts what is done in it as this phase, and no other that it is within."""
        outer = self._enter(name)
        try:
            yield
        finally:
            self._enter(outer)

    def waiting(self, newest: Any) -> "_Waiting":
        """A context in which the host waits for data.

        Args:
          newest: a `jax.Array` that the step makes which was dispatched last; None before the first.
        """
        self._waiting.newest = newest
        return self._waiting

    def _enter(self, phase: str) -> str:
        """Counts what has passed, and goes on in another phase; the one before."""
        now = self._now()
        before = self._phase
        self._seconds[before] += now - self._since
        self._since = now
        self._phase = phase
        return before

    def _move_to_data(self, seconds: float) -> None:
        """Counts seconds that have just passed, and are not counted yet, as a wait for data."""
        # They will be counted as part of the present phase, too.
        self._seconds[self._phase] -= seconds
        self._seconds[DATA] += seconds


class _Waiting:
    """The wait for a batch, of which counts what the devices have been idle for.

    They have been for none of it if they still compute when it ends. While that is so, as it should be, no more
    is asked, and it costs a microsecond or two. Else the next wait looks closer: it counts whole if the devices
    are idle when it begins, and if not, a thread beside it waits for the instant in which they are. Where the
    wait before was a short one, which a thread would make longer, it counts half instead.
    """

    newest: Any = None

    def __init__(self, clock: Clock):
        self._clock = clock
        # Whether the devices were idle when the wait before ended, and how long it was.
        self._was_idle = False
        self._last_seconds = 0.0
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def __enter__(self) -> None:
        self._begin = self._clock._now()
        self._ended: concurrent.futures.Future[float] | None = None
        # Before the first step of a run, and after a roll-back, there is none to be computed.
        self._was_idle = self._was_idle and self.newest is not None
        self._is_busy = self._was_idle and not self.newest.is_ready()
        if self._is_busy and self._last_seconds > _SHORT_SECONDS:
            if self._thread is None:
                self._thread = concurrent.futures.ThreadPoolExecutor(1, "idle")
            self._ended = self._thread.submit(self._wait, self.newest)

    def __exit__(self, *exc: object) -> None:
        if self.newest is None:
            return
        now = self._clock._now()
        is_idle = self.newest.is_ready()
        if is_idle and self._was_idle:
            self._clock._move_to_data(max(now - self._idle_since(now), 0.0))
        self._was_idle = is_idle
        self._last_seconds = now - self._begin

    def _idle_since(self, now: float) -> float:
        if not self._is_busy:
            return self._begin
        if self._ended is None:
            return (self._begin + now) / 2
        return self._ended.result()

    def _wait(self, newest: Any) -> float:
        newest.block_until_ready()
        return self._clock._now()


_IMPORTED = time.monotonic()


def age() -> float:
    """Returns the seconds since this process began; where the system does not say, since this was imported."""
    try:
        with open("/proc/self/stat", "rb") as file:
            # See proc(5): the 22nd field, of which the second, a name, may hold anything but ends with ')'.
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED
