"""The members of a run: which of them writes, and what all of them agree on.

Two things are called a place. `xshard.base.places.own` is this process's among those
that JAX has joined: it determines which rows of a batch and which blocks of an array
are its own. A member's place in a run says who writes the run's files and speaks for
it: the one that leads.

In most runs both are the same, and process 0 leads to the end. The members of a run
that goes on without those it loses are not joined by JAX: each has a JAX of its own,
with all data and all state, and makes the whole run. They share out the replicas of its
steps, and agree on whatever one of them decides: see `xshard.pod.exchanging`.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xshard.base import places
from xshard.pod import host_collectives


class Members:
    """The members of a run that are the processes which JAX has joined, or the only
    one.

    Attributes:
      exchange: what they combine the terms of steps by, a `logical.Exchange`; None: JAX
        does.
      has_succeeded: whether this process leads since another one was lost.
    """

    exchange: Any = None
    has_succeeded: bool = False

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

    @property
    def is_outside(self) -> bool:
        """Whether this process has no place yet in a run that is under way."""
        return False

    @property
    def standing(self) -> Mapping[str, int]:
        """What the status and the rows say of the members, in a run that goes on
        without those that it loses; empty in others.
        """
        return {}

    def enter(self) -> None:
        """Waits for a place in the run, with the state of its newest checkpoint."""

    def admit(self, step: int) -> None:
        """Lets in processes that have none.

        Args:
          step: the step, which has just been saved. All members restore it.
        """

    def note(self, content: bytes) -> None:
        """Notes what must be equal on all members, who compare it at the next poll."""

    def poll(self, requests: Sequence[Any]) -> list[Any]:
        """Returns the requests of all members.

        Args:
          requests: those of this member, as JSON.
        """
        return list(requests)

    def channel(self, what: str, seconds: float) -> host_collectives.Channel:
        """Returns a channel for the main thread, on which process 0 is the leader.

        Args:
          what: the purpose of the gathers, for the error message.
          seconds: how long the processes wait for one another.
        """
        return host_collectives.Channel(what, seconds)

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
