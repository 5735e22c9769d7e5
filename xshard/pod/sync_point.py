"""Agreement of all processes on a request, and on the poll at which all of them act on
it.
"""

import json
import threading
from collections.abc import Callable, Iterable

from xshard.base import spans
from xshard.pod import host_collectives
from xshard.pod import members as members_lib
from xshard.pod import request as request_lib


class SyncPoint:
    """Delivers requests to the training, which polls for them, at the same poll number
    on every process.

    A second thread exchanges messages with the other processes while the training goes
    on. When a process asks for something, each process posts the number of its next
    poll, and its training waits there. All processes act at the largest of these
    numbers, which is the earliest poll that every process can still reach.

    Attributes:
      stop_reason: why the processes have agreed to stop; empty if they have not.
    """

    def __init__(self, board: host_collectives.Board):
        self._board = board
        self._nudge = threading.Event()
        # Taking the lock itself costs less than entering the condition, and each step
        # does it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._num_polls = 0
        # The requests of this process that no round has taken up, by their kind.
        self._requested: dict[str, request_lib.Request] = {}
        # The poll at which the training waits until the processes have agreed; None if
        # no round is open.
        self._posted: int | None = None
        self._decided: dict[int, request_lib.Request] = {}
        # Only the talking thread uses these.
        self._round = 0
        self._posted_request: request_lib.Request | None = None
        self.stop_reason = ""

    # For the training.

    def poll(self) -> request_lib.Request | None:
        """Returns the request to act on at this poll, if any."""
        with self._lock:
            self._num_polls += 1
            if self._posted is not None:
                with spans.Span(spans.AGREE):
                    while self._posted is not None and self._num_polls >= self._posted:
                        self._changed.wait()
            return self._decided.pop(self._num_polls, None)

    # For anyone.

    def ask(self, request: request_lib.Request) -> None:
        """Asks all processes to act on a request, at the next poll that all can still
        reach.

        A request replaces an earlier one of its kind that no process has taken up.
        """
        with self._changed:
            self._requested[request.kind] = request
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
        if self._requested or self._posted is not None:
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
                self._posted_request = _most_urgent(self._requested.values())
            text = json.dumps([self._posted, self._posted_request])
        polls = []
        requests = []
        topic = f"round {self._round}"
        for each in self._board.gather(topic, text, meanwhile):
            poll, requested = json.loads(each)
            polls.append(poll)
            if requested is not None:
                requests.append(request_lib.Request(*requested))
        self._round += 1
        # Among equals the lowest process index wins. The others had the same purpose.
        agreed = _most_urgent(requests)
        assert agreed is not None, "a round begins with a request"
        self._take_up(agreed)
        return agreed, max(polls)

    def _take_up(self, agreed: request_lib.Request) -> None:
        """Notes that the processes have agreed on a request."""
        with self._changed:
            self._requested.pop(agreed.kind, None)
            if agreed.kind == request_lib.STOP:
                # A stop saves, too, and no step follows that could be traced.
                self._requested.clear()
                self.stop_reason = agreed.why

    def decide(self, request: request_lib.Request, poll: int) -> None:
        """Releases the training, and delivers the request at the agreed poll."""
        with self._changed:
            if request.kind != request_lib.STOP:
                # A poll delivers one request. Two rounds may agree on the same poll,
                # and then do so on all processes.
                while poll in self._decided:
                    poll += 1
            self._decided[poll] = request
            self._posted = None
            self._changed.notify_all()


class Polled(SyncPoint):
    """Delivers requests of the members of a run that agree at each poll."""

    def __init__(self, members: members_lib.Members):
        super().__init__(host_collectives.Board(0, 1))
        self._members = members

    def poll(self) -> request_lib.Request | None:
        """Returns the request to act on at this poll, if any: the most urgent one."""
        with self._lock:
            asked = list(self._requested.values())
        requests = self._members.poll(asked)
        agreed = _most_urgent([request_lib.Request(*each) for each in requests])
        if agreed is not None:
            self._take_up(agreed)
        return agreed

    def is_due(self) -> bool:
        """Returns False: the training itself agrees."""
        return False


def _most_urgent(
    requests: Iterable[request_lib.Request],
) -> request_lib.Request | None:
    """Returns the first of the most urgent requests; None if there are none."""
    urgency = request_lib.BY_URGENCY.index
    return min(requests, key=lambda request: urgency(request.kind), default=None)
