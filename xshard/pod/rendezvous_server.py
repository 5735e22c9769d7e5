"""Process 0's part in the meeting of a run's processes: it checks each one that
connects, and answers all of them.

It serves all connections at the same time, each with a time limit. A connection that
does not have the token of the launch, or that breaks the protocol, is dropped, and does
not end the meeting.
"""

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from xshard.pod import handshake, process_spec, signals

# How long a client may take to identify itself, and how long the clients may take to
# read the final answer.
_ANSWER_SECONDS = 5.0
# How long process 0 still waits for the right processes after a wrong one has
# connected.
_PATIENCE_SECONDS = 10.0
# How long to wait so that data that has already arrived is read.
_SETTLE_SECONDS = 0.01
# The largest number of connections at a time that have not identified themselves.
_MAX_UNIDENTIFIED = 512


class _Client:
    """A connection to process 0, from the first byte on."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        token: str,
    ):
        self.peer = peer
        self.hello: handshake.Hello | None = None
        self.has_spoken = False
        self.is_known = False
        self._reader = reader
        self._writer = writer
        self._token = token

    async def authenticate(self) -> handshake.Hello:
        """Returns the client's hello; raises MalformedError unless it has the token and
        keeps to the protocol.
        """
        line = await handshake.read_line(self._reader, handshake.MAX_SHORT_LINE_BYTES)
        its_nonce = handshake.read_nonce(line)
        self.has_spoken = True
        own_nonce = handshake.nonce()
        self._seals = handshake.Seals(
            self._token, handshake.SERVER, f"{its_nonce} {own_nonce}"
        )
        self._writer.write(handshake.nonce_line(own_nonce))
        self.send({"process": 0})
        # The client first sends an empty sealed line. Longer lines are accepted only
        # after it has shown the token.
        self._seals.read(
            await handshake.read_line(self._reader, handshake.MAX_SHORT_LINE_BYTES)
        )
        self.is_known = True
        return handshake.read_hello(await self.read())

    async def read(self) -> dict[str, Any]:
        """Returns the next message of a client that has shown the token; raises
        MalformedError if it is invalid.
        """
        return self._seals.read(
            await handshake.read_line(self._reader, handshake.MAX_LINE_BYTES)
        )

    def accept(self, hello: handshake.Hello) -> None:
        """Accepts the client as the process that its hello names."""
        self.send({"welcome": True})
        self.hello = hello

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message, without waiting until the client has received it."""
        self._writer.write(self._seals.line(message))

    def close(self) -> None:
        """Closes the connection after all messages are sent."""
        self._writer.close()

    async def wait_closed(self) -> None:
        """Waits until the connection is closed."""
        await self._writer.wait_closed()


