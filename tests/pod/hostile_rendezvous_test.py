"""Tests that random messages neither end the meeting of a run's processes nor reveal
anything to strangers.
"""

import contextlib
import json
import re
import socket
import struct

import hypothesis
import pytest
from hypothesis import strategies as st

from tests import guests, hostile
from tests.launch import harness
from xshard.pod import rendezvous

# The meeting waits for two processes besides process 0, so that this one alone cannot
# start the run.
HELLO = {
    "process_id": 1,
    "num_processes": 3,
    "host": "h1",
    "pid": 7,
    "facts": guests.FACTS,
}
# What a stranger without the token hears: the challenge of any version of Python, and
# that its answer is wrong.
REFUSAL = re.compile(
    rb"\0\0\0.#CHALLENGE#(\{sha256\})?.{20,40}(\0\0\0.#FAILURE#)?", re.DOTALL
)
# Longer than any message takes: a connection that process 0 has not closed by then
# stays open for good.
SECONDS = 60
PIECES = st.sampled_from([1, 7, 1 << 16])


@pytest.fixture(scope="module")
def meeting():
    """The place and the future of a meeting that waits for two processes. They come at
    the end, and the run starts.
    """
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        # A process with the token but another config would end the meeting after these
        # seconds.
        patch.setattr(rendezvous, "_PATIENCE_SECONDS", harness.FOREVER)
        start = stack.enter_context(guests.processes())
        first, *others = guests.make_specs(3)
        host = start(first)
        yield first, host
        assert not host.done(), host.result()
        futures = [host, *map(start, others)]
        hosts = [socket.gethostname()] * 3
        assert [future.result() for future in futures] == [hosts] * 3


@contextlib.contextmanager
def undisturbed(meeting):
    """Yields a new connection to the meeting, and asserts that the meeting goes on
    afterwards and still answers a process with the token.
    """
    spec, host = meeting
    # If the meeting were over, the next connection would wait for it.
    assert not host.done()
    # Each example closes its own connections: all of them together would exceed the
    # limit of open files.
    with guests.OPEN:
        with hostile.little_memory():
            yield guests.connect(spec)
        assert not host.done(), host.result()
        assert guests.Stranger(guests.connect(spec)).show_token()


def say(sock, data, pieces):
    """Sends data in pieces of `pieces` bytes, unless the other side closes the
    connection.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The rest of long data is sent at once, to save time.
    head = data[: 200 * pieces]
    with contextlib.suppress(OSError):
        for begin in range(0, len(head), pieces):
            sock.sendall(head[begin : begin + pieces])
        sock.sendall(data[len(head) :])
        sock.shutdown(socket.SHUT_WR)


def hear(sock):
    """Returns everything that arrives until the other side closes the connection, as it
    must.
    """
    sock.settimeout(SECONDS)
    data_heard = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            data_heard += data
    return data_heard


def framed(content):
    """Returns a message of `multiprocessing.connection`."""
    return struct.pack("!i", len(content)) + content


def messages():
    """Returns a strategy for one to three messages, damaged, forged or without the
    right length.
    """
    content = hostile.contents(HELLO)
    lengths = st.sampled_from([0, 1, 20, 256, 257, 1 << 20, (1 << 31) - 1, -1, -2])
    lying = st.builds(lambda n, x: struct.pack("!i", n) + x, lengths, content)
    return st.lists(content | content.map(framed) | lying, min_size=1, max_size=3)


def answers(meeting, hello, more, pieces):
    """Returns the answers that a process with the token gets to two messages before it
    is disconnected: one, or none.
    """
    with undisturbed(meeting) as sock:
        stranger = guests.Stranger(sock)
        assert stranger.show_token()
        say(sock, framed(hello) + framed(more), pieces)
        heard = hear(sock)
    if not heard:
        return []
    assert heard[:4] == struct.pack("!i", len(heard) - 4)
    return [json.loads(heard[4:])]


@hostile.settings(slow=True)
@hypothesis.given(messages(), PIECES)
def test_a_stranger_without_the_token_is_only_refused(meeting, contents, pieces):
    with undisturbed(meeting) as sock:
        say(sock, b"".join(contents), pieces)
        assert REFUSAL.fullmatch(hear(sock))


@hostile.settings(slow=True)
@hypothesis.given(st.sampled_from(["", "another"]), messages(), PIECES)
def test_a_stranger_with_another_token_gets_no_answer(meeting, token, contents, pieces):
    with undisturbed(meeting) as sock:
        stranger = guests.Stranger(sock, token)
        assert not stranger.show_token()
        say(sock, b"".join(contents), pieces)
        assert hear(sock) == b""


@hostile.settings(slow=True)
@hypothesis.given(
    hostile.contents(HELLO), hostile.contents({"signal": "SIGWINCH"}), PIECES
)
def test_a_process_with_the_token_gets_an_error_or_nothing(
    meeting, hello, more, pieces
):
    for answer in answers(meeting, hello, more, pieces):
        # With the token, even a process with another index or config counts as one of
        # this launch.
        assert answer["error"] and not answer["hosts"] and not answer["stopped"]
        json.loads(hello)


@pytest.mark.parametrize("name", HELLO)
@hostile.settings(slow=True)
@hypothesis.given(hostile.VALUES)
def test_a_process_that_sends_a_wrong_type_gets_no_answer(meeting, name, value):
    hello = {**HELLO, name: value}
    is_of_its_type = type(value) is type(HELLO[name])
    received = answers(meeting, json.dumps(hello).encode(), b"{}", 1 << 16)
    assert is_of_its_type or not received


@pytest.mark.parametrize("token", [None, "another", guests.TOKEN])
def test_a_message_without_an_end_is_not_kept(meeting, token):
    with undisturbed(meeting) as sock, pytest.raises(OSError) as e:
        if token is not None:
            stranger = guests.Stranger(sock, token)
            assert stranger.show_token() == (token == guests.TOKEN)
        sock.settimeout(SECONDS)
        sock.sendall(struct.pack("!i", (1 << 31) - 1))
        for _ in range(64):
            sock.sendall(bytes(1 << 20))
    assert not isinstance(e.value, TimeoutError)
