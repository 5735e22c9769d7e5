"""The messages of processes that meet: sealed with the token of their launch, and bounded in size, depth and types.

Each side says a nonce. From then on each line has a seal, which only who knows the token can make: the token
itself is never sent. Process 0 seals first, so that no other program is told of a config.
"""

import asyncio
import dataclasses
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any

from xshard.files import jsonfile
from xshard.metrics import show
from xshard.pod import places

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
        if len(name) > _LONGEST_NAME:
            raise MalformedError("facts")
        if not isinstance(value, str) or len(value) > _LONGEST_VALUE:
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


class MismatchError(places.StartError):
    """A process has come that does not fit. The message says in full what differs.

    Attributes:
      brief: the same, without any value of a config.
    """

    def __init__(self, full: str, brief: str = ""):
        super().__init__(full)
        self.brief = brief or full


def mismatch(own: Hello, other: Hello, present: Hello | None) -> MismatchError | None:
    """Finds what is wrong with a process that has come, if anything.

    Args:
      own: the hello of process 0.
      other: the hello of the process that has come.
      present: the hello of a process with the same number that has come already; None if there is none.
    """
    if other.count != own.count:
        return MismatchError(
            f"{other.name} was started with --num_processes={other.count}, {own.name} with "
            f"{own.count}: start all with the same number."
        )
    if present is not None:
        return MismatchError(
            f"two processes are --process_id={other.index}: on {present.host} (pid {present.pid}) and on "
            f"{other.host} (pid {other.pid}). Each needs a number of its own."
        )
    names: list[str] = []
    values: list[str] = []
    for fact in sorted(own.facts.keys() | other.facts.keys()):
        here, there = own.facts.get(fact), other.facts.get(fact)
        if here != there:
            name = _plain(fact)
            here, there = _plain(here or "none"), _plain(there or "none")
            names.append(name)
            values.append(f"{name}: {there} there, {here} on {own.host}")
    if not names:
        return None
    begin = f"{other.name} has other code or another config"
    end = "give all hosts the same."
    return MismatchError(
        f"{begin} ({show.listed(values, _SHOWN, '; ')}): {end}",
        f"{begin} ({show.listed(names, _SHOWN, '; ')}): {end} {own.name} prints the values.",
    )


def _plain(text: str) -> str:
    """A text as a terminal may show it, whoever has sent it."""
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}..."
    if text.isprintable():
        return text
    return text.encode("unicode_escape").decode()


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
        self._other = HOST
        if own == HOST:
            self._other = GUEST
        # Counts of lines, which are their places.
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
        if not hmac.compare_digest(seal, self._seal(self._other, self._read, body)):
            raise MalformedError("seal")
        self._read += 1
        return _load(body)

    def _seal(self, speaker: str, place: int, body: bytes) -> bytes:
        sealed = f"{speaker} {place} ".encode() + body
        return hmac.digest(self._key, sealed, "sha256").hex().encode()


async def read_line(reader: asyncio.StreamReader, longest: int) -> bytes:
    """Receives the next line, without its end.

    Raises:
      GoneError: if the connection ends first.
      MalformedError: if the line is longer than `longest` bytes.
    """
    line = b""
    while not line.endswith(b"\n"):
        try:
            line += await reader.readuntil(b"\n")
        except asyncio.LimitOverrunError as e:
            # The line is longer than what the reader holds; this takes what it holds.
            line += await reader.readexactly(e.consumed)
        except (asyncio.IncompleteReadError, OSError) as e:
            raise GoneError from e
        if len(line) > longest + 1:
            raise MalformedError("length")
    return line[:-1]


def _dump(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _load(body: bytes) -> dict[str, Any]:
    try:
        return jsonfile.loads(body)
    except ValueError as e:
        raise MalformedError("JSON") from e
