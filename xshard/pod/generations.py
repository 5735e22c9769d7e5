"""The protocol by which the members of a run combine values, and go on without those
that are lost. It has no sockets, threads or clock.

A run's members make the same exchanges, numbered from 0, in the same order. Their
leader combines what all of them contribute, and each exchange returns the result.

A generation is a list of members, of which the first is the leader. The meeting, which
is the program that started the processes, begins one after another: it asks those that
are there how far they have come (`Prepare`), from which moment on they accept nothing
of earlier generations, and then tells all of them who the members are (`Begin`). The
leader is one that has come furthest.

- The members are at most one exchange apart, since an exchange needs a contribution
  of each. Those that lack the result of the last exchange receive it from the leader.
- A leader's call returns after all members have the result. So what it writes never
  follows from a result that could be lost with it.
- A generation without a process begins only after that process has ended. So no two
  leaders write at the same time.
- A process's place, as its program sees it, changes only within a call.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

# Where members send messages to that are for the meeting.
MEETING = -1
# How long the meeting waits after a broken link for the end of one of the processes.
LINK_SECONDS = 1.0
# At most this much time passes for the meeting between two ticks. If its own process
# was stopped for longer, the members were not silent for that long.
_LONGEST_TICK = 1.0
# The part of a contribution that says that there is none.
_NO_PART = -1
# Why a process is put out that has come too late.
_RUN_HAS_ENDED = "the run has ended"
_ALL_ARE_LOST = "all members are lost"


class Tagged(msgspec.Struct, tag=True, tag_field="message"):
    """A message, whose JSON has the name of its class as "message"."""


# Messages to the meeting.


class Ready(Tagged):
    """A process could take a place now."""

    address: str


class Prepared(Tagged):
    """A member accepts nothing of earlier generations any more.

    Attributes:
      generation: the generation that begins.
      exchange: the exchange that the member makes, or will make next.
      units: the units of work that it has done, or does, for this exchange.
    """

    generation: int
    exchange: int
    units: tuple[int, ...] = ()


class Broken(Tagged):
    """A member has lost its connection to another."""

    generation: int
    peer: int


class Odd(Tagged):
    """A member computes other things than the rest."""

    number: int
    why: str


class Admit(Tagged):
    """The leader lets newcomers in.

    Attributes:
      exchange: the exchange with which they begin.
      word: what they need to know to restore the state before it.
    """

    exchange: int
    word: Any


class Restored(Tagged):
    """A newcomer has restored the state before an exchange."""

    exchange: int


class Leaving(Tagged):
    """A member has made its last exchange."""


class Alive(Tagged):
    """A process sends this now and then, and has it back if the meeting answers.

    Attributes:
      exchange: the exchange that it makes, or will make next.
      time: the process's time, in seconds of any origin.
    """

    exchange: int
    time: float = 0.0


# Messages of the meeting.


class Prepare(Tagged):
    """A generation begins."""

    generation: int


class Peer(msgspec.Struct, frozen=True):
    """A member of a generation.

    Attributes:
      number: the process.
      address: where it accepts connections.
      units: the units of work that it has done for the generation's first exchange.
    """

    number: int
    address: str
    units: tuple[int, ...] = ()


class Begin(Tagged):
    """A generation has begun.

    Attributes:
      generation: its number.
      exchange: its first exchange.
      members: its members, the leader first.
      takeovers: how many members have been lost so far, whose part others took over.
    """

    generation: int
    exchange: int
    members: tuple[Peer, ...]
    takeovers: int


class Arrivals(Tagged):
    """Whether newcomers wait for whom there is room."""

    waiting: bool


class Restore(Tagged):
    """A newcomer is to restore the state before an exchange."""

    exchange: int
    word: Any


class Admitted(Tagged):
    """All newcomers have come that could."""

    exchange: int


class Bye(Tagged):
    """All members are done."""


# Messages between members.


class Joined(Tagged):
    """A member has connected to its leader."""

    generation: int
    number: int
    exchange: int


class Contribution(Tagged):
    """A part of what a member contributes, or `_NO_PART`."""

    generation: int
    exchange: int
    part: int
    label: str


class Result(Tagged):
    """A part of a result."""

    generation: int
    exchange: int
    part: int


class Received(Tagged):
    """A member has a result."""

    generation: int
    exchange: int


Message = (
    Ready
    | Prepared
    | Broken
    | Odd
    | Admit
    | Restored
    | Leaving
    | Alive
    | Prepare
    | Begin
    | Arrivals
    | Restore
    | Admitted
    | Bye
    | Joined
    | Contribution
    | Result
    | Received
)


class Work(Protocol):
    """What a program exchanges: how it is divided, added up and kept.

    Attributes:
      label: what the exchange is for; equal on all members.
      units: the number of units of work that members share; 0 if each contributes.
      parts: the number of parts that are sent one after another.
      admits: what newcomers need to know, if the exchange lets them in; else None.
    """

    label: str
    units: int
    parts: int
    admits: Any

    def contribution(self, part: int) -> Any:
        """Returns a part of what this process contributes."""

    def add(self, part: int, total: Any, more: Any) -> Any:
        """Returns the sum of two parts; raises ValueError if they do not fit."""

    def conclude(self, part: int, total: Any, members: Sequence[int]) -> None:
        """Keeps a part of the result, the sum of what the members contributed."""

    def store(self, part: int, payload: Any) -> None:
        """Keeps a part of the result that the leader has sent."""

    def result(self, part: int) -> Any:
        """Returns a part of the result."""


class MemberPort(Protocol):
    """What a member's side of the protocol makes happen."""

    def send(self, number: int, message: Message, payload: Any = None) -> None:
        """Sends a message to a process, or to the meeting."""

    def connect(self, leader: Peer) -> None:
        """Connects to the leader, and calls `Member.connected`."""

    def cut(self) -> None:
        """Ends all connections to other members."""

    def compute(self, units: tuple[int, ...]) -> None:
        """Lets the program do units of work, and call `Member.computed`."""

    def finish(self, word: Any = None) -> None:
        """Lets the program's call return."""

    def fail(self, why: str) -> None:
        """Lets the program's call, or its next one, raise."""


