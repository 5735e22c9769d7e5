"""Signs of life: who is silent, and for how long; and whether a run that is alive comes on."""

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
        self._rows = dict.fromkeys(range(count), "")
        # How often nothing new has been heard of each one in a row.
        self._silent_ticks = dict.fromkeys(range(count), 0)
        self._unanswered = 0
        self.lost: set[int] = set()

    def hear(self, rows: Mapping[int, str]) -> float:
        """Returns for how many seconds those that are lost have been silent; 0: none is.

        Args:
          rows: the last row that each process has written of itself.
        """
        is_over = False
        # Process 0, which asks, is never silent.
        silence = {0: 0.0}
        for index, before in self._rows.items():
            row = rows.get(index, "")
            self._rows[index] = row
            if index == 0:
                continue
            silence[index] = self._silent_ticks[index] * self._tick
            self._silent_ticks[index] += 1
            if row != before:
                self._silent_ticks[index] = 0
            is_over = is_over or silence[index] > self._limit(row)
        if not is_over:
            return 0.0
        # What cuts off one may cut off others, of whom a tick more was heard.
        longest = max(silence.values())
        self.lost = {i for i, seconds in silence.items() if seconds > longest / 2}
        return longest

    def _limit(self, row: str) -> float:
        """The seconds that one may be silent which has written this row last."""
        if not row or json.loads(row)["doing"] == status.STARTING:
            return self._timeouts.start
        return self._timeouts.heartbeat

    def answered(self) -> None:
        """Notes that the process that coordinates has answered."""
        self._unanswered = 0

    def unanswered(self) -> float:
        """Returns for how many seconds it has not, if that is too long; else 0."""
        self._unanswered += 1
        silent = self._unanswered * self._tick
        if silent > self._timeouts.heartbeat:
            return silent
        return 0.0


class Progress:
    """Counts ticks without progress, as `Heartbeat` does; of this process, whose devices may stand still.

    Threads of the host go on when a device, or a collective between devices, does not: a process may be alive for
    ever without coming to the end of a step.
    """

    def __init__(self, seconds: float, tick_seconds: float):
        """Begins to count.

        Args:
          seconds: how long it may not come on while it trains or evaluates; 0: for ever.
          tick_seconds: the time from one call of `stalled` to the next.
        """
        self._limit, self._tick = seconds, tick_seconds
        self._ticks = 0

    def made(self) -> None:
        """Notes that the run has come on; from any thread."""
        self._ticks = 0

    def stalled(self, doing: str) -> float:
        """Returns for how many seconds it has not come on, if that is too long for what it does; else 0."""
        self._ticks += 1
        silent = self._ticks * self._tick
        # What else a run does has bounds of its own, or, as compiling, none that are known.
        is_bounded = doing in (status.TRAINING, status.EVALUATING)
        return silent if self._limit and is_bounded and silent > self._limit else 0.0
