"""`python -m xshard.checkpoint`: what it says of checkpoints, whole and damaged."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xshard import checkpoint
from xshard.checkpoint import __main__ as tool


@pytest.fixture
def directory(tmp_path):
    manager = checkpoint.Manager(tmp_path / "ck", keep_last=3)
    for step in (1, 2):
        state = {
            "w": jnp.full((2, 3), step, jnp.bfloat16),
            "scale/current_loss_scale": jnp.float32(2.0**step),
            "same": jnp.arange(3),
            "rng": jax.random.key(0),
        }
        manager.save(step, state, {"experiment": "some"})
    return tmp_path / "ck"


def run(capsys, *arguments):
    code = tool.main([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if code in (0, 1) and captured.out else captured.err


def test_ls(directory, capsys):
    (directory / "step_00000003.0123abcd").mkdir()
    code, rows = run(capsys, "ls", directory)
    assert code == 0
    assert [(r["step"], r["counts"]) for r in rows] == [(1, "yes"), (2, "yes"), (3, "no")]
    assert tool.main(["ls", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "counts", "written", "MB", "directory"] and len(lines) == 4


def test_show(directory, capsys):
    _, rows = run(capsys, "show", directory, 2)
    by_path = {row["path"]: row for row in rows}
    assert by_path["w"]["type"] == "bfloat16" and by_path["w"]["shape"] == [2, 3]
    assert by_path["rng"]["type"] == str(jax.random.key_impl(jax.random.key(0)))
    assert by_path["scale/current_loss_scale"]["value"] == 4.0
    assert by_path["experiment"]["value"] == "some" and by_path["step"]["value"] == 2


def test_verify_reads_every_byte(directory, capsys):
    assert run(capsys, "verify", directory) == (
        0,
        [{"step": 1, "state": "whole"}, {"step": 2, "state": "whole"}],
    )
    (path,) = directory.glob("step_00000002.*/meta.json")
    path.write_bytes(path.read_bytes().replace(b"some", b"sime"))
    code, rows = run(capsys, "verify", directory)
    assert code == 1 and rows[0]["state"] == "whole" and "meta.json" in rows[1]["state"]
    assert run(capsys, "verify", directory, 1)[0] == 0


def test_diff(directory, capsys):
    _, rows = run(capsys, "diff", directory, 1, 2)
    assert {row["path"]: row["largest difference"] for row in rows} == {
        "w": 1.0,
        "scale/current_loss_scale": 2.0,
    }


def test_rm(directory, capsys):
    assert run(capsys, "rm", directory, 1)[0] == 0
    assert checkpoint.Manager(directory, keep_last=1).all_steps() == [2]


def test_export(directory, capsys, tmp_path):
    file = tmp_path / "out.npz"
    assert run(capsys, "export", directory, 2, file)[0] == 0
    with np.load(file) as arrays:
        np.testing.assert_array_equal(arrays["w"], np.full((2, 3), 2.0, np.float32))
        assert arrays["same"].dtype == np.int32
    code, error = run(capsys, "export", directory, 2, file)
    assert code == 1 and "File exists" in error


@pytest.mark.parametrize("command", [["show", 9], ["diff", 1, 9], ["rm", 9], ["verify", 9]])
def test_steps_that_are_not_there(directory, capsys, command):
    code, error = run(capsys, command[0], directory, *command[1:])
    assert code == 1 and "no checkpoint of step 9" in error and "[1, 2]" in error


def test_a_directory_that_is_not_there(tmp_path, capsys):
    code, error = run(capsys, "ls", tmp_path / "nothing")
    assert code == 1 and "is no directory" in error
