"""Tests of how processes meet, over real sockets, with threads as processes;
tests/launch uses real processes.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing import connection as mp_connection

import msgspec
import pytest

from tests.guests import (
    FACTS,
    OPEN,
    OTHER,
    TOKEN,
    SignalReceiver,
    Stranger,
    connect,
    make_specs,
    meet,
    processes,
)
from tests.launch import harness
from xshard.pod import rendezvous, signals, startup

HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def close_connections():
    """Closes the connections that a test has opened."""
    with OPEN:
        yield


# Processes that connect, and the hosts or errors that they receive.


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("token", [TOKEN, ""])
def test_each_process_receives_the_hosts_of_all(count, token):
    assert meet(make_specs(count), token=token) == [[HOST] * count] * count


@pytest.mark.parametrize("host", ["[::1]", "localhost", "127.0.0.1"])
def test_a_loopback_address_stays_on_loopback(host):
    port = harness.free_port()
    assert rendezvous.interface(f"{host}:{port}") in ("::1", "127.0.0.1")
    with rendezvous._listen(make_specs(2, port, host)[0]) as server:
        assert server.getsockname()[0] in ("::1", "127.0.0.1")
    assert meet(make_specs(2, port, host)) == [[HOST] * 2] * 2


def test_an_address_of_no_interface_listens_on_all_interfaces():
    # The address of a Kubernetes service, or before address translation, belongs to no
    # interface. Nor does any in 192.0.2.0/24.
    for address in ("192.0.2.1:8476", "no.such.host.invalid:8476", f"{'x' * 70}:8476"):
        assert rendezvous.interface(address) == ""


def test_a_name_that_is_loopback_only_here_listens_on_all_interfaces(monkeypatch):
    # Debian resolves a machine's own name to 127.0.1.1; other machines resolve it to
    # another address.
    resolve = lambda host, *args, **kwargs: original(
        "127.0.1.1" if host == "h0" else host, *args, **kwargs
    )
    original = socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        if host == "h0" and kwargs.get("flags") == socket.AI_NUMERICHOST:
            raise socket.gaierror("not a number")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", getaddrinfo)
    assert rendezvous.interface("h0:1") == ""
    assert rendezvous.interface("127.0.1.1:1") == "127.0.1.1"


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
    monkeypatch.setattr(startup.runtime, "listen_at", lambda address: None)
    monkeypatch.setattr(
        startup.jax.distributed,
        "initialize",
        lambda *args, **kwargs: captured.update(kwargs),
    )
    spec = rendezvous.ProcessSpec(address, 2, 0)
    startup.join(spec, rendezvous.Timeouts(), FACTS, "", SignalReceiver())
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
    monkeypatch.setattr(startup.runtime, "listen_at", lambda address: None)
    seen = []
    monkeypatch.setattr(
        startup.jax.distributed,
        "initialize",
        lambda *args, **kwargs: seen.append(dict(os.environ).get("no_grpc_proxy")),
    )
    spec = rendezvous.ProcessSpec("10.0.0.1:8476", 2, 0)
    startup.join(spec, rendezvous.Timeouts(), FACTS, "", SignalReceiver())
    assert seen == [exempt]


def hello(process_id=1, num_processes=2, host="stranger", pid=1, facts=FACTS):
    """Returns the hello of a process."""
    return rendezvous._Hello(process_id, num_processes, host, pid, facts)


def say(stranger, message):
    """Sends the message of a process."""
    stranger.connection.send_bytes(json.dumps(msgspec.to_builtins(message)).encode())


def hear(stranger):
    """Returns the next message of process 0, without the fields that it leaves out."""
    answer = json.loads(stranger.connection.recv_bytes())
    return {name: value for name, value in answer.items() if value}


def greeted(spec, token=TOKEN, **fields):
    """Returns a stranger that has shown the token and sent a hello."""
    stranger = Stranger(connect(spec), token)
    assert stranger.show_token()
    say(stranger, hello(**fields))
    return stranger


def served(server):
    """Accepts a process as process 0 does, and returns its connection and its hello."""
    stranger = Stranger(OPEN.enter_context(server.accept()[0]))
    mp_connection.deliver_challenge(stranger.connection, TOKEN.encode())
    mp_connection.answer_challenge(stranger.connection, TOKEN.encode())
    return stranger, json.loads(stranger.connection.recv_bytes())


def test_processes_that_do_not_connect_are_named(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "_TELL_SECONDS", 0.0)
    specs = make_specs(5)
    with processes() as start:
        # All processes that do connect have connected before the deadline.
        first = start(specs[0], seconds=1.0)
        strangers = [greeted(specs[0], process_id=i, num_processes=5) for i in (1, 2)]
        received = str(first.result())
    assert received.startswith("process 3, 4 of 5 did not connect to 127.0.0.1:")
    assert "--num_processes=5 is right" in received
    assert [hear(stranger) for stranger in strangers] == [{"error": received}] * 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("waiting 1 s more for process 1, 2, 3, 4 of 5 to connect to")
    assert told.endswith("a run of one process needs --num_processes=1")


def test_a_port_taken_by_another_program_is_reported(monkeypatch):
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (received,) = meet(make_specs(2, port)[:1])
        assert f"port {port} is taken by another program" in str(received)
        # To another process, the program accepts the connection and sends nothing.
        (received,) = meet(make_specs(2, port)[1:], seconds=0.2)
        assert "did not answer as process 0" in str(received)


def test_a_process_gives_up_on_a_program_that_is_not_process_0(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.5)
    for answer in (
        b"HTTP/1.0 400 Bad Request\r\n\r\n",
        b"\0\0\0\5hello",
        b"\0\0\0\5he",
        b"",
    ):
        with socket.create_server(("127.0.0.1", 0)) as other, processes() as start:
            last = start(make_specs(2, other.getsockname()[1])[1])
            while not last.done():
                other.settimeout(0.1)
                with contextlib.suppress(OSError):
                    connection = OPEN.enter_context(other.accept()[0])
                    connection.sendall(answer)
                    if not answer:
                        connection.close()
            assert "did not answer as process 0" in str(last.result())


def test_an_unreachable_coordinator_is_reported():
    for address, reason in (
        (f"127.0.0.1:{harness.free_port()}", "refused"),
        ("no.such.host.invalid:1", "known"),
    ):
        (received,) = meet([rendezvous.ProcessSpec(address, 2, 1)], seconds=0.5)
        text = str(received)
        assert text.startswith("process 1 on ") and "cannot reach" in text
        assert reason in text


# Processes that do not fit the run.


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE_SECONDS", 0.5)


def test_different_process_counts_are_refused(impatient):
    first = make_specs(2)[0]
    other = rendezvous.ProcessSpec(first.address, 3, 1)
    received = [str(e) for e in meet([first, other])]
    assert set(received) == {received[0]}
    assert "--num_processes=3, process 0 on" in received[0]


def test_two_processes_with_one_id_are_refused(impatient):
    first, second, _ = make_specs(3)
    received = [str(e) for e in meet([first, second, second])]
    assert all("two processes have --process_id=1" in text for text in received)


def test_different_code_or_config_is_named(impatient):
    first, second = make_specs(2)
    with processes() as start:
        futures = [start(first), start(second, facts=OTHER)]
        received = [str(future.result()) for future in futures]
    assert set(received) == {received[0]}
    for part in (
        "process 1 on",
        "config.steps: 13 there, 12 on",
        "xshard/loop.py: ffffffff there",
    ):
        assert part in received[0]


def test_without_a_token_the_others_receive_no_config_values(impatient):
    first, second, third = make_specs(3)
    with processes() as start:
        futures = [
            start(first, token=""),
            start(second, token=""),
            start(third, token="", facts=OTHER),
        ]
        full, brief, mismatched = (str(future.result()) for future in futures)
    assert "config.steps: 13 there, 12 on" in full
    for text in (brief, mismatched):
        assert "(config.steps; xshard/loop.py)" in text and "prints the values" in text
        assert "13" not in text.replace(HOST, "")


def test_the_first_differences_are_listed_and_the_rest_counted(impatient):
    facts = {f"file{i}": "a" for i in range(8)}
    first, second = make_specs(2)
    with processes() as start:
        futures = [
            start(first, facts=facts),
            start(second, facts=dict.fromkeys(facts, "b")),
        ]
        received = str(futures[0].result())
    assert "file4" in received and "file5" not in received and "and 3 more" in received


def test_a_long_value_is_shown_by_its_checksum(impatient):
    first, second = make_specs(2)
    long = "x" * (4 << 20)
    same = meet((first, second), facts={"config.table": long})
    assert same == [[HOST] * 2] * 2
    with processes() as start:
        facts = [{"t": f"{long}{spec.process_id}"} for spec in (first, second)]
        futures = [start(first, facts=facts[0]), start(second, facts=facts[1])]
        received = str(futures[0].result())
    assert "has different code or a different config (t: xxx" in received
    checksums = re.findall("SHA-256 ([0-9a-f]{16})", received)
    assert len(set(checksums)) == 2 and len(received) < 2000


def test_the_right_process_still_starts_the_run_after_a_wrong_one():
    first, second = make_specs(2)
    three = rendezvous.ProcessSpec(first.address, 3, 1)
    with processes() as start:
        host = start(first)
        received = str(start(second, facts=OTHER).result())
        assert "different code or a different config" in received
        assert "--num_processes=3" in str(start(three).result())
        futures = [host, start(second)]
        assert [future.result() for future in futures] == [[HOST] * 2] * 2


# Processes of another launch.


def test_processes_with_another_token_or_none_are_turned_away(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE_SECONDS", 0.3)
    first, second = make_specs(2)
    with processes() as start:
        host = start(first, seconds=3.0)
        for token in ("", "another"):
            received = str(start(second, token=token, facts=OTHER).result())
            assert "it has a different launch token (XSHARD_LAUNCH_TOKEN)" in received
        received = str(host.result())
    assert received.startswith("process 1 of 2 did not connect")
    rejected = "that connected, the last from 127.0.0.1, did not have this launch's"
    assert rejected in received


def test_a_process_sends_no_token_and_no_config_to_an_unproven_host(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE_SECONDS", 0.3)
    received = []
    with socket.create_server(("127.0.0.1", 0)) as other, processes() as start:
        last = start(make_specs(2, other.getsockname()[1])[1])
        while not last.done():
            other.settimeout(0.1)
            with contextlib.suppress(OSError, EOFError):
                stranger = Stranger(OPEN.enter_context(other.accept()[0]))
                # It cannot tell whether the answer to its challenge is right, and
                # cannot answer the other's.
                stranger.connection.send_bytes(b"#CHALLENGE#" + bytes(20))
                received.append(stranger.connection.recv_bytes())
                stranger.connection.send_bytes(b"#WELCOME#")
                received.append(stranger.connection.recv_bytes())
                stranger.connection.send_bytes(bytes(16))
                received.append(stranger.connection.recv_bytes())
                while True:
                    received.append(stranger.connection.recv_bytes())
        assert "it has a different launch token" in str(last.result())
    digest, challenge, failure = received[:3]
    assert challenge.startswith(b"#CHALLENGE#") and failure == b"#FAILURE#"
    sent = b"".join(received)
    assert TOKEN.encode() not in sent and b"config" not in sent and len(digest) < 64


# Rogue connections.


def raw(data):
    """Returns a function that connects and sends only this data."""

    def visit(spec):
        sock = connect(spec)
        with contextlib.suppress(OSError):
            sock.sendall(data)
        return sock

    return visit


def with_token(content, token=TOKEN):
    """Returns a function that connects, shows the token, and sends a message."""

    def visit(spec):
        stranger = Stranger(connect(spec), token)
        if stranger.show_token():
            stranger.connection.send_bytes(content)
        return stranger.socket

    return visit


def with_hello(**fields):
    """Returns a function that connects, shows the token, and sends a wrong hello."""
    return with_token(json.dumps(msgspec.to_builtins(hello()) | fields).encode())


ROGUES = {
    "a browser": raw(b"GET / HTTP/1.0\r\n\r\n"),
    "random bytes": raw(bytes(range(256)) * 4096),
    "a long message": raw(b"\xff\xff\xff\xff\0\0\1\0\0\0\0\0" + bytes(1 << 20)),
    "a hello without the token": raw(b"\0\0\0\2{}"),
    "another launch": with_token(b"{}", token="another"),
    "started by hand": with_token(b"{}", token=""),
    "no JSON": with_token(b"\xff" * 100),
    "a pickle": with_token(b"\x80\x04N."),
    "deep JSON": with_token(b"[" * 200_000),
    "a missing field": with_token(b"{}"),
    "another field": with_hello(more=1),
    "facts that are no dictionary": with_hello(facts=5),
    "numbers as facts": with_hello(facts={"a": 1}),
    "a boolean index": with_hello(process_id=True),
    "index 0": with_hello(process_id=0),
    "an index beyond the count": with_hello(process_id=2),
    "a string as the count": with_hello(num_processes="2"),
    "control characters in the host": with_hello(host="\x1b[2J\x07"),
    "a long host": with_hello(host="h" * 1000),
}


@pytest.mark.parametrize("rogue", ROGUES)
def test_a_rogue_connection_is_dropped_and_the_run_starts(rogue):
    specs = make_specs(3)
    with processes() as start:
        futures = [start(specs[0]), start(specs[1])]
        with ROGUES[rogue](specs[0]) as sock:
            sock.settimeout(harness.FOREVER)
            with contextlib.suppress(ConnectionError):
                while sock.recv(1 << 16):
                    pass
        futures.append(start(specs[2]))
        assert [future.result() for future in futures] == [[HOST] * 3] * 3


def test_an_accepted_process_that_sends_an_invalid_message_is_dropped():
    specs = make_specs(3)
    with processes() as start:
        host = start(specs[0])
        stranger = greeted(specs[0], process_id=1, num_processes=3)
        say(stranger, rendezvous._Leaving("SIGWINCH"))
        assert stranger.is_dropped()
        futures = [host, start(specs[1]), start(specs[2])]
        assert [future.result() for future in futures] == [[HOST] * 3] * 3


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_slow_stranger_delays_the_others_for_some_seconds(monkeypatch, is_silent):
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 3.0)
    first, second = make_specs(2)
    with processes() as start:
        host = start(first)
        slow = connect(first)
        dropped = threading.Event()

        def trickle():
            # Each byte would meet a time limit that restarts with every byte.
            with contextlib.suppress(OSError):
                slow.sendall(b"\0\0\0\xc8")
                while not dropped.wait(0.05):
                    slow.sendall(b"x")
            dropped.set()

        trickling = threading.Thread(target=trickle)
        if not is_silent:
            trickling.start()
        futures = [host, start(second)]
        assert [future.result() for future in futures] == [[HOST] * 2] * 2
        dropped.set()


def test_strangers_that_say_nothing_do_not_move_the_deadline(monkeypatch):
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", harness.FOREVER)
    specs = make_specs(3)
    with processes() as start:
        host = start(specs[0], seconds=1.0)
        accepted = greeted(specs[0], process_id=1, num_processes=3)
        strangers = [connect(specs[0]) for _ in range(20)]
        # Process 0 waits for the first one until its deadline, and serves no other.
        received = str(host.result())
        assert received.startswith("process 2 of 3 did not connect")
        assert hear(accepted) == {"error": received}
        for sock in strangers:
            sock.close()


def test_a_process_that_left_frees_its_index():
    specs = make_specs(3)
    with processes() as start:
        host = start(specs[0])
        gone = greeted(specs[0], process_id=1, num_processes=3)
        gone.socket.shutdown(socket.SHUT_RDWR)
        # Its index is free again for the process that replaces it.
        futures = [host, start(specs[1]), start(specs[2])]
        assert [future.result() for future in futures] == [[HOST] * 3] * 3


def test_a_process_that_connected_and_left_is_named():
    specs = make_specs(3)
    with processes() as start:
        host = start(specs[0], seconds=2.0)
        gone = greeted(specs[0], process_id=1, num_processes=3, pid=4711)
        gone.socket.shutdown(socket.SHUT_RDWR)
        received = str(host.result())
    assert received.startswith("process 1, 2 of 3 did not connect")
    assert "process 1 on stranger (pid 4711) connected, but left before" in received


def test_the_end_of_process_0_is_detected_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server, processes() as start:
        last = start(make_specs(2, server.getsockname()[1])[1])
        stranger, _ = served(server)
        stranger.socket.shutdown(socket.SHUT_RDWR)
        assert "has ended or can no longer be reached" in str(last.result())


@pytest.mark.parametrize(
    "answer",
    [
        b"[]",
        b"{}",
        b'{"hosts": ["h0"]}',
        b'{"hosts": ["h0", "\\u001b[2J"]}',
        b'{"error": "\\u001b[2J"}',
        b'{"stopped": "by process 1", "signal": "SIGWINCH"}',
    ],
)
def test_an_answer_that_process_0_cannot_have_sent_is_not_believed(answer):
    with socket.create_server(("127.0.0.1", 0)) as server, processes() as start:
        last = start(make_specs(2, server.getsockname()[1])[1])
        stranger, _ = served(server)
        stranger.connection.send_bytes(answer)
        assert "has ended or can no longer be reached" in str(last.result())


# Signals.


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 42), (signal.SIGINT, 130), (signal.SIGUSR1, 42)],
)
def test_a_signal_to_one_waiting_process_stops_all(monkeypatch, index, number, code):
    specs = make_specs(4)
    heard = []
    receivers = [SignalReceiver() for _ in range(3)]
    await_answer = rendezvous._Client._await_answer
    monkeypatch.setattr(
        rendezvous._Client,
        "_await_answer",
        lambda *args: (heard.append(args), await_answer(*args))[1],
    )
    with processes() as start:
        futures = [
            start(spec, signal_receiver=receiver)
            for spec, receiver in zip(specs[:3], receivers, strict=True)
        ]
        harness.wait_until(lambda: len(heard) == 2)
        receivers[index].send(number)
        stops = [future.result() for future in futures]
    assert [e.code for e in stops] == [code] * 3
    prefix = f"{number.name} on process {index} on {HOST}: stopped before the run began"
    assert all(str(e).startswith(prefix) for e in stops)


def test_of_two_signals_all_report_the_one_that_process_0_heard_of_first():
    signal_receiver = SignalReceiver()
    with socket.create_server(("127.0.0.1", 0)) as server, processes() as start:
        spec = make_specs(2, server.getsockname()[1])[1]
        last = start(spec, signal_receiver=signal_receiver)
        stranger, _ = served(server)
        signal_receiver.send(signal.SIGTERM)
        assert hear(stranger) == {"signal": "SIGTERM"}
        stop = rendezvous._Answer(stopped="SIGINT on process 2", signal="SIGINT")
        say(stranger, stop)
        stop = last.result()
    assert (str(stop), stop.code) == ("SIGINT on process 2", 130)


def test_a_signal_stops_a_process_whatever_process_0_answers():
    for answer in (rendezvous._Answer(hosts=("h0", "h1")), None):
        signal_receiver = SignalReceiver()
        with socket.create_server(("127.0.0.1", 0)) as server, processes() as start:
            spec = make_specs(2, server.getsockname()[1])[1]
            last = start(spec, signal_receiver=signal_receiver)
            stranger, _ = served(server)
            signal_receiver.send(signal.SIGTERM)
            assert hear(stranger) == {"signal": "SIGTERM"}
            if answer is not None:
                say(stranger, answer)
            stranger.socket.shutdown(socket.SHUT_RDWR)
            assert last.result().code == 42


def test_a_signal_stops_a_process_before_process_0_listens():
    signal_receiver = SignalReceiver()
    with processes() as start:
        last = start(make_specs(2)[1], signal_receiver=signal_receiver)
        signal_receiver.send(signal.SIGTERM)
        assert last.result().code == 42


def test_a_signal_stops_a_process_while_a_stranger_says_nothing():
    signal_receiver = SignalReceiver()
    with socket.create_server(("127.0.0.1", 0)) as other, processes() as start:
        spec = make_specs(2, other.getsockname()[1])[1]
        last = start(spec, signal_receiver=signal_receiver)
        with other.accept()[0]:
            signal_receiver.send(signal.SIGTERM)
            assert last.result().code == 42


PROGRAM = """
import sys
from xshard.pod import rendezvous, signals
with signals.SignalReceiver() as receiver:
    print("heard", flush=True)
    try:
        spec = rendezvous.ProcessSpec(sys.argv[1], 2, 0)
        rendezvous.meet(spec, 1000.0, {}, "", receiver)
    except rendezvous.StoppedError as e:
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
