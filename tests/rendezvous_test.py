"""Tests of how processes meet, over real sockets, with threads as processes;
tests/launch uses real processes.
"""

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
    SignalReceiver,
    Stranger,
    connect,
    make_places,
    meet,
    processes,
)
from tests.launch import harness
from xshard.pod import (
    handshake,
    process_spec,
    rendezvous,
    rendezvous_server,
    signals,
    startup,
)


@pytest.fixture(autouse=True)
def close_connections():
    """Closes the connections that a test has opened."""
    with OPEN:
        yield


# Processes that connect, and the hosts or errors that they receive.


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("token", [TOKEN, ""])
def test_each_process_receives_the_hosts_of_all(count, token):
    host = socket.gethostname()
    assert meet(make_places(count), token=token) == [[host] * count] * count


@pytest.mark.parametrize("host", ["[::1]", "localhost", "127.0.0.1"])
def test_a_loopback_address_stays_on_loopback(host):
    port = harness.free_port()
    assert process_spec.interface(f"{host}:{port}") in ("::1", "127.0.0.1")
    with process_spec.listen(make_places(2, port, host)[0]) as server:
        assert server.getsockname()[0] in ("::1", "127.0.0.1")
    assert meet(make_places(2, port, host)) == [[socket.gethostname()] * 2] * 2


def test_an_address_of_no_interface_listens_on_all_interfaces():
    # The address of a Kubernetes service, or before address translation, belongs to no
    # interface. Nor does any in 192.0.2.0/24.
    for address in ("192.0.2.1:8476", "no.such.host.invalid:8476", f"{'x' * 70}:8476"):
        assert process_spec.interface(address) == ""


def test_a_name_that_is_loopback_only_here_listens_on_all_interfaces(monkeypatch):
    # Debian resolves a machine's own name to 127.0.1.1; other machines resolve it to
    # another address.
    resolve = lambda host, *args, **kwargs: original(
        "127.0.1.1" if host == "h0" else host, *args, **kwargs
    )
    original = socket.getaddrinfo
    numbers_only = {"flags": socket.AI_NUMERICHOST}

    def getaddrinfo(host, *args, **kwargs):
        if host == "h0" and kwargs == numbers_only:
            raise socket.gaierror("not a number")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(process_spec.socket, "getaddrinfo", getaddrinfo)
    assert process_spec.interface("h0:1") == ""
    assert process_spec.interface("127.0.1.1:1") == "127.0.1.1"


@pytest.mark.parametrize(
    ("address", "bound"),
    [
        ("127.0.0.1:8476", "127.0.0.1:8476"),
        ("[::1]:8476", "[::1]:8476"),
        ("192.0.2.1:8476", None),
    ],
)
def test_jax_binds_the_address_at_which_the_processes_met(monkeypatch, address, bound):
    captured = {}
    monkeypatch.setattr(startup.rendezvous, "meet", lambda *args: ["h0", "h1"])
    monkeypatch.setattr(startup.jax.config, "update", lambda *args: None)
    monkeypatch.setattr(
        startup.jax.distributed,
        "initialize",
        lambda *args, **kwargs: captured.update(kwargs),
    )
    place = process_spec.ProcessSpec(address, 2, 0)
    startup.join(place, startup.Timeouts(), FACTS, "", SignalReceiver())
    assert captured["coordinator_bind_address"] == bound


