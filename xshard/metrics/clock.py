"""A clock that divides a process's time into training and the phases that keep its
devices from training.

A host runs ahead of its devices, so host work does not always delay them. The phases
are:

start       from the start of the process until the first training step has been
            dispatched: imports, reading data, restoring, and compiling that step.
data        the host waits for a batch while the devices are idle. A wait during which
the devices still compute
            earlier steps costs nothing, and counts as training.
checkpoint  the host saves. It has waited for all earlier steps first, which counts as
training. Writing in the
            background does not count.
evaluation  the same for an evaluation, including its compilation.
training    the rest.

With several processes each has its own clock. They differ little, since the processes
synchronize in every step.
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


# Several times as long as a round trip to another thread.
_SHORT_SECONDS = 1e-3


class Every:
    """A timer that fires once every so many seconds; with 0, never."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._clock = clock
        self._due = clock() + seconds

    def has_passed(self) -> bool:
        """Returns whether this is the first call since the interval has passed."""
        if not self._seconds:
            return False
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + self._seconds
        return True


class Rate:
    """The number of steps per second, over the last `times` observations."""

    def __init__(self, times: int):
        self._steps: collections.deque[tuple[float, int]] = collections.deque(
            maxlen=times
        )

    def add(self, now: float, step: int) -> None:
        """Records the step that the run has reached."""
        self._steps.append((now, step))

    def value(self) -> float | None:
        """Returns the rate; None if no step was made between the observations."""
        if not self._steps:
            return None
        (begin, first), (end, last) = self._steps[0], self._steps[-1]
        if last <= first:
            return None
        return (last - first) / (end - begin)


class Clock:
    """Counts the seconds of each phase since the process started; one thread enters
    phases, any may read.
    """

    def __init__(
        self, begin: float | None = None, now: Callable[[], float] = time.monotonic
    ):
        """Starts in the phase 'start'.

        Args:
          begin: the start time of the process, on the clock of `now`; by default from
            the operating system.
          now: returns the time in seconds.
        """
        self._now = now
        if begin is None:
            # `age` is called first, so that the time between the two calls is lost
            # rather than counted twice.
            already = age()
            begin = now() - already
        # The present phase, its begin, and the seconds of each phase until then. They
        # are replaced together, because another thread may read them.
        self._counted = START, begin, dict.fromkeys(PHASES, 0.0)
        self._waiting = _Waiting(self)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase until now."""
        phase, since, seconds = self._counted
        return seconds | {phase: seconds[phase] + self._now() - since}

    def started(self) -> None:
        """Ends the phase 'start'."""
        self._enter(TRAINING)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside the context as this phase only, not as the enclosing
        one.
        """
        outer = self._enter(name)
        try:
            yield
        finally:
            self._enter(outer)

    def waiting(self, newest: Any) -> "_Waiting":
        """Returns a context in which the host waits for data.

        Args:
          newest: a `jax.Array` computed by the most recently dispatched step; None
            before the first step.
        """
        self._waiting.newest = newest
        return self._waiting

    def _enter(self, phase: str) -> str:
        """Counts the time since the last change, and enters another phase; returns the
        previous one.
        """
        now = self._now()
        before, since, seconds = self._counted
        self._counted = phase, now, seconds | {before: seconds[before] + now - since}
        return before

    def _move_to_data(self, seconds: float) -> None:
        """Counts seconds that have just passed, and are not counted yet, as a wait for
        data.
        """
        # `_enter` will also count them for the present phase, so they are subtracted
        # from it in advance.
        phase, since, counted = self._counted
        moved = counted | {phase: counted[phase] - seconds}
        moved[DATA] += seconds
        self._counted = phase, since, moved


class _Waiting:
    """A wait for a batch, which counts the part during which the devices were idle.

    If the devices are still busy when the wait ends, no part counts. In a healthy run
    this is always so, and the check costs a microsecond or two. Otherwise the next wait
    is measured more closely:

    - If the devices are idle when it begins, all of it counts.
    - If not, a thread waits for the moment they become idle.
    - If the previous wait was so short that a thread would prolong it, half of the wait
      counts instead.
    """

    newest: Any = None

    def __init__(self, clock: Clock):
        self._clock = clock
        # Whether the devices were idle when the previous wait ended, and how long that
        # wait was.
        self._was_idle = False
        self._last_seconds = 0.0
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def __enter__(self) -> None:
        self._begin = self._clock._now()
        self._ended: concurrent.futures.Future[float] | None = None
        # Before the first step of a run, and after a roll-back, no step is being
        # computed.
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
    """Returns the seconds since this process started; without support by the system,
    since this module was imported.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            # proc(5): field 22 is the start time. Field 2 is a name that may contain
            # anything and ends with ')', so the fields are counted from the last ')'.
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf(
            "SC_CLK_TCK"
        )
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED
