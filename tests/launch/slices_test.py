"""A pod whose processes are slices that train apart: one of them is lost for good."""

import contextlib
import os
import signal
import sys

from tests import pace
from tests.launch import harness

_STEPS = 24
_COMMAND = (
    sys.executable,
    "-m",
    "xshard.main",
    "--config=tests/toy.py",
    f"--config.steps={_STEPS}",
    "--config.batch_size=12",
    "--config.eval_batch_size=12",
    "--config.slices=0",
    "--config.outer.every_steps=4",
    "--config.outer.dtype=int8",
    "--config.log_every_steps=1",
    "--config.checkpoint.every_steps=6",
)


def test_the_slices_that_are_left_go_on_from_the_last_exchange(tmp_path):
    directory = tmp_path / "run"
    command = [*_COMMAND, f"--workdir={directory}"]
    with contextlib.ExitStack() as stack:
        with pace.slow(tmp_path / "slow", 7) as variables:
            process = harness.launch(
                "--elastic=2:3",
                "--cpu_devices=1",
                command=command,
                env=harness.environment(**variables),
            )
            stack.enter_context(harness.running(process))
            harness.read_until(process, f"step  7/{_STEPS}")
            os.kill(harness.status(directory)[1]["pid"], signal.SIGKILL)
            harness.read_until(
                process, "2 of 3 hosts are left: starting it again on these"
            )
        code, output = harness.finish(process)
        assert code == 0, output
        assert "is of 3 slice(s), and there are now 2" in output
        # It was saved after step 6, within the round that began with step 5.
        assert "since step 4 is lost" in output
        assert f"step {_STEPS}/{_STEPS}" in output
        # The lost one comes back: a new start has all three.
        process = harness.launch(
            "--elastic=2:3",
            "--cpu_devices=1",
            command=[*command, f"--config.steps={_STEPS + 2}"],
            env=harness.environment(),
        )
        stack.enter_context(harness.running(process))
        code, output = harness.finish(process)
    assert code == 0, output
    assert "is of 2 slice(s), and there are now 3" in output
    assert len(harness.status(directory)) == 3
