"""Tests that a language model in real processes ends in the same bits after a kill and
a restart.
"""

import json
import os
import random
import signal
import sys

import pytest

from experiments.lm import experiment
from tests import pace
from tests.launch import harness


class Model(experiment.LanguageModel):
    """The language model, at the pace that a test sets."""

    def train_batches(self, part):
        return pace.batches(super().train_batches(part))


# The config with a smaller model and shorter text, so that a step is short, and with
# fewer steps.
OPTIONS = [
    "--config.experiment=tests.launch.lm_test.Model",
    "--config.steps=30",
    "--config.eval_every_steps=15",
    "--config.log_every_steps=5",
    "--config.checkpoint.every_steps=5",
    "--config.text.eval_windows=16",
    "--config.text.length=32",
    "--config.eval_batch_size=16",
    "--config.model.width=16",
    "--config.model.heads=2",
    "--config.model.feed_forward=32",
    "--config.sample.length=6",
    "--config.loss_scale.increment_period=7",
]
COMMAND = [
    sys.executable,
    "-m",
    "xshard.main",
    "--config=configs/lm_tiny.py",
    *OPTIONS,
    *harness.PATIENT,
]


def start(directory, *options, count=1, devices=8, **variables):
    command = [*COMMAND, f"--workdir={directory}", *options]
    flags = (f"--num_processes={count}", f"--cpu_devices={devices}")
    environment = harness.environment(**variables)
    return harness.launch(*flags, command=command, cwd=harness.ROOT, env=environment)


def finish(process):
    code, output = harness.finish(process)
    assert code == 0, output
    return output


SHARDED = ("--config.reduction.shard_params=True", "--config.model_parallel=2")


@pytest.mark.long
@pytest.mark.parametrize("count, options", [(1, ()), (2, SHARDED)])
def test_a_killed_and_restarted_run_ends_in_the_same_bits_and_text(
    tmp_path, count, options
):
    shape = {"count": count, "devices": 4 // count}
    output = finish(start(tmp_path / "whole", *options, **shape))
    text = json.loads((tmp_path / "whole/results.json").read_text())["samples"]
    assert "--- 'def '" in text and "samples:" in output
    # The run saves each of these steps. By then the previous save has finished, so the
    # run can resume from it.
    step = random.Random().choice(range(15, 30, 5))
    with pace.slow(tmp_path / "slow", step) as variables:
        process = start(tmp_path / "killed", *options, **shape, **variables)
        harness.read_until(process, f"step {step:>2}/30")
        pid = random.choice(harness.status(tmp_path / "killed"))["pid"]
        os.kill(pid, signal.SIGKILL)
    assert "resumed from the checkpoint of step" in finish(process), f"killed at {step}"
    harness.assert_same_end(tmp_path / "killed", tmp_path / "whole", 30)


@pytest.mark.long
def test_each_group_of_a_model_parallel_run_initializes_a_one_device_run(tmp_path):
    groups = ["--config.group_assignment=((0, 1), (2, 3))", "--config.model_parallel=2"]
    run = tmp_path / "run"
    output = finish(start(run, *groups, "--config.steps=10"))
    assert "2 group(s) x 2 replica(s) x 2 device(s)" in output
    values = json.loads((run / "results.json").read_text())["eval"]
    assert len(values["bits_per_byte"]) == 2
    # A run on one device starts with a group's parameters. Its learning rate of 0 keeps
    # them unchanged.
    one_device = [
        "--config.steps=1",
        "--config.optimizer.learning_rate=0.0",
        f"--init_from={run}@10",
    ]
    for group in range(2):
        group_run = tmp_path / f"group_{group}"
        finish(start(group_run, *one_device, f"--init_group={group}", devices=1))
        alone = json.loads((group_run / "results.json").read_text())["eval"][
            "bits_per_byte"
        ]
        # One device sums float16 numbers over 'model' in another order.
        assert alone == pytest.approx(values["bits_per_byte"][group], rel=1e-3)
