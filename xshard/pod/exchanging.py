"""The members of a run that goes on without those that it loses.

What they agree on goes through their exchange, in one order for all. If the leader is
lost, another one leads from within the call that it would have answered.
"""

import collections
import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xshard import errors
from xshard.base import spans
from xshard.pod import exchange as exchange_lib
from xshard.pod import host_collectives, members
from xshard.pod import request as request_lib


class Exchanging(members.Members):
    """The members of a run that goes on without those that it loses."""

    def __init__(
        self, number: int, exchange: exchange_lib.Exchange, *, is_outside: bool
    ):
        """Takes an exchange.

        Args:
          number: the number of this process.
          exchange: the exchange, in which this process has a place unless it is
            outside.
          is_outside: whether the run is under way. Until `enter` this process reads for
            itself what the leader would tell it.
        """
        self.exchange = self
        self.has_succeeded = False
        self._number = number
        self._exchange = exchange
        self._is_outside = is_outside
        self._leads = not is_outside and exchange.place.index == 0
        self._standing: Mapping[str, int] = {}
        # A checksum of what has been noted.
        self._noted = 0
        # What the leader has open: how it is opened, and what closes it.
        self._held: list[
            tuple[
                Callable[[], contextlib.AbstractContextManager[Any]],
                contextlib.ExitStack,
            ]
        ] = []

    @property
    def number(self) -> int:
        """The number of this process, by which its own files are named."""
        return self._number

    @property
    def leads(self) -> bool:
        """Whether this process leads; it changes in calls only."""
        return self._leads

    @property
    def may_lead(self) -> bool:
        """Whether this process leads, or may come to."""
        return True

    @property
    def is_outside(self) -> bool:
        """Whether this process has no place yet in a run that is under way."""
        return self._is_outside

    @property
    def standing(self) -> Mapping[str, int]:
        """The generation, the number of its members, and how many were lost so far and
        taken over from; as of this process's last call.
        """
        return self._standing

    def enter(self) -> None:
        """Waits for a place in the run, with the state of its newest checkpoint."""
        word = self._exchange.enter()
        # All members restore the checkpoint together, once this one is among them.
        self._exchange.restored()
        self._is_outside = False
        self.admit(word["step"])

    def admit(self, step: int) -> None:
        """Lets in processes that have no place, after a step that has been saved."""
        self._exchange.admit(f"processes join after step {step}", {"step": step})
        # They have noted nothing yet.
        self._noted = 0
        self._take_place()

    def note(self, content: bytes) -> None:
        """Notes what must be equal on all members, who compare it at the next poll."""
        self._noted = zlib.crc32(content, self._noted)

    def poll(self, requests: Sequence[Any]) -> list[Any]:
        """Returns the requests of all members.

        Args:
          requests: those of this member, as JSON.

        Raises:
          LostError: of `xshard.pod.host_collectives`, if what this member has noted
            differs from what the others have.
        """
        asked = list(requests)
        if self._exchange.arrivals:
            asked.append(request_lib.ARRIVALS)
        words = self.gather("requests", [asked, self._noted])
        self._check([noted for _, noted in words])
        return [request for requests, _ in words for request in requests]

    def _check(self, noted: Sequence[int]) -> None:
        """Raises LostError if this member is the one that differs."""
        counts = collections.Counter(noted)
        # Of two equally large parts, the one with the leader goes on.
        usual = max(noted, key=lambda each: (counts[each], each == noted[0]))
        if self._noted != usual:
            raise host_collectives.LostError(
                f"process {self._number} has other rows or other examples than most of "
                f"the {len(noted)} members of this run since they last agreed: its "
                "memory, its processor or its data is not as theirs. The others go on "
                "without it."
            )

    def channel(self, what: str, seconds: float) -> host_collectives.Channel:
        """Returns a channel for the main thread; who is late is for the exchange."""
        del seconds
        return _Channel(what, self)

    def by_leader(self, what: str, action: Callable[[], Any]) -> Any:
        """Returns what an action returns on the leader."""
        return _Channel(what, self).on_process_0(action)

    @contextlib.contextmanager
    def while_leading(
        self, open_one: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> Iterator[None]:
        """Opens a context of the leader's, now or when this process comes to lead."""
        with contextlib.ExitStack() as stack:
            held = (open_one, stack)
            self._held.append(held)
            # The innermost is closed first, and opened last.
            stack.callback(self._held.remove, held)
            if self._leads:
                stack.enter_context(open_one())
            yield

    def gather(self, what: str, word: Any) -> list[Any]:
        """Returns the words of all members, the leader's first.

        Args:
          what: the purpose, equal on all members.
          word: what this one says, a JSON value.
        """
        if self._is_outside:
            return [word]
        with spans.Span(spans.AGREE):
            words = self._exchange.gather(what, word)
        self._take_place()
        return words

    def combine(
        self,
        label: str,
        like: Sequence[Any],
        units: int,
        contribute: Callable[[Sequence[int]], list[np.ndarray]],
        operations: Sequence[np.ufunc],
    ) -> list[np.ndarray]:
        """Combines what members compute, as `logical.Exchange` says."""
        combined = self._exchange.combine(label, like, units, contribute, operations)
        self._take_place()
        return combined

    def close(self) -> None:
        """Ends the exchange, when all members have made their last call."""
        self._exchange.close()

    def _take_place(self) -> None:
        """Notes how this process stands after a call, and opens what a leader has open
        once it has come to lead.
        """
        place = self._exchange.place
        # Another thread reads it, so it is replaced at once.
        self._standing = {
            "generation": place.generation,
            "members": place.count,
            "takeovers": place.takeovers,
        }
        if self._leads or place.index:
            return
        self._leads = True
        self.has_succeeded = True
        for open_one, stack in self._held:
            stack.enter_context(open_one())


class _Channel(host_collectives.Channel):
    """A channel of members, whose process 0 is whoever leads."""

    def __init__(self, what: str, members: Exchanging):
        super().__init__(what, 0.0)
        self._members = members
        # Nobody knows how many will be left.
        self.count = 2

    def on_process_0(
        self,
        action: Callable[[], Any],
        kind: type[errors.UserError] = errors.UserError,
    ) -> Any:
        """Runs an action on the leader, again on its successor if it is lost."""
        outcomes: list[Any] = []
        while not outcomes:
            outcome = None
            failure = None
            if self._members.leads or self._members.is_outside:
                outcome, failure = host_collectives.attempted(action)
            outcomes = [each for each in self.gather(outcome) if each is not None]
        return host_collectives.value_of(outcomes[0], failure, kind)

    def _gather_texts(self, text: str) -> list[str]:
        return self._members.gather(self._what, text)
