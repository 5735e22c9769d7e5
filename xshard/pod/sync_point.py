"""Agreement of all processes on a notice, and on the poll at which all of them act on
it.
"""

import json
import threading
from collections.abc import Callable

from xshard.pod import host_collectives
from xshard.pod import notice as notice_lib


class SyncPoint:
    """Delivers notices to the training, which polls for them, at the same poll number
    on every process.

    A second thread exchanges messages with the other processes while the training goes
    on. When a process asks for something, each process posts the number of its next
    poll, and its training waits there. All processes act at the largest of these
    numbers, which is the earliest poll that every process can still reach.
    """

    def __init__(self, board: host_collectives.Board):
        self._board = board
        self._nudge = threading.Event()
        # Taking the lock itself costs less than entering the condition, and each step
        # does it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._polls = 0
        self._requested: notice_lib.Notice | None = None
        # The poll at which the training waits until the processes have agreed; None if
        # no round is open.
        self._posted: int | None = None
        self._decided: dict[int, notice_lib.Notice] = {}
        # Only the talking thread uses these.
        self._round = 0
        self._text = ""
        self.is_stopping = False

    # For the training.

    def poll(self) -> notice_lib.Notice | None:
        """Returns the notice to act on at this poll, if any."""
        with self._lock:
            self._polls += 1
            while self._posted is not None and self._polls >= self._posted:
                self._changed.wait()
            return self._decided.pop(self._polls, None)

    # For anyone.

    def ask(self, notice: notice_lib.Notice) -> None:
        """Asks all processes to act on a notice, at the next poll that all can still
        reach.
        """
        with self._changed:
            if self._requested is None or notice.kind == notice_lib.STOP:
                self._requested = notice
        self._nudge.set()

    def nudge(self) -> None:
        """Wakes the thread that is in `wait`."""
        self._nudge.set()

    # For the thread that talks.

    def wait(self, seconds: float) -> None:
        """Waits until something is asked for on this process, at most the given number
        of seconds.
        """
        self._nudge.wait(seconds)
        self._nudge.clear()

    def is_due(self) -> bool:
        """Returns whether a notice is pending, on this process or another."""
        if self._requested is not None or self._posted is not None:
            return True
        return bool(self._board.read(f"round {self._round}"))

    def gather(self, meanwhile: Callable[[], None]) -> tuple[notice_lib.Notice, int]:
        """Returns the notice that all processes agree on, and the number of the poll at
        which they act on it.

        Args:
          meanwhile: called repeatedly until all other processes have answered.
        """
        with self._changed:
            # After an outage this is called again. The other processes may have read
            # the first post, so it stands.
            if self._posted is None:
                self._posted = self._polls + 1
                self._text = json.dumps([self._posted, self._requested])
                self._requested = None
        points = []
        notices = []
        for text in self._board.gather(f"round {self._round}", self._text, meanwhile):
            point, asked = json.loads(text)
            points.append(point)
            if asked is not None:
                notices.append(notice_lib.Notice(*asked))
        self._round += 1
        # A stop takes precedence over a save, because it saves too. Among equals the
        # lowest process index wins.
        notices.sort(key=lambda notice: notice.kind != notice_lib.STOP)
        if notices[0].kind == notice_lib.STOP:
            self.is_stopping = True
        return notices[0], max(points)

    def decide(self, notice: notice_lib.Notice, point: int) -> None:
        """Releases the training, and delivers the notice at the agreed poll."""
        with self._changed:
            # A save that is agreed on after a stop, for the same poll, must not replace
            # the stop.
            if notice.kind == notice_lib.STOP or point not in self._decided:
                self._decided[point] = notice
            self._posted = None
            self._changed.notify_all()
