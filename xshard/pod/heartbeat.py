"""Detection of processes that are silent, and of a run that is alive but makes no
progress.
"""

import json
from collections.abc import Mapping

from xshard.pod import rendezvous, status


class Heartbeat:
    """Measures silence in ticks of the calling thread instead of by the clock.

    While this process's Python interpreter is blocked, no ticks pass, so it does not
    mistake the others for silent.

    Attributes:
      lost: the processes that have been silent for too long.
    """

    def __init__(self, count: int, timeouts: rendezvous.Timeouts, tick_seconds: float):
        """Starts to count.

        Args:
          count: the number of processes.
          timeouts: how long a process may be silent, while it starts and later.
          tick_seconds: the time from one call of `update` or `unanswered` to the next.
        """
        self._timeouts = timeouts
        self._shortest = min(timeouts.start, timeouts.heartbeat)
        self._tick_seconds = tick_seconds
        self._rows = dict.fromkeys(range(count), "")
        # For each process, the number of ticks in a row without a new row.
        self._silent_ticks = dict.fromkeys(range(count), 0)
        # The number of ticks since the coordinator has answered.
        self._unanswered_ticks = 0
        self.lost: set[int] = set()

    # For process 0, which hears of all others.

    def update(self, rows: Mapping[int, str]) -> float:
        """Counts a tick, and finds the processes that are lost.

        Args:
          rows: the last status that each process has written, as JSON.

        Returns:
          For how many seconds the lost processes have been silent; 0 if none is lost.
        """
        is_any_lost = False
        # Process 0 makes this call, so it is never silent.
        silence = {0: 0.0}
        for index, before in self._rows.items():
            row = rows.get(index, "")
            self._rows[index] = row
            if index == 0:
                continue
            silence[index] = self._silent_ticks[index] * self._tick_seconds
            self._silent_ticks[index] += 1
            if row != before:
                self._silent_ticks[index] = 0
            # Only the row of a process that is silent is parsed: thousands of others
            # write theirs in each tick.
            is_silent = silence[index] > self._shortest
            if is_silent and silence[index] > self._limit(row):
                is_any_lost = True
        if not is_any_lost:
            return 0.0
        # One cause may cut off several processes, but not in the same tick. All that
        # were silent for more than half of the longest time are lost.
        longest = max(silence.values())
        self.lost = {i for i, seconds in silence.items() if seconds > longest / 2}
        return longest

    def _limit(self, row: str) -> float:
        """Returns for how many seconds a process may be silent after this row."""
        if not row or json.loads(row)["doing"] == status.STARTING:
            return self._timeouts.start
        return self._timeouts.heartbeat

    # For the other processes, which hear of process 0.

    def answered(self) -> None:
        """Notes that the coordinator, process 0, has answered."""
        self._unanswered_ticks = 0

    def unanswered(self) -> float:
        """Counts a tick without an answer of the coordinator.

        Returns:
          For how many seconds it has not answered, if that is too long; else 0.
        """
        self._unanswered_ticks += 1
        seconds = self._unanswered_ticks * self._tick_seconds
        if seconds > self._timeouts.heartbeat:
            return seconds
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
        self._limit_seconds = seconds
        self._tick_seconds = tick_seconds
        self._ticks = 0

    def note_progress(self) -> None:
        """Notes progress; may be called from any thread."""
        self._ticks = 0

    def stalled(self, phase: str) -> float:
        """Counts a tick without progress.

        Args:
          phase: what the process does now; only the phases in `status.BOUNDED` can
            stall.

        Returns:
          For how many seconds there was no progress, if that exceeds the limit; else 0.
        """
        self._ticks += 1
        seconds = self._ticks * self._tick_seconds
        is_bounded = self._limit_seconds and phase in status.BOUNDED
        if is_bounded and seconds > self._limit_seconds:
            return seconds
        return 0.0
