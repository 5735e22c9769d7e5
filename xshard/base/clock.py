"""A clock that divides a process's time into training and what keeps it from training.

A host runs ahead of its devices, so host work does not always delay them. The phases
are:

start       from the start of the process until the first training step has been
            dispatched: imports, reading data, restoring, and compiling that step.
data        the host waits for a batch while the devices are idle. A wait during which
            the devices still compute earlier steps costs nothing, and counts as
            training.
checkpoint  the host saves. It has waited for all earlier steps first, which counts as
            training. Writing in the background does not count.
evaluation  the same for an evaluation, including its compilation.
trace       the host begins or writes a profile of some steps.
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
from typing import Any, NamedTuple

from xshard.base import spans

START = "start"
DATA = "data"
CHECKPOINT = "checkpoint"
EVALUATION = "evaluation"
TRACE = "trace"
TRAINING = "training"
PHASES = (START, DATA, CHECKPOINT, EVALUATION, TRACE, TRAINING)
# The time of the host in none of the parts of `spans`.
OTHER = "other"
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
        begin, first = self._steps[0]
        end, last = self._steps[-1]
        if last <= first:
            return None
        return (last - first) / (end - begin)


class _Counted(NamedTuple):
    """The present phase, when it began, and the seconds of each phase until then."""

    phase: str
    since: float
    seconds: dict[str, float]


class Clock:
    """Counts the seconds of each phase since the process started.

    One thread enters phases, and any thread may read the seconds.
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
        # It is always replaced as a whole, because another thread may read it.
        self._counted = _Counted(START, begin, dict.fromkeys(PHASES, 0.0))
        # Whether the devices were idle when the last wait for data ended, and how long
        # it took, in seconds.
        self._was_idle = False
        self._last_wait = 0.0
        # What `parts` counts from the first step on: the track of the thread, and the
        # seconds by then.
        self._track: spans.Track | None = None
        self._begun = 0.0
        self._before: dict[str, float] = {}
        # The time of the host outside of all parts until the last wait for data began;
        # and how much of that time delayed the devices.
        self._outside = 0.0
        self._delaying = 0.0
        # Starts its thread when the first task is submitted.
        self._idle_watcher = concurrent.futures.ThreadPoolExecutor(1, "idle")

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase until now."""
        phase, since, seconds = self._counted
        return seconds | {phase: seconds[phase] + self._now() - since}

    def started(self) -> None:
        """Ends the phase 'start'."""
        self._enter(TRAINING)
        if self._track is None:
            self._track = spans.current_track()
            self._begun = self._now()
            self._before = self._counted_parts(self._track)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time in the context as this phase, not as the enclosing one."""
        outer = self._enter(name)
        try:
            with spans.Span(name):
                yield
        finally:
            self._enter(outer)

    def parts(self) -> dict[str, float]:
        """Returns the seconds since the first step in each part of `spans`; empty
        before it.

        A wait for data, and the time of the host in no part ('other'), count only as
        far as the devices were idle; the rest is 'step'. Then what one process needs
        more than the others is what they wait for.
        """
        if self._track is None:
            return {}
        counted = self._counted_parts(self._track)
        parts = {}
        for name, seconds in counted.items():
            parts[name] = max(0.0, seconds - self._before[name])
        own = sum(parts.values()) - parts[spans.STEP] - parts[spans.WRITE]
        parts[spans.STEP] = max(0.0, self._now() - self._begun - own)
        return parts

    def _counted_parts(self, track: spans.Track) -> dict[str, float]:
        """Returns the seconds of each part as they are counted; 'step' is the rest."""
        parts = dict(track.seconds)
        parts[spans.DATA] = self.seconds()[DATA]
        parts[OTHER] = self._delaying
        parts[spans.WRITE] = spans.background_seconds()
        return parts

    @contextlib.contextmanager
    def waiting(self, newest: Any) -> Iterator[None]:
        """Counts the part of the context during which the devices are idle as 'data'.

        In a healthy run the devices are still busy when each wait ends. Then nothing
        counts, and to find that out costs a microsecond or two. Only after a wait at
        whose end the devices were idle, the next one is measured: if they are idle when
        it begins, all of it counts; otherwise a thread notes when they become idle. So
        the first of several waits for slow data does not count. After a wait that was
        so short that a thread would prolong it, the next one counts only if they are
        idle when it begins.

        Args:
          newest: a `jax.Array` computed by the most recently dispatched step; None
            before the first step of a run and after a roll-back, when nothing counts.
        """
        outside = self._now() - spans.current_track().covered
        if newest is None:
            self._was_idle = False
            self._outside = outside
            with spans.Span(spans.DATA):
                yield
            return
        begin = self._now()
        is_idle = newest.is_ready()
        if is_idle:
            self._delaying += outside - self._outside
        self._outside = outside
        is_idle_from_begin = self._was_idle and is_idle
        becomes_idle = None
        is_measured = self._was_idle and self._last_wait > _SHORT_SECONDS
        if is_measured and not is_idle_from_begin:
            becomes_idle = self._idle_watcher.submit(self._time_when_ready, newest)
        with spans.Span(spans.DATA):
            yield
        is_idle = newest.is_ready()
        end = self._now()
        if is_idle_from_begin:
            self._move_to_data(end - begin)
        elif is_idle and becomes_idle is not None:
            self._move_to_data(max(end - becomes_idle.result(), 0.0))
        self._was_idle = is_idle
        self._last_wait = end - begin

    def _time_when_ready(self, newest: Any) -> float:
        newest.block_until_ready()
        return self._now()

    def _enter(self, phase: str) -> str:
        """Counts the time until now, and enters a phase; returns the previous one."""
        now = self._now()
        before, since, seconds = self._counted
        seconds = seconds | {before: seconds[before] + now - since}
        self._counted = _Counted(phase, now, seconds)
        return before

    def _move_to_data(self, moved: float) -> None:
        """Counts seconds of the present phase, not counted yet, as a wait for data."""
        # `_enter` will also count them for the present phase, so they are subtracted
        # from it in advance.
        phase, since, seconds = self._counted
        seconds = seconds | {phase: seconds[phase] - moved}
        seconds[DATA] += moved
        self._counted = _Counted(phase, since, seconds)


_IMPORTED = time.monotonic()


def boot() -> tuple[str, float]:
    """Returns the ID of the machine's present boot, and the seconds since then, also
    those in which the machine was suspended. They do not depend on the wall clock.

    Without support by the system, the ID is empty.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            identity = file.read().strip()
        return identity, time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError, ValueError):
        return "", time.monotonic()


def age() -> float:
    """Returns the seconds since this process started.

    Without support by the system, these are the seconds since this module was imported.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            content = file.read()
        # proc(5): field 22 is the start time. Field 2 is a name that may contain
        # anything and ends with ')', so the fields are counted from the last ')'.
        fields = content.rpartition(b")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED
