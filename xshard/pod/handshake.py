"""The messages of processes that meet: sealed with the token of their launch, and bounded in size, depth and types.

Each side says a nonce. From then on each line has a seal, which only who knows the token can make: the token
itself is never sent. Process 0 seals first, so that no other program is told of a config.
"""

import dataclasses
import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from xshard.files import jsonfile

# The environment's variable in which the launcher hands the token to the processes of a launch.
VARIABLE = "XSHARD_LAUNCH_TOKEN"
# In bytes: of a line of who knows the token, which may hold a config and a checksum of each file; of anybody's.
LONGEST = 1 << 20
BRIEF = 1 << 10
HOST, GUEST = "host", "guest"
_SEAL_CHARACTERS = 64
_NONCE_BYTES = 16
_MOST_PROCESSES = 1 << 20
_MOST_PID = 1 << 32
_LONGEST_HOST = 255
_LONGEST_NAME = 4096
# A longer value of a config is told from others by its checksum.
_LONGEST_VALUE = 1024
_KEPT_OF_LONG = 512
# What differs is listed up to here: other code differs in many files.
_SHOWN = 5
_SHOWN_CHARACTERS = 300


class MalformedError(Exception):
    """A message that no process of this launch sends."""


class GoneError(Exception):
    """The other side has closed the connection, or cannot be reached."""


@dataclasses.dataclass(frozen=True)
class Hello:
    """The facts that a process gives of itself.

    Attributes:
      index: its number.
      count: the number of processes, as it was told.
      host: its host.
      pid: its process ID there.
      facts: what must be equal on all processes.
    """

    index: int
    count: int
    host: str
    pid: int
    facts: Mapping[str, str]

    @property
    def name(self) -> str:
        """The process, for people."""
        return f"process {self.index} on {self.host}"


def read_hello(message: Mapping[str, Any]) -> Hello:
    """Parses a guest's hello; raises MalformedError if it is not what any process would say."""
    count = _integer(message, "count", 2, _MOST_PROCESSES)
    index = _integer(message, "index", 1, count - 1)
    pid = _integer(message, "pid", 0, _MOST_PID)
    host = text(message, "host", _LONGEST_HOST)
    facts = message.get("facts")
    if not isinstance(facts, dict):
        raise MalformedError("facts")
    for name, value in facts.items():
        if not isinstance(value, str):
            raise MalformedError("facts")
        if len(name) > _LONGEST_NAME or len(value) > _LONGEST_VALUE:
            raise MalformedError("facts")
    return Hello(index, count, host, pid, facts)


def shortened(facts: Mapping[str, str]) -> dict[str, str]:
    """The facts with long values cut, each with the checksum of the whole."""
    return {name: _short(value) for name, value in facts.items()}


def _short(value: str) -> str:
    if len(value) <= _LONGEST_VALUE:
        return value
    checksum = hashlib.sha256(value.encode(errors="backslashreplace")).hexdigest()[:16]
    return f"{value[:_KEPT_OF_LONG]}... ({len(value)} characters, SHA-256 {checksum}...)"


@dataclasses.dataclass(frozen=True)
class Problem:
    """A reason to refuse a process that has come.

    Attributes:
      brief: in words that say no value of a config.
      full: in full.
    """

    brief: str
    full: str


def mismatch(own: Hello, other: Hello, there: Hello | None) -> Problem | None:
    """Finds what is wrong with a process that has come, if anything.

    Args:
      own: what process 0 says of itself.
      other: what the other has said.
      there: what one with its number has said, if that is there already.
    """
    if other.count != own.count:
        text = (
            f"{other.name} was started with --num_processes={other.count}, {own.name} with "
            f"{own.count}: start all with the same number."
        )
        return Problem(text, text)
    if there is not None:
        text = (
            f"two processes are --process_id={other.index}: on {there.host} (pid {there.pid}) and on "
            f"{other.host} (pid {other.pid}). Each needs a number of its own."
        )
        return Problem(text, text)
    names = sorted(own.facts.keys() | other.facts.keys())
    differ = [name for name in names if own.facts.get(name) != other.facts.get(name)]
    if not differ:
        return None
    said = [
        f"{_plain(name)}: {_plain(other.facts.get(name, 'none'))} there, "
        f"{_plain(own.facts.get(name, 'none'))} on {own.host}"
        for name in differ
    ]
    begin, end = f"{other.name} has other code or another config", "give all hosts the same."
    brief = f"{begin} ({_first([_plain(name) for name in differ])}): {end} {own.name} prints the values."
    return Problem(brief, f"{begin} ({_first(said)}): {end}")


def _first(differences: list[str]) -> str:
    shown = differences[:_SHOWN]
    if len(differences) > _SHOWN:
        shown.append(f"and {len(differences) - _SHOWN} more")
    return "; ".join(shown)


def _plain(said: str) -> str:
    """A text as a terminal may show it, whoever has sent it."""
    cut = said if len(said) <= _SHOWN_CHARACTERS else f"{said[:_SHOWN_CHARACTERS]}..."
    return cut if cut.isprintable() else cut.encode("unicode_escape").decode()


def _integer(message: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = message.get(name)
    # True is an int to Python.
    if type(value) is not int or not least <= value <= most:
        raise MalformedError(name)
    return value


def text(message: Mapping[str, Any], name: str, longest: int = BRIEF) -> str:
    """A text of a message that may be printed; MalformedError if there is none."""
    value = message.get(name)
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise MalformedError(name)
    return value


def nonce() -> str:
    """A number that was never used before."""
    return secrets.token_hex(_NONCE_BYTES)


def nonce_line(value: str) -> bytes:
    """The line that says a nonce, without a seal."""
    return _dump({"nonce": value}) + b"\n"


def read_nonce(line: bytes) -> str:
    """The other side's nonce; MalformedError if the line is none."""
    return text(_load(line), "nonce", 2 * _NONCE_BYTES)


class Seals:
    """The lines of one side of one connection.

    A seal covers both nonces, who speaks, and the line's place: no line counts twice, or elsewhere.
    """

    def __init__(self, token: str, own: str, nonces: str):
        """Begins.

        Args:
          token: of the launch; empty for processes that were started by hand.
          own: `HOST` or `GUEST`.
          nonces: the guest's, and the host's.
        """
        key = token.encode(errors="surrogateescape")
        self._key = hmac.digest(key, nonces.encode(), "sha256")
        self._own = own
        self._others = GUEST if own == HOST else HOST
        self._said = 0
        self._read = 0

    def line(self, message: Mapping[str, Any]) -> bytes:
        """The next line that this side says."""
        body = _dump(message)
        seal = self._seal(self._own, self._said, body)
        self._said += 1
        return seal + b" " + body + b"\n"

    def read(self, line: bytes) -> dict[str, Any]:
        """The message of the next line of the other side; MalformedError unless its seal is right."""
        seal, body = line[:_SEAL_CHARACTERS], line[_SEAL_CHARACTERS + 1 :]
        if not hmac.compare_digest(seal, self._seal(self._others, self._read, body)):
            raise MalformedError("seal")
        self._read += 1
        return _load(body)

    def _seal(self, speaker: str, place: int, body: bytes) -> bytes:
        said = f"{speaker} {place} ".encode() + body
        return hmac.digest(self._key, said, "sha256").hex().encode()


class Lines:
    """Cuts what comes over a connection, which does not block, into lines."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._came = bytearray()

    def receive(self) -> None:
        """Takes what has come; GoneError at the connection's end."""
        try:
            data = self._connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as e:
            raise GoneError from e
        if not data:
            raise GoneError
        self._came += data

    def take(self, longest: int) -> bytes | None:
        """The next line; None if it has not all come yet, and MalformedError if it is longer than that."""
        end = self._came.find(b"\n")
        if end > longest or (end < 0 and len(self._came) > longest):
            raise MalformedError("length")
        if end < 0:
            return None
        line = bytes(self._came[:end])
        del self._came[: end + 1]
        return line


def _dump(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _load(body: bytes) -> dict[str, Any]:
    try:
        return jsonfile.loads(body)
    except ValueError as e:
        raise MalformedError("JSON") from e
