"""Exchanges of values between the members of a run, which goes on without those that
are lost.

Each member runs the whole program, with a JAX of its own. What they share out is summed
up here: see `xshard.pod.generations` for the protocol.
"""

import dataclasses
import functools
import math
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from xshard import errors
from xshard.files import jsonfile
from xshard.pod import generations, links, rendezvous

_RETRY_SECONDS = 0.05
_ALIVE_SECONDS = 1.0
# Arrays of JAX on CPUs begin at a multiple of so many bytes.
_ALIGNMENT = 64
# The key of a header besides those of the message.
_WORDS = "words"


class LostError(errors.UserError):
    """The run cannot go on. The message says what is lost."""


def lease_seconds(heartbeat_seconds: float) -> float:
    """Returns how long a process on another host goes on without an answer of the
    launcher, which replaces it after `heartbeat_seconds` without a message.
    """
    return heartbeat_seconds / 2


class _Words:
    """The exchange of a word of each member."""

    units = 0
    parts = 1

    def __init__(self, label: str, number: int, word: Any, admits: Any = None):
        self.label = label
        self.admits = admits
        self._own = [[number, word]]
        self._result: list[Any] = []

    def contribution(self, part: int) -> list[Any]:
        """Returns this process's number and word."""
        return self._own

    def add(self, part: int, total: list[Any], more: list[Any]) -> list[Any]:
        """Returns the words of both."""
        return total + more

    def conclude(self, part: int, total: list[Any], members: Sequence[int]) -> None:
        """Keeps the words in the order of the members."""
        self._result = sorted(total, key=lambda each: members.index(each[0]))

    def store(self, part: int, payload: list[Any]) -> None:
        """Keeps the words in the order that the leader gave them."""
        self._result = payload

    def result(self, part: int) -> list[Any]:
        """Returns the numbers and words of all."""
        return self._result

    @property
    def words(self) -> list[Any]:
        """The words of all, the leader's first."""
        return [word for _, word in self._result]