class Server:
    """Process 0's part in the meeting."""

    def __init__(
        self,
        at: process_spec.ProcessSpec,
        own: handshake.Hello,
        token: str,
        signal_receiver: signals.SignalReceiver,
    ):
        """Prepares the meeting; does not listen yet.

        Args:
          at: the place of process 0.
          own: the hello of process 0.
          token: the token of the launch; empty if there is none.
          signal_receiver: the signals; any of them ends the meeting.
        """
        self._at = at
        self._own = own
        self._token = token
        self._signal_receiver = signal_receiver
        # The connections that have not identified themselves, in the order of their
        # arrival.
        self._unidentified: list[_Client] = []
        self._accepted: dict[int, _Client] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Set when a client is accepted, or when something happens that may end the
        # meeting.
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        # The error of the first client that does not fit. It is raised if the right one
        # does not come in time.
        self._mismatch: handshake.MismatchError | None = None
        self._rejected = 0
        self._last_rejected = ""
        self._last_disconnected = ""

    async def run(self, seconds: float) -> list[str]:
        """Meets the other processes; returns the host name of each process.

        Args:
          seconds: how long to wait until all processes have connected.

        Raises:
          StartError: if a process does not connect in time, or does not fit.
          StoppedError: if one of the processes receives a signal.
        """
        try:
            hosts = await self._gather(seconds)
        except process_spec.StartError as e:
            await self._answer({"error": self._for_guests(e)})
            raise
        except process_spec.StoppedError as e:
            await self._answer({"stopped": str(e), "code": e.code})
            raise
        await self._answer({"hosts": hosts})
        return hosts

    def _for_guests(self, e: process_spec.StartError) -> str:
        """Returns the message that clients receive: with values of a config only if
        they have shown a token.
        """
        if isinstance(e, handshake.MismatchError) and not self._token:
            return e.brief
        return str(e)

    async def _gather(self, seconds: float) -> list[str]:
        """Serves all connections until every process is accepted; returns their host
        names.
        """
        loop = asyncio.get_running_loop()
        server = process_spec.listen(self._at)
        server.setblocking(False)
        loop.add_reader(server.fileno(), self._accept, server)
        loop.add_reader(self._signal_receiver.fileno(), self._news.set)
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await self._news.wait()
                    # Before the last client came, an accepted one may have ended, and
                    # its end is not read yet.
                    await asyncio.sleep(_SETTLE_SECONDS)
                    self._news.clear()
                    self._check()
                    if len(self._accepted) == self._at.count - 1:
                        return self._hosts()
        except TimeoutError:
            raise self._mismatch or process_spec.StartError(
                self._missing_message()
            ) from None
        finally:
            # From here on the run reads the signals, and JAX's coordinator listens at
            # the port.
            loop.remove_reader(self._signal_receiver.fileno())
            loop.remove_reader(server.fileno())
            server.close()

    def _end(self, failure: Exception) -> None:
        """Makes `_gather` raise the failure; a task other than `_gather`'s must not
        touch its timeout.
        """
        self._failure = failure
        self._news.set()

    def _check(self) -> None:
        """Raises the error that ends the meeting, if there is one."""
        for number in self._signal_receiver.read():
            raise process_spec.stopped(self._own.name, number)
        if self._failure is not None:
            raise self._failure

    def _hosts(self) -> list[str]:
        hosts = [self._own.host]
        for index in sorted(self._accepted):
            hello = self._accepted[index].hello
            assert hello is not None
            hosts.append(hello.host)
        return hosts

    def _accept(self, server: socket.socket) -> None:
        """Accepts a connection. Asyncio's own server is not used: it fills the log when
        no file can be opened.
        """
        try:
            connection, address = server.accept()
        except OSError:
            # The peer has left already, or too many files are open, and the oldest
            # stranger must make room.
            if self._unidentified:
                self._unidentified.pop(0).close()
            return
        connection.setblocking(False)
        process_spec.keep_alive(connection)
        task = asyncio.create_task(self._serve(connection, str(address[0])))
        # The event loop keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        """Serves one connection, from the first byte to its end."""
        reader, writer = await asyncio.open_connection(
            sock=connection, limit=handshake.MAX_SHORT_LINE_BYTES
        )
        client = _Client(reader, writer, peer, self._token)
        self._unidentified.append(client)
        if len(self._unidentified) > _MAX_UNIDENTIFIED:
            self._unidentified.pop(0).close()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                hello = await client.authenticate()
            self._admit(client, hello)
            await self._listen(client)
        except (handshake.MalformedError, handshake.DisconnectedError, TimeoutError):
            self._forget(client)
        finally:
            client.close()

    def _admit(self, client: _Client, hello: handshake.Hello) -> None:
        """Accepts a client; if it does not fit, tells it so and raises
        DisconnectedError.
        """
        if client not in self._unidentified:
            # It was dropped to make room for others.
            raise handshake.DisconnectedError
        present = None
        if hello.index in self._accepted:
            present = self._accepted[hello.index].hello
        mismatch = handshake.mismatch(self._own, hello, present)
        if mismatch is not None:
            if self._mismatch is None:
                self._mismatch = mismatch
                loop = asyncio.get_running_loop()
                loop.call_later(_PATIENCE_SECONDS, self._end, mismatch)
            client.send({"error": self._for_guests(mismatch)})
            raise handshake.DisconnectedError
        client.accept(hello)
        self._unidentified.remove(client)
        self._accepted[hello.index] = client
        self._news.set()

    async def _listen(self, client: _Client) -> NoReturn:
        """Listens to an accepted client, which sends a message only if it receives a
        signal.
        """
        while True:
            name = handshake.text(await client.read(), "leaving")
            numbers = {number.name: number for number in signals.CODES}
            if name not in numbers:
                raise handshake.MalformedError("leaving")
            assert client.hello is not None
            self._end(process_spec.stopped(client.hello.name, numbers[name]))

    def _forget(self, client: _Client) -> None:
        if client in self._unidentified:
            self._unidentified.remove(client)
        if client.has_spoken and not client.is_known:
            self._rejected += 1
            self._last_rejected = client.peer
        if client.hello is not None:
            del self._accepted[client.hello.index]
            self._last_disconnected = f"{client.hello.name} (pid {client.hello.pid})"

    async def _answer(self, answer: Mapping[str, object]) -> None:
        """Sends the answer to all accepted clients, and closes all connections."""
        accepted = list(self._accepted.values())
        for client in accepted:
            client.send(answer)
        for client in [*self._unidentified, *accepted]:
            client.close()
        sent = asyncio.gather(
            *(client.wait_closed() for client in accepted), return_exceptions=True
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(sent, _ANSWER_SECONDS)

    def _missing_message(self) -> str:
        missing = [str(i) for i in range(1, self._at.count) if i not in self._accepted]
        their = "their"
        if len(missing) == 1:
            their = "its"
        text = (
            f"process {', '.join(missing)} of {self._at.count} did not connect to {self._at.address} within "
            f"the start timeout. See {their} output, and check that --num_processes={self._at.count} is right."
        )
        if self._last_disconnected:
            text += f" {self._last_disconnected} connected, but left before the others connected."
        if self._rejected:
            text += (
                f" {self._rejected} that connected, the last from {self._last_rejected}, did not have "
                f"this launch's token ({handshake.TOKEN_VARIABLE}): start all processes by one launch."
            )
        return text
