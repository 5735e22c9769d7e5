"""The members of a run: which of them writes, and what all of them agree on.

Two things are called a place. `xshard.base.places.own` is this process's among those
that JAX has joined: it determines which rows of a batch and which blocks of an array
are its own. A member's place in a run says who writes the run's files and speaks for
it: the one that leads.

In most runs both are the same, and process 0 leads to the end. The members of a run
that goes on without those it loses are not joined by JAX: each has a JAX of its own,
with all data and all state, and makes the whole run. They share out the replicas of its
steps (`xshard.pod.exchange`), and agree here on whatever one of them decides. If the
leader is lost, another one leads from within the call that it would have answered.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xshard.base import places, spans
from xshard.pod import exchange as exchange_lib
from xshard.pod import host_collectives


class Members:
    """The members of a run that are the processes which JAX has joined, or the only
    one.

    Attributes:
      exchange: what they combine the terms of steps by; None: JAX does.
    """

    exchange: "Exchanging | None" = None

    @property
    def number(self) -> int:
        """The number of this process, by which its own files are named."""
        return places.own().index

    @property
    def leads(self) -> bool:
        """Whether this process writes the run's files and speaks for it."""
        return self.number == 0

    @property
    def may_lead(self) -> bool:
        """Whether this process leads, or may come to."""
        return self.leads

    def channel(self, what: str, seconds: float) -> host_collectives.Channel:
        """Returns a channel for the main thread, on which process 0 is the leader.

        Args:
          what: the purpose of the gathers, for the error message.
          seconds: how long the processes wait for one another.
        """
        return host_collectives.Channel(what, seconds)

    def writing_channel(self, what: str, seconds: float) -> host_collectives.Channel:
        """Returns a channel of those that write checkpoints together.

        A thread beside the main one uses it.

        Args:
          what: as in `channel`.
          seconds: as in `channel`.
        """
        return self.channel(what, seconds)

    def by_leader(self, what: str, action: Callable[[], Any]) -> Any:
        """Returns what an action returns on the leader, if only the leader knows.

        Processes that JAX has joined all know it, and each acts by itself.

        Args:
          what: the purpose, equal on all members.
          action: returns a short JSON value. If the leader is lost, its successor runs
            it again.
        """
        del what
        return action()

    def while_leading(
        self, open_one: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns a context with one of the leader's inside, while this process leads.

        Args:
          open_one: returns the leader's context. It must make no gather.
        """
        return open_one() if self.leads else contextlib.nullcontext()


class Exchanging(Members):
    """The members of a run that goes on without those that it loses."""

    def __init__(self, number: int, exchange: exchange_lib.Exchange):
        """Takes an exchange in which this process has a place.

        Args:
          number: the number of this process.
          exchange: the exchange.
        """
        self.exchange = self
        self._number = number
        self._exchange = exchange
        self._leads = exchange.place.index == 0
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

    def channel(self, what: str, seconds: float) -> host_collectives.Channel:
        """Returns a channel for the main thread; who is late is for the exchange."""
        del seconds
        return _Channel(what, self)

    def writing_channel(self, what: str, seconds: float) -> host_collectives.Channel:
        """Returns the channel of a single process: the leader writes alone."""
        return host_collectives.Channel(what, seconds)

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
        with spans.Span(spans.AGREE):
            words = self._exchange.gather(what, word)
        self._succeed()
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
        self._succeed()
        return combined

    def close(self) -> None:
        """Ends the exchange, when all members have made their last call."""
        self._exchange.close()

    def _succeed(self) -> None:
        """Opens what a leader has open, once this process has come to lead."""
        if self._leads or self._exchange.place.index:
            return
        self._leads = True
        for open_one, stack in self._held:
            stack.enter_context(open_one())


class _Channel(host_collectives.Channel):
    """A channel of members, whose process 0 is whoever leads."""

    def __init__(self, what: str, members: Exchanging):
        super().__init__(what, 0.0)
        self._members = members
        # Nobody knows how many will be left.
        self.count = 2

    def on_process_0(self, action: Callable[[], Any]) -> Any:
        """Runs an action on the leader, again on its successor if it is lost."""
        outcomes: list[Any] = []
        while not outcomes:
            outcome = None
            failure = None
            if self._members.leads:
                outcome, failure = host_collectives.attempted(action)
            outcomes = [each for each in self.gather(outcome) if each is not None]
        return host_collectives.value_of(outcomes[0], failure)

    def _gather_texts(self, text: str) -> list[str]:
        return self._members.gather(self._what, text)