class _Sums:
    """The exchange of arrays that are combined elementwise."""

    admits = None

    def __init__(
        self,
        label: str,
        like: Sequence[Any],
        units: int,
        operations: Sequence[np.ufunc],
    ):
        self.label = label
        self.units = units
        self.arrays = [_empty(each.shape, each.dtype) for each in like]
        self._own: list[np.ndarray] = []
        self._operations = operations
        self._parts = _divided(self.arrays)
        self._results = [self._views(self.arrays, i) for i in range(self.parts)]

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self._parts)

    def _views(self, arrays: Sequence[np.ndarray], part: int) -> list[np.ndarray]:
        views = []
        for i, start, end in self._parts[part]:
            views.append(arrays[i].reshape(-1)[start:end])
        return views

    def take(self, arrays: Sequence[Any]) -> None:
        """Adds what this process has computed to what it contributes."""
        checked = []
        for array, like in zip(arrays, self.arrays, strict=True):
            own = np.asarray(array, order="C")
            if own.shape != like.shape or own.dtype != like.dtype:
                raise ValueError(
                    f"{self.label}: an array of {own.shape} {own.dtype} was computed, "
                    f"where one of {like.shape} {like.dtype} is exchanged"
                )
            checked.append(own)
        if not self._own:
            self._own = checked
            return
        for i, operation in enumerate(self._operations):
            self._own[i] = np.asarray(operation(self._own[i], checked[i]))

    def contribution(self, part: int) -> list[np.ndarray]:
        """Returns a part of what this process has computed."""
        return self._views(self._own, part)

    def add(
        self, part: int, total: list[np.ndarray], more: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Combines two parts; the result's own memory takes the sum."""
        result = self._results[part]
        for (i, *_), x, y, out in zip(
            self._parts[part], total, more, result, strict=True
        ):
            if x.dtype != out.dtype or y.dtype != out.dtype:
                raise ValueError(f"{x.dtype} and {y.dtype} are not {out.dtype}")
            self._operations[i](x, y, out=out)
        return result

    def conclude(
        self, part: int, total: list[np.ndarray], members: Sequence[int]
    ) -> None:
        """Keeps the sum of all."""
        if total is not self._results[part]:
            self.store(part, total)

    def store(self, part: int, payload: list[np.ndarray]) -> None:
        """Keeps a part of the result."""
        for out, array in zip(self._results[part], payload, strict=True):
            np.copyto(out, array)

    def result(self, part: int) -> list[np.ndarray]:
        """Returns a part of the result."""
        return self._results[part]


def _empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an array that JAX uses on CPUs without copying it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _divided(arrays: Sequence[np.ndarray]) -> list[list[tuple[int, int, int]]]:
    """Divides arrays into parts of about equal size.

    Returns:
      For each part, the indices of its arrays, and the first and last element of each.
    """
    parts: list[list[tuple[int, int, int]]] = [[]]
    room = links.PART_BYTES
    for i, array in enumerate(arrays):
        start = 0
        while start < array.size:
            count = min(array.size - start, room // array.itemsize)
            if not count:
                parts.append([])
                room = links.PART_BYTES
                continue
            parts[-1].append((i, start, start + count))
            room -= count * array.itemsize
            start += count
    return parts


@dataclasses.dataclass(frozen=True)
class Place:
    """A process's place among the members.

    Attributes:
      index: its index; 0 is the leader's.
      count: the number of members.
      generation: their generation.
      takeovers: how many had been lost by then.
    """

    index: int
    count: int
    generation: int
    takeovers: int


class _Event(NamedTuple):
    """What the training thread is to do: compute units of work, or return."""

    units: tuple[int, ...] = ()
    error: str | None = None
    word: Any = None


class Exchange:
    """A process's exchanges with the other members of its run.

    All members call the same methods with the same labels in the same order. A call
    blocks; members that are lost meanwhile are replaced within it.
    """

    def __init__(
        self,
        address: str,
        number: int,
        token: str,
        facts: Mapping[str, str],
        *,
        start_seconds: float = 300.0,
        heartbeat_seconds: float = 30.0,
        look: Callable[[], None] | None = None,
    ):
        """Connects to the meeting.

        Args:
          address: the meeting's HOST:PORT.
          number: the number of this process, which no other process of the run has or
            had.
          token: the token of the launch.
          facts: names and texts that must be equal on all processes.
          start_seconds: how long to try to reach the meeting.
          heartbeat_seconds: how long what is sent may remain unanswered.
          look: called some times a second meanwhile; what it raises ends that.

        Raises:
          StartError: if the meeting cannot be reached, or refuses this process.
        """
        self._number = number
        self._key = token.encode(errors="surrogateescape")
        self._silence_seconds = heartbeat_seconds
        self._lease_seconds = lease_seconds(heartbeat_seconds)
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._member = generations.Member(number, heartbeat_seconds, self)
        self._hello = links.Hello(number, socket.gethostname(), os.getpid(), {})
        hello = msgspec.structs.replace(self._hello, facts=dict(facts))
        sock = self._meet(address, hello, start_seconds, look)
        # The address by which the meeting is reached is one that others can reach.
        host, *_ = sock.getsockname()
        listener = socket.create_server((host, 0), family=sock.family, backlog=128)
        port = listener.getsockname()[1]
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._loop = links.Loop(self._receive, self._lost, self._tick, self.fail)
        self._loop.listen(
            listener, self._key, lambda _: "", self._accepted, heartbeat_seconds
        )
        self._meeting = self._loop.add(generations.MEETING, sock)
        self._peers: dict[int, links.Link] = {}
        self._next_alive = 0.0
        # When the meeting last answered, if it does.
        self._answered: float | None = None
        # Counts how often the links were cut: a connection that was begun before is
        # not used.
        self._num_cuts = 0
        self._loop.start()

    def _meet(
        self,
        address: str,
        hello: links.Hello,
        seconds: float,
        look: Callable[[], None] | None,
    ) -> socket.socket:
        deadline = time.monotonic() + seconds
        while True:
            if look is not None:
                look()
            try:
                return links.connect(address, self._key, hello, self._silence_seconds)
            except links.RefusedError as e:
                raise rendezvous.StartError(
                    f"process {hello.number} on {hello.host} has no place in this run: "
                    f"{e}."
                ) from e
            except OSError as e:
                if time.monotonic() > deadline:
                    raise rendezvous.StartError(
                        f"process {hello.number} on {hello.host} cannot reach the "
                        f"launcher at {address} ({e}): has it ended?"
                    ) from e
            time.sleep(_RETRY_SECONDS)

    # For the training thread.

    @property
    def place(self) -> Place:
        """This process's place when the last call returned."""
        member = self._member
        return Place(member.place, member.count, member.generation, member.takeovers)

    @property
    def arrivals(self) -> bool:
        """Whether newcomers wait for whom there is room; only the leader knows."""
        return self._member.arrivals

    def enter(self, look: Callable[[], None] | None = None) -> Any:
        """Waits for a place in the run.

        Args:
          look: called some times a second meanwhile; what it raises ends that.

        Returns:
          None in the first generation. For a newcomer, the word that the members gave
          to `admit`: restore the state that it names, call `restored`, and then `admit`
          as they do.

        Raises:
          LostError: if the launcher has ended.
        """
        self._loop.call(lambda: self._member.enter(self._address))
        while look is not None and self._events.empty():
            look()
            time.sleep(_RETRY_SECONDS)
        return self._wait()

    def restored(self) -> None:
        """Says that this newcomer has restored the state."""
        self._loop.call(self._member.restored)

    def gather(self, label: str, word: Any) -> list[Any]:
        """Returns the words of all members, the leader's first.

        Args:
          label: what the exchange is for; equal on all members.
          word: what this process says, as JSON.
        """
        return self._exchange_words(_Words(label, self._number, word))

    def admit(self, label: str, word: Any) -> list[Any]:
        """Lets in the newcomers that wait, and returns the words of all members.

        Args:
          label: what the exchange is for; equal on all members.
          word: what newcomers need to know to restore the state, as JSON.
        """
        return self._exchange_words(_Words(label, self._number, word, admits=word))

    def combine(
        self,
        label: str,
        like: Sequence[Any],
        units: int,
        contribute: Callable[[tuple[int, ...]], Sequence[Any]],
        operations: Sequence[np.ufunc],
    ) -> list[np.ndarray]:
        """Combines arrays over units of work, which the members share.

        Args:
          label: what the exchange is for; equal on all members.
          like: the shapes and dtypes of the arrays.
          units: the number of units.
          contribute: returns the arrays of some units, already combined. It is called
            again, with other units, if this process takes over those of another.
          operations: how each array is combined, such as `np.add`: elementwise, in any
            order with the same bits.

        Returns:
          The arrays over all units, which must not be written to.
        """
        shapes = ", ".join(f"{each.dtype}{list(each.shape)}" for each in like)
        sums = _Sums(f"{label} ({shapes})", like, units, operations)
        self._exchange(sums, contribute)
        for array in sums.arrays:
            array.setflags(write=False)
        return sums.arrays

    def close(self) -> None:
        """Waits until all members have made their last exchange, and ends all
        connections.
        """
        self._loop.call(self._member.leave)
        self._wait()
        self._loop.end()

    def _exchange_words(self, words: _Words) -> list[Any]:
        self._exchange(words)
        return words.words

    def _exchange(
        self,
        work: Any,
        contribute: Callable[[tuple[int, ...]], Sequence[Any]] | None = None,
    ) -> None:
        self._loop.call(lambda: self._member.call(work))
        self._wait(work, contribute)

    def _wait(self, work: Any = None, contribute: Any = None) -> Any:
        """Does what the protocol asks for, until the call returns."""
        while True:
            event = self._events.get()
            if event.error is not None:
                raise LostError(
                    f"{event.error}. The same command resumes from the last checkpoint."
                )
            if not event.units:
                return event.word
            work.take(contribute(event.units))
            self._loop.call(functools.partial(self._member.computed, event.units))

    # What the protocol makes happen, in the loop's thread.

    def send(self, number: int, message: Any, payload: Any = None) -> None:
        """Sends a message, as `MemberPort` describes."""
        link = self._meeting
        if number != generations.MEETING:
            if number not in self._peers:
                return
            link = self._peers[number]
        header = msgspec.to_builtins(message)
        if payload and isinstance(payload[0], list):
            self._loop.send(link, {**header, _WORDS: payload})
        else:
            self._loop.send(link, header, payload or ())

    def connect(self, leader: generations.Peer) -> None:
        """Connects to the leader, as `MemberPort` describes."""
        num_cuts = self._num_cuts

        def joined(sock: socket.socket) -> None:
            if num_cuts != self._num_cuts:
                sock.close()
                return
            self._peers[leader.number] = self._loop.add(leader.number, sock)
            self._member.connected()

        def failed() -> None:
            if num_cuts == self._num_cuts:
                self._member.broken(leader.number)

        def run() -> None:
            try:
                sock = links.connect(
                    leader.address, self._key, self._hello, self._silence_seconds
                )
            except (OSError, links.RefusedError):
                self._loop.call(failed)
            else:
                self._loop.call(lambda: joined(sock))

        threading.Thread(target=run, daemon=True).start()

    def cut(self) -> None:
        """Ends all connections to other members."""
        self._num_cuts += 1
        for link in self._peers.values():
            self._loop.close(link)
        self._peers = {}

    def compute(self, units: tuple[int, ...]) -> None:
        """Lets the training thread do units of work."""
        self._events.put(_Event(units=units))

    def finish(self, word: Any = None) -> None:
        """Lets the training thread's call return."""
        self._events.put(_Event(word=word))

    def fail(self, why: str) -> None:
        """Lets the training thread's call raise."""
        self._events.put(_Event(error=why))

    def _accepted(self, hello: links.Hello, sock: socket.socket) -> None:
        self._loop.add(hello.number, sock)

    def _receive(
        self, link: links.Link, header: dict[str, Any], arrays: list[np.ndarray]
    ) -> None:
        words = header.pop(_WORDS, None)
        message = jsonfile.parse(header, generations.Message)
        if isinstance(message, generations.Alive):
            # An answer may have waited here for long, so its own age counts.
            self._answered = message.time or time.monotonic()
            return
        if isinstance(message, generations.Joined):
            # What was connected for an earlier generation is of no use.
            if message.generation < self._member.prepared:
                self._loop.close(link)
                return
            self._peers[link.number] = link
        payload = arrays if words is None else words
        self._member.receive(link.number, message, payload)

    def _lost(self, link: links.Link) -> None:
        if link is self._meeting:
            self._member.meeting_lost()
        elif self._peers.get(link.number) is link:
            del self._peers[link.number]
            self._member.broken(link.number)

    def _tick(self) -> None:
        now = time.monotonic()
        if self._answered is not None and now > self._answered + self._lease_seconds:
            # The launcher may have given this process's place away, so it must do
            # nothing any more, not even report this.
            os.kill(os.getpid(), signal.SIGKILL)
        self._member.tick(now)
        if now >= self._next_alive:
            self._next_alive = now + _ALIVE_SECONDS
            alive = generations.Alive(self._member.exchange, now)
            self.send(generations.MEETING, alive)
