"""Process 0's part in the meeting of a run's processes: it checks each one that connects, and answers all of them.

It serves all connections at the same time, each with a time limit. A connection that does not have the token of the
launch, or that breaks the protocol, is dropped, and does not end the meeting.
"""

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from xshard.pod import handshake, places, signals

# How long a guest may take to identify itself, and how long the guests may take to read the final answer.
_ANSWER_SECONDS = 5.0
# How long process 0 still waits for the right processes after a wrong one has connected.
_PATIENCE_SECONDS = 10.0
# How long to wait so that data that has already arrived is read.
_SETTLE_SECONDS = 0.01
# The largest number of connections at a time that have not identified themselves.
_MOST_STRANGERS = 512


class _Guest:
    """A connection to process 0, from the first byte on."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, token: str
    ):
        self.peer = peer
        self.hello: handshake.Hello | None = None
        self.has_spoken = False
        self.is_known = False
        self._reader = reader
        self._writer = writer
        self._token = token

    async def greet(self) -> handshake.Hello:
        """Returns the guest's hello; raises MalformedError unless it has the token and keeps to the protocol."""
        line = await handshake.read_line(self._reader, handshake.BRIEF)
        its_nonce = handshake.read_nonce(line)
        self.has_spoken = True
        own_nonce = handshake.nonce()
        self._seals = handshake.Seals(self._token, handshake.HOST, f"{its_nonce} {own_nonce}")
        self._writer.write(handshake.nonce_line(own_nonce))
        self.say({"process": 0})
        # The guest first sends an empty sealed line. Longer lines are accepted only after it has shown the token.
        self._seals.read(await handshake.read_line(self._reader, handshake.BRIEF))
        self.is_known = True
        return handshake.read_hello(await self.read())

    async def read(self) -> dict[str, Any]:
        """Returns the next message of a guest that has shown the token; raises MalformedError if it is invalid."""
        return self._seals.read(await handshake.read_line(self._reader, handshake.LONGEST))

    def seat(self, hello: handshake.Hello) -> None:
        """Accepts the guest as the process that its hello names."""
        self.say({"welcome": True})
        self.hello = hello

    def say(self, message: Mapping[str, object]) -> None:
        """Sends a message, without waiting until the guest has received it."""
        self._writer.write(self._seals.line(message))

    def dismiss(self) -> None:
        """Closes the connection after all messages are sent."""
        self._writer.close()

    async def dismissed(self) -> None:
        """Waits until the connection is closed."""
        await self._writer.wait_closed()


