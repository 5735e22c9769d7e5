"""Agreement of all processes on a request, and on the poll at which all of them act on
it.
"""

import json
import threading
from collections.abc import Callable

from xshard.pod import host_collectives
from xshard.pod import request as request_lib


class SyncPoint:
    """Delivers requests to the training, which polls for them, at the same poll number
    on every process.

    A second thread exchanges messages with the other processes while the training goes
    on. When a process asks for something, each process posts the number of its next
    poll, and its training waits there. All processes act at the largest of these
    numbers, which is the earliest poll that every process can still reach.

    Attributes:
      is_stopping: whether the processes have agreed to stop.
    """

    def __init__(self, board: host_collectives.Board):
        self._board = board
        self._nudge = threading.Event()
        # Taking the lock itself costs less than entering the condition, and each step
        # does it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._num_polls = 0
        self._requested: request_lib.Request | None = None
        # The poll at which the training waits until the processes have agreed; None if
        # no round is open.
        self._posted: int | None = None
        self._decided: dict[int, request_lib.Request] = {}
        # Only the talking thread uses these.
        self._round = 0
        self._posted_text = ""
        self.is_stopping = False

    # For the training.

    def poll(self) -> request_lib.Request | None:
        """Returns the request to act on at this poll, if any."""
        with self._lock:
            self._num_polls += 1
            while self._posted is not None and self._num_polls >= self._posted:
                self._changed.wait()
            return self._decided.pop(self._num_polls, None)

    # For anyone.

    def ask(self, request: request_lib.Request) -> None:
        """Asks all processes to act on a request, at the next poll that all can still
        reach.
        """
        with self._changed:
            if self._requested is None or request.kind == request_lib.STOP:
                self._requested = request
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
        """Returns whether a request is pending, on this process or another."""
        if self._requested is not None or self._posted is not None:
            return True
        return bool(self._board.read(f"round {self._round}"))

    def gather(self, meanwhile: Callable[[], None]) -> tuple[request_lib.Request, int]:
        """Returns the request that all processes agree on, and the number of the poll
        at which they act on it.

        Args:
          meanwhile: called repeatedly until all other processes have answered.
        """
        with self._changed:
            # After an outage this is called again. The other processes may have read
            # the first post, so it stands.
            if self._posted is None:
                self._posted = self._num_polls + 1
                self._posted_text = json.dumps([self._posted, self._requested])
                self._requested = None
        polls = []
        requests = []
        topic = f"round {self._round}"
        for text in self._board.gather(topic, self._posted_text, meanwhile):
            poll, requested = json.loads(text)
            polls.append(poll)
            if requested is not None:
                requests.append(request_lib.Request(*requested))
        self._round += 1
        # A stop takes precedence over a save, because it saves too. Among equals the
        # lowest process index wins.
        requests.sort(key=lambda request: request.kind != request_lib.STOP)
        agreed = requests[0]
        if agreed.kind == request_lib.STOP:
            self.is_stopping = True
        return agreed, max(polls)

    def decide(self, request: request_lib.Request, poll: int) -> None:
        """Releases the training, and delivers the request at the agreed poll."""
        with self._changed:
            # A save that is agreed on after a stop, for the same poll, must not replace
            # the stop.
            if request.kind == request_lib.STOP or poll not in self._decided:
                self._decided[poll] = request
            self._posted = None
            self._changed.notify_all()
