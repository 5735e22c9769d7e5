"""Tests that random messages neither end the meeting of a run's processes nor reveal
anything to strangers.
"""

import contextlib
import json
import re
import socket

import hypothesis
import pytest
from hypothesis import strategies as st

from tests import guests, hostile
from tests.launch import harness
from xshard.pod import handshake, rendezvous_server

NONCE = {"nonce": "a" * 32}
# The meeting waits for two processes besides process 0, so that this one alone cannot
# start the run.
HELLO = {"index": 1, "count": 3, "host": "h1", "pid": 7, "facts": guests.FACTS}
# The answer to a valid nonce. Without the token, process 0 sends nothing more.
GREETING = re.compile(
    rb'(\{"nonce": "[0-9a-f]{32}"\}\n[0-9a-f]{64} \{"process": 0\}\n)?'
)
PART = b"x" * (1 << 20)
# Longer than any exchange takes: a connection that process 0 has not closed by then
# stays open for good.
SECONDS = 60


def lines(document):
    """Returns a strategy for one to three damaged or forged documents, each with or
    without an end of line.
    """
    ends = st.sampled_from([b"\n", b"\n", b"\n", b"", b"\r\n", b"\0"])
    return st.lists(
        st.builds(bytes.__add__, hostile.contents(document), ends),
        min_size=1,
        max_size=3,
    )


@pytest.fixture(scope="module")
def meeting():
    """The place and the future of a meeting that waits for two processes. They come at
    the end, and the run starts.
    """
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        # A process with the token but another config would end the meeting after these
        # seconds.
        patch.setattr(rendezvous_server, "_PATIENCE_SECONDS", harness.FOREVER)
        start = stack.enter_context(guests.processes())
        first, *others = guests.make_places(3)
        host = start(first)
        yield first, host
        assert not host.done(), host.result()
        futures = [host, *map(start, others)]
        assert [future.result() for future in futures] == [
            [socket.gethostname()] * 3
        ] * 3


def say(connection, data, pieces):
    """Sends data in pieces of `pieces` bytes until the other side closes the
    connection.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The rest of long data is sent at once, to save time.
    head = data[: 200 * pieces]
    with contextlib.suppress(OSError):
        for begin in range(0, len(head), pieces):
            connection.sendall(head[begin : begin + pieces])
        connection.sendall(data[len(head) :])
        connection.shutdown(socket.SHUT_WR)


def hear(connection):
    """Returns everything that arrives until the other side closes the connection, as it
    must.
    """
    data_heard = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            data_heard += data
    return data_heard


@contextlib.contextmanager
def undisturbed(meeting):
    """Asserts that the meeting goes on afterwards and still answers a client with the
    token.
    """
    place, host = meeting
    # If the meeting were over, the next connection would wait for it.
    assert not host.done()
    # Each example closes its own connections: all of them together would exceed the
    # limit of open files.
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
def test_a_stranger_without_a_token_gets_only_the_greeting(meeting, messages, pieces):
    with undisturbed(meeting) as place, guests.connect(place) as connection:
        connection.settimeout(SECONDS)
        say(connection, b"".join(messages), pieces)
        assert GREETING.fullmatch(hear(connection))


@hostile.settings(slow=True)
@hypothesis.given(st.sampled_from(["", "another"]), hostile.contents(HELLO), PIECES)
def test_a_stranger_with_another_token_gets_no_answer(meeting, token, hello, pieces):
    with undisturbed(meeting) as place:
        stranger = guests.Stranger(place, token)
        with stranger.connection as connection:
            connection.settimeout(SECONDS)
            assert not stranger.greet()
            say(connection, sealed(stranger, b"{}") + sealed(stranger, hello), pieces)
            assert hear(connection) == b""


@hostile.settings(slow=True)
@hypothesis.given(
    hostile.contents(HELLO), hostile.contents({"leaving": "SIGWINCH"}), PIECES
)
def test_a_guest_with_the_token_gets_a_welcome_or_an_error(
    meeting, hello, more, pieces
):
    for answer in answers(meeting, hello, more, pieces):
        # With the token, even a process with another index or config counts as one of
        # this launch.
        assert answer == {"welcome": True} or answer.keys() == {"error"}
        json.loads(hello)


@pytest.mark.parametrize("name", HELLO)
@hostile.settings(slow=True)
@hypothesis.given(hostile.VALUES)
def test_a_guest_that_sends_a_wrong_type_gets_no_answer(meeting, name, value):
    hello = {**HELLO, name: value}
    is_of_its_type = type(value) is type(HELLO[name])
    messages = answers(meeting, json.dumps(hello).encode(), b"{}", 1 << 16)
    assert is_of_its_type or not messages


def answers(meeting, hello, more, pieces):
    """Returns the answers that a client with the token gets to two messages before it
    is disconnected: one, or none.
    """
    with undisturbed(meeting) as place:
        stranger = guests.Stranger(place)
        with stranger.connection as connection:
            connection.settimeout(SECONDS)
            assert stranger.greet()
            say(connection, sealed(stranger, hello) + sealed(stranger, more), pieces)
            received = [
                stranger._seals.read(line) for line in hear(connection).splitlines()
            ]
    assert len(received) <= 1
    return received


@pytest.mark.parametrize("token", [None, "another", guests.TOKEN])
def test_a_message_without_an_end_is_not_kept(meeting, token):
    with undisturbed(meeting) as place:
        stranger = guests.Stranger(place, token)
        with stranger.connection as connection, pytest.raises(OSError) as e:
            connection.settimeout(SECONDS)
            assert token is None or stranger.greet() == (token == guests.TOKEN)
            for _ in range(64):
                connection.sendall(PART)
    assert not isinstance(e.value, TimeoutError)


def sealed(stranger, content):
    """Returns the next line of a client with a token: any content, with the seal that
    belongs to it.
    """
    seals = stranger._seals
    seal = seals._seal(handshake.CLIENT, seals._num_sent, content)
    seals._num_sent += 1
    return seal + b" " + content + b"\n"
