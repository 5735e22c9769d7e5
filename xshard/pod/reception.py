"""Process 0's part in the meeting of a run's processes: it hears each one out, and tells all who has come.

It hears all at a time, none for long, and believes nobody: what does not know the token of the launch, or does
not keep to the protocol, is dropped and ends nothing.
"""

import contextlib
import functools
import selectors
import socket
import time
from collections.abc import Callable, Mapping

from xshard.pod import handshake, places, signals

# How long a guest may take to say who it is; and an answer to be read.
_ANSWER_SECONDS = 5.0
# How long the right processes may still take to come when a wrong one has.
_PATIENCE_SECONDS = 10.0
# So many guests at a time may be without a name.
_MOST_STRANGERS = 512


class _WrongGuestError(places.StartError):
    """A process has come that does not fit."""

    def __init__(self, problem: handshake.Problem):
        super().__init__(problem.full)
        self.brief = problem.brief


class _Guest:
    """One who has come to process 0, from the first byte on."""

    def __init__(self, connection: socket.socket, peer: str, token: str):
        self.connection = connection
        self.peer = peer
        self.hello: handshake.Hello | None = None
        self.deadline = time.monotonic() + _ANSWER_SECONDS
        self.has_spoken = False
        self.is_known = False
        self._token = token
        self._lines = handshake.Lines(connection)
        self._seals: handshake.Seals | None = None

    def receive(self) -> None:
        """Takes what has come; GoneError at its end."""
        self._lines.receive()

    def read(self) -> dict[str, object] | None:
        """The next message of who knows the token, if it has come; MalformedError if it is none."""
        while (line := self._lines.take(self._longest)) is not None:
            if self._seals is None:
                self._seals = self._greet(handshake.read_nonce(line))
            else:
                message = self._seals.read(line)
                if self.is_known:
                    return message
                self.is_known = True
        return None

    def seat(self, hello: handshake.Hello) -> None:
        """Takes it for the process that it says it is."""
        self.say({"welcome": True})
        self.hello = hello

    def sealed(self, message: Mapping[str, object]) -> bytes:
        """A message, for this guest alone."""
        assert self._seals is not None
        return self._seals.line(message)

    def say(self, message: Mapping[str, object]) -> None:
        """Says something short; GoneError if it cannot be said at once."""
        self._send(self.sealed(message))

    @property
    def _longest(self) -> int:
        return handshake.LONGEST if self.is_known else handshake.BRIEF

    def _greet(self, its_nonce: str) -> handshake.Seals:
        self.has_spoken = True
        own_nonce = handshake.nonce()
        seals = handshake.Seals(self._token, handshake.HOST, f"{its_nonce} {own_nonce}")
        self._send(handshake.nonce_line(own_nonce) + seals.line({"process": 0}))
        return seals

    def _send(self, line: bytes) -> None:
        try:
            sent = self.connection.send(line)
        except OSError as e:
            raise handshake.GoneError from e
        if sent < len(line):
            raise handshake.GoneError


