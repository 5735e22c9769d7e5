"""Connections between processes of a launch: the proof that both know its token, and
messages with arrays on a thread of their own.

A connection begins with the challenges of `multiprocessing.connection`, in which each
side proves that it knows the token of the launch. The messages are JSON of bounded
size, and those of a `Loop` may have arrays, as raw bytes. They are never pickled,
because unpickling runs what the sender wants.
"""

import collections
import contextlib
import json
import multiprocessing
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection as mp_connection
from typing import Any

import msgspec
import numpy as np

from xshard.files import jsonfile

# A hello holds a config, and a checksum for each source file.
_MAX_MESSAGE_BYTES = 16 << 20
# The largest part of an array that is one message.
PART_BYTES = 4 << 20
# The first probe after 10 s of silence, then one every 5 s; after 4 probes without an
# answer the connection ends.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
# What reading from a connection raises if it has ended, or if what it brings cannot
# come from a process of this launch. Python 3.11 asserts that a challenge is one.
BROKEN = (OSError, EOFError, ValueError, AssertionError)
# How long the other side may take to show the token and say who it is.
ANSWER_SECONDS = 10.0
# The sizes of a message's header and of its arrays.
_SIZES = struct.Struct("<II")
# A message up to this size is sent in one piece.
_SMALL_BYTES = 64 << 10
# At most this many connections are served at a time before they have shown the token.
_MAX_STRANGERS = 64
_TICK_SECONDS = 0.25


class Connection(mp_connection.Connection):
    """A connection whose messages are JSON objects, and that another thread can end."""

    def __init__(self, sock: socket.socket):
        """Takes over a connected socket, and sets it to block."""
        sock.settimeout(None)
        # The connection ends within half a minute after the other side's host or the
        # network is gone. If it has ended already, the next read reports it.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                # Not every system has all of these options.
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        # The socket keeps a descriptor of its own, so that `end` works in any thread.
        super().__init__(os.dup(sock.fileno()))
        self._socket = sock

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message as JSON, not as a pickle."""
        self.send_bytes(json.dumps(msgspec.to_builtins(message)).encode())

    def recv(self) -> Any:
        """Returns the next message; raises ValueError if it is no JSON object."""
        return jsonfile.loads(self.recv_bytes(_MAX_MESSAGE_BYTES))

    def end(self) -> None:
        """Ends the connection; a call in another thread that waits for data raises."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; no thread may use it any more."""
        super().close()
        self._socket.close()

    def detach(self, silence_seconds: float) -> socket.socket:
        """Returns the socket, and closes the connection.

        Args:
          silence_seconds: how long what is sent may be unanswered by the other host.
        """
        super().close()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            self._socket.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_seconds)
            )
        return self._socket


@contextlib.contextmanager
def time_limit(seconds: float, *connections: Connection) -> Iterator[None]:
    """Ends connections that a context uses for longer than this, and so the context.

    `multiprocessing` has no time limits of its own, and a limit for each read would
    begin again with every byte that arrives.
    """

    def end() -> None:
        for connection in connections:
            connection.end()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Hello(msgspec.Struct, frozen=True):
    """What a process says when it connects.

    Attributes:
      number: the number of the process in its run.
      host: the name of its host.
      pid: its process ID on that host.
      facts: names and values that must be equal on all processes.
    """

    number: int
    host: str
    pid: int
    facts: dict[str, str]


class Answer(msgspec.Struct, frozen=True):
    """The answer to a hello.

    Attributes:
      error: why the process is refused; empty if it is not.
    """

    error: str = ""


class RefusedError(Exception):
    """The other side refuses this process. The message says why."""


def connect(
    address: str, key: bytes, hello: Hello, silence_seconds: float
) -> socket.socket:
    """Connects to a process of the launch.

    Args:
      address: its HOST:PORT.
      key: the token of the launch.
      hello: what this process says of itself.
      silence_seconds: how long what is sent may be unanswered by the other host.

    Raises:
      OSError: if the address cannot be reached.
      RefusedError: if the other side refuses this process, or has another token.
    """
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS)
    connection = Connection(sock)
    try:
        with time_limit(ANSWER_SECONDS, connection):
            mp_connection.answer_challenge(connection, key)
            mp_connection.deliver_challenge(connection, key)
            connection.send(hello)
            answer = jsonfile.parse(connection.recv(), Answer)
    except multiprocessing.AuthenticationError as e:
        connection.close()
        raise RefusedError("it has another launch token") from e
    except BROKEN as e:
        connection.close()
        raise OSError(f"{address} did not answer as a process of this run") from e
    if answer.error:
        connection.close()
        raise RefusedError(answer.error)
    return connection.detach(silence_seconds)


