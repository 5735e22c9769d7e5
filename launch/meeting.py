"""The launcher's side of a run that goes on without the processes that it loses: it
gives the processes their places, as `xshard.pod.generations` describes.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from xshard.files import jsonfile
from xshard.pod import generations, links, rendezvous

# What stands in an address for the launcher's host, which has several names.
HOST = "HOST-OF-THE-LAUNCHER"


class Meeting:
    """Gives the processes of a run their places until the run ends.

    Attributes:
      address: where processes connect, as HOST:PORT; if they are on other hosts, `HOST`
        stands for this one.
      former: the processes that are or were members.
    """

    def __init__(
        self,
        count: int,
        token: str,
        kill: Callable[[int, str], None],
        log: Callable[[str], None],
        *,
        start_seconds: float = 300.0,
        silence_seconds: float = 30.0,
        shutdown_seconds: float = 60.0,
        answers: bool = False,
    ):
        """Begins to accept connections.

        Args:
          count: the number of members with which the run begins.
          token: the token of the launch.
          kill: ends a process; called with its number and the reason.
          log: called with a line about each generation.
          start_seconds: the time after which a process is put out that does not come.
          silence_seconds: the time without a message after which a process is put out.
          shutdown_seconds: the time after which a process is put out that does not end
            after the run.
          answers: whether processes are on other hosts and hold leases, for which their
            messages are answered.
        """
        self.former: set[int] = set()
        self._kill = kill
        self._log = log
        self._links: dict[int, links.Link] = {}
        self._lock = threading.Lock()
        # The facts of the first process, with which those of all others must agree.
        self._first: links.Hello | None = None
        self._expected: set[int] = set()
        self._machine = generations.Meeting(
            count, start_seconds, silence_seconds, shutdown_seconds, self
        )
        self._answers = answers
        # When a process was last answered; and those that are to end, which are not.
        self._answered: dict[int, float] = {}
        self._killed: set[int] = set()
        self._listener = links.open_listener("" if answers else "127.0.0.1")
        port = self._listener.getsockname()[1]
        self.address = f"{HOST if answers else '127.0.0.1'}:{port}"
        self._loop = links.Loop(self._receive, self._lost, self._tick, log)
        self._loop.listen(
            self._listener,
            token.encode(errors="surrogateescape"),
            self._admit,
            self._accepted,
            silence_seconds,
        )
        self._loop.start()

    # In the launcher's thread.

    def started(self, number: int, *, joins: bool) -> None:
        """Notes that a process is started, with a number that no other had.

        Args:
          number: the number.
          joins: whether it waits until the run has begun.
        """
        with self._lock:
            self._expected.add(number)
        self._loop.call(lambda: self._machine.started(number, joins=joins))

    def ended(self, number: int) -> None:
        """Notes that a process has ended."""
        with self._lock:
            self._expected.discard(number)
        self.forsake(number)
        self._loop.call(lambda: self._machine.ended(number))

    def forsake(self, number: int) -> None:
        """Answers a process no more, so that it ends with its lease."""
        self._killed.add(number)

    def close(self) -> None:
        """Ends all connections."""
        self._loop.end()
        self._listener.close()

    def last_answer(self, number: int) -> float:
        """Returns when a process was last answered, in `time.monotonic`'s seconds; 0 if
        never.
        """
        return self._answered.get(number, 0.0)

    @property
    def members(self) -> Sequence[int]:
        """The processes that are members, the leader first."""
        return list(self._machine.members)

    @property
    def generation(self) -> int:
        """The generation that has begun; 0 before the first."""
        return self._machine.generation

    @property
    def is_done(self) -> bool:
        """Whether all members have made their last exchange."""
        return self._machine.is_done

    # In the loop's threads.

    def send(self, number: int, message: Any) -> None:
        """Sends a message, as `MeetingPort` describes."""
        if number in self._links:
            self._loop.send(self._links[number], msgspec.to_builtins(message))

    def kill(self, number: int, why: str) -> None:
        """Ends a process, as `MeetingPort` describes."""
        self.forsake(number)
        self._kill(number, why)

    def begun(self, generation: int, members: Sequence[int]) -> None:
        """Notes that a generation has begun."""
        # Another thread may be reading it.
        self.former = self.former | set(members)
        names = ", ".join(map(str, members))
        self._log(f"generation {generation}: processes {names}; {members[0]} leads")

    def _admit(self, hello: links.Hello) -> str:
        """Returns why a process is refused; empty if it is not."""
        with self._lock:
            if hello.number not in self._expected:
                return f"the launcher has started no process {hello.number}"
            self._first = self._first or hello
            differing = rendezvous.differences(
                self._first.facts, hello.facts, self._first.host
            )
            if differing:
                return (
                    "it has different code or a different config "
                    f"({rendezvous.listed(differing.values())}): give all processes "
                    "the same"
                )
            return ""

    def _accepted(self, hello: links.Hello, sock: socket.socket) -> None:
        self._links[hello.number] = self._loop.add(hello.number, sock)
        self._machine.connected(hello.number)
        self._answer(hello.number, generations.Alive(0))

    def _answer(self, number: int, message: generations.Alive) -> None:
        """Lets a process on another host go on for another while."""
        if self._answers and number not in self._killed:
            self._answered[number] = time.monotonic()
            self.send(number, message)

    def _receive(self, link: links.Link, header: dict[str, Any], arrays: Any) -> None:
        message = jsonfile.parse(header, generations.Message)
        # A process may have connected again.
        if self._links.get(link.number) is link:
            self._machine.receive(link.number, message)
            if isinstance(message, generations.Alive):
                self._answer(link.number, message)

    def _lost(self, link: links.Link) -> None:
        if self._links.get(link.number) is link:
            self._machine.disconnected(link.number)

    def _tick(self) -> None:
        self._machine.tick(time.monotonic())
