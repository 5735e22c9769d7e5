"""Processes that meet, and strangers that connect to them, for tests. Sockets are real,
and processes are threads.
"""

import atexit
import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import socket
from multiprocessing import connection as mp_connection

from tests.launch import harness
from xshard.pod import rendezvous

FACTS = {"config.steps": "12", "xshard/loop.py": "0a1b2c3d"}
OTHER = {**FACTS, "config.steps": "13", "xshard/loop.py": "ffffffff"}
TOKEN = "5e" * 32


OPEN = contextlib.ExitStack()


class SignalReceiver:
    """Stands in for the signals of a process, which only a main thread can receive."""

    def __init__(self, opened=OPEN):
        self._end, self._wake = map(opened.enter_context, socket.socketpair())
        self._end.setblocking(False)

    def fileno(self):
        return self._end.fileno()

    def read(self):
        with contextlib.suppress(BlockingIOError):
            return [signal.Signals(number) for number in self._end.recv(64)]
        return []

    def send(self, number):
        self._wake.send(bytes([number]))


# For processes that receive no signal. It stays open when a test closes OPEN.
_ALWAYS_OPEN = contextlib.ExitStack()
atexit.register(_ALWAYS_OPEN.close)
SILENCE = SignalReceiver(_ALWAYS_OPEN)


@contextlib.contextmanager
def processes():
    """Yields a function that starts a process as a thread, and returns a future of the
    hosts, or of the error.
    """

    def attend(
        spec,
        facts=FACTS,
        token=TOKEN,
        seconds=harness.FOREVER,
        signal_receiver=SILENCE,
    ):
        try:
            return rendezvous.meet(spec, seconds, facts, token, signal_receiver)
        except (rendezvous.StartError, rendezvous.StoppedError) as e:
            return e

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        yield lambda spec, **options: pool.submit(attend, spec, **options)


def meet(specs, **options):
    """Starts a process at each place, and returns the hosts or the error that each one
    receives.
    """
    with processes() as start:
        futures = [start(spec, **options) for spec in specs]
        return [future.result() for future in futures]


def make_specs(count, port=None, host="127.0.0.1"):
    address = f"{host}:{port or harness.free_port()}"
    return [rendezvous.ProcessSpec(address, count, index) for index in range(count)]


def connect(spec):
    """Connects to process 0 as soon as it listens, and returns the socket."""
    host, _, port = spec.address.rpartition(":")

    def attempt():
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(
                (host.strip("[]"), int(port)), harness.FOREVER
            )
        return None

    return OPEN.enter_context(harness.wait_until(attempt))


class Stranger:
    """A program that connects to the port of process 0 and follows the protocol as far
    as a test wants.

    Attributes:
      socket: the socket.
      connection: a connection of `multiprocessing` on that socket.
    """

    def __init__(self, sock, token=TOKEN):
        self.socket = sock
        sock.settimeout(None)
        descriptor = os.dup(sock.fileno())
        self.connection = OPEN.enter_context(mp_connection.Connection(descriptor))
        self._key = token.encode()

    def show_token(self):
        """Shows the token; returns whether process 0 accepts it, and shows it too."""
        try:
            mp_connection.answer_challenge(self.connection, self._key)
            mp_connection.deliver_challenge(self.connection, self._key)
        except multiprocessing.AuthenticationError:
            return False
        return True

    def is_dropped(self):
        """Waits until process 0 sends something or closes the connection; returns
        whether it closes it without another message.
        """
        with contextlib.suppress(OSError, EOFError):
            return not self.connection.recv_bytes()
        return True