def open_listener(host: str) -> socket.socket:
    """Returns a listening socket at a free port.

    Args:
      host: the address; empty for all of this machine, IPv4 and IPv6.
    """
    is_both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_both else socket.AF_INET
    return socket.create_server(
        (host, 0), family=family, dualstack_ipv6=is_both, backlog=128
    )


def _accept(
    sock: socket.socket,
    key: bytes,
    admit: Callable[[Hello], str],
    silence_seconds: float,
) -> tuple[Hello, socket.socket] | None:
    """Returns who has connected; None if it is no process of this launch, or `admit`
    refuses it.
    """
    connection = Connection(sock)
    try:
        with time_limit(ANSWER_SECONDS, connection):
            mp_connection.deliver_challenge(connection, key)
            mp_connection.answer_challenge(connection, key)
            hello = jsonfile.parse(connection.recv(), Hello)
            error = admit(hello)
            connection.send(Answer(error))
    except (multiprocessing.AuthenticationError, *BROKEN):
        connection.close()
        return None
    if error:
        connection.close()
        return None
    return hello, connection.detach(silence_seconds)


class Link:
    """A connection of a `Loop`.

    Attributes:
      number: the number of the process at the other end.
      is_ended_by_peer: whether that process has ended it, and not the network.
    """

    def __init__(self, number: int, sock: socket.socket):
        self.number = number
        self.is_ended_by_peer = False
        self.socket = sock
        self.outgoing: collections.deque[memoryview] = collections.deque()
        self.reader = self._read()
        self.wanted = next(self.reader)
        self.filled = 0
        self.message: tuple[dict[str, Any], list[np.ndarray]] | None = None

    def _read(self) -> Iterator[memoryview]:
        """Yields the buffers to be filled, one after another, and sets `message` after
        the last of a message.
        """
        sizes = bytearray(_SIZES.size)
        while True:
            yield memoryview(sizes)
            header_bytes, arrays_bytes = _SIZES.unpack(sizes)
            if header_bytes > _MAX_MESSAGE_BYTES or arrays_bytes > 2 * PART_BYTES:
                raise ValueError("the message is too large")
            header = bytearray(header_bytes)
            if header_bytes:
                yield memoryview(header)
            values = jsonfile.loads(bytes(header))
            content = np.empty(arrays_bytes, np.uint8)
            if arrays_bytes:
                yield content.data
            described = jsonfile.parse(values.pop("arrays", []), list[tuple[str, int]])
            self.message = (values, _arrays(described, content))


def _arrays(described: Sequence[tuple[str, int]], content: np.ndarray) -> list[Any]:
    """Returns the arrays of these types and sizes that lie one after another."""
    arrays = []
    start = 0
    for name, size in described:
        try:
            dtype = np.dtype(name)
        except TypeError as e:
            raise ValueError(f"{name} is no dtype") from e
        if dtype.kind not in "iufb" or size < 0:
            raise ValueError(f"there is no array of {size} {name}")
        end = start + dtype.itemsize * size
        if end > content.size:
            raise ValueError("the arrays are larger than the message")
        arrays.append(content[start:end].view(dtype))
        start = end
    return arrays


