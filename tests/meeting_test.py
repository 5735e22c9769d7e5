"""How processes meet: real sockets; the processes are threads here, real ones in tests/launch."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from tests.guests import (
    FACTS,
    OPEN,
    OTHER,
    TOKEN,
    Heard,
    Stranger,
    connect,
    make_places,
    meet,
    processes,
)
from tests.launch import harness
from xshard.pod import handshake, meeting, places, reception, rendezvous, signals


@pytest.fixture(autouse=True)
def close_connections():
    """Closes what a test has opened."""
    with OPEN:
        yield


# Who comes, and what they hear.


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("token", [TOKEN, ""])
def test_all_hear_who_has_come(count, token):
    host = socket.gethostname()
    assert meet(make_places(count), token=token) == [[host] * count] * count


@pytest.mark.parametrize("host", ["[::1]", "localhost", "127.0.0.1"])
def test_loopback_is_not_left(host):
    port = harness.free_port()
    assert places.interface(f"{host}:{port}") in ("::1", "127.0.0.1")
    with places.listen(make_places(2, port, host)[0]) as server:
        assert server.getsockname()[0] in ("::1", "127.0.0.1")
    assert meet(make_places(2, port, host)) == [[socket.gethostname()] * 2] * 2


def test_an_address_of_no_interface_means_all_of_them():
    # As of a service on Kubernetes, or behind address translation: 192.0.2.0/24 is nobody's.
    for address in ("192.0.2.1:8476", "no.such.host.invalid:8476", f"{'x' * 70}:8476"):
        assert places.interface(address) == ""


def test_a_name_that_means_loopback_only_here_means_all_interfaces(monkeypatch):
    # As Debian's own name, which is 127.0.1.1 on that host and another address on all others.
    find = lambda host, *args, **kwargs: original(
        "127.0.1.1" if host == "h0" else host, *args, **kwargs
    )
    original = socket.getaddrinfo
    numbers_only = {"flags": socket.AI_NUMERICHOST}

    def getaddrinfo(host, *args, **kwargs):
        if host == "h0" and kwargs == numbers_only:
            raise socket.gaierror("not a number")
        return find(host, *args, **kwargs)

    monkeypatch.setattr(places.socket, "getaddrinfo", getaddrinfo)
    assert places.interface("h0:1") == ""
    assert places.interface("127.0.1.1:1") == "127.0.1.1"


@pytest.mark.parametrize(
    ("address", "bound"),
    [("127.0.0.1:8476", "127.0.0.1:8476"), ("[::1]:8476", "[::1]:8476"), ("192.0.2.1:8476", None)],
)
def test_jax_listens_where_the_processes_have_met(monkeypatch, address, bound):
    given = {}
    monkeypatch.setattr(rendezvous.meeting, "meet", lambda *args: ["h0", "h1"])
    monkeypatch.setattr(rendezvous.jax.config, "update", lambda *args: None)
    monkeypatch.setattr(
        rendezvous.jax.distributed, "initialize", lambda *args, **kwargs: given.update(kwargs)
    )
    place = places.Place(address, 2, 0)
    rendezvous.join(place, rendezvous.Timeouts(), FACTS, "", Heard())
    assert given["coordinator_bind_address"] == bound


def test_who_does_not_come_is_named():
    at = make_places(5)
    with processes() as start:
        # The time is up when those have come who will.
        first = start(at[0], seconds=1.0)
        strangers = [Stranger(at[0]) for _ in range(2)]
        for index, stranger in enumerate(strangers, 1):
            assert stranger.greet()
            stranger.say_hello(index=index, count=5)
            assert stranger.hear() == {"welcome": True}
        said = str(first.result())
    assert said.startswith("process 3, 4 of 5 did not connect to 127.0.0.1:")
    assert "--num_processes=5 is right" in said
    assert [stranger.hear() for stranger in strangers] == [{"error": said}] * 2


def test_a_taken_port():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = meet(make_places(2, port)[:1])
        assert f"port {port} is taken by another program" in str(said[0])
        # To the others, it takes the connection and says nothing.
        said = meet(make_places(2, port)[1:], seconds=-4.5)
        assert "did not answer as process 0" in str(said[0])


def test_a_program_that_answers_something_else_is_not_asked_for_ever(monkeypatch):
    monkeypatch.setattr(meeting, "_PATIENCE_SECONDS", 0.5)
    for answer in (b"HTTP/1.0 400 Bad Request\r\n\r\n", b"[" * 200_000 + b"\n", b"x" * (2 << 20)):
        with socket.create_server(("127.0.0.1", 0)) as other, processes() as start:
            last = start(make_places(2, other.getsockname()[1])[1])
            while not last.done():
                other.settimeout(0.1)
                with contextlib.suppress(OSError), other.accept()[0] as connection:
                    connection.sendall(answer)
            assert "did not answer as process 0" in str(last.result())


def test_a_coordinator_that_cannot_be_reached():
    for address, why in (
        (f"127.0.0.1:{harness.free_port()}", "refused"),
        ("no.such.host.invalid:1", "known"),
    ):
        (said,) = meet([places.Place(address, 2, 1)], seconds=0.5)
        assert str(said).startswith("process 1 on ") and "cannot reach" in str(said)
        assert why in str(said)


# What does not fit.


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(reception, "_PATIENCE_SECONDS", 0.5)


def test_another_number_of_processes(impatient):
    first = make_places(2)[0]
    said = [str(e) for e in meet([first, places.Place(first.address, 3, 1)])]
    assert set(said) == {said[0]} and "--num_processes=3, process 0 on" in said[0]


def test_two_with_one_number(impatient):
    first, second, _ = make_places(3)
    said = [str(e) for e in meet([first, second, second])]
    assert all("two processes have --process_id=1" in text for text in said)


def test_other_code_or_config_is_named(impatient):
    first, second = make_places(2)
    with processes() as start:
        said = [str(f.result()) for f in (start(first), start(second, facts=OTHER))]
    assert set(said) == {said[0]}
    for part in ("process 1 on", "config.steps: 13 there, 12 on", "xshard/loop.py: ffffffff there"):
        assert part in said[0]


def test_without_a_token_a_guest_is_told_of_no_value(impatient):
    first, second, third = make_places(3)
    with processes() as start:
        futures = [
            start(p, token="", facts=f)
            for p, f in ((first, FACTS), (second, FACTS), (third, OTHER))
        ]
        full, brief, told = (str(future.result()) for future in futures)
    assert "config.steps: 13 there, 12 on" in full
    for text in (brief, told):
        assert "(config.steps; xshard/loop.py)" in text and "prints the values" in text
        assert "13" not in text.replace(socket.gethostname(), "")


def test_many_differences_are_counted(impatient):
    facts = {f"file{i}": "a" for i in range(8)}
    first, second = make_places(2)
    with processes() as start:
        futures = [start(first, facts=facts), start(second, facts=dict.fromkeys(facts, "b"))]
        said = str(futures[0].result())
    assert "file4" in said and "file5" not in said and "and 3 more" in said


def test_a_long_value_is_compared_by_its_checksum(impatient):
    first, second = make_places(2)
    long = "x" * (4 << 20)
    assert meet((first, second), facts={"config.table": long}) == [[socket.gethostname()] * 2] * 2
    with processes() as start:
        futures = [start(p, facts={"t": f"{long}{p.index}"}) for p in (first, second)]
        said = str(futures[0].result())
    assert "has different code or a different config (t: xxx" in said and len(said) < 2000


def test_more_facts_than_a_message_holds():
    at = make_places(2)
    with processes() as start:
        first = start(at[0], seconds=1.0)
        last = start(at[1], facts={f"package/{i:0100}.py": "0a1b2c3d" for i in range(10_000)})
        assert "has 10000 facts" in str(last.result())
        assert "did not connect" in str(first.result())


def test_after_a_wrong_process_the_right_one_still_begins_the_run():
    first, second = make_places(2)
    with processes() as start:
        futures = [start(first)]
        assert "different code or a different config" in str(start(second, facts=OTHER).result())
        assert "--num_processes=3" in str(start(places.Place(first.address, 3, 1)).result())
        futures.append(start(second))
        assert [future.result() for future in futures] == [[socket.gethostname()] * 2] * 2


# Who is not of this launch.


def test_another_launch_and_no_launch_are_turned_away(monkeypatch):
    monkeypatch.setattr(meeting, "_PATIENCE_SECONDS", 0.3)
    first, second = make_places(2)
    with processes() as start:
        host = start(first, seconds=3.0)
        for token in ("", "another"):
            said = str(start(second, token=token, facts=OTHER).result())
            assert "it has a different launch token (XSHARD_LAUNCH_TOKEN)" in said
        said = str(host.result())
    assert said.startswith("process 1 of 2 did not connect")
    assert "that connected, the last from 127.0.0.1, did not have this launch's token" in said


def test_who_does_not_know_the_token_hears_nothing_and_learns_nothing():
    first, second = make_places(2)
    with processes() as start:
        host = start(first)
        stranger = Stranger(first, token="")
        assert not stranger.greet()
        stranger.say({})
        stranger.say_hello(facts=OTHER)
        assert stranger.is_dropped()
        assert isinstance(start(second).result(), list) and isinstance(host.result(), list)


def test_the_token_and_a_config_are_never_sent_to_what_only_listens():
    sent = []
    with socket.create_server(("127.0.0.1", 0)) as other, processes() as start:
        last = start(make_places(2, other.getsockname()[1])[1], seconds=-4.0)
        with other.accept()[0] as connection:
            # It would have to show the token first.
            connection.sendall(handshake.nonce_line("b" * 32) + b"0" * 64 + b' {"process": 0}\n')
            while data := connection.recv(1 << 16):
                sent.append(data)
        last.result()
    said = b"".join(sent)
    assert json.loads(said).keys() == {"nonce"} and TOKEN.encode() not in said


def test_a_line_counts_once_and_where_it_was_said():
    nonces = "a b"
    guest = handshake.Seals(TOKEN, handshake.GUEST, nonces)
    host = handshake.Seals(TOKEN, handshake.HOST, nonces)
    line = guest.line({"leaving": "SIGTERM"})[:-1]
    assert host.read(line) == {"leaving": "SIGTERM"}
    others = [
        host,
        guest,
        handshake.Seals(TOKEN, handshake.HOST, "a c"),
        handshake.Seals("", handshake.HOST, nonces),
    ]
    for other in others:
        with pytest.raises(handshake.MalformedError):
            other.read(line)


# Whoever else comes.


def raw(data):
    def come(place):
        connection = connect(place)
        with contextlib.suppress(OSError):
            connection.sendall(data)
        return connection

    return come


def sealed(*messages, token=TOKEN, **fields):
    """One who has the token, and then says something else."""

    def come(place):
        stranger = Stranger(place, token)
        stranger.greet()
        with contextlib.suppress(OSError):
            for message in messages:
                stranger.connection.sendall(message)
            if fields:
                stranger.say_hello(**fields)
        return stranger.connection

    return come


def sealed_depth(place):
    stranger = Stranger(place)
    assert stranger.greet()
    stranger.say_body(b"[" * 200_000)
    return stranger.connection


MANY = {str(i): 1 for i in range(3)}
ROGUES = {
    "deep": raw(b"[" * 200_000 + b"\n"),
    "deep with the token": sealed_depth,
    "a browser": raw(b"GET / HTTP/1.0\r\n\r\n"),
    "random bytes": raw(bytes(range(256)) * 4096),
    "no end": raw(b"x" * (4 << 20)),
    "the hello of before": raw(
        b'{"index": 1, "count": 2, "host": "evil", "pid": 1, "facts": {}}\n'
    ),
    "a nonce of a number": raw(b'{"nonce": 7}\n'),
    "garbage with the token": sealed(b"\xff" * 100 + b"\n"),
    "no end with the token": sealed(b"x" * (2 << 20)),
    "facts that are none": sealed(facts=5),
    "facts of numbers": sealed(facts=MANY),
    "facts of facts": sealed(facts={"a": {"b": "c"}}),
    "a long fact": sealed(facts={"a": "b" * 5000}),
    "an index of lists": sealed(index=[1]),
    "an index that is a truth": sealed(index=True),
    "index 0": sealed(index=0),
    "an index beyond": sealed(index=2),
    "a large index": sealed(index=10**30),
    "a count of words": sealed(count="2"),
    "a host of numbers": sealed(host=5),
    "a host that rings": sealed(host="\x1b[2J\x07"),
    "a pid below": sealed(pid=-1),
    "another launch": sealed(token="another", index=1),
    "by hand": sealed(token="", index=1),
}


@pytest.mark.parametrize("rogue", ROGUES)
def test_a_rogue_is_dropped_and_the_run_begins(rogue):
    at = make_places(3)
    with processes() as start:
        futures = [start(at[0]), start(at[1])]
        with ROGUES[rogue](at[0]) as connection:
            connection.settimeout(harness.FOREVER)
            with contextlib.suppress(ConnectionError):
                while connection.recv(1 << 16):
                    pass
        futures.append(start(at[2]))
        assert [future.result() for future in futures] == [[socket.gethostname()] * 3] * 3


def test_a_seated_guest_that_says_something_else_loses_its_place():
    at = make_places(3)
    with processes() as start:
        host = start(at[0])
        stranger = Stranger(at[0])
        assert stranger.greet()
        stranger.say_hello(index=1, count=3)
        assert stranger.hear() == {"welcome": True}
        stranger.say({"leaving": "SIGWINCH"})
        assert stranger.hear() is None
        others = [start(at[1]), start(at[2])]
        assert [f.result() for f in (host, *others)] == [[socket.gethostname()] * 3] * 3


def test_a_slow_guest_holds_up_neither_the_others_nor_the_deadline(monkeypatch):
    monkeypatch.setattr(reception, "_ANSWER_SECONDS", 1.0)
    first, second = make_places(2)
    with processes() as start:
        host = start(first)
        drip, silent = connect(first), connect(first)
        dropped = threading.Event()

        def trickle():
            # Each byte in time for any limit on a byte.
            with contextlib.suppress(OSError):
                while not dropped.wait(0.05):
                    drip.sendall(b" ")
            dropped.set()

        trickling = threading.Thread(target=trickle)
        trickling.start()
        # Both are sent away while the others are waited for.
        trickling.join(harness.FOREVER)
        assert not trickling.is_alive() and silent.recv(1) == b"" and not host.done()
        assert isinstance(start(second).result(), list) and isinstance(host.result(), list)
        # And alone with it, process 0 waits no longer than it would.
        first = make_places(2)[0]
        host = start(first, seconds=2.0)
        silent = Stranger(first)
        assert silent.greet()
        assert "did not connect" in str(host.result()) and silent.is_dropped()


def test_200_connections_at_once():
    first, second = make_places(2)
    with processes() as start:
        host = start(first)
        crowd = [connect(first) for _ in range(200)]
        assert isinstance(start(second).result(), list) and isinstance(host.result(), list)
        for one in crowd:
            one.close()


def test_of_more_strangers_than_there_is_room_for_the_first_go(monkeypatch):
    monkeypatch.setattr(reception, "_MOST_STRANGERS", 3)
    first, second = make_places(2)
    with processes() as start:
        host = start(first)
        crowd = [connect(first) for _ in range(5)]
        assert crowd[0].recv(1) == b"" and crowd[1].recv(1) == b""
        assert isinstance(start(second).result(), list) and isinstance(host.result(), list)


def test_who_is_gone_is_not_there():
    at = make_places(3)
    with processes() as start:
        host = start(at[0])
        gone = Stranger(at[0])
        assert gone.greet()
        gone.say_hello(index=1, count=3)
        assert gone.hear() == {"welcome": True}
        gone.connection.shutdown(socket.SHUT_RDWR)
        # Its number is free again, whenever the end of the connection is seen.
        others = [start(at[1]), start(at[2])]
        assert [f.result() for f in (host, *others)] == [[socket.gethostname()] * 3] * 3


def test_who_was_there_and_is_gone_is_named():
    at = make_places(3)
    with processes() as start:
        host = start(at[0], seconds=2.0)
        gone = Stranger(at[0])
        assert gone.greet()
        gone.say_hello(index=1, count=3, pid=4711)
        assert gone.hear() == {"welcome": True}
        gone.connection.shutdown(socket.SHUT_RDWR)
        said = str(host.result())
    assert said.startswith("process 1, 2 of 3 did not connect")
    assert "process 1 on stranger (pid 4711) connected, but left before" in said


def test_a_process_0_that_ends_is_noticed_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server, processes() as start:
        last = start(make_places(2, server.getsockname()[1])[1])
        with server.accept()[0] as connection, connection.makefile("rb") as file:
            nonces = f"{handshake.read_nonce(file.readline()[:-1])} {'c' * 32}"
            seals = handshake.Seals(TOKEN, handshake.HOST, nonces)
            connection.sendall(handshake.nonce_line("c" * 32) + seals.line({"process": 0}))
            for _ in range(2):
                seals.read(file.readline()[:-1])
            connection.sendall(seals.line({"welcome": True}))
        assert "has ended or can no longer be reached" in str(last.result())


# Signals.


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 130), (signal.SIGUSR1, 42)]
)
def test_a_signal_to_one_that_waits_ends_all_who_wait(monkeypatch, index, number, code):
    at = make_places(4)
    seated = []
    seat = reception._Guest.seat
    monkeypatch.setattr(
        reception._Guest, "seat", lambda guest, hello: (seat(guest, hello), seated.append(hello))
    )
    ears = [Heard() for _ in range(3)]
    with processes() as start:
        futures = [start(place, heard=ear) for place, ear in zip(at[:3], ears, strict=True)]
        harness.wait_until(lambda: len(seated) == 2)
        ears[index].send(number)
        ends = [future.result() for future in futures]
    assert [e.code for e in ends] == [code] * 3
    who = (
        f"{number.name} on process {index} on {socket.gethostname()}: stopped before the run began"
    )
    assert all(str(e).startswith(who) for e in ends)


def test_a_signal_before_process_0_is_there():
    heard = Heard()
    with processes() as start:
        last = start(make_places(2)[1], heard=heard)
        heard.send(signal.SIGTERM)
        assert last.result().code == 42


PROGRAM = """
import sys
from xshard.pod import meeting, places, signals
with signals.Heard() as heard:
    print("heard", flush=True)
    try:
        meeting.meet(places.Place(sys.argv[1], 2, 0), 1000.0, {}, "", heard)
    except places.StoppedError as e:
        print(e)
        sys.exit(e.code)
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU])
def test_a_real_signal_to_a_real_process(number):
    address = f"127.0.0.1:{harness.free_port()}"
    process = harness.start([sys.executable, "-c", PROGRAM, address])
    with harness.running(process):
        harness.read_until(process, "heard")
        process.send_signal(number)
        code, output = harness.finish(process)
    assert code == signals.CODES[number] and f"{number.name} on process 0" in output


