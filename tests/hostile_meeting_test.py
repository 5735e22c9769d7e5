"""Whoever comes to the meeting of a run's processes and says anything at random: it goes on, and tells strangers nothing."""

import contextlib
import json
import re
import socket

import hypothesis
import pytest
from hypothesis import strategies as st

from tests import guests, hostile
from tests.launch import harness
from xshard.pod import handshake, reception

NONCE = {"nonce": "a" * 32}
# One of two that are waited for, so that nobody alone can begin the run.
HELLO = {"index": 1, "count": 3, "host": "h1", "pid": 7, "facts": guests.FACTS}
# What is said to anybody who says a nonce, and no more than that without the token.
GREETING = re.compile(rb'(\{"nonce": "[0-9a-f]{32}"\}\n[0-9a-f]{64} \{"process": 0\}\n)?')
PART = b"x" * (1 << 20)
# Longer than any of it takes: who is not sent away by then is not sent away.
SECONDS = 60


def lines(document):
    """One or more of these, with ends of lines or without."""
    ends = st.sampled_from([b"\n", b"\n", b"\n", b"", b"\r\n", b"\0"])
    return st.lists(
        st.builds(bytes.__add__, hostile.contents(document), ends), min_size=1, max_size=3
    )


@pytest.fixture(scope="module")
def meeting():
    """A meeting that waits for two more processes, at its place; in the end they come, and the run begins."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        # One with the token may be of another config, and only ends the meeting if no other comes.
        patch.setattr(reception, "_PATIENCE_SECONDS", harness.FOREVER)
        start = stack.enter_context(guests.processes())
        first, *others = guests.make_places(3)
        host = start(first)
        yield first, host
        assert not host.done(), host.result()
        futures = [host, *map(start, others)]
        assert [future.result() for future in futures] == [[socket.gethostname()] * 3] * 3


def say(connection, data, pieces):
    """Sends it in pieces of some bytes, as far as the other side listens."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Of what is long the end comes at once.
    head = data[: 200 * pieces]
    with contextlib.suppress(OSError):
        for begin in range(0, len(head), pieces):
            connection.sendall(head[begin : begin + pieces])
        connection.sendall(data[len(head) :])
        connection.shutdown(socket.SHUT_WR)


def hear(connection):
    """All that is said until the end, which must come."""
    heard = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            heard += data
    return heard


@contextlib.contextmanager
def undisturbed(meeting):
    """Sees that the meeting goes on, and who has the token is heard."""
    place, host = meeting
    # Who is not there any more would be waited for.
    assert not host.done()
    # What an example has opened is closed with it: there are more of them than a process may have files.
    with guests.OPEN:
        with hostile.little_memory():
            yield place
        assert not host.done(), host.result()
        guest = guests.Stranger(place)
        guest.connection.settimeout(SECONDS)
        assert guest.greet()


PIECES = st.sampled_from([1, 7, 1 << 16])


@hostile.settings(slow=True)
@hypothesis.given(lines(NONCE), PIECES)
def test_who_has_no_token(meeting, said, pieces):
    with undisturbed(meeting) as place, guests.connect(place) as connection:
        connection.settimeout(SECONDS)
        say(connection, b"".join(said), pieces)
        assert GREETING.fullmatch(hear(connection))


@hostile.settings(slow=True)
@hypothesis.given(st.sampled_from(["", "another"]), hostile.contents(HELLO), PIECES)
def test_who_has_another_token(meeting, token, hello, pieces):
    with undisturbed(meeting) as place:
        stranger = guests.Stranger(place, token)
        with stranger.connection as connection:
            connection.settimeout(SECONDS)
            assert not stranger.greet()
            say(connection, sealed(stranger, b"{}") + sealed(stranger, hello), pieces)
            assert hear(connection) == b""


@hostile.settings(slow=True)
@hypothesis.given(hostile.contents(HELLO), hostile.contents({"leaving": "SIGWINCH"}), PIECES)
def test_who_has_the_token(meeting, hello, more, pieces):
    for answer in answers(meeting, hello, more, pieces):
        # A process of this launch, if with another number or config.
        assert answer == {"welcome": True} or answer.keys() == {"error"}
        json.loads(hello)


@pytest.mark.parametrize("name", HELLO)
@hostile.settings(slow=True)
@hypothesis.given(hostile.VALUES)
def test_who_has_the_token_and_other_types(meeting, name, value):
    hello = {**HELLO, name: value}
    is_of_its_type = type(value) is type(HELLO[name])
    said = answers(meeting, json.dumps(hello).encode(), b"{}", 1 << 16)
    assert is_of_its_type or not said


def answers(meeting, hello, more, pieces):
    """What one with the token is told who says these, before it is sent away: one message, or none."""
    with undisturbed(meeting) as place:
        stranger = guests.Stranger(place)
        with stranger.connection as connection:
            connection.settimeout(SECONDS)
            assert stranger.greet()
            say(connection, sealed(stranger, hello) + sealed(stranger, more), pieces)
            found = [stranger._seals.read(line) for line in hear(connection).splitlines()]
    assert len(found) <= 1
    return found


@pytest.mark.parametrize("token", [None, "another", guests.TOKEN])
def test_what_has_no_end_is_not_kept(meeting, token):
    with undisturbed(meeting) as place:
        stranger = guests.Stranger(place, token)
        with stranger.connection as connection, pytest.raises(OSError) as e:
            connection.settimeout(SECONDS)
            assert token is None or stranger.greet() == (token == guests.TOKEN)
            for _ in range(64):
                connection.sendall(PART)
    assert not isinstance(e.value, TimeoutError)


def sealed(stranger, content):
    """The next line of who has a token: whatever it says, with the seal that goes with it."""
    seals = stranger._seals
    seal = seals._seal(handshake.GUEST, seals._said, content)
    seals._said += 1
    return seal + b" " + content + b"\n"
