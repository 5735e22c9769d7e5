"""Signs of life: who is silent, and for how long."""

import json
from collections.abc import Mapping

from xshard.pod import rendezvous, status


class Heartbeat:
    """Counts ticks of silence: they do not pass while something keeps Python from running.

    Attributes:
      lost: the processes that have been silent for too long.
    """

    def __init__(self, count: int, timeouts: rendezvous.Timeouts, tick_seconds: float):
        """Begins to count.

        Args:
          count: the number of processes.
          timeouts: how long one may be silent, while it starts and later.
          tick_seconds: the time from one call to the next.
        """
        self._timeouts = timeouts
        self._tick = tick_seconds
        self._last = {i: ("", 0) for i in range(count)}
        self._unanswered = 0
        self.lost: set[int] = set()

    def hear(self, rows: Mapping[int, str]) -> float:
        """Returns for how many seconds those that are lost have been silent; 0: none is.

        Args:
          rows: what each process has said of itself last.
        """
        silence, is_over = {}, False
        for index, (text, ticks) in self._last.items():
            row = rows.get(index, "")
            self._last[index] = (row, 0) if row != text else (text, ticks + 1)
            silence[index] = ticks * self._tick if index else 0.0
            is_starting = not row or json.loads(row)["doing"] == status.STARTING
            limit = self._timeouts.start if is_starting else self._timeouts.heartbeat
            is_over |= silence[index] > limit
        if not is_over:
            return 0.0
        # What cuts off one may cut off others, of whom a tick more was heard.
        longest = max(silence.values())
        self.lost = {i for i, seconds in silence.items() if i and seconds > longest / 2}
        return longest

    def answered(self) -> None:
        """Notes that the process that coordinates has answered."""
        self._unanswered = 0

    def unanswered(self) -> float:
        """Returns for how many seconds it has not, if that is too long; else 0."""
        self._unanswered += 1
        silent = self._unanswered * self._tick
        return silent if silent > self._timeouts.heartbeat else 0.0
