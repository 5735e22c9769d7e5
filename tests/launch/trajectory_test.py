"""Tests that a run ends in the same bits if it continues on other processes and devices
after a kill or a lost host.
"""

import functools
import os
import signal

import pytest

from tests.launch import harness

_STEPS = 12


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The work directory of a run without interruptions."""
    return harness.whole_run(tmp_path_factory, harness.EXACT)


@pytest.mark.sample(1, of="moves")
def test_a_run_ends_in_the_same_bits_on_other_processes_and_devices(
    tmp_path, uninterrupted
):
    moved = [*harness.EXACT, f"--workdir={tmp_path / 'moved'}"]
    start_on_8_devices = functools.partial(harness.start, [*moved, "--cpu_devices=8"])
    three_processes = ["--num_processes=3", "--cpu_devices=1"]
    harness.kill_at(7, _STEPS, tmp_path, start_on_8_devices)
    start = functools.partial(harness.launch, *three_processes, command=moved)
    harness.kill_at(11, _STEPS, tmp_path, start)
    two_processes = ["--num_processes=2", "--cpu_devices=2"]
    code, output = harness.finish(harness.launch(*two_processes, command=moved))
    assert code == 0, output
    assert "resumed from the checkpoint of step" in output
    harness.assert_same_end(tmp_path / "moved", uninterrupted, _STEPS)


def lose_the_leader(tmp_path, hosts):
    """Runs an elastic run, whose leader is killed; returns the exit code, and the
    output after that.
    """
    directory = tmp_path / "run"

    def start(variables):
        return harness.launch(
            f"--elastic={hosts}",
            "--cpu_devices=1",
            command=[*harness.EXACT, f"--workdir={directory}"],
            env=harness.environment(**variables),
        )

    def disturb(process):
        os.kill(harness.status(directory)[0]["pid"], signal.SIGKILL)
        harness.read_until(process, "hosts are left, ")

    return harness.run_disturbed(tmp_path, start, _STEPS, disturb)


@pytest.mark.sample(0.4)
def test_a_run_that_loses_a_host_goes_on_to_the_same_bits(tmp_path, uninterrupted):
    code, output = lose_the_leader(tmp_path, "2:3")
    assert code == 0 and "resumed from the checkpoint of step" not in output, output
    assert harness.status(tmp_path / "run")[0]["members"] == 2
    harness.assert_same_end(tmp_path / "run", uninterrupted, _STEPS)


@pytest.mark.sample(0.4)
def test_a_run_that_loses_too_many_hosts_saves_and_stops(tmp_path, uninterrupted):
    code, output = lose_the_leader(tmp_path, "2:2")
    assert code == 42, output
    command = [*harness.EXACT, f"--workdir={tmp_path / 'run'}"]
    process = harness.launch("--elastic=2:2", "--cpu_devices=1", command=command)
    code, output = harness.finish(process)
    assert code == 0 and "resumed from the checkpoint of step" in output, output
    harness.assert_same_end(tmp_path / "run", uninterrupted, _STEPS)


def test_state_that_begins_with_an_example_is_equal_on_all_processes(tmp_path):
    """Each process has other examples, and a batch norm begins with their averages."""
    normalized = [
        *harness.EXACT,
        "--config.experiment=tests.toy.Normalized",
        "--config.steps=2",
    ]
    alone = [*normalized, f"--workdir={tmp_path / 'alone'}", "--cpu_devices=2"]
    code, output = harness.finish(harness.start(alone))
    assert code == 0, output
    command = [*normalized, f"--workdir={tmp_path / 'together'}"]
    process = harness.launch("--num_processes=2", "--cpu_devices=1", command=command)
    code, output = harness.finish(process)
    assert code == 0, output
    harness.assert_same_end(tmp_path / "together", tmp_path / "alone", 2)
