"""Processes that meet, and strangers that connect to them, for tests. Sockets are real,
and processes are threads.
"""

import concurrent.futures
import contextlib
import signal
import socket

from tests.launch import harness
from xshard.pod import handshake, process_spec, rendezvous

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


# For processes that receive no signal. It has its own stack, so that it stays open when
# a test closes OPEN.
SILENCE = SignalReceiver(contextlib.ExitStack())


@contextlib.contextmanager
def processes():
    """Yields a function that starts a process as a thread, and returns a future of the
    hosts, or of the error.
    """

    def attend(
        place,
        facts=FACTS,
        token=TOKEN,
        seconds=harness.FOREVER,
        signal_receiver=SILENCE,
    ):
        try:
            return rendezvous.meet(place, seconds, facts, token, signal_receiver)
        except (process_spec.StartError, process_spec.StoppedError) as e:
            return e

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        yield lambda place, **options: pool.submit(attend, place, **options)


def meet(at, **options):
    """Starts a process at each place, and returns the hosts or the error that each one
    receives.
    """
    with processes() as start:
        return [future.result() for future in [start(place, **options) for place in at]]


def make_places(count, port=None, host="127.0.0.1"):
    address = f"{host}:{port or harness.free_port()}"
    return [process_spec.ProcessSpec(address, count, index) for index in range(count)]


def connect(place):
    """Connects to process 0 as soon as it listens, and returns the connection."""
    host, _, port = place.address.rpartition(":")

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
    """

    def __init__(self, place, token=TOKEN):
        self.connection = connect(place)
        self._file = OPEN.enter_context(self.connection.makefile("rb"))
        self._token = token

    def greet(self):
        """Proves to know the token; returns False if process 0 does not prove to know
        the same one.
        """
        self.connection.sendall(handshake.nonce_line("a" * 32))
        nonces = f"{'a' * 32} {handshake.read_nonce(self._file.readline()[:-1])}"
        self._seals = handshake.Seals(self._token, handshake.CLIENT, nonces)
        with contextlib.suppress(handshake.MalformedError):
            self._seals.read(self._file.readline()[:-1])
            self.say({})
            return True
        return False

    def say(self, message):
        self.connection.sendall(self._seals.line(message))

    def say_body(self, body):
        """Sends bytes that are not a message, with a valid seal."""
        line = (
            self._seals._seal(handshake.CLIENT, self._seals._num_sent, body)
            + b" "
            + body
        )
        self.connection.sendall(line + b"\n")

    def say_hello(self, **fields):
        hello = {"index": 1, "count": 2, "host": "stranger", "pid": 1, "facts": FACTS}
        self.say({**hello, **fields})

    def hear(self):
        """Returns the next message; None at the end of the connection."""
        with contextlib.suppress(ConnectionError):
            line = self._file.readline()
            return self._seals.read(line[:-1]) if line else None
        return None

    def is_dropped(self):
        with contextlib.suppress(ConnectionError):
            return self.connection.recv(1) == b""
        return True