def test_a_crowd_that_takes_all_files_keeps_nobody_out():
    first, second = make_places(2)
    shell = 'ulimit -n 64; exec "$@"'
    process = harness.start(
        ["bash", "-c", shell, "-", sys.executable, "-c", PROGRAM, first.address]
    )
    with harness.running(process), processes() as start:
        harness.read_until(process, "heard")
        crowd = [connect(first) for _ in range(100)]
        assert isinstance(start(second, facts={}, token="").result(), list)
        code, output = harness.finish(process)
        assert (code, output) == (0, "") and len(crowd) == 100


def test_what_it_was_started_to_ignore_is_ignored():
    program = (
        "import signal\nfrom xshard.pod import signals\n"
        "with signals.Heard() as heard:\n"
        "    for number in (signal.SIGHUP, signal.SIGXCPU):\n"
        "        signal.raise_signal(number)\n"
        "    print(*heard.read())"
    )
    command = ["nohup", sys.executable, "-c", program]
    done = subprocess.run(
        command, env=harness.environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.stdout.split() == [str(int(signal.SIGXCPU))], done.stderr


def test_the_signals_are_given_back():
    numbers = signals.to_hear()
    before = [signal.getsignal(number) for number in numbers]
    with signals.Heard() as heard:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert harness.wait_until(heard.read) == [signal.SIGUSR2]
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
