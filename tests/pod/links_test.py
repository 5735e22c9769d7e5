"""Tests of what a link accepts: bytes that are no message end it, and nothing else."""

import contextlib
import json
import queue
import socket
import struct

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.launch import harness
from xshard.pod import links

KEY = b"5e" * 32


class Receiver:
    """A loop that keeps what comes."""

    def __init__(self):
        self.received = queue.SimpleQueue()
        self.lost = queue.SimpleQueue()
        self.loop = links.Loop(
            lambda link, header, arrays: self.received.put((header, arrays)),
            self.lost.put,
            lambda: None,
            self.lost.put,
        )
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.loop.listen(
            self.listener,
            KEY,
            lambda hello: "it is number 9" if hello.number == 9 else "",
            lambda hello, sock: self.loop.add(hello.number, sock),
            harness.FOREVER,
        )
        self.loop.start()

    @property
    def address(self):
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def connect(self, number=1, key=KEY):
        hello = links.Hello(number, "h1", 7, {})
        return links.connect(self.address, key, hello, harness.FOREVER)


@pytest.fixture(scope="module")
def receiver():
    made = Receiver()
    with contextlib.closing(made.listener):
        yield made
        made.loop.end()


@pytest.fixture
def sock(receiver):
    with receiver.connect() as sock:
        sock.settimeout(harness.FOREVER)
        yield sock


def framed(header, content=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<II", len(text), len(content)) + text + content


def test_arrays_come_as_they_were_sent(receiver):
    sender = Receiver()
    arrays = [
        np.arange(links.PART_BYTES // 8, dtype=np.int64),
        np.array([1.5, np.nan], np.float32),
        np.array([], np.uint8),
        np.array([True, False]),
    ]
    sock = receiver.connect()

    def send():
        link = sender.loop.add(1, sock)
        sender.loop.send(link, {"a": 1}, arrays)
        sender.loop.send(link, {"b": [2]})

    sender.loop.call(send)
    header, came = receiver.received.get()
    assert header == {"a": 1}
    for array, sent in zip(came, arrays, strict=True):
        assert array.dtype == sent.dtype
        np.testing.assert_array_equal(array, sent)
    assert receiver.received.get() == ({"b": [2]}, [])
    sender.loop.end()
    sender.listener.close()
    assert receiver.lost.get().number == 1


def test_who_is_refused_learns_why(receiver):
    with pytest.raises(links.RefusedError, match="it is number 9"):
        receiver.connect(9)
    with pytest.raises(links.RefusedError, match="another launch token"):
        receiver.connect(1, b"other")


@pytest.mark.parametrize(
    "content",
    [
        framed(b"no JSON"),
        framed([1]),
        framed({"arrays": 3}),
        framed({"arrays": [["<i4", 2]]}, b"1234"),
        framed({"arrays": [["<i4", -1]]}),
        framed({"arrays": [["O", 1]]}, b"12345678"),
        framed({"arrays": [["no type", 1]]}, b"12345678"),
        struct.pack("<II", 1 << 31, 0),
        struct.pack("<II", 2, 1 << 31) + b"{}",
    ],
)
def test_what_is_no_message_ends_the_connection(receiver, sock, content):
    sock.sendall(content)
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""
    assert receiver.lost.get().number == 1
    assert receiver.received.empty()


@hypothesis.given(st.binary(max_size=200), st.sampled_from([1, 7, 200]))
def test_random_bytes_end_the_connection_or_nothing(receiver, content, piece):
    with receiver.connect() as sock:
        sock.settimeout(harness.FOREVER)
        with contextlib.suppress(OSError):
            for start in range(0, len(content), piece):
                sock.sendall(content[start : start + piece])
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert receiver.lost.get().number == 1