@pytest.mark.parametrize(
    "given, exempt",
    [
        ({}, None),
        ({"https_proxy": "http://proxy:3128"}, "10.0.0.1"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": ".local"}, ".local,10.0.0.1"),
        (
            {"grpc_proxy": "proxy:1", "no_proxy": "a", "no_grpc_proxy": "b"},
            "b,10.0.0.1",
        ),
    ],
)
def test_the_coordinator_is_reached_without_a_proxy(monkeypatch, given, exempt):
    for name in (
        "http_proxy",
        "https_proxy",
        "grpc_proxy",
        "no_proxy",
        "no_grpc_proxy",
    ):
        # Set before, so that it is restored whatever the code sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(startup.rendezvous, "meet", lambda *args: ["h0", "h1"])
    monkeypatch.setattr(startup.jax.config, "update", lambda *args: None)
    seen = []
    monkeypatch.setattr(
        startup.jax.distributed,
        "initialize",
        lambda *args, **kwargs: seen.append(dict(os.environ).get("no_grpc_proxy")),
    )
    place = process_spec.ProcessSpec("10.0.0.1:8476", 2, 0)
    startup.join(place, startup.Timeouts(), FACTS, "", SignalReceiver())
    assert seen == [exempt]


def test_processes_that_do_not_connect_are_named():
    all_places = make_places(5)
    with processes() as start:
        # All processes that do connect have connected before the deadline.
        first = start(all_places[0], seconds=1.0)
        strangers = [Stranger(all_places[0]) for _ in range(2)]
        for index, stranger in enumerate(strangers, 1):
            assert stranger.greet()
            stranger.say_hello(index=index, count=5)
            assert stranger.hear() == {"welcome": True}
        received = str(first.result())
    assert received.startswith("process 3, 4 of 5 did not connect to 127.0.0.1:")
    assert "--num_processes=5 is right" in received
    assert [stranger.hear() for stranger in strangers] == [{"error": received}] * 2


def test_a_port_taken_by_another_program_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        received = meet(make_places(2, port)[:1])
        assert f"port {port} is taken by another program" in str(received[0])
        # To a client, the other program accepts the connection and sends nothing. A
        # client waits for an answer for 5 s more than `seconds`, so here for 0.5 s.
        received = meet(make_places(2, port)[1:], seconds=-4.5)
        assert "did not answer as process 0" in str(received[0])


def test_a_guest_gives_up_on_a_program_that_is_not_process_0(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE_SECONDS", 0.5)
    for answer in (
        b"HTTP/1.0 400 Bad Request\r\n\r\n",
        b"[" * 200_000 + b"\n",
        b"x" * (2 << 20),
    ):
        with socket.create_server(("127.0.0.1", 0)) as other, processes() as start:
            last = start(make_places(2, other.getsockname()[1])[1])
            while not last.done():
                other.settimeout(0.1)
                with contextlib.suppress(OSError), other.accept()[0] as connection:
                    connection.sendall(answer)
            assert "did not answer as process 0" in str(last.result())


def test_an_unreachable_coordinator_is_reported():
    for address, reason in (
        (f"127.0.0.1:{harness.free_port()}", "refused"),
        ("no.such.host.invalid:1", "known"),
    ):
        (received,) = meet([process_spec.ProcessSpec(address, 2, 1)], seconds=0.5)
        assert str(received).startswith("process 1 on ") and "cannot reach" in str(
            received
        )
        assert reason in str(received)


# Processes that do not fit the run.


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(rendezvous_server, "_PATIENCE_SECONDS", 0.5)


def test_different_process_counts_are_refused(impatient):
    first = make_places(2)[0]
    received = [
        str(e) for e in meet([first, process_spec.ProcessSpec(first.address, 3, 1)])
    ]
    assert (
        set(received) == {received[0]}
        and "--num_processes=3, process 0 on" in received[0]
    )


def test_two_processes_with_one_id_are_refused(impatient):
    first, second, _ = make_places(3)
    received = [str(e) for e in meet([first, second, second])]
    assert all("two processes have --process_id=1" in text for text in received)


def test_different_code_or_config_is_named(impatient):
    first, second = make_places(2)
    with processes() as start:
        received = [str(f.result()) for f in (start(first), start(second, facts=OTHER))]
    assert set(received) == {received[0]}
    for part in (
        "process 1 on",
        "config.steps: 13 there, 12 on",
        "xshard/loop.py: ffffffff there",
    ):
        assert part in received[0]


def test_without_a_token_guests_receive_no_config_values(impatient):
    first, second, third = make_places(3)
    with processes() as start:
        futures = [
            start(p, token="", facts=f)
            for p, f in ((first, FACTS), (second, FACTS), (third, OTHER))
        ]
        full, brief, mismatched = (str(future.result()) for future in futures)
    assert "config.steps: 13 there, 12 on" in full
    for text in (brief, mismatched):
        assert "(config.steps; xshard/loop.py)" in text and "prints the values" in text
        assert "13" not in text.replace(socket.gethostname(), "")


def test_the_first_differences_are_listed_and_the_rest_counted(impatient):
    facts = {f"file{i}": "a" for i in range(8)}
    first, second = make_places(2)
    with processes() as start:
        futures = [
            start(first, facts=facts),
            start(second, facts=dict.fromkeys(facts, "b")),
        ]
        received = str(futures[0].result())
    assert "file4" in received and "file5" not in received and "and 3 more" in received


def test_a_long_value_is_compared_by_its_checksum(impatient):
    first, second = make_places(2)
    long = "x" * (4 << 20)
    assert (
        meet((first, second), facts={"config.table": long})
        == [[socket.gethostname()] * 2] * 2
    )
    with processes() as start:
        futures = [start(p, facts={"t": f"{long}{p.index}"}) for p in (first, second)]
        received = str(futures[0].result())
    assert (
        "has different code or a different config (t: xxx" in received
        and len(received) < 2000
    )


def test_more_facts_than_a_message_holds_are_refused():
    all_places = make_places(2)
    with processes() as start:
        first = start(all_places[0], seconds=1.0)
        last = start(
            all_places[1],
            facts={f"package/{i:0100}.py": "0a1b2c3d" for i in range(10_000)},
        )
        assert "has 10000 facts" in str(last.result())
        assert "did not connect" in str(first.result())


def test_the_right_process_still_starts_the_run_after_a_wrong_one():
    first, second = make_places(2)
    with processes() as start:
        futures = [start(first)]
        assert "different code or a different config" in str(
            start(second, facts=OTHER).result()
        )
        assert "--num_processes=3" in str(
            start(process_spec.ProcessSpec(first.address, 3, 1)).result()
        )
        futures.append(start(second))
        assert [future.result() for future in futures] == [
            [socket.gethostname()] * 2
        ] * 2


# Processes of another launch.


def test_processes_with_another_token_or_none_are_turned_away(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE_SECONDS", 0.3)
    first, second = make_places(2)
    with processes() as start:
        host = start(first, seconds=3.0)
        for token in ("", "another"):
            received = str(start(second, token=token, facts=OTHER).result())
            assert "it has a different launch token (XSHARD_LAUNCH_TOKEN)" in received
        received = str(host.result())
    assert received.startswith("process 1 of 2 did not connect")
    assert (
        "that connected, the last from 127.0.0.1, did not have this launch's token"
        in received
    )


def test_a_stranger_without_the_token_is_dropped():
    first, second = make_places(2)
    with processes() as start:
        host = start(first)
        stranger = Stranger(first, token="")
        assert not stranger.greet()
        stranger.say({})
        stranger.say_hello(facts=OTHER)
        assert stranger.is_dropped()
        assert isinstance(start(second).result(), list) and isinstance(
            host.result(), list
        )


def test_a_guest_sends_no_token_and_no_config_to_an_unproven_host():
    sent = []
    with socket.create_server(("127.0.0.1", 0)) as other, processes() as start:
        # A client waits for an answer for 5 s more than `seconds`, so here for 1 s.
        last = start(make_places(2, other.getsockname()[1])[1], seconds=-4.0)
        with other.accept()[0] as connection:
            # A host must prove that it has the token before a client sends more; this
            # seal is wrong.
            connection.sendall(
                handshake.nonce_line("b" * 32) + b"0" * 64 + b' {"process": 0}\n'
            )
            while data := connection.recv(1 << 16):
                sent.append(data)
        last.result()
    received = b"".join(sent)
    assert json.loads(received).keys() == {"nonce"} and TOKEN.encode() not in received


def test_a_sealed_line_is_valid_once_and_on_its_own_connection():
    nonces = "a b"
    guest = handshake.Seals(TOKEN, handshake.CLIENT, nonces)
    host = handshake.Seals(TOKEN, handshake.SERVER, nonces)
    line = guest.line({"leaving": "SIGTERM"})[:-1]
    assert host.read(line) == {"leaving": "SIGTERM"}
    others = [
        host,
        guest,
        handshake.Seals(TOKEN, handshake.SERVER, "a c"),
        handshake.Seals("", handshake.SERVER, nonces),
    ]
    for other in others:
        with pytest.raises(handshake.MalformedError):
            other.read(line)


# Rogue connections.


def raw(data):
    """Returns a function that connects and sends only this data."""

    def visit(place):
        connection = connect(place)
        with contextlib.suppress(OSError):
            connection.sendall(data)
        return connection

    return visit


def sealed(*messages, token=TOKEN, **fields):
    """Returns a function that connects, shows the token, sends raw messages, and a
    hello if it has fields.
    """

    def visit(place):
        stranger = Stranger(place, token)
        stranger.greet()
        with contextlib.suppress(OSError):
            for message in messages:
                stranger.connection.sendall(message)
            if fields:
                stranger.say_hello(**fields)
        return stranger.connection

    return visit


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
    "an endless line": raw(b"x" * (4 << 20)),
    "a hello without nonce and seal": raw(
        b'{"index": 1, "count": 2, "host": "evil", "pid": 1, "facts": {}}\n'
    ),
    "a number as the nonce": raw(b'{"nonce": 7}\n'),
    "garbage with the token": sealed(b"\xff" * 100 + b"\n"),
    "an endless line with the token": sealed(b"x" * (2 << 20)),
    "facts that are no dictionary": sealed(facts=5),
    "numbers as facts": sealed(facts=MANY),
    "nested facts": sealed(facts={"a": {"b": "c"}}),
    "a long fact": sealed(facts={"a": "b" * 5000}),
    "a list as the index": sealed(index=[1]),
    "a boolean index": sealed(index=True),
    "index 0": sealed(index=0),
    "an index beyond the count": sealed(index=2),
    "a large index": sealed(index=10**30),
    "a string as the count": sealed(count="2"),
    "a number as the host": sealed(host=5),
    "control characters in the host": sealed(host="\x1b[2J\x07"),
    "a negative pid": sealed(pid=-1),
    "another launch": sealed(token="another", index=1),
    "started by hand": sealed(token="", index=1),
}


@pytest.mark.parametrize("rogue", ROGUES)
def test_a_rogue_connection_is_dropped_and_the_run_starts(rogue):
    all_places = make_places(3)
    with processes() as start:
        futures = [start(all_places[0]), start(all_places[1])]
        with ROGUES[rogue](all_places[0]) as connection:
            connection.settimeout(harness.FOREVER)
            with contextlib.suppress(ConnectionError):
                while connection.recv(1 << 16):
                    pass
        futures.append(start(all_places[2]))
        assert [future.result() for future in futures] == [
            [socket.gethostname()] * 3
        ] * 3


def test_an_accepted_guest_that_sends_an_invalid_message_is_dropped():
    all_places = make_places(3)
    with processes() as start:
        host = start(all_places[0])
        stranger = Stranger(all_places[0])
        assert stranger.greet()
        stranger.say_hello(index=1, count=3)
        assert stranger.hear() == {"welcome": True}
        stranger.say({"leaving": "SIGWINCH"})
        assert stranger.hear() is None
        others = [start(all_places[1]), start(all_places[2])]
        assert [f.result() for f in (host, *others)] == [[socket.gethostname()] * 3] * 3


def test_slow_guests_delay_neither_the_others_nor_the_deadline(monkeypatch):
    monkeypatch.setattr(rendezvous_server, "_ANSWER_SECONDS", 1.0)
    first, second = make_places(2)
    with processes() as start:
        host = start(first)
        drip, silent = connect(first), connect(first)
        dropped = threading.Event()

        def trickle():
            # Each byte would meet a time limit that restarts with every byte.
            with contextlib.suppress(OSError):
                while not dropped.wait(0.05):
                    drip.sendall(b" ")
            dropped.set()

        trickling = threading.Thread(target=trickle)
        trickling.start()
        # Process 0 drops both while it waits for the other process.
        trickling.join(harness.FOREVER)
        assert not trickling.is_alive() and silent.recv(1) == b"" and not host.done()
        assert isinstance(start(second).result(), list) and isinstance(
            host.result(), list
        )
        # If only a slow client has connected, process 0 still keeps to its deadline.
        first = make_places(2)[0]
        host = start(first, seconds=2.0)
        silent = Stranger(first)
        assert silent.greet()
        assert "did not connect" in str(host.result()) and silent.is_dropped()


def test_200_simultaneous_connections_keep_nobody_out():
    first, second = make_places(2)
    with processes() as start:
        host = start(first)
        crowd = [connect(first) for _ in range(200)]
        assert isinstance(start(second).result(), list) and isinstance(
            host.result(), list
        )
        for visitor in crowd:
            visitor.close()


def test_the_oldest_strangers_are_dropped_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(rendezvous_server, "_MAX_UNIDENTIFIED", 3)
    first, second = make_places(2)
    with processes() as start:
        host = start(first)
        crowd = [connect(first) for _ in range(5)]
        assert crowd[0].recv(1) == b"" and crowd[1].recv(1) == b""
        assert isinstance(start(second).result(), list) and isinstance(
            host.result(), list
        )


def test_a_process_that_left_frees_its_index():
    all_places = make_places(3)
    with processes() as start:
        host = start(all_places[0])
        gone = Stranger(all_places[0])
        assert gone.greet()
        gone.say_hello(index=1, count=3)
        assert gone.hear() == {"welcome": True}
        gone.connection.shutdown(socket.SHUT_RDWR)
        # Its index is free again, whether or not process 0 has detected the end of the
        # connection yet.
        others = [start(all_places[1]), start(all_places[2])]
        assert [f.result() for f in (host, *others)] == [[socket.gethostname()] * 3] * 3


def test_a_process_that_connected_and_left_is_named():
    all_places = make_places(3)
    with processes() as start:
        host = start(all_places[0], seconds=2.0)
        gone = Stranger(all_places[0])
        assert gone.greet()
        gone.say_hello(index=1, count=3, pid=4711)
        assert gone.hear() == {"welcome": True}
        gone.connection.shutdown(socket.SHUT_RDWR)
        received = str(host.result())
    assert received.startswith("process 1, 2 of 3 did not connect")
    assert "process 1 on stranger (pid 4711) connected, but left before" in received


def test_the_end_of_process_0_is_detected_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server, processes() as start:
        last = start(make_places(2, server.getsockname()[1])[1])
        with server.accept()[0] as connection, connection.makefile("rb") as file:
            nonces = f"{handshake.read_nonce(file.readline()[:-1])} {'c' * 32}"
            seals = handshake.Seals(TOKEN, handshake.SERVER, nonces)
            connection.sendall(
                handshake.nonce_line("c" * 32) + seals.line({"process": 0})
            )
            for _ in range(2):
                seals.read(file.readline()[:-1])
            connection.sendall(seals.line({"welcome": True}))
        assert "has ended or can no longer be reached" in str(last.result())


# Signals.


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 42), (signal.SIGINT, 130), (signal.SIGUSR1, 42)],
)
def test_a_signal_to_one_waiting_process_stops_all(monkeypatch, index, number, code):
    all_places = make_places(4)
    seated = []
    seat = rendezvous_server._Client.accept
    monkeypatch.setattr(
        rendezvous_server._Client,
        "accept",
        lambda guest, hello: (seat(guest, hello), seated.append(hello)),
    )
    receivers = [SignalReceiver() for _ in range(3)]
    with processes() as start:
        futures = [
            start(place, signal_receiver=receiver)
            for place, receiver in zip(all_places[:3], receivers, strict=True)
        ]
        harness.wait_until(lambda: len(seated) == 2)
        receivers[index].send(number)
        stops = [future.result() for future in futures]
    assert [e.code for e in stops] == [code] * 3
    prefix = f"{number.name} on process {index} on {socket.gethostname()}: stopped before the run began"
    assert all(str(e).startswith(prefix) for e in stops)