class Host:
    """Process 0's part in the meeting."""

    def __init__(
        self, at: places.Place, own: handshake.Hello, token: str, heard: signals.Heard | None
    ):
        """Prepares.

        Args:
          at: the place of process 0.
          own: what it says of itself.
          token: of the launch; empty if there is none.
          heard: the signals, of which one ends the meeting; None if nobody asks.
        """
        self._at = at
        self._own = own
        self._token = token
        self._heard = heard
        self._selector = selectors.DefaultSelector()
        self._strangers: list[_Guest] = []
        self._seated: dict[int, _Guest] = {}
        # What is wrong with the first wrong guest, for when the right one does not come.
        self._problem: handshake.Problem | None = None
        self._patient_until = float("inf")
        self._turned_away = 0
        self._last_turned_away = ""
        self._last_to_leave = ""

    def attend(self, seconds: float) -> list[str]:
        """Meets the others; the host of each process.

        Args:
          seconds: until all have come.

        Raises:
          StartError: if not all have come in time, or if some of them do not fit.
          StoppedError: if a signal has come to one of them.
        """
        failure: Exception | None = None
        with contextlib.closing(self._selector):
            with places.listen(self._at) as server:
                try:
                    self._gather(server, time.monotonic() + seconds)
                    answer: dict[str, object] = {"hosts": self._hosts()}
                except places.StartError as e:
                    answer, failure = {"error": self._for_guests(e)}, e
                except places.StoppedError as e:
                    answer, failure = {"stopped": str(e), "code": e.code}, e
            # The server is closed before the answer: JAX's coordinator takes the port over.
            self._answer(answer)
        if failure is not None:
            raise failure
        return self._hosts()

    def _for_guests(self, e: places.StartError) -> str:
        """Returns what guests are told: of the values of a config only those that have shown a token."""
        if isinstance(e, _WrongGuestError) and not self._token:
            return e.brief
        return str(e)

    def _hosts(self) -> list[str]:
        others = (self._seated[index].hello for index in sorted(self._seated))
        return [self._own.host, *(other.host for other in others if other is not None)]

    def _gather(self, server: socket.socket, deadline: float) -> None:
        """Serves all who come until all are there."""
        server.setblocking(False)
        accept = functools.partial(self._accept, server)
        self._selector.register(server, selectors.EVENT_READ, accept)
        if self._heard is not None:
            self._selector.register(self._heard, selectors.EVENT_READ, self._hear_signals)
        while True:
            self._serve(self._seconds_to_wait(deadline))
            # Who is gone by now is not there.
            if self._is_complete():
                self._serve(0)
                if self._is_complete():
                    return
            self._check_time(deadline)

    def _is_complete(self) -> bool:
        return len(self._seated) == self._at.count - 1

    def _seconds_to_wait(self, deadline: float) -> float:
        times = [deadline, self._patient_until, *(guest.deadline for guest in self._strangers)]
        return max(min(times) - time.monotonic(), 0)

    def _check_time(self, deadline: float) -> None:
        now = time.monotonic()
        for guest in [g for g in self._strangers if now >= g.deadline]:
            self._drop(guest)
        if self._problem is not None and now >= min(self._patient_until, deadline):
            raise _WrongGuestError(self._problem)
        if now >= deadline:
            raise places.StartError(self._who_is_missing())

    def _serve(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            call: Callable[[], None] = key.data
            call()

    def _hear_signals(self) -> None:
        assert self._heard is not None
        for number in self._heard.read():
            raise places.stopped(self._own.name, number)

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, address = server.accept()
        except OSError:
            # It has left already; or there are too many, of whom the first to come must go.
            if self._strangers:
                self._drop(self._strangers[0])
            return
        connection.setblocking(False)
        places.keep_alive(connection)
        guest = _Guest(connection, str(address[0]), self._token)
        self._strangers.append(guest)
        serve = functools.partial(self._hear, guest)
        self._selector.register(connection, selectors.EVENT_READ, serve)
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop(self._strangers[0])

    def _hear(self, guest: _Guest) -> None:
        if guest.connection.fileno() < 0:
            # Another's turn has ended it since.
            return
        try:
            guest.receive()
            while (message := guest.read()) is not None:
                self._take(guest, message)
        except (handshake.MalformedError, handshake.GoneError):
            self._drop(guest)

    def _take(self, guest: _Guest, message: dict[str, object]) -> None:
        if guest.hello is not None:
            name = handshake.text(message, "leaving")
            number = next((n for n in signals.CODES if n.name == name), None)
            if number is None:
                raise handshake.MalformedError("leaving")
            raise places.stopped(guest.hello.name, number)
        hello = handshake.read_hello(message)
        there = self._seated.get(hello.index)
        problem = handshake.mismatch(self._own, hello, there.hello if there else None)
        if problem is None:
            guest.seat(hello)
            self._strangers.remove(guest)
            self._seated[hello.index] = guest
            return
        if self._problem is None:
            self._problem = problem
            self._patient_until = time.monotonic() + _PATIENCE_SECONDS
        guest.say({"error": self._for_guests(_WrongGuestError(problem))})
        # It has been told, and leaves.
        raise handshake.GoneError

    def _drop(self, guest: _Guest) -> None:
        if guest in self._strangers:
            self._strangers.remove(guest)
            if guest.has_spoken and not guest.is_known:
                self._turned_away += 1
                self._last_turned_away = guest.peer
        if guest.hello is not None:
            del self._seated[guest.hello.index]
            self._last_to_leave = f"{guest.hello.name} (pid {guest.hello.pid})"
        self._selector.unregister(guest.connection)
        guest.connection.close()

    def _answer(self, answer: Mapping[str, object]) -> None:
        """Tells all who are there, as far as they listen, and sends the others away."""
        for guest in self._strangers:
            guest.connection.close()
        rest = {guest: guest.sealed(answer) for guest in self._seated.values()}
        until = time.monotonic() + _ANSWER_SECONDS
        with selectors.DefaultSelector() as selector:
            for guest in rest:
                selector.register(guest.connection, selectors.EVENT_WRITE, guest)
            while selector.get_map() and time.monotonic() < until:
                for key, _ in selector.select(max(until - time.monotonic(), 0)):
                    guest = key.data
                    rest[guest] = _send_some(guest.connection, rest[guest])
                    if not rest[guest]:
                        selector.unregister(guest.connection)
        for guest in self._seated.values():
            guest.connection.close()

    def _who_is_missing(self) -> str:
        missing = [str(i) for i in range(1, self._at.count) if i not in self._seated]
        they = "it" if len(missing) == 1 else "they"
        text = (
            f"process {', '.join(missing)} of {self._at.count} did not come to {self._at.address} within "
            f"the start timeout. See what {they} printed, and whether --num_processes={self._at.count} is right."
        )
        if self._last_to_leave:
            text += f" {self._last_to_leave} came, and was gone again before the others came."
        if self._turned_away:
            text += (
                f" {self._turned_away} that came, the last from {self._last_turned_away}, did not have "
                f"this launch's token ({handshake.VARIABLE}): all processes must be started by one launch."
            )
        return text


def _send_some(connection: socket.socket, data: bytes) -> bytes:
    """Sends what can be sent; what is left of it."""
    try:
        return data[connection.send(data) :]
    except BlockingIOError:
        return data
    except OSError:
        return b""
