"""Agreement of all processes on what to do, and on the point at which all of them can."""

import json
import threading
from collections.abc import Callable

from xshard.pod import notice as notice_lib
from xshard.pod import processes


class Agreement:
    """Notices for the training, which polls; each process's at the same of its polls.

    A thread beside the training talks with the other processes.
    """

    def __init__(self, board: processes.Board):
        self._board = board
        self._nudge = threading.Event()
        self._changed = threading.Condition()
        self._polls = 0
        self._asked: notice_lib.Notice | None = None
        # The poll before which the training waits, while the others are asked for theirs.
        self._posted: int | None = None
        self._decided: dict[int, notice_lib.Notice] = {}
        # The talking thread's own.
        self._round = 0
        self._text = ""
        self.is_stopping = False

    # For the training.

    def poll(self) -> notice_lib.Notice | None:
        """Returns what is to be done now, if anything."""
        with self._changed:
            self._polls += 1
            while self._posted is not None and self._polls >= self._posted:
                self._changed.wait()
            return self._decided.pop(self._polls, None)

    # For anyone.

    def ask(self, notice: notice_lib.Notice) -> None:
        """Asks all processes for something, at the next point that all can still reach."""
        with self._changed:
            if self._asked is None or notice.kind == notice_lib.STOP:
                self._asked = notice
        self._nudge.set()

    def nudge(self) -> None:
        """Ends a wait."""
        self._nudge.set()

    # For the thread that talks.

    def wait(self, seconds: float) -> None:
        """Waits until something is asked for here, at most so long."""
        self._nudge.wait(seconds)
        self._nudge.clear()

    def is_due(self) -> bool:
        """Returns whether something is asked for, here or elsewhere."""
        if self._asked is not None or self._posted is not None:
            return True
        return bool(self._board.read(f"round {self._round}"))

    def gather(self, meanwhile: Callable[[], None]) -> tuple[notice_lib.Notice, int]:
        """Returns what is asked for, and the last of the next points at which all can still act.

        Args:
          meanwhile: is called while the other processes have not answered.
        """
        with self._changed:
            # What has been posted stands: this may be the second try, after an outage, and the others may have
            # read the first.
            if self._posted is None:
                self._posted = self._polls + 1
                self._text = json.dumps([self._posted, self._asked])
                self._asked = None
        points = []
        notices = []
        for text in self._board.gather(f"round {self._round}", self._text, meanwhile):
            point, asked = json.loads(text)
            points.append(point)
            if asked is not None:
                notices.append(notice_lib.Notice(*asked))
        self._round += 1
        # A stop goes before a save, which it includes; the first process goes before the others.
        notices.sort(key=lambda notice: notice.kind != notice_lib.STOP)
        if notices[0].kind == notice_lib.STOP:
            self.is_stopping = True
        return notices[0], max(points)

    def settle(self, notice: notice_lib.Notice, point: int) -> None:
        """Lets the training go on to the point, where it is given the notice."""
        with self._changed:
            # A save that was decided after a stop, for the same point, does not undo it.
            if notice.kind == notice_lib.STOP or point not in self._decided:
                self._decided[point] = notice
            self._posted = None
            self._changed.notify_all()
