"""How processes find one another: real sockets; the processes are threads here, real ones in tests/launch."""

import concurrent.futures
import socket
import time
import types

import pytest

from tests.launch import harness
from xshard import rendezvous

FACTS = {"config.steps": "12", "xshard/loop.py": "0a1b2c3d"}


def meet(places, seconds=harness.FOREVER, facts=None):
    """What each of some processes hears: the hosts, or the error."""

    def one(item):
        index, place = item
        try:
            return rendezvous.meet(place, seconds, (facts or {}).get(index, FACTS))
        except rendezvous.StartError as e:
            return str(e)

    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(one, enumerate(places)))


def places(count, port=None):
    address = f"127.0.0.1:{port or harness.free_port()}"
    return [rendezvous.Place(address, count, index) for index in range(count)]


@pytest.mark.parametrize("count", [2, 5])
def test_all_hear_who_has_come(count):
    assert meet(places(count)) == [[socket.gethostname()] * count] * count


def test_who_does_not_come_is_named(monkeypatch):
    came = []
    # The time is up when those have come who will.
    monotonic = lambda: time.monotonic() + (harness.FOREVER if len(came) == 2 else 0)
    monkeypatch.setattr(
        rendezvous, "time", types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    )
    monkeypatch.setattr(rendezvous, "_mismatch", lambda own, other, _: came.append(other) or "")
    said = meet(places(5)[:3])
    assert len(set(said)) == 1 and said[0].startswith(
        "process 3, 4 of 5 did not come to 127.0.0.1:"
    )
    assert "--num_processes=5 is right" in said[0]


def test_another_number_of_processes():
    first = places(2)[0]
    said = meet([first, rendezvous.Place(first.address, 3, 1)])
    assert set(said) == {said[0]} and "--num_processes=3, process 0 on" in said[0]


def test_two_with_one_number():
    first, second, _ = places(3)
    said = meet([first, second, second])
    assert any("two processes are --process_id=1" in text for text in said)
    assert not any(isinstance(text, list) for text in said)


def test_other_code_or_config_is_named():
    other = {**FACTS, "config.steps": "13", "xshard/loop.py": "ffffffff"}
    said = meet(places(2), facts={1: other})
    assert set(said) == {said[0]}
    for part in ("process 1 on", "config.steps: 13 there, 12 on", "xshard/loop.py: ffffffff there"):
        assert part in said[0]


def test_many_differences_are_counted():
    facts = {f"file{i}": "a" for i in range(8)}
    said = meet(places(2), facts={0: facts, 1: dict.fromkeys(facts, "b")})
    assert "file4" in said[0] and "file5" not in said[0] and "and 3 more" in said[0]


def test_a_taken_port():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(rendezvous.StartError, match=f"port {port} is taken by another program"):
            rendezvous.meet(places(2, port)[0], 1.0, FACTS)
        # To the others, it takes the connection and says nothing.
        with pytest.raises(rendezvous.StartError, match="did not answer as process 0"):
            rendezvous.meet(places(2, port)[1], -4.5, FACTS)


def test_a_coordinator_that_cannot_be_reached():
    for address, why in (
        (f"127.0.0.1:{harness.free_port()}", "refused"),
        ("no.such.host.invalid:1", "known"),
    ):
        with pytest.raises(rendezvous.StartError, match=f"process 1 on .* cannot reach .*{why}"):
            rendezvous.meet(rendezvous.Place(address, 2, 1), 0.5, FACTS)


def test_a_stranger_at_the_port_does_no_harm():
    all_places = places(2)
    host, _, port = all_places[0].address.rpartition(":")

    def strange():
        while True:
            try:
                with socket.create_connection((host, int(port)), harness.FOREVER) as connection:
                    connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    return connection.recv(1)
            except ConnectionRefusedError:
                continue

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = pool.submit(rendezvous.meet, all_places[0], harness.FOREVER, FACTS)
        assert strange() == b""
        rendezvous.meet(all_places[1], harness.FOREVER, FACTS)
        assert len(first.result()) == 2


@pytest.mark.parametrize(
    "said, message",
    [
        ((None, 2, 0), "--coordinator_address must be given too"),
        (("h:1", None, None), "--num_processes and --process_id must be given too"),
        (("h", 2, 0), "must be HOST:PORT"),
        (("h:99999", 2, 0), "must be HOST:PORT"),
        (("h:1", 2, 2), "--process_id=2 must be from 0 to 1"),
    ],
)
def test_flags_that_do_not_fit(said, message):
    with pytest.raises(rendezvous.StartError, match=message):
        rendezvous.place(*said)


def test_one_process_needs_no_place():
    assert rendezvous.place(None, None, None) is None
    assert rendezvous.place(None, 1, None) is None
    assert rendezvous.place("h:1", 1, 0) is None


def test_what_slurm_says_is_detected(monkeypatch):
    step = {"JOB_ID": 7, "STEP_NODELIST": "h[0-1]", "NTASKS": 2, "PROCID": 1, "LOCALID": 0}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert rendezvous.place(None, None, None) == rendezvous.Place("h0:61447", 2, 1, [0])
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert rendezvous.place(None, None, None) is None
