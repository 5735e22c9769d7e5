"""Tests of a run on several hosts that goes on without those it loses."""

import contextlib
import io
import os
import re
import signal
import sys

import pytest

from launch import engine
from launch import hosts as hosts_lib
from tests.launch import harness, network

# So many that slow ones outlast what a busy machine takes to notice a lost host.
_STEPS = 60
# Seconds. It is short because a test waits for it to expire, and long enough for
# connected processes to be heard.
_HEARTBEAT = 20
_EXACT = [
    *harness.EXACT,
    f"--config.steps={_STEPS}",
    "--config.eval_every_steps=4",
    "--config.checkpoint.every_steps=3",
    f"--heartbeat_timeout_seconds={_HEARTBEAT}",
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The work directory of a run of one process."""
    return harness.whole_run(tmp_path_factory, _EXACT)


@pytest.fixture
def hosts(tmp_path):
    """Four hosts. The launcher is on the first."""
    if not network.is_allowed():
        pytest.skip(network.NEEDED)
    with contextlib.ExitStack() as stack:
        yield network.Hosts(stack, tmp_path, 4)


def run_disturbed(hosts, tmp_path, disturb):
    """Runs three members and a spare on the hosts but the first; returns as
    `harness.run_disturbed` does.
    """
    starter = hosts.starter(tmp_path / "starter", [1, 2, 3, 3])

    def start(variables):
        return hosts.start(
            0,
            *[sys.executable, "-m", "launch", "--num_processes=3", "--spares=1"],
            *["--cpu_devices=1", f"--through={starter}", "--"],
            *[*_EXACT, f"--workdir={tmp_path / 'run'}"],
            **variables,
        )

    return harness.run_disturbed(tmp_path, start, _STEPS, disturb)


def test_a_command_that_starts_nothing_is_named(tmp_path):
    process = harness.launch(
        *["--num_processes=2", "--spares=0", "--max_failures=1", "--through=false"],
        command=[*_EXACT, f"--workdir={tmp_path / 'run'}"],
    )
    code, output = harness.finish(process)
    assert code == 1
    assert "the command that starts processes ended with exit code 1" in output


# A process that ends its agent, and is then ended by the system.
_ENDS_ITS_AGENT = """
import os, signal, time
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(600)
"""


def test_a_process_whose_agent_is_lost_counts_as_ended():
    """Also one that nobody has told to end."""
    connections = hosts_lib.Hosts(
        ["env"],
        1,
        engine.make_token(),
        lease_seconds=1.0,
        told=lambda number: None,
        answered=lambda number: 0.0,
        out=io.StringIO(),
    )
    process = connections.start(0, [sys.executable, "-c", _ENDS_ITS_AGENT])
    harness.wait_until(lambda: process.poll() is not None)
    assert process.poll() == -signal.SIGKILL
    connections.close()


def test_agents_go_on_without_the_command_that_started_them():
    connections = hosts_lib.Hosts(
        ["bash", "-c", '"$@" & wait', "bash"],
        1,
        engine.make_token(),
        lease_seconds=harness.FOREVER,
        told=lambda number: None,
        answered=lambda number: 0.0,
        out=(out := io.StringIO()),
    )
    program = "import time; print('here', flush=True); time.sleep(600)"
    process = connections.start(0, [sys.executable, "-c", program])
    harness.wait_until(lambda: "here" in out.getvalue())
    connections._starter._process.kill()
    harness.wait_until(lambda: connections._failure)
    process.send_signal(signal.SIGTERM)
    harness.wait_until(lambda: process.poll() is not None)
    assert process.poll() == -signal.SIGTERM
    connections.close()


def test_a_signal_to_all_agents_is_one_signal(monkeypatch):
    monkeypatch.setattr(hosts_lib, "_ONE_SIGNAL_SECONDS", harness.FOREVER)
    told = []
    out = io.StringIO()
    connections = hosts_lib.Hosts(
        ["bash", "-c", '"$@" & "$@" & wait', "bash"],
        2,
        engine.make_token(),
        lease_seconds=harness.FOREVER,
        told=told.append,
        answered=lambda number: 0.0,
        out=out,
    )
    program = "import os, time; print(os.getppid(), flush=True); time.sleep(600)"
    processes = []
    for number in range(2):
        processes.append(connections.start(number, [sys.executable, "-c", program]))
    agents = harness.wait_until(
        lambda: len(found := re.findall(r"\] (\d+)\n", out.getvalue())) == 2 and found
    )
    for agent in agents:
        os.kill(int(agent), signal.SIGINT)
    harness.wait_until(
        lambda: len(connections._tolds.get(signal.SIGINT, (0.0, ()))[1]) == 2
    )
    assert told == [signal.SIGINT]
    os.kill(int(agents[0]), signal.SIGINT)
    harness.wait_until(lambda: len(told) == 2)
    # The launcher tells the processes.
    assert [process.poll() for process in processes] == [None, None]
    connections.close()


def leader(directory):
    """Returns the host and the process ID of the member that leads."""
    (row,) = harness.status(directory)
    return int(row["host"].removeprefix("h")), row["pid"]


def test_a_run_goes_on_without_a_process_and_then_without_a_host(
    tmp_path, hosts, uninterrupted
):
    directory = tmp_path / "run"

    def disturb(process):
        _, pid = leader(directory)
        os.kill(pid, signal.SIGKILL)
        # First without it, then with the spare.
        harness.read_until(process, "generation 2: ")
        harness.read_until(process, "generation 3: ")
        harness.wait_until(lambda: leader(directory)[1] != pid)
        host, pid = leader(directory)
        hosts.cut(host)
        # Nobody can tell the process there to end.
        harness.wait_until(lambda: harness.process_state(pid) == "Z")
        harness.read_until(process, "it was silent for 20 s")

    code, output = run_disturbed(hosts, tmp_path, disturb)
    assert code == 0, output
    harness.assert_same_end(directory, uninterrupted, _STEPS)


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("other", ["launcher", "leader"])
def test_a_host_whose_words_are_lost_is_left_behind(
    tmp_path, hosts, uninterrupted, other
):
    directory = tmp_path / "run"

    def disturb(process):
        host, _ = leader(directory)
        # Whichever program is the first to answer gets a member; the spare, which may
        # be alone on its host, has no words for a leader.
        pids = harness.members(process)
        members = {hosts.host(pids[number]) for number in range(3)}
        deaf = min(members - {host})
        hosts.deafen(deaf, 0 if other == "launcher" else host)
        harness.read_until(process, "the run goes on without it")

    code, output = run_disturbed(hosts, tmp_path, disturb)
    assert code == 0, output
    harness.assert_same_end(directory, uninterrupted, _STEPS)
