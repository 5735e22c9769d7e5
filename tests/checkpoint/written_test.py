"""Tests that work directories of an earlier version open and resume; see
written/README.md.
"""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from configs import digits, gan
from tests import rows
from xshard import loop
from xshard.checkpoint import __main__ as tool
from xshard.stored import fingerprint

WRITTEN = pathlib.Path(__file__).parent / "written"
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
COMMON = {
    "batch_size": 16,
    "log_every_steps": 1,
    "fingerprint_every_steps": 1,
    "eval_every_steps": 1000,
    "checkpoint.every_steps": 4,
    "writers": ("jsonl",),
}
SMALL = {"model.channels": 2, "model.hidden": 8}
RUNS = {
    "groups": (
        digits,
        SMALL
        | {
            "group_assignment": HALVES,
            "loss_scale.initial_loss_scale": 262144.0,
            "loss_scale.increment_period": 3,
        },
    ),
    "shards": (
        digits,
        SMALL
        | {
            "optimizer.average_decay": 0.9,
            "reduction.shard_update": True,
            "reduction.shard_params": True,
        },
    ),
    "slices": (
        gan,
        {
            "model.generator": (8,),
            "model.discriminator": (8,),
            "slices": 2,
            "reduction.slice_dtype": "int8",
        },
    ),
}


def run_tool(capsys, command, directory):
    """Returns what a command of the checkpoint tool prints about a directory."""
    capsys.readouterr()
    assert tool.main([command, str(directory), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", RUNS)
def test_a_work_directory_of_an_earlier_version_resumes(tmp_path, capsys, name):
    directory = shutil.copytree(WRITTEN / name, tmp_path / name)
    (entry,) = run_tool(capsys, "ls", directory)
    assert (entry["step"], entry["state"]) == (4, "complete")
    # Compares every array with the fingerprint that the earlier version computed on
    # its devices.
    assert run_tool(capsys, "verify", directory) == [{"step": 4, "state": "whole"}]

    module, changes = RUNS[name]
    config = module.get_config()
    config.update_from_flattened_dict({"steps": 8, **COMMON, **changes})
    with jax.numpy_dtype_promotion("standard"):
        assert loop.run(config.lock(), str(directory), "") == 0
    printed = capsys.readouterr().out
    assert "resumed from the checkpoint of step 4" in printed

    lines = (WRITTEN / f"{name}.jsonl").read_text().splitlines()
    expected = {row["step"]: row for row in map(json.loads, lines)}
    actual = {row["step"]: row for row in rows.read(directory) if "epoch" in row}
    assert [*actual] == [1, 2, 3, 4, 5, 6, 7, 8]
    # A row has the fingerprints of the state before its step. So that of step 5 has
    # those of the restored state, which must have the same bits as when it was saved.
    restored = {name for name in expected[5] if name.startswith(fingerprint.PREFIX)}
    assert len(restored) >= 3
    for column in restored:
        assert actual[5][column] == expected[5][column]
    for step, row in expected.items():
        for column, value in row.items():
            if not column.startswith(("perf/", fingerprint.PREFIX)):
                # Another version of XLA may round differently, in float16. A norm that
                # is not finite is null in the file.
                np.testing.assert_allclose(
                    np.array(actual[step][column], float),
                    np.array(value, float),
                    rtol=0.01,
                    err_msg=f"step {step}, {column}",
                )
    verified = run_tool(capsys, "verify", directory)
    assert [(row["step"], row["state"]) for row in verified] == [
        (4, "whole"),
        (8, "whole"),
    ]