class Host:
    """Process 0's part in the meeting."""

    def __init__(self, at: places.Place, own: handshake.Hello, token: str, heard: signals.Heard):
        """Prepares the meeting; does not listen yet.

        Args:
          at: the place of process 0.
          own: the hello of process 0.
          token: the token of the launch; empty if there is none.
          heard: the signals; any of them ends the meeting.
        """
        self._at = at
        self._own = own
        self._token = token
        self._heard = heard
        # The connections that have not identified themselves, in the order of their arrival.
        self._strangers: list[_Guest] = []
        self._seated: dict[int, _Guest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Set when a guest is accepted, or when something happens that may end the meeting.
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        # The error of the first guest that does not fit. It is raised if the right one does not come in time.
        self._mismatch: handshake.MismatchError | None = None
        self._turned_away = 0
        self._last_turned_away = ""
        self._last_to_leave = ""

    async def attend(self, seconds: float) -> list[str]:
        """Meets the other processes; returns the host name of each process.

        Args:
          seconds: how long to wait until all processes have connected.

        Raises:
          StartError: if a process does not connect in time, or does not fit.
          StoppedError: if one of the processes receives a signal.
        """
        try:
            hosts = await self._gather(seconds)
        except places.StartError as e:
            await self._answer({"error": self._for_guests(e)})
            raise
        except places.StoppedError as e:
            await self._answer({"stopped": str(e), "code": e.code})
            raise
        await self._answer({"hosts": hosts})
        return hosts

    def _for_guests(self, e: places.StartError) -> str:
        """Returns the message that guests receive: with values of a config only if they have shown a token."""
        if isinstance(e, handshake.MismatchError) and not self._token:
            return e.brief
        return str(e)

    async def _gather(self, seconds: float) -> list[str]:
        """Serves all connections until every process is accepted; returns their host names."""
        loop = asyncio.get_running_loop()
        server = places.listen(self._at)
        server.setblocking(False)
        loop.add_reader(server.fileno(), self._accept, server)
        loop.add_reader(self._heard.fileno(), self._news.set)
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await self._news.wait()
                    # Before the last guest came, an accepted one may have ended, and its end is not read yet.
                    await asyncio.sleep(_SETTLE_SECONDS)
                    self._news.clear()
                    self._check()
                    if len(self._seated) == self._at.count - 1:
                        return self._hosts()
        except TimeoutError:
            raise self._mismatch or places.StartError(self._who_is_missing()) from None
        finally:
            # From here on the run reads the signals, and JAX's coordinator listens at the port.
            loop.remove_reader(self._heard.fileno())
            loop.remove_reader(server.fileno())
            server.close()

    def _end(self, failure: Exception) -> None:
        """Makes `_gather` raise the failure; a task other than `_gather`'s must not touch its timeout."""
        self._failure = failure
        self._news.set()

    def _check(self) -> None:
        """Raises the error that ends the meeting, if there is one."""
        for number in self._heard.read():
            raise places.stopped(self._own.name, number)
        if self._failure is not None:
            raise self._failure

    def _hosts(self) -> list[str]:
        hosts = [self._own.host]
        for index in sorted(self._seated):
            hello = self._seated[index].hello
            assert hello is not None
            hosts.append(hello.host)
        return hosts

    def _accept(self, server: socket.socket) -> None:
        """Accepts a connection. Asyncio's own server is not used: it fills the log when no file can be opened."""
        try:
            connection, address = server.accept()
        except OSError:
            # The peer has left already, or too many files are open, and the oldest stranger must make room.
            if self._strangers:
                self._strangers.pop(0).dismiss()
            return
        connection.setblocking(False)
        places.keep_alive(connection)
        task = asyncio.create_task(self._serve(connection, str(address[0])))
        # The event loop keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        """Serves one connection, from the first byte to its end."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=handshake.BRIEF)
        guest = _Guest(reader, writer, peer, self._token)
        self._strangers.append(guest)
        if len(self._strangers) > _MOST_STRANGERS:
            self._strangers.pop(0).dismiss()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                hello = await guest.greet()
            self._take(guest, hello)
            await self._hear(guest)
        except (handshake.MalformedError, handshake.GoneError, TimeoutError):
            self._forget(guest)
        finally:
            guest.dismiss()

    def _take(self, guest: _Guest, hello: handshake.Hello) -> None:
        """Accepts a guest; if it does not fit, tells it so and raises GoneError."""
        if guest not in self._strangers:
            # It was dropped to make room for others.
            raise handshake.GoneError
        present = None
        if hello.index in self._seated:
            present = self._seated[hello.index].hello
        mismatch = handshake.mismatch(self._own, hello, present)
        if mismatch is not None:
            if self._mismatch is None:
                self._mismatch = mismatch
                loop = asyncio.get_running_loop()
                loop.call_later(_PATIENCE_SECONDS, self._end, mismatch)
            guest.say({"error": self._for_guests(mismatch)})
            raise handshake.GoneError
        guest.seat(hello)
        self._strangers.remove(guest)
        self._seated[hello.index] = guest
        self._news.set()

    async def _hear(self, guest: _Guest) -> NoReturn:
        """Listens to an accepted guest, which sends a message only if it receives a signal."""
        while True:
            name = handshake.text(await guest.read(), "leaving")
            numbers = {number.name: number for number in signals.CODES}
            if name not in numbers:
                raise handshake.MalformedError("leaving")
            assert guest.hello is not None
            self._end(places.stopped(guest.hello.name, numbers[name]))

    def _forget(self, guest: _Guest) -> None:
        if guest in self._strangers:
            self._strangers.remove(guest)
        if guest.has_spoken and not guest.is_known:
            self._turned_away += 1
            self._last_turned_away = guest.peer
        if guest.hello is not None:
            del self._seated[guest.hello.index]
            self._last_to_leave = f"{guest.hello.name} (pid {guest.hello.pid})"

    async def _answer(self, answer: Mapping[str, object]) -> None:
        """Sends the answer to all accepted guests, and closes all connections."""
        seated = list(self._seated.values())
        for guest in seated:
            guest.say(answer)
        for guest in [*self._strangers, *seated]:
            guest.dismiss()
        sent = asyncio.gather(*(guest.dismissed() for guest in seated), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(sent, _ANSWER_SECONDS)

    def _who_is_missing(self) -> str:
        missing = [str(i) for i in range(1, self._at.count) if i not in self._seated]
        their = "their"
        if len(missing) == 1:
            their = "its"
        text = (
            f"process {', '.join(missing)} of {self._at.count} did not connect to {self._at.address} within "
            f"the start timeout. See {their} output, and check that --num_processes={self._at.count} is right."
        )
        if self._last_to_leave:
            text += f" {self._last_to_leave} connected, but left before the others connected."
        if self._turned_away:
            text += (
                f" {self._turned_away} that connected, the last from {self._last_turned_away}, did not have "
                f"this launch's token ({handshake.VARIABLE}): start all processes by one launch."
            )
        return text
