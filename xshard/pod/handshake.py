"""The messages of processes that meet: sealed with the token of their launch, and
bounded in size, depth and types.

Each side sends a nonce. Every later line carries a seal, an HMAC that only a process
with the token can compute; the token itself is never sent. Process 0 seals first, so
that a process sends its config to no other program.
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
from xshard.metrics import formatting
from xshard.pod import process_spec

# The environment variable in which the launcher passes the token to the processes of a
# launch.
TOKEN_VARIABLE = "XSHARD_LAUNCH_TOKEN"
# The longest lines, in bytes. LONGEST is for a side that has shown the token: its line
# may hold a config and a checksum for each file. BRIEF is for anyone else.
MAX_LINE_BYTES = 1 << 20
MAX_SHORT_LINE_BYTES = 1 << 10
SERVER, CLIENT = "host", "guest"
_SEAL_CHARACTERS = 64
_NONCE_BYTES = 16
_MOST_PROCESSES = 1 << 20
_MOST_PID = 1 << 32
_LONGEST_HOST = 255
_LONGEST_NAME = 4096
# A longer value of a config is cut, and compared by its checksum.
_LONGEST_VALUE = 1024
_KEPT_OF_LONG = 512
# At most this many differences are listed, because different code may differ in many
# files.
_SHOWN = 5
_SHOWN_CHARACTERS = 300


class MalformedError(Exception):
    """A message that no process of this launch can have sent."""


class DisconnectedError(Exception):
    """The other side closed the connection, or cannot be reached."""


@dataclasses.dataclass(frozen=True)
class Hello:
    """The description that a process sends of itself.

    Attributes:
      index: the process's index.
      count: the number of processes that it was started with.
      host: the name of its host.
      pid: its process ID on that host.
      facts: names and values that must be equal on all processes.
    """

    index: int
    count: int
    host: str
    pid: int
    facts: Mapping[str, str]

    @property
    def name(self) -> str:
        """The process, as messages name it."""
        return f"process {self.index} on {self.host}"


def read_hello(message: Mapping[str, Any]) -> Hello:
    """Parses a client's hello; raises MalformedError if no process can have sent it."""
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
    """Returns the facts with long values cut; a cut value ends with the checksum of the
    whole value.
    """
    short = dict(facts)
    for name, value in facts.items():
        if len(value) > _LONGEST_VALUE:
            checksum = hashlib.sha256(
                value.encode(errors="backslashreplace")
            ).hexdigest()[:16]
            begin = value[:_KEPT_OF_LONG]
            short[name] = f"{begin}... ({len(value)} characters, SHA-256 {checksum}...)"
    return short


class MismatchError(process_spec.StartError):
    """A process that connected does not fit the others. The message names all
    differences, with values.

    Attributes:
      brief: the message without any value of a config.
    """

    def __init__(self, full: str, brief: str = ""):
        super().__init__(full)
        self.brief = brief or full


def mismatch(own: Hello, other: Hello, present: Hello | None) -> MismatchError | None:
    """Returns the error for a process that does not fit; None if it fits.

    Args:
      own: the hello of process 0.
      other: the hello of the process that connected.
      present: the hello of an earlier process with the same index; None if there is
        none.
    """
    if other.count != own.count:
        return MismatchError(
            f"{other.name} was started with --num_processes={other.count}, {own.name} with "
            f"{own.count}: start all with the same number."
        )
    if present is not None:
        return MismatchError(
            f"two processes have --process_id={other.index}: on {present.host} (pid {present.pid}) and on "
            f"{other.host} (pid {other.pid}). Give each another number."
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
    begin = f"{other.name} has different code or a different config"
    end = "give all hosts the same code and config."
    return MismatchError(
        f"{begin} ({formatting.listed(values, _SHOWN, '; ')}): {end}",
        f"{begin} ({formatting.listed(names, _SHOWN, '; ')}): {end} {own.name} prints the values.",
    )


def _plain(text: str) -> str:
    """Returns a text that is safe to print on a terminal, whoever sent it: cut, and
    with escapes.
    """
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}..."
    if text.isprintable():
        return text
    return text.encode("unicode_escape").decode()


def _integer(message: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = message.get(name)
    # Not isinstance, because a bool is an int too.
    if type(value) is not int or not least <= value <= most:
        raise MalformedError(name)
    return value


def text(
    message: Mapping[str, Any], name: str, longest: int = MAX_SHORT_LINE_BYTES
) -> str:
    """Returns a printable text field of a message; raises MalformedError if it is
    missing or invalid.
    """
    value = message.get(name)
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise MalformedError(name)
    return value


def nonce() -> str:
    """Returns a random number, as hex digits, that is used for one connection only."""
    return secrets.token_hex(_NONCE_BYTES)


def nonce_line(value: str) -> bytes:
    """Returns the line that sends a nonce, without a seal."""
    return _dump({"nonce": value}) + b"\n"


def read_nonce(line: bytes) -> str:
    """Returns the other side's nonce; raises MalformedError if the line holds none."""
    return text(_load(line), "nonce", 2 * _NONCE_BYTES)


class Seals:
    """Seals the lines of one side of a connection, and checks the seals of the other
    side.

    A seal covers both nonces, the sender's role and the line's number. A line that is
    replayed, reordered, reflected or copied from another connection therefore has a
    wrong seal.
    """

    def __init__(self, token: str, own: str, nonces: str):
        """Prepares the seals of a connection.

        Args:
          token: the token of the launch; empty for processes that were started by hand.
          own: the role of this side, `SERVER` or `CLIENT`.
          nonces: the client's nonce and the host's, separated by a space.
        """
        key = token.encode(errors="surrogateescape")
        self._key = hmac.digest(key, nonces.encode(), "sha256")
        self._own = own
        self._other = SERVER
        if own == SERVER:
            self._other = CLIENT
        # The numbers of lines so far, which number the next lines.
        self._num_sent = 0
        self._read = 0

    def line(self, message: Mapping[str, Any]) -> bytes:
        """Returns the next line that this side sends, with its seal."""
        body = _dump(message)
        seal = self._seal(self._own, self._num_sent, body)
        self._num_sent += 1
        return seal + b" " + body + b"\n"

    def read(self, line: bytes) -> dict[str, Any]:
        """Returns the message in the other side's next line; raises MalformedError if
        its seal is wrong.
        """
        seal, body = line[:_SEAL_CHARACTERS], line[_SEAL_CHARACTERS + 1 :]
        # In constant time, so that a forger learns nothing from how long a rejection
        # takes.
        if not hmac.compare_digest(seal, self._seal(self._other, self._read, body)):
            raise MalformedError("seal")
        self._read += 1
        return _load(body)

    def _seal(self, speaker: str, place: int, body: bytes) -> bytes:
        sealed = f"{speaker} {place} ".encode() + body
        return hmac.digest(self._key, sealed, "sha256").hex().encode()


async def read_line(reader: asyncio.StreamReader, longest: int) -> bytes:
    """Receives the next line, without the newline.

    Raises:
      DisconnectedError: if the connection ends first.
      MalformedError: if the line is longer than `longest` bytes.
    """
    line = b""
    while not line.endswith(b"\n"):
        try:
            line += await reader.readuntil(b"\n")
        except asyncio.LimitOverrunError as e:
            # The line is longer than the reader's buffer. This takes the buffered part,
            # and the loop goes on.
            line += await reader.readexactly(e.consumed)
        except (asyncio.IncompleteReadError, OSError) as e:
            raise DisconnectedError from e
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