class Member:
    """A process's side of the protocol.

    Attributes:
      exchange: the exchange that the process makes, or will make next.
      generation: the generation in which its program's last call returned.
      place: its index in that generation.
      count: the number of members of that generation.
      takeovers: how many members had been lost by then.
      arrivals: whether newcomers wait for whom there is room.
      prepared: the newest generation that the process is prepared for.
    """

    def __init__(self, number: int, silence_seconds: float, port: MemberPort):
        """Has no place yet.

        Args:
          number: the process's number.
          silence_seconds: how long a member may take to connect to its leader.
          port: what this makes happen.
        """
        self.exchange = 0
        self.generation = 0
        self.place = 0
        self.count = 0
        self.takeovers = 0
        self.arrivals = False
        self._number = number
        self._silence_seconds = silence_seconds
        self._port = port
        self.prepared = 0
        # The generation that has begun.
        self._begun = 0
        self._lost = 0
        self._members: tuple[Peer, ...] = ()
        self._first = 0
        self._is_connected = False
        # Of the leader: the members that have not connected, and until when they may.
        self._absent: set[int] = set()
        self._absent_until: float | None = None
        self._is_entering = False
        self._is_leaving = False
        self._early: list[tuple[int, Any, Any]] = []
        self._call: Work | None = None
        self._last: Work | None = None
        # The units of work of the current exchange that the program does or has done.
        self._held: tuple[int, ...] = ()
        self._computing: set[int] = set()
        self._admitted = -1
        # Of the leader: by part, the sum so far and who has contributed to it.
        self._totals: dict[int, Any] = {}
        self._came: dict[int, set[int]] = {}
        # Of the leader: what came before its program made the same exchange.
        self._waiting: list[tuple[int, Contribution, Any]] = []
        # Of the leader: those that may lack the result before the generation's first
        # exchange. It lets nobody in until then, since a newcomer could not give it to
        # them.
        self._behind: set[int] = set()
        # Of a member: the parts of the result that have come.
        self._parts: set[int] = set()
        # Of the leader: those that may lack the last result, which is not yet returned.
        self._lacking: set[int] = set()
        self._meeting_lost = False
        # A member to which the connection has ended in this generation.
        self._lost_peer: int | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this process leads the generation that has begun."""
        return bool(self._members) and self._members[0].number == self._number

    @property
    def _is_frozen(self) -> bool:
        return self._begun < self.prepared or not self._begun

    # What the program does.

    def enter(self, address: str) -> None:
        """Asks for a place; the call returns in the first generation, or for a newcomer
        when it is to restore.
        """
        self._is_entering = True
        self._port.send(MEETING, Ready(address))
        self._fail_if_all_is_lost()

    def restored(self) -> None:
        """Notes that a newcomer has restored the state before its first exchange."""
        self._port.send(MEETING, Restored(self.exchange))
        self._fail_if_all_is_lost()

    def call(self, work: Work) -> None:
        """Begins the next exchange of the program."""
        self._call = work
        self._fail_if_all_is_lost()
        waiting = self._waiting
        self._waiting = []
        for sender, message, payload in waiting:
            self._contributed(sender, message, payload)
        self._proceed()

    def computed(self, units: Iterable[int]) -> None:
        """Notes that the program has done units of work."""
        self._computing -= set(units)
        self._proceed()

    def leave(self) -> None:
        """Notes that the program has made its last exchange; the call returns when that
        holds for all members.
        """
        self._is_leaving = True
        if self._meeting_lost:
            self._port.finish()
        else:
            self._port.send(MEETING, Leaving())

    # What happens.

    def connected(self) -> None:
        """Notes that the connection to the leader stands."""
        self._is_connected = True
        joined = Joined(self._begun, self._number, self.exchange)
        self._port.send(self._members[0].number, joined)
        self._proceed()

    def tick(self, now: float) -> None:
        """Acts on the time, in seconds of any origin."""
        if self._is_frozen or not self._absent:
            return
        if self._absent_until is None:
            self._absent_until = now + self._silence_seconds
        elif now > self._absent_until:
            self._absent_until = None
            for number in self._absent:
                self.broken(number)

    def broken(self, peer: int) -> None:
        """Notes that the connection to a member has ended, or cannot be made."""
        if self._is_frozen:
            # It may have connected for a generation that this process does not know.
            self._early = [each for each in self._early if each[0] != peer]
            return
        if peer not in [member.number for member in self._members]:
            return
        self._lost_peer = peer
        self._port.send(MEETING, Broken(self._begun, peer))
        self._fail_if_all_is_lost()

    def meeting_lost(self) -> None:
        """Notes that the connection to the meeting has ended."""
        self._meeting_lost = True
        if self._is_leaving:
            self._port.finish()
        elif self.is_leader and self._call is not None:
            # Nobody can come any more.
            self._admitted = self.exchange
            self._proceed()
        self._fail_if_all_is_lost()

    def _fail_if_all_is_lost(self) -> None:
        """Lets the program's call raise if it cannot go on without the meeting."""
        if not self._meeting_lost or self._is_leaving:
            return
        if self._is_frozen:
            self._port.fail("the launcher has ended")
        elif self._lost_peer is not None and self._call is not None:
            self._port.fail(
                f"process {self._lost_peer} is lost, and the launcher has ended"
            )

    def receive(self, sender: int, message: Any, payload: Any = None) -> None:
        """Acts on a message."""
        if sender != MEETING:
            if message.generation > self._begun:
                self._early.append((sender, message, payload))
                return
            if message.generation < self._begun or self._is_frozen:
                return
        match message:
            case Prepare():
                self._prepare(message.generation)
            case Begin():
                self._begin(message)
            case Arrivals():
                self.arrivals = message.waiting
            case Restore():
                self.exchange = message.exchange
                self._is_entering = False
                self._port.finish(message.word)
            case Admitted():
                self._admitted = message.exchange
                self._proceed()
            case Bye():
                self._port.finish()
            case Joined():
                self._joined(sender, message.exchange)
            case Contribution():
                self._contributed(sender, message, payload)
            case Result():
                self._received(message, payload)
            case Received():
                self._settle(sender, message.exchange)

    # Generations.

    def _prepare(self, generation: int) -> None:
        self.prepared = generation
        self._lost_peer = None
        self._port.cut()
        self._is_connected = False
        self._early = []
        self._waiting = []
        self._forget()
        self._port.send(MEETING, Prepared(generation, self.exchange, self._held))

    def _forget(self) -> None:
        """Drops what was received of an exchange that is not complete."""
        self._totals = {}
        self._came = {}
        self._parts = set()

    def _begin(self, begin: Begin) -> None:
        self._begun = begin.generation
        self._lost = begin.takeovers
        self._members = begin.members
        self._first = begin.exchange
        if self._is_entering:
            self._is_entering = False
            self._note_place()
            self._port.finish()
        self._absent = set()
        self._absent_until = None
        if self.is_leader:
            others = {member.number for member in self._members} - {self._number}
            self._absent = set(others)
            self._behind = set(others)
            if self._lacking:
                self._lacking = others
                self._return_if_settled()
            self._proceed()
        else:
            self.arrivals = False
            self._port.connect(self._members[0])
        early = self._early
        self._early = []
        for sender, message, payload in early:
            self.receive(sender, message, payload)

    def _note_place(self) -> None:
        numbers = [member.number for member in self._members]
        self.generation = self._begun
        self.place = numbers.index(self._number)
        self.count = len(numbers)
        self.takeovers = self._lost

    # An exchange.

    def _share(self, units: int) -> list[int]:
        """Returns the units of work that this process does in the current exchange."""
        claims: dict[int, list[int]] = {m.number: [] for m in self._members}
        if self.exchange == self._first:
            for member in self._members:
                claims[member.number] += member.units
        claimed = {unit for claim in claims.values() for unit in claim}
        # Whoever has done least takes over next; among equals, the first.
        for unit in range(units):
            if unit not in claimed:
                min(claims.values(), key=len).append(unit)
        return claims[self._number]

    def _proceed(self) -> None:
        """Does what the current exchange now allows: work, or a contribution."""
        work = self._call
        if work is None or self._is_frozen or self._lacking:
            return
        if not self.is_leader and not self._is_connected:
            return
        if self.exchange < self._first:
            # The leader has the result.
            return
        if work.units:
            new = [u for u in self._share(work.units) if u not in self._held]
            if new:
                self._held += tuple(new)
                self._computing |= set(new)
                self._port.compute(tuple(new))
                return
        if self._computing:
            return
        is_admitting = work.admits is not None and self._admitted < self.exchange
        if self.is_leader and is_admitting and not self._meeting_lost:
            if not self._behind:
                self._port.send(MEETING, Admit(self.exchange, work.admits))
            return
        self._contribute(work)

    def _contribute(self, work: Work) -> None:
        has_any = bool(self._held) or not work.units
        if self.is_leader:
            if not has_any:
                self._add(self._number, _NO_PART, None)
                return
            for part in range(work.parts):
                self._add(self._number, part, work.contribution(part))
            return
        leader = self._members[0].number
        if not has_any:
            message = Contribution(self._begun, self.exchange, _NO_PART, work.label)
            self._port.send(leader, message)
            return
        for part in range(work.parts):
            message = Contribution(self._begun, self.exchange, part, work.label)
            self._port.send(leader, message, work.contribution(part))

    # The leader.

    def _joined(self, sender: int, exchange: int) -> None:
        """Sends the last result to a member that lacks it."""
        self._absent.discard(sender)
        if exchange == self._first:
            self._settle(sender, exchange - 1)
            return
        assert self._last is not None
        for part in range(self._last.parts):
            message = Result(self._begun, exchange, part)
            self._port.send(sender, message, self._last.result(part))

    def _settle(self, sender: int, exchange: int) -> None:
        """Notes that a member has the result of an exchange."""
        if exchange == self._first - 1 and sender in self._behind:
            self._behind.discard(sender)
            self._proceed()
        if exchange == self.exchange - 1 and self._lacking:
            self._lacking.discard(sender)
            self._return_if_settled()

    def _return_if_settled(self) -> None:
        if not self._lacking:
            self._return()

    def _contributed(self, sender: int, message: Contribution, payload: Any) -> None:
        work = self._call
        if work is None or self._lacking:
            self._waiting.append((sender, message, payload))
            return
        if message.label != work.label:
            why = f"it is at {message.label}, the leader at {work.label}"
            self._port.send(MEETING, Odd(sender, why))
            return
        try:
            self._add(sender, message.part, payload)
        except ValueError as e:
            self._port.send(MEETING, Odd(sender, f"{work.label}: {e}"))

    def _add(self, sender: int, part: int, payload: Any) -> None:
        """Adds a part of a member's contribution, and sends the sum if that was the
        last one.
        """
        work = self._call
        assert work is not None
        came = self._came.setdefault(part, set())
        if sender in came:
            return
        came.add(sender)
        if part != _NO_PART:
            if part in self._totals:
                self._totals[part] = work.add(part, self._totals[part], payload)
            else:
                self._totals[part] = payload
        numbers = [member.number for member in self._members]
        without = self._came.get(_NO_PART, set())
        for each in list(self._totals):
            if len(self._came[each] | without) == len(numbers):
                work.conclude(each, self._totals.pop(each), numbers)
                self._parts.add(each)
                for number in numbers:
                    if number != self._number:
                        message = Result(self._begun, self.exchange, each)
                        self._port.send(number, message, work.result(each))
        if len(self._parts) == work.parts:
            self._lacking = set(numbers) - {self._number}
            self._advance(work)
            self._return_if_settled()

    # A member that does not lead.

    def _received(self, message: Result, payload: Any) -> None:
        work = self._call
        if message.exchange != self.exchange or work is None:
            return
        work.store(message.part, payload)
        self._parts.add(message.part)
        if len(self._parts) == work.parts:
            self._advance(work)
            received = Received(self._begun, message.exchange)
            self._port.send(self._members[0].number, received)
            self._return()

    def _advance(self, work: Work) -> None:
        """Notes that this process has the result of the exchange."""
        self._last = work
        self.exchange += 1
        self._held = ()
        self._forget()

    def _return(self) -> None:
        self._call = None
        self._note_place()
        self._port.finish()