def test_a_signal_before_the_welcome_is_read_reaches_process_0():
    signal_receiver = SignalReceiver()
    with socket.create_server(("127.0.0.1", 0)) as server, processes() as start:
        place = make_places(2, server.getsockname()[1])[1]
        last = start(place, signal_receiver=signal_receiver)
        with server.accept()[0] as connection, connection.makefile("rb") as file:
            nonces = f"{handshake.read_nonce(file.readline()[:-1])} {'c' * 32}"
            seals = handshake.Seals(TOKEN, handshake.SERVER, nonces)
            connection.sendall(
                handshake.nonce_line("c" * 32) + seals.line({"process": 0})
            )
            for _ in range(2):
                seals.read(file.readline()[:-1])
            signal_receiver.send(signal.SIGTERM)
            assert seals.read(file.readline()[:-1]) == {"leaving": "SIGTERM"}
            connection.sendall(seals.line({"welcome": True}))
            connection.sendall(seals.line({"stopped": "by process 1", "code": 42}))
        stop = last.result()
    assert (str(stop), stop.code) == ("by process 1", 42)


def test_a_signal_stops_a_guest_before_process_0_listens():
    signal_receiver = SignalReceiver()
    with processes() as start:
        last = start(make_places(2)[1], signal_receiver=signal_receiver)
        signal_receiver.send(signal.SIGTERM)
        assert last.result().code == 42


