"""Bytes of host memory that a save or a restore may hold at a time, and how far it has come."""

import threading
import time
from collections.abc import Callable

# Between two messages on progress, and before the first.
_EVERY_SECONDS = 10.0


class Budget:
    """A number of bytes that may be taken, and are given back."""

    def __init__(self, limit: int):
        """Begins with nothing taken."""
        self._limit = limit
        self._taken = 0
        self._closed = False
        self._changed = threading.Condition()

    def fits(self, nbytes: int) -> bool:
        """Returns whether so many could be taken now. What is larger than the limit fits when it is alone."""
        return self._closed or not self._taken or self._taken + nbytes <= self._limit

    def take(self, nbytes: int) -> None:
        """Takes bytes, when they are there."""
        with self._changed:
            self._changed.wait_for(lambda: self.fits(nbytes))
            self._taken += nbytes

    def give(self, nbytes: int) -> None:
        """Gives bytes back."""
        with self._changed:
            self._taken -= nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Lets everyone pass, since nobody will give anything back any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Progress:
    """Says how far something has come, if it takes long."""

    def __init__(
        self,
        what: str,
        total: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begins.

        Args:
          what: what is done, such as 'saving step 400'.
          total: the bytes of all of it.
          say: takes the message.
          clock: the time in seconds.
        """
        self._what = what
        self._total = total
        self._say = say
        self._clock = clock
        self._begin = clock()
        self._last = self._begin
        self._done = 0

    def add(self, nbytes: int) -> None:
        """So many more bytes are done."""
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
