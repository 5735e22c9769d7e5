"""Reports on the progress of a save or a restore that takes long."""

import time
from collections.abc import Callable

# The time between two messages, and before the first.
_INTERVAL_SECONDS = 10.0


class ProgressReporter:
    """Reports the progress of a task that takes long."""

    def __init__(
        self,
        what: str,
        total: int,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts the clock.

        Args:
          what: the task, such as 'saving step 400'.
          total: the size of the task in bytes.
          log: called with each message.
          clock: returns the time in seconds.
        """
        self._what = what
        self._total = total
        self._log = log
        self._clock = clock
        self._begin = clock()
        self._last = self._begin
        self._done = 0

    def add(self, nbytes: int) -> None:
        """Adds bytes that are done, and reports the progress if a message is due."""
        self._done += nbytes
        now = self._clock()
        if now - self._last < _INTERVAL_SECONDS:
            return
        self._last = now
        rate = self._done / (now - self._begin)
        seconds_left = (self._total - self._done) / max(rate, 1)
        self._log(
            f"{self._what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, "
            f"{rate / 1e6:.0f} MB/s, {seconds_left:.0f} s left"
        )
