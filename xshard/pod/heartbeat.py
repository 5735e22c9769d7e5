"""Detection of processes that are silent, and of a run that is alive but makes no
progress.
"""

import json
from collections.abc import Mapping

from xshard.pod import startup, status


class Heartbeat:
    """Measures silence in ticks of the calling thread instead of by the clock.

    While this process's Python interpreter is blocked, no ticks pass, so it does not
    mistake the others for silent.

    Attributes:
      lost: the processes that have been silent for too long.
    """

    def __init__(self, count: int, timeouts: startup.Timeouts, tick_seconds: float):
        """Starts to count.

        Args:
          count: the number of processes.
          timeouts: how long a process may be silent, while it starts and later.
          tick_seconds: the time from one call of `hear` to the next.
        """
        self._timeouts = timeouts
        self._tick = tick_seconds
        self._rows = dict.fromkeys(range(count), "")
        # For each process, the number of ticks in a row without a new row.
        self._silent_ticks = dict.fromkeys(range(count), 0)
        self._unanswered = 0
        self.lost: set[int] = set()

    def update(self, rows: Mapping[int, str]) -> float:
        """Returns for how many seconds the lost processes have been silent; 0 if no
        process is lost.

        Args:
          rows: the last status that each process has written.
        """
        is_over = False
        # Process 0 makes this call, so it is never silent.
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
        # One cause may cut off several processes, but not in the same tick. All that
        # were silent for more than half of the longest time are lost.
        longest = max(silence.values())
        self.lost = {i for i, seconds in silence.items() if seconds > longest / 2}
        return longest

    def _limit(self, row: str) -> float:
        """Returns for how many seconds a process may be silent after it wrote this row."""
        if not row or json.loads(row)["doing"] == status.STARTING:
            return self._timeouts.start
        return self._timeouts.heartbeat

    def answered(self) -> None:
        """Notes that the coordinator, process 0, has answered."""
        self._unanswered = 0

    def unanswered(self) -> float:
        """Returns for how many seconds the coordinator has not answered, if that is too
        long; else 0.
        """
        self._unanswered += 1
        silent = self._unanswered * self._tick
        if silent > self._timeouts.heartbeat:
            return silent
        return 0.0


class StallDetector:
    """Measures the time without progress of this process, in ticks as `Heartbeat` does.

    If a device or a collective hangs, the threads of the host go on. The process then
    stays alive forever without finishing a step.
    """

    def __init__(self, seconds: float, tick_seconds: float):
        """Starts to count.

        Args:
          seconds: how long the process may train or evaluate without progress; 0 for no
            limit.
          tick_seconds: the time from one call of `stalled` to the next.
        """
        self._limit, self._tick = seconds, tick_seconds
        self._ticks = 0

    def note_progress(self) -> None:
        """Notes progress; may be called from any thread."""
        self._ticks = 0

    def stalled(self, doing: str) -> float:
        """Returns for how many seconds there was no progress, if that exceeds the limit
        in this phase; else 0.
        """
        self._ticks += 1
        silent = self._ticks * self._tick
        if self._limit and doing in status.BOUNDED and silent > self._limit:
            return silent
        return 0.0
