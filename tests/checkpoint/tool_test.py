"""Tests of `python -m xshard.checkpoint` on intact and damaged checkpoints."""

import json
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest

from tests.checkpoint.harness import make_manager, save
from xshard import checkpoint, mesh
from xshard.checkpoint import __main__ as tool
from xshard.checkpoint import store

OPTIONS = {"keep_best": 2, "best_metric": "error", "best_mode": "min"}


@pytest.fixture
def directory(tmp_path):
    manager = make_manager(tmp_path / "ck")
    for step in (1, 2):
        state = {
            "w": jnp.full((2, 3), step, jnp.bfloat16),
            "scale/current_loss_scale": jnp.float32(2.0**step),
            "same": jnp.arange(3),
            "rng": jax.random.key(0),
        }
        metadata = {"experiment": "some", "config": {"checkpoint": OPTIONS}}
        manager.save(
            step, state, metadata, data={"step": step}, metrics={"error": 1.0 / step}
        )
    manager.close()
    return tmp_path / "ck"


def print_nothing(message):
    del message


def run(capsys, *arguments):
    """Runs a command with --json; returns its exit code, and its rows or the text on
    stderr.
    """
    code = tool.main([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if code in (
        0,
        1,
    ) and captured.out else captured.err


def test_ls_prints_the_state_of_each_checkpoint(directory, capsys):
    (directory / "step_00000003.0123abcd").mkdir()
    run(capsys, "pin", directory, 1)
    code, rows = run(capsys, "ls", directory)
    assert code == 0
    shown = [(r["step"], r["state"], r["pinned"], r["best"]) for r in rows]
    assert shown == [
        (1, "complete", "pinned", "2: error 1"),
        (2, "complete", "", "1: error 0.5"),
        (3, "incomplete", "", ""),
    ]
    assert rows[0]["age"].endswith(" s") and 0 < rows[0]["MB"] < 1
    assert tool.main(["ls", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "step",
        "state",
        "age",
        "MB",
        "pinned",
        "best",
        "folder",
    ]
    assert len(lines) == 4


def test_a_nonfinite_checkpoint_is_reported_and_passes_verify(tmp_path, capsys):
    manager = make_manager(tmp_path, finite="^params/")
    save(manager, 1, {"params": {"w": jnp.array([jnp.inf]), "v": jnp.ones(1)}})
    manager.close()
    _, (row,) = run(capsys, "ls", tmp_path)
    assert row["state"] == "not finite"
    _, shown = run(capsys, "show", tmp_path, 1)
    assert {row["path"]: row["value"] for row in shown}["not finite"] == ["params/w"]
    _, (row,) = run(capsys, "verify", tmp_path)
    assert row["state"] == "whole"


def test_show_prints_the_arrays_and_the_metadata(directory, capsys):
    _, rows = run(capsys, "show", directory, 2)
    by_path = {row["path"]: row for row in rows}
    assert by_path["w"]["type"] == "bfloat16" and by_path["w"]["shape"] == [2, 3]
    assert by_path["rng"]["type"] == str(jax.random.key_impl(jax.random.key(0)))
    assert by_path["scale/current_loss_scale"]["value"] == 4.0
    assert by_path["experiment"]["value"] == "some" and by_path["step"]["value"] == 2
    assert (
        by_path["data"]["value"] == [{"step": 2}]
        and by_path["jax"]["value"] == jax.__version__
    )


def test_show_prints_the_sharding_of_an_array(tmp_path, capsys):
    manager = make_manager(tmp_path)
    place = mesh.sharding(mesh.make_mesh(), None, "replica")
    save(manager, 1, {"w": jax.device_put(jnp.ones((2, 8)), place)})
    _, rows = run(capsys, "show", tmp_path, 1)
    assert rows[0]["sharding"] == "P(None, 'replica')"


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


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_an_object_that_one_read_misses_is_not_reported_as_missing(
    directory, capsys, monkeypatch, command
):
    arguments = [command, directory, *([2] if command == "show" else [])]
    read, reads, missed = store.Disk.read, [], None

    def miss_one(self, name):
        reads.append(name)
        return None if len(reads) == missed else read(self, name)

    monkeypatch.setattr(store.Disk, "read", miss_one)

    def rows():
        reads.clear()
        code, output = run(capsys, *arguments)
        return code, [{**row, "age": ""} for row in output]

    undisturbed = rows()
    assert undisturbed[0] == 0 and reads
    # Each read in turn misses its object once.
    for missed in range(1, len(reads) + 1):
        assert rows() == undisturbed, missed


def test_diff_prints_the_largest_difference_of_each_array(directory, capsys):
    _, rows = run(capsys, "diff", directory, 1, 2)
    assert {row["path"]: row["largest difference"] for row in rows} == {
        "w": 1.0,
        "scale/current_loss_scale": 2.0,
    }


def test_diff_names_what_one_checkpoint_lacks_and_loses_no_difference(tmp_path, capsys):
    manager = make_manager(tmp_path / "ck")
    for step in (1, 2):
        # complex64 has no numbers between these.
        state = {"z": np.array([1e9 + step + 0j]), f"only/{step}": np.zeros(1)}
        manager.save(step, state, {})
    manager.close()
    _, rows = run(capsys, "diff", tmp_path / "ck", 1, 2)
    found = {row["path"]: row["largest difference"] for row in rows}
    assert found.pop("z") == 1
    assert found.keys() == {"only/1", "only/2"}
    assert all("only in one checkpoint" in text for text in found.values())


def test_a_pinned_step_is_kept_until_it_is_unpinned(directory, capsys):
    assert run(capsys, "pin", directory, 1)[0] == 0
    assert run(capsys, "pin", directory, 1)[0] == 0
    manager = make_manager(directory, keep_last=1)
    save(manager, 3, {"w": jnp.ones(1)})
    assert manager.all_steps() == [1, 3]
    assert run(capsys, "unpin", directory, 1)[0] == 0
    save(manager, 4, {"w": jnp.ones(1)})
    assert manager.all_steps() == [4]


def test_rm_deletes_a_checkpoint(directory, capsys):
    assert run(capsys, "rm", directory, 1)[0] == 0
    assert make_manager(directory).all_steps() == [2]


def test_rm_completes_an_interrupted_deletion(directory, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(store.Disk, "delete_folder", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            run(capsys, "rm", directory, 1)
    assert list(directory.glob("step_00000001.*"))
    assert run(capsys, "rm", directory, 1)[0] == 0
    assert not list(directory.glob("step_00000001.*"))
    code, error = run(capsys, "rm", directory, 1)
    assert code == 1 and "no checkpoint of step 1" in error


def test_orbax_restores_a_checkpoint_after_the_orbax_command(directory, capsys):
    assert run(capsys, "orbax", directory, 2)[1][0]["arrays"] == 4
    (folder,) = directory.glob("step_00000002.*")
    with warnings.catch_warnings():
        # Orbax warns about its own defaults and about an event loop that it leaves
        # open.
        warnings.simplefilter("ignore")
        checkpointer = orbax.checkpoint.StandardCheckpointer()
        arrays = checkpointer.restore(folder)
        checkpointer.close()
    np.testing.assert_array_equal(arrays["w"], np.full((2, 3), 2, jnp.bfloat16))
    np.testing.assert_array_equal(arrays["rng"], jax.random.key_data(jax.random.key(0)))
    assert make_manager(directory).latest_step() == 2


@pytest.mark.parametrize(
    "use_zarr3,use_ocdbt", [(False, True), (True, True), (False, False)]
)
def test_an_orbax_checkpoint_is_imported(tmp_path, capsys, use_zarr3, use_ocdbt):
    params = {
        "mlp/linear": {
            "w": np.arange(6.0, dtype=np.float32).reshape(2, 3),
            "b": np.ones(3),
        }
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handler = orbax.checkpoint.PyTreeCheckpointHandler(
            use_zarr3=use_zarr3, use_ocdbt=use_ocdbt
        )
        with orbax.checkpoint.Checkpointer(handler) as checkpointer:
            checkpointer.save(tmp_path / "orbax", params)
    code, rows = run(capsys, "import", tmp_path / "orbax", tmp_path / "new")
    assert code == 0 and rows[0]["arrays"] == 2
    state = {"params": {"mlp/linear": {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}}}
    loaded = checkpoint.init_from(
        checkpoint.Source(str(tmp_path / "new")), state, print_nothing
    )
    np.testing.assert_array_equal(
        loaded["params"]["mlp/linear"]["w"], params["mlp/linear"]["w"]
    )
    code, error = run(capsys, "import", tmp_path / "orbax", tmp_path / "new")
    assert code == 1 and "already holds checkpoints" in error
    code, error = run(capsys, "import", tmp_path, tmp_path / "new2")
    assert code == 1 and "is not an orbax checkpoint" in error


@pytest.mark.parametrize(
    "command", [["show", 9], ["diff", 1, 9], ["rm", 9], ["verify", 9]]
)
def test_a_missing_step_is_an_error_that_lists_the_existing_steps(
    directory, capsys, command
):
    code, error = run(capsys, command[0], directory, *command[1:])
    assert code == 1 and "no checkpoint of step 9" in error and "[1, 2]" in error


@pytest.fixture
def workdir(directory, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"checkpoint": {"directory": str(directory)}})
    )
    return tmp_path


def test_all_forms_of_naming_a_checkpoint_are_accepted(directory, workdir, capsys):
    for place in (directory, workdir):
        assert [row["step"] for row in run(capsys, "ls", place)[1]] == [1, 2]
        expected = run(capsys, "show", place, 1)
        assert run(capsys, "show", f"{place}@1") == expected
        assert run(capsys, "show", place) == run(capsys, "show", place, 2)
        assert run(capsys, "verify", f"{place}@1")[1] == [{"step": 1, "state": "whole"}]
        expected = run(capsys, "diff", place, 1, 2)
        assert run(capsys, "diff", f"{place}@1", f"{place}@2") == expected
        assert run(capsys, "pin", f"{place}@1") == (0, [{"pinned": 1}])
    assert run(capsys, "rm", f"{workdir}@1") == (0, [{"deleted": 1}])
    with pytest.raises(SystemExit, match="2"):
        tool.main(["rm", str(directory)])
    assert "rm DIR@STEP" in capsys.readouterr().err


def test_a_directory_whose_own_name_ends_like_a_step_is_itself(directory, capsys):
    elsewhere = directory.rename(directory.with_name("ck@1"))
    assert [row["step"] for row in run(capsys, "verify", elsewhere)[1]] == [1, 2]


def test_ls_names_a_folder_without_checkpoints(tmp_path, capsys):
    assert tool.main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {tmp_path}\n"


def test_a_marked_checkpoint_is_verified_by_its_step_and_named(directory, capsys):
    (folder,) = directory.glob("step_00000002.*")
    (folder / "DAMAGED").write_text("{}")
    marked = {"step": 2, "state": "whole, but marked as damaged: heal removes the mark"}
    assert run(capsys, "verify", directory) == (
        0,
        [{"step": 1, "state": "whole"}, marked],
    )
    assert run(capsys, "verify", directory, 2) == (0, [marked])
    code, error = run(capsys, "show", directory, 2)
    assert (
        code == 1 and "steps there: [1]; incomplete or marked as damaged: [2]" in error
    )


def test_a_full_disk_lets_rm_delete_all_but_the_newest(directory, capsys, monkeypatch):
    def create(self, name, content):
        raise store.CheckpointError(f"{self}/{name}: no room")

    monkeypatch.setattr(store.Store, "create", create)
    code, error = run(capsys, "rm", directory, 2)
    assert code == 1 and "no room" in error and "make room first" in error
    assert run(capsys, "rm", directory, 1) == (0, [{"deleted": 1}])
    assert [row["step"] for row in run(capsys, "ls", directory)[1]] == [2]


def test_an_interrupted_import_can_be_repeated(tmp_path, capsys, monkeypatch):
    (tmp_path / "new/step_00000000.0123abcd/p0").mkdir(parents=True)
    monkeypatch.setattr(tool.orbax, "read", lambda source: {"params/w": np.ones(3)})
    assert run(capsys, "import", tmp_path, tmp_path / "new")[0] == 0
    assert [row["state"] for row in run(capsys, "ls", tmp_path / "new")[1]] == [
        "complete"
    ]


def test_a_path_is_the_same_in_every_locale(directory, tmp_path):
    directory.rename(tmp_path / "für uns")
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [
        sys.executable,
        "-m",
        "xshard.checkpoint",
        "verify",
        tmp_path / "für uns",
    ]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_path_that_is_not_utf8_is_an_error(tmp_path, capsys):
    code, error = run(capsys, "ls", os.fsdecode(os.fsencode(tmp_path) + b"/f\xfcr"))
    assert code == 1 and "must be UTF-8" in error


def test_a_missing_directory_is_an_error(tmp_path, capsys):
    code, error = run(capsys, "ls", tmp_path / "nothing")
    assert code == 1 and "is not a directory" in error
    (tmp_path / "file").touch()
    code, error = run(capsys, "ls", tmp_path / "file")
    assert code == 1 and "is a file: give a run's work directory" in error