class Loop:
    """Sends and receives messages in a thread of its own, in which it also calls what
    acts on them.
    """

    def __init__(
        self,
        receive: Callable[[Link, dict[str, Any], list[np.ndarray]], None],
        lost: Callable[[Link], None],
        tick: Callable[[], None],
        failed: Callable[[str], None],
    ):
        """Starts no thread yet.

        Args:
          receive: called with each message and its arrays.
          lost: called after a connection has ended, unless `close` ended it.
          tick: called some times a second.
          failed: called with the reason if the thread fails.
        """
        self._receive = receive
        self._lost = lost
        self._tick = tick
        self._failed = failed
        self._selector = selectors.DefaultSelector()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_end, self._wake = socket.socketpair()
        self._wake_end.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ, self._woken)
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    # In any thread.

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def end(self) -> None:
        """Ends the thread and all connections."""

        def end() -> None:
            self._is_ending = True

        self.call(end)
        self._thread.join(ANSWER_SECONDS)
        self._wake.close()

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function in the loop's thread."""
        self._calls.append(function)
        # If the buffer is full, the thread wakes anyway; or it has ended.
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def listen(
        self,
        listener: socket.socket,
        key: bytes,
        admit: Callable[[Hello], str],
        accepted: Callable[[Hello, socket.socket], None],
        silence_seconds: float,
    ) -> None:
        """Accepts connections; call it before `start`.

        Args:
          listener: a listening socket.
          key: the token of the launch.
          admit: returns why a process is refused, empty if it is not; called in other
            threads.
          accepted: called for each process that is not refused.
          silence_seconds: as in `connect`.
        """

        def greet(sock: socket.socket) -> None:
            with self._strangers:
                guest = _accept(sock, key, admit, silence_seconds)
            if guest is None:
                return
            hello, sock = guest
            if self._is_ending:
                sock.close()
            else:
                self.call(lambda: accepted(hello, sock))

        def accept() -> None:
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                threading.Thread(target=greet, args=(sock,), daemon=True).start()

        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, accept)

    # In the loop's thread.

    def add(self, number: int, sock: socket.socket) -> Link:
        """Returns the link of a socket that `connect` or `listen` has made."""
        link = Link(number, sock)
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, link)
        return link

    def send(
        self, link: Link, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()
    ) -> None:
        """Sends a message. The arrays must not change until it has been sent."""
        if link.socket.fileno() < 0:
            return
        described = [[array.dtype.str, array.size] for array in arrays]
        if described:
            header = {**header, "arrays": described}
        text = json.dumps(header).encode()
        size = sum(array.nbytes for array in arrays)
        pieces = [memoryview(_SIZES.pack(len(text), size) + text)]
        for array in arrays:
            if array.nbytes:
                pieces.append(array.view(np.uint8).data)
        if size and size + len(text) <= _SMALL_BYTES:
            pieces = [memoryview(b"".join(pieces))]
        was_idle = not link.outgoing
        link.outgoing.extend(pieces)
        if was_idle:
            self._write(link)

    def close(self, link: Link) -> None:
        """Ends a link."""
        if link.socket.fileno() >= 0:
            self._selector.unregister(link.socket)
            link.socket.close()

    def _run(self) -> None:
        try:
            self._serve_all()
        except Exception as e:
            self._failed(f"{type(e).__name__}: {e}")
            raise
        finally:
            # If this thread fails, the others must not wait for it.
            for key in list(self._selector.get_map().values()):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                self._selector.unregister(sock)
                sock.close()
            self._selector.close()

    def _serve_all(self) -> None:
        next_tick = time.monotonic()
        while not self._is_ending:
            ready = self._selector.select(max(0.0, next_tick - time.monotonic()))
            for key, events in ready:
                if isinstance(key.data, Link):
                    self._serve(key.data, events)
                else:
                    key.data()
            while self._calls:
                self._calls.popleft()()
            if time.monotonic() >= next_tick:
                self._tick()
                next_tick = time.monotonic() + _TICK_SECONDS

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_end.recv(4096)

    def _serve(self, link: Link, events: int) -> None:
        if events & selectors.EVENT_READ and link.socket.fileno() >= 0:
            self._read(link)
        if events & selectors.EVENT_WRITE and link.socket.fileno() >= 0:
            self._write(link)

    def _read(self, link: Link) -> None:
        """Reads what has come, up to one message."""
        try:
            while link.message is None:
                count = link.socket.recv_into(link.wanted[link.filled :])
                if not count:
                    raise EOFError
                link.filled += count
                if link.filled == len(link.wanted):
                    link.wanted = next(link.reader)
                    link.filled = 0
        except BlockingIOError:
            return
        except BROKEN as e:
            link.is_ended_by_peer = isinstance(e, EOFError | ConnectionResetError)
            self._break(link)
            return
        header, arrays = link.message
        link.message = None
        try:
            self._receive(link, header, arrays)
        except ValueError:
            # It is no message of this protocol.
            self._break(link)

    def _write(self, link: Link) -> None:
        """Sends what can be sent now."""
        try:
            while link.outgoing:
                piece = link.outgoing[0]
                count = link.socket.send(piece)
                if count < len(piece):
                    link.outgoing[0] = piece[count:]
                else:
                    link.outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._break(link)
            return
        events = selectors.EVENT_READ
        if link.outgoing:
            events |= selectors.EVENT_WRITE
        self._selector.modify(link.socket, events, link)

    def _break(self, link: Link) -> None:
        self.close(link)
        # Not at once: what is sending may be in the middle of its work.
        self.call(lambda: self._lost(link))
