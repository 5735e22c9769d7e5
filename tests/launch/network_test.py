"""Tests of pods on hosts with separate networks when the link to one host is cut."""

import contextlib
import json
import signal

import pytest

from tests.launch import harness, network

COUNT = 3
# Seconds. It is short because a test waits for it to expire, and long enough for
# connected processes to be heard.
HEARTBEAT = 20
OPTIONS = [
    "--config.log_every_steps=20",
    "--config.eval_every_steps=100000",
    "--config.checkpoint.every_steps=50",
    "--cpu_devices=2",
    f"--num_processes={COUNT}",
    "--coordinator_address=h0:8476",
    "--config.steps=1000000",
]


@pytest.fixture
def hosts(tmp_path):
    if not network.is_allowed():
        pytest.skip(network.NEEDED)
    with contextlib.ExitStack() as stack:
        yield network.Hosts(stack, tmp_path, COUNT)


@contextlib.contextmanager
def pod(hosts, directory, *options):
    with contextlib.ExitStack() as stack:
        command = [*harness.TOY, f"--workdir={directory}", *OPTIONS, *options]
        yield [
            stack.enter_context(
                harness.running(hosts.start(i, *command, f"--process_id={i}"))
            )
            for i in range(COUNT)
        ]


def step(directory):
    with contextlib.suppress(OSError, ValueError):
        return json.loads((directory / "status.json").read_bytes())[0]["step"] or 0
    return 0


def wait_for_step(directory, target):
    harness.wait_until(lambda: step(directory) >= target)


@pytest.mark.sample(0.4)
@pytest.mark.parametrize("lost", [2, 0])
def test_a_lasting_cut_ends_all_processes_and_names_the_lost_host(
    hosts, tmp_path, lost
):
    directory = tmp_path / "run"
    with pod(hosts, directory, f"--heartbeat_timeout_seconds={HEARTBEAT}") as processes:
        wait_for_step(directory, 120)
        hosts.cut(lost)
        ends = [harness.finish(process) for process in processes]
    assert [code for code, _ in ends] == [1] * COUNT, ends
    connected, cut_off = ends[1][1], ends[lost][1]
    if lost:
        # Process 0 reports the loss for all. The process that is cut off cannot reach
        # process 0.
        assert (
            f"error: process {lost} on h{lost}: not heard from for {HEARTBEAT}"
            in ends[0][1]
        )
        assert "process 0 on h0, which coordinates, has not answered" in cut_off
    else:
        assert "process 0 on h0, which coordinates, has not answered" in connected
        assert "error: process 1 on h1, process 2 on h2: not heard from for" in cut_off
    hosts.join(lost)
    with pod(hosts, directory, f"--config.steps={step(directory) + 200}") as processes:
        (first, output), *others = [harness.finish(process) for process in processes]
        assert first == 0 and "resumed from the checkpoint of step" in output, output
        assert [code for code, _ in others] == [0] * (COUNT - 1)


def seconds_silent(directory, index):
    """Returns for how many seconds process 0 has not heard from another process, as of
    its own last status.
    """
    rows = harness.status(directory)
    return rows[0]["time"] - rows[index]["time"]


@pytest.mark.sample(1, of="cuts")
def test_a_pod_survives_a_cut_shorter_than_the_heartbeat_timeout(hosts, tmp_path):
    directory = tmp_path / "run"
    with pod(hosts, directory) as processes:
        wait_for_step(directory, 100)
        hosts.cut(2)
        harness.wait_until(lambda: seconds_silent(directory, 2) > 2)
        hosts.join(2)
        harness.wait_until(lambda: seconds_silent(directory, 2) < 2)
        wait_for_step(directory, step(directory) + 100)
        processes[1].send_signal(signal.SIGTERM)
        ends = [harness.finish(process) for process in processes]
        assert [code for code, _ in ends] == [42] * COUNT, ends