PROGRAM = """
import sys
from xshard.pod import rendezvous, process_spec, signals
with signals.SignalReceiver() as receiver:
    print("heard", flush=True)
    try:
        rendezvous.meet(process_spec.ProcessSpec(sys.argv[1], 2, 0), 1000.0, {}, "", receiver)
    except process_spec.StoppedError as e:
        print(e)
        sys.exit(e.code)
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU])
def test_a_real_signal_stops_a_real_process(number):
    address = f"127.0.0.1:{harness.free_port()}"
    process = harness.start([sys.executable, "-c", PROGRAM, address])
    with harness.running(process):
        harness.read_until(process, "heard")
        process.send_signal(number)
        code, output = harness.finish(process)
    assert code == signals.CODES[number] and f"{number.name} on process 0" in output


def test_a_crowd_that_takes_all_descriptors_keeps_nobody_out():
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


def test_signals_that_a_program_was_started_to_ignore_stay_ignored():
    program = (
        "import signal\nfrom xshard.pod import signals\n"
        "with signals.SignalReceiver() as receiver:\n"
        "    for number in (signal.SIGHUP, signal.SIGXCPU):\n"
        "        signal.raise_signal(number)\n"
        "    print(*receiver.read())"
    )
    command = ["nohup", sys.executable, "-c", program]
    done = subprocess.run(
        command,
        env=harness.environment(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout.split() == [str(int(signal.SIGXCPU))], done.stderr


def test_signal_handlers_are_restored():
    numbers = signals.stop_signals()
    before = [signal.getsignal(number) for number in numbers]
    with signals.SignalReceiver() as signal_receiver:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert harness.wait_until(signal_receiver.read) == [signal.SIGUSR2]
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