class MeetingPort(Protocol):
    """What the meeting makes happen."""

    def send(self, number: int, message: Message) -> None:
        """Sends a message to a process."""

    def kill(self, number: int, why: str) -> None:
        """Ends a process, and calls `Meeting.ended` once it has ended."""

    def begun(self, generation: int, members: Sequence[int]) -> None:
        """Notes that a generation has begun."""


class _Process:
    """What the meeting knows of a process.

    Attributes:
      joins: whether it joins the run when that has begun.
      address: where it accepts connections; empty until it is ready.
      came: whether it has connected to the meeting.
      connected: whether it is connected still.
      heard: when the meeting heard of it last.
      exchange: the exchange that it makes, or will make next.
      units: the units of work that it has done for that exchange.
      restores: the exchange with which it is to begin; -1 if it is no newcomer.
      restored: whether it has restored the state for that.
      leaving: whether it has made its last exchange.
      killed: whether it is to end.
    """

    def __init__(self, now: float, joins: bool):
        self.joins = joins
        self.address = ""
        self.came = False
        self.connected = False
        self.heard = now
        self.exchange = 0
        self.units: tuple[int, ...] = ()
        self.restores = -1
        self.restored = False
        self.leaving = False
        self.killed = False


class Meeting:
    """The side of the program that started the processes, and gives them places.

    Attributes:
      generation: the generation that has begun, 0 before the first.
      members: its members, the leader first.
      takeovers: how many members have been lost so far.
      is_done: whether all members have made their last exchange.
    """

    def __init__(
        self,
        count: int,
        start_seconds: float,
        silence_seconds: float,
        shutdown_seconds: float,
        port: MeetingPort,
    ):
        """Waits for the first processes.

        Args:
          count: the number of members with which the run begins, and up to which it is
            filled up again.
          start_seconds: the time after which a process is put out that does not come.
          silence_seconds: the time without a message after which a process is put out.
          shutdown_seconds: the time after which a process is put out that does not end
            after the run.
          port: what the meeting makes happen.
        """
        self.generation = 0
        self.members: list[int] = []
        self.takeovers = 0
        self.is_done = False
        self._count = count
        self._start_seconds = start_seconds
        self._silence_seconds = silence_seconds
        self._shutdown_seconds = shutdown_seconds
        self._port = port
        self._processes: dict[int, _Process] = {}
        self._now = 0.0
        self._last_tick: float | None = None
        # The newest generation that processes were asked to prepare, who was asked, and
        # who of them has not answered.
        self._proposed = 0
        self._asked: list[int] = []
        self._awaited: set[int] = set()
        self._is_changing = False
        # By the member that complains, the peer and the time.
        self._broken: dict[int, tuple[int, float]] = {}
        # The exchange at which links were last made anew.
        self._repaired = -1
        # The exchange at which newcomers are let in, and until when.
        self._admitting = -1
        self._admit_until = 0.0

    @property
    def _has_members(self) -> bool:
        return any(number in self._processes for number in self.members)

    # What happens.

    def started(self, number: int, *, joins: bool) -> None:
        """Notes that a process has been started, to begin the run or to join it.

        Whoever starts it may not know yet that the run has ended.
        """
        self._processes[number] = _Process(self._now, joins)
        if self.is_done:
            self.put_out(number, _RUN_HAS_ENDED)
        elif self.generation and not self._has_members:
            self.put_out(number, _ALL_ARE_LOST)

    def connected(self, number: int) -> None:
        """Notes that a process has connected."""
        if number in self._processes:
            self._processes[number].came = True
            self._processes[number].connected = True
            self._processes[number].heard = self._now

    def disconnected(self, number: int) -> None:
        """Notes that the connection to a process has ended."""
        if number in self._processes:
            self._processes[number].connected = False
            self._processes[number].heard = self._now

    def ended(self, number: int) -> None:
        """Notes that a process has ended."""
        self._processes.pop(number, None)
        self._finish_if_all_leave()
        if self.is_done:
            return
        if not self.generation:
            # Another process may begin in its place.
            self.members = []
            self._is_changing = False
            self._start_if_all_ready()
        elif not self._has_members:
            # Newcomers do not know how far the run has come.
            self._is_changing = False
            for other in list(self._processes):
                self.put_out(other, _ALL_ARE_LOST)
        elif number in self.members or self._is_changing:
            self._change()
        self._admit_if_all_restored()

    def tick(self, now: float) -> None:
        """Acts on the time, in seconds of any origin."""
        if self._last_tick is not None:
            self._now += min(now - self._last_tick, _LONGEST_TICK)
        self._last_tick = now
        for number, process in list(self._processes.items()):
            limit = self._silence_seconds
            why = f"it was silent for {limit:g} s"
            if not process.came:
                limit = self._start_seconds
                why = f"it did not connect within {limit:g} s"
            elif not process.connected and self.is_done:
                limit = self._shutdown_seconds
                why = f"it did not end within {limit:g} s after the run"
            elif not process.connected:
                limit = LINK_SECONDS
                why = "its connection to the launcher has ended"
            if self._now - process.heard > limit:
                self.put_out(number, why)
        self._judge_links()
        if self._admitting >= 0 and self._now > self._admit_until:
            for number in self._newcomers():
                self.put_out(number, "it did not restore the state in time")

    def put_out(self, number: int, why: str) -> None:
        """Ends a process. Members go on once it has ended, if it is one of them."""
        process = self._processes.get(number)
        if process is None or process.killed:
            return
        process.killed = True
        self._port.kill(number, why)
        if number not in self.members and self._has_members:
            if self._is_changing and number in self._asked:
                self._change()
            self._admit_if_all_restored()

    def receive(self, number: int, message: Any) -> None:
        """Acts on a message of a process."""
        process = self._processes.get(number)
        if process is None or process.killed:
            return
        process.heard = self._now
        match message:
            case Ready():
                process.address = message.address
                self._start_if_all_ready()
                self._tell_arrivals()
            case Prepared():
                self._note_prepared(number, message)
            case Broken():
                is_current = message.generation == self.generation
                if is_current and not self._is_changing:
                    self._broken.setdefault(number, (message.peer, self._now))
            case Odd():
                if self.members[:1] == [number]:
                    self.put_out(message.number, message.why)
            case Admit():
                if self.members[:1] == [number]:
                    self._admit(message)
            case Restored():
                process.restored = True
                self._admit_if_all_restored()
            case Leaving():
                process.leaving = True
                self._finish_if_all_leave()
            case Alive():
                process.exchange = max(process.exchange, message.exchange)

    # Generations.

    def _start_if_all_ready(self) -> None:
        if self.members or self.generation:
            return
        ready = []
        for number, process in sorted(self._processes.items()):
            if process.address and not process.joins and not process.killed:
                ready.append(number)
        if len(ready) >= self._count:
            self.members = ready[: self._count]
            self._change()

    def _change(self) -> None:
        """Asks all that are there to prepare a generation."""
        self._broken = {}
        self._asked = self._present()
        self._is_changing = bool(self._asked)
        self._awaited = set(self._asked)
        self._proposed += 1
        for number in self._asked:
            self._port.send(number, Prepare(self._proposed))

    def _present(self) -> list[int]:
        """Returns the members of the next generation: those that are left, and the
        newcomers that have restored the state.
        """
        left = [n for n in self.members if n in self._processes]
        return left + self._restored()

    def _note_prepared(self, number: int, message: Prepared) -> None:
        if message.generation != self._proposed:
            return
        process = self._processes[number]
        process.exchange = message.exchange
        process.units = message.units
        self._awaited.discard(number)
        if not self._awaited and self._is_changing:
            self._begin()

    def _begin(self) -> None:
        """Begins the generation that all have prepared. A newcomer that has restored
        the state since they were asked is for the next one.
        """
        numbers = [n for n in self._asked if n in self._processes]
        exchange = max(self._processes[n].exchange for n in numbers)
        late = [n for n in numbers if self._processes[n].exchange < exchange - 1]
        if late:
            # The members have gone on without a newcomer: their leader has lost the
            # connection to this meeting.
            for number in late:
                self.put_out(number, "the run has gone on without it")
            return
        # The leader stays, if it is there: it has always come furthest.
        furthest = [n for n in numbers if self._processes[n].exchange == exchange]
        leader = furthest[0]
        numbers.remove(leader)
        numbers.insert(0, leader)
        peers = []
        for number in numbers:
            process = self._processes[number]
            units = process.units if process.exchange == exchange else ()
            peers.append(Peer(number, process.address, units))
            process.restored = False
            process.restores = -1
        self._is_changing = False
        self.generation = self._proposed
        self.takeovers += len(set(self.members) - set(numbers))
        self.members = numbers
        begin = Begin(self.generation, exchange, tuple(peers), self.takeovers)
        for number in numbers:
            self._port.send(number, begin)
        self._port.begun(self.generation, numbers)
        self._tell_arrivals()

    # Links.

    def _judge_links(self) -> None:
        """Acts on broken links between members that both live on: they are made anew;
        if they break again at the same exchange, one of the two is put out.
        """
        if not self._broken or self._is_changing or self.is_done:
            return
        if self._now - min(time for _, time in self._broken.values()) < LINK_SECONDS:
            return
        exchange = max(self._processes[n].exchange for n in self._present())
        if exchange > self._repaired:
            self._repaired = exchange
            self._change()
            return
        leader = self.members[0]
        against_leader = [n for n, (peer, _) in self._broken.items() if peer == leader]
        why = "its connection to the leader has ended twice"
        if len(against_leader) > 1 and 2 * len(against_leader) >= len(self.members):
            self.put_out(leader, "the others' connections to it have ended twice")
        else:
            for number, (peer, _) in self._broken.items():
                self.put_out(number if peer == leader else peer, why)
        self._broken = {}

    # Newcomers.

    def _newcomers(self) -> list[int]:
        """Returns the processes that are to restore the state and have not."""
        newcomers = []
        for number, process in self._processes.items():
            is_restoring = process.restores >= 0 and not process.restored
            if is_restoring and not process.killed:
                newcomers.append(number)
        return newcomers

    def _restored(self) -> list[int]:
        """Returns the newcomers that have restored the state."""
        restored = []
        for number, process in self._processes.items():
            if process.restored and not process.killed and number not in self.members:
                restored.append(number)
        return restored

    def _waiting(self) -> list[int]:
        """Returns the newcomers that wait and for whom there is room."""
        waiting = []
        for number, process in sorted(self._processes.items()):
            is_placed = number in self.members or process.restores >= 0
            if process.address and not is_placed and not process.killed:
                waiting.append(number)
        return waiting[: max(0, self._count - len(self.members))]

    def _tell_arrivals(self) -> None:
        if self.members and self.members[0] in self._processes:
            message = Arrivals(bool(self._waiting()))
            self._port.send(self.members[0], message)

    def _admit(self, message: Admit) -> None:
        if message.exchange > self._admitting:
            self._admitting = message.exchange
            self._admit_until = self._now + self._silence_seconds
            for number in self._waiting():
                self._processes[number].restores = message.exchange
                self._port.send(number, Restore(message.exchange, message.word))
        self._admit_if_all_restored()

    def _admit_if_all_restored(self) -> None:
        if self._admitting < 0 or self._is_changing or self._newcomers():
            return
        if self._restored():
            self._change()
        elif self.members and self.members[0] in self._processes:
            self._port.send(self.members[0], Admitted(self._admitting))

    # The end.

    def _finish_if_all_leave(self) -> None:
        left = [n for n in self.members if n in self._processes]
        if self.is_done or not left:
            return
        if all(self._processes[n].leaving for n in left):
            self.is_done = True
            for number in list(self._processes):
                if number in left:
                    self._port.send(number, Bye())
                else:
                    self.put_out(number, _RUN_HAS_ENDED)
