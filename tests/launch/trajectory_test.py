"""One trajectory: a run that is killed and goes on with other numbers of processes and devices."""

import functools

from tests.launch import harness

_STEPS = 12
# Of which neither 8 devices nor 4 hold as many each.
_EXACT = [
    *harness.TOY,
    "--config.logical_replicas=6",
    "--config.reduction.arithmetic=exact",
    "--config.log_every_steps=1",
]


def test_a_run_ends_in_the_same_bits_whatever_it_went_on_with(tmp_path):
    whole = [*_EXACT, f"--workdir={tmp_path / 'whole'}", "--cpu_devices=1"]
    code, output = harness.finish(harness.start(whole))
    assert code == 0, output
    moved = [*_EXACT, f"--workdir={tmp_path / 'moved'}"]
    many = functools.partial(harness.start, [*moved, "--cpu_devices=8"])
    three = ["--num_processes=3", "--cpu_devices=1"]
    harness.kill_at(7, _STEPS, tmp_path, many)
    start = functools.partial(harness.launch, *three, command=moved)
    harness.kill_at(11, _STEPS, tmp_path, start)
    two = ["--num_processes=2", "--cpu_devices=2"]
    code, output = harness.finish(harness.launch(*two, command=moved))
    assert code == 0, output
    assert "resumed from the checkpoint of step" in output
    harness.assert_same_end(tmp_path / "moved", tmp_path / "whole", _STEPS)
