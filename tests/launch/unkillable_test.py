"""Tests that a run goes on without processes that are killed, and ends in the same
bits.
"""

import os
import signal

import pytest

from tests import rows
from tests.launch import harness

# So many that slow ones outlast what a busy machine takes to notice a kill.
_STEPS = 30
_EXACT = [
    *harness.EXACT,
    f"--config.steps={_STEPS}",
    "--config.eval_every_steps=4",
    "--config.checkpoint.every_steps=3",
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The work directory of a run of one process."""
    return harness.whole_run(tmp_path_factory, _EXACT)


def run_disturbed(tmp_path, spares, disturb):
    """Runs three members, which are slow from step 5 until they have been disturbed.

    Args:
      tmp_path: the folder, in which the work directory is `run`.
      spares: the number of processes that wait to join.
      disturb: called with the launcher after step 5.

    Returns:
      The exit code, and the output from where `disturb` has read it.
    """

    def start(variables):
        return harness.launch(
            "--num_processes=3",
            "--cpu_devices=1",
            f"--spares={spares}",
            command=[*_EXACT, f"--workdir={tmp_path / 'run'}"],
            env=harness.environment(**variables),
        )

    return harness.run_disturbed(tmp_path, start, _STEPS, disturb)


def leader(directory):
    """Returns the process ID of the member that leads."""
    return harness.status(directory)[0]["pid"]


def end(process, directory, who, number=signal.SIGKILL):
    """Sends a signal to a member, the one that leads or another; returns its process
    ID.
    """
    first = leader(directory)
    pid = first
    if who != "leader":
        pid = min(set(harness.members(process).values()) - {first})
    os.kill(pid, number)
    return pid


@pytest.mark.parametrize("first, second", [("leader", "leader"), ("other", "leader")])
def test_members_that_are_killed_cost_no_step(tmp_path, uninterrupted, first, second):
    directory = tmp_path / "run"

    def disturb(process):
        lost = end(process, directory, first)
        harness.read_until(process, "generation 2")
        if first == "leader":
            harness.wait_until(lambda: leader(directory) != lost)
        end(process, directory, second)
        harness.read_until(process, "generation 3")

    code, output = run_disturbed(tmp_path, 0, disturb)
    assert code == 0, output
    assert "step  5/" not in output
    (last,) = harness.status(directory)
    names = ("generation", "members", "takeovers")
    assert [last[name] for name in names] == [3, 1, 2]
    trained = [row for row in rows.read(directory) if "perf/members" in row]
    assert len(trained) == _STEPS
    assert [trained[0][f"perf/{name}"] for name in names] == [1, 3, 0]
    assert [trained[-1][f"perf/{name}"] for name in names] == [3, 1, 2]
    assert not any("perf/members" in row for row in rows.read(uninterrupted))
    harness.assert_same_end(directory, uninterrupted, _STEPS)


def test_a_process_joins_for_one_that_is_killed(tmp_path, uninterrupted):
    directory = tmp_path / "run"

    def disturb(process):
        before = set(harness.members(process).values())
        lost = end(process, directory, "leader")
        assert lost in before
        # First without it, then with the spare.
        harness.read_until(process, "generation 3")
        harness.read_until(process, "resumed from the checkpoint of step")

    code, output = run_disturbed(tmp_path, 1, disturb)
    assert code == 0, output
    harness.assert_same_end(directory, uninterrupted, _STEPS)


def test_a_signal_to_one_member_stops_all_at_one_step(tmp_path, uninterrupted):
    directory = tmp_path / "run"

    def disturb(process):
        end(process, directory, "other", signal.SIGTERM)
        # All have left with their state saved. They are no longer slow.
        harness.read_until(process, "starting it again")

    code, output = run_disturbed(tmp_path, 0, disturb)
    assert code == 0 and "resumed from the checkpoint of step" in output, output
    harness.assert_same_end(directory, uninterrupted, _STEPS)
