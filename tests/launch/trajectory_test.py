"""Tests that a run ends in the same bits if it continues on other processes and devices
after a kill or a lost host.
"""

import contextlib
import functools
import os
import signal

import pytest

from tests import pace
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


@pytest.mark.sample(0.4)
def test_a_run_that_loses_a_host_ends_in_the_same_bits(tmp_path, uninterrupted):
    directory = tmp_path / "run"
    command = [*harness.EXACT, f"--workdir={directory}"]
    with contextlib.ExitStack() as stack:
        with pace.slow(tmp_path / "slow", 7) as variables:
            env = harness.environment(**variables)
            process = harness.launch(
                "--elastic=2:3", "--cpu_devices=1", command=command, env=env
            )
            stack.enter_context(harness.running(process))
            harness.read_until(process, f"step  7/{_STEPS}")
            os.kill(harness.status(directory)[1]["pid"], signal.SIGKILL)
            harness.read_until(
                process, "2 of 3 hosts are left: starting it again on these"
            )
        code, output = harness.finish(process)
    assert code == 0, output
    assert "resumed from the checkpoint of step" in output and "[2]" not in output
    assert len(harness.status(directory)) == 2
    harness.assert_same_end(directory, uninterrupted, _STEPS)


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
