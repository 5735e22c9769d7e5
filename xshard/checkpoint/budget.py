"""The budget of host memory for a save or a restore, and reports on its progress."""

import threading
import time
from collections.abc import Callable

# The time between two progress messages, and before the first.
_EVERY_SECONDS = 10.0


class Budget:
    """A number of bytes that one thread takes and another gives back."""

    def __init__(self, limit: int):
        """Creates a budget of `limit` bytes, none of which are taken."""
        self._limit = limit
        self._in_use = 0
        self._closed = False
        self._changed = threading.Condition()

    def fits(self, nbytes: int) -> bool:
        """Returns whether `nbytes` can be taken now. More than the limit fits if
        nothing else is taken.
        """
        return self._closed or not self._in_use or self._in_use + nbytes <= self._limit

    def take(self, nbytes: int) -> None:
        """Takes bytes, after waiting until they fit."""
        with self._changed:
            self._changed.wait_for(lambda: self.fits(nbytes))
            self._in_use += nbytes

    def give(self, nbytes: int) -> None:
        """Gives bytes back."""
        with self._changed:
            self._in_use -= nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Releases every waiting thread, because no more bytes will be given back."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class ProgressReporter:
    """Reports the progress of a task that takes long."""

    def __init__(
        self,
        what: str,
        total: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts the clock.

        Args:
          what: the task, such as 'saving step 400'.
          total: the size of the task in bytes.
          say: called with each message.
          clock: returns the time in seconds.
        """
        self._what = what
        self._total = total
        self._say = say
        self._clock = clock
        self._begin = clock()
        self._last = self._begin
        self._done = 0

    def add(self, nbytes: int) -> None:
        """Adds bytes that are done, and reports the progress if a message is due."""
        self._done += nbytes
        now = self._clock()
        if now - self._last < _EVERY_SECONDS:
            return
        self._last = now
        rate = self._done / (now - self._begin)
        seconds_left = (self._total - self._done) / max(rate, 1)
        self._say(
            f"{self._what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, "
            f"{rate / 1e6:.0f} MB/s, {seconds_left:.0f} s left"
        )
