"""Views of a process's time, the tree of spans of `xshard.base.spans`: a clock, which
divides it into training and what keeps it from training, and a file.

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
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from xshard.base import spans
from xshard.base.spans import CHECKPOINT, DATA, EVALUATION, TRACE

START = "start"
TRAINING = "training"
PHASES = (START, DATA, CHECKPOINT, EVALUATION, TRACE, TRAINING)
# Several times as long as a round trip to another thread.
_SHORT_SECONDS = 1e-3
# How often the file of spans gets the shares of all parts.
_SHARES_SECONDS = 10.0
# The size above which a file is no longer appended to. The one before is kept, so a
# process has twice as much.
_MOST_BYTES = 4 << 20
# No line of it is longer.
_MOST_OF_LINE = 4096
# Of the monotonic clock, in which spans are measured, to the time of day.
_TO_TIME_OF_DAY = time.time() - time.monotonic()


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


class Clock:
    """The time of a process since it started, as phases and as parts.

    Both are views of the spans of the thread that creates it. Any thread may read them.
    """

    def __init__(self) -> None:
        """Starts in the phase 'start', with an empty tree of spans."""
        # `age` is called first, so that the time between the two calls is lost rather
        # than counted twice.
        self._age = age()
        self._tree = spans.begin_anew()
        # The seconds of 'start', once it has ended; and those of 'data'.
        self._start: float | None = None
        self._data = 0.0
        # Whether the devices were idle when the last wait for data ended, and how long
        # it took, in seconds.
        self._was_idle = False
        self._last_wait = 0.0
        # The time of the host outside of all spans until the last wait for data began;
        # and how much of that time delayed the devices.
        self._outside = 0.0
        self._delaying = 0.0
        # Starts its thread when the first task is submitted.
        self._idle_watcher = concurrent.futures.ThreadPoolExecutor(1, "idle")

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase until now."""
        seconds = dict.fromkeys(PHASES, 0.0)
        seconds[TRAINING] = self._age
        for path, spent in self._tree.seconds(time.monotonic()).items():
            phase = TRAINING
            for part in path:
                if part in (CHECKPOINT, EVALUATION, TRACE):
                    phase = part
            seconds[phase] += spent
        seconds[START] = seconds[TRAINING] if self._start is None else self._start
        seconds[DATA] = self._data
        seconds[TRAINING] -= seconds[START] + seconds[DATA]
        return seconds

    def started(self) -> None:
        """Ends the phase 'start', if it has not ended before."""
        if self._start is None:
            self._start = self.seconds()[START]

    def parts(self) -> dict[str, float]:
        """Returns the seconds of each part of `spans`; empty before the first step.

        A wait for data, and the time of the host in no part ('other'), count only as
        far as the devices were idle; the rest is 'step', as is what was before the
        first step. Then what one process needs more than the others is what they wait
        for.
        """
        if self._start is None:
            return {}
        now = time.monotonic()
        parts = self._tree.parts(now)
        own = parts | {DATA: self._data, spans.OTHER: self._delaying}
        own[spans.STEP] += sum(parts.values()) - sum(own.values())
        # It is beside the others.
        own[spans.WRITE] = spans.tree(spans.BACKGROUND).parts(now)[spans.WRITE]
        return own

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
        begin = time.monotonic()
        outside = self._tree.seconds(begin)[()]
        is_idle_from_begin = False
        becomes_idle = None
        if newest is None:
            self._was_idle = False
        else:
            is_idle = newest.is_ready()
            if is_idle:
                self._delaying += outside - self._outside
            is_idle_from_begin = self._was_idle and is_idle
            is_measured = self._was_idle and self._last_wait > _SHORT_SECONDS
            if is_measured and not is_idle:
                becomes_idle = self._idle_watcher.submit(_time_when_ready, newest)
        self._outside = outside
        with spans.Span(DATA):
            yield
        if newest is None:
            return
        end = time.monotonic()
        self._was_idle = newest.is_ready()
        self._last_wait = end - begin
        if is_idle_from_begin:
            self._data += end - begin
        elif self._was_idle and becomes_idle is not None:
            self._data += max(end - becomes_idle.result(), 0.0)


def _time_when_ready(newest: Any) -> float:
    newest.block_until_ready()
    return time.monotonic()


class SpanFile:
    """The file of a process's long spans, and of the shares of all parts of its time.

    Perfetto reads it (https://ui.perfetto.dev, "Open trace file"):

        WORKDIR/spans/process_0.json

    It grows to a bounded size.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        index: int,
        clock: Clock,
        say: Callable[[str], None],
    ):
        """Prepares the file; writes nothing.

        Args:
          directory: the work directory.
          index: the process's index.
          clock: the process's clock.
          say: prints a line.
        """
        self._path = directory / "spans" / f"process_{index}.json"
        self._index = index
        self._process = f"process {index} on {socket.gethostname()}"
        self._clock = clock
        self._say = say
        self._has_failed = False
        self._lock = threading.Lock()
        # The numbers by which the file names threads.
        self._threads: dict[str, int] = {}
        self._shares_at = time.monotonic()
        self._parts_before: dict[str, float] = {}

    def flush(self, *, is_last: bool = False) -> None:
        """Appends what is new to the file; may be called from any thread.

        An earlier start of the run may have written to the file.

        Args:
          is_last: whether the run ends, so that the shares until now are written.
        """
        lines = []

        def add(kind: str, name: str, at: float, **more: Any) -> None:
            # An event of Chrome's trace format, whose times are microseconds.
            at = round(1e6 * (at + _TO_TIME_OF_DAY))
            event = {"ph": kind, "name": name, "ts": at, "pid": self._index, **more}
            lines.append(json.dumps(event, separators=(",", ":")) + ",\n")

        with self._lock:
            while spans.LONG:
                thread, name, begin, end = spans.LONG.popleft()
                if thread not in self._threads:
                    self._threads[thread] = len(self._threads)
                    names = {"process_name": self._process, "thread_name": thread}
                    for kind, named in names.items():
                        number = self._threads[thread]
                        add("M", kind, begin, tid=number, args={"name": named})
                number = self._threads[thread]
                add("X", name, begin, tid=number, dur=round(1e6 * (end - begin)))
            now = time.monotonic()
            seconds = now - self._shares_at
            if seconds > 0 and (seconds >= _SHARES_SECONDS or is_last):
                parts = self._clock.parts()
                shares = {}
                for name, before in self._parts_before.items():
                    shares[name] = round(max(0.0, parts[name] - before) / seconds, 4)
                if shares:
                    add("C", "shares", now, args=shares)
                self._parts_before = parts
                self._shares_at = now
            if lines:
                self._append(lines)

    def _append(self, lines: list[str]) -> None:
        # Missing spans are no reason to end a run.
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab+") as file:
                # Cuts off the end of a line that a killed process wrote in part.
                size = file.tell()
                file.seek(max(0, size - _MOST_OF_LINE))
                tail = file.read()
                size += tail.rfind(b"\n") + 1 - len(tail)
                file.truncate(size)
                # The format allows an array without its end.
                start = "" if size else "[\n"
                size += file.write((start + "".join(lines)).encode())
            if size > _MOST_BYTES:
                self._path.replace(self._path.with_suffix(".previous.json"))
                # The next file has names of its own.
                self._threads = {}
        except OSError as e:
            if not self._has_failed:
                self._say(f"spans are lost: {self._path}: {e.strerror or e}")
            self._has_failed = True


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
