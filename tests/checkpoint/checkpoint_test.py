"""Checkpoints: what is saved comes back bit by bit, or not at all."""

import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.optimizers import harness
from xshard import checkpoint, mesh

DTYPES = (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "uint8", "int8",
    "uint32", "bool",
)  # fmt: skip


def make_tree(seed=0, shape=(4, 6)):
    rng = np.random.default_rng(seed)
    arrays = {name: jnp.asarray(rng.normal(size=shape) * 3).astype(name) for name in DTYPES}
    return {
        "arrays": arrays,
        "names": {
            "~/0/mu/a b": jnp.arange(3),
            "empty": jnp.zeros((0, 4)),
            "scalar": jnp.float32(seed),
        },
        "keys": [jax.random.key(seed), jax.random.split(jax.random.key(seed, impl="rbg"), 3)],
    }


def make_manager(directory, keep_last=3):
    return checkpoint.Manager(directory, keep_last=keep_last)


def files_of(manager, step):
    (directory,) = manager.directory.glob(f"step_{step:08d}.*")
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_every_type_comes_back_bit_by_bit(tmp_path):
    manager, tree = make_manager(tmp_path / "new" / "dir"), make_tree()
    assert manager.latest_step() is None and manager.all_steps() == []
    manager.save(7, tree, {"note": [1, "x"]})
    restored, metadata = manager.restore(tree)
    harness.assert_equal(restored, tree)
    assert metadata == {"note": [1, "x"]} and manager.latest_step() == 7
    harness.assert_equal(make_manager(tmp_path / "new" / "dir").restore(tree, step=7)[0], tree)


def test_chunks_of_large_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.format, "CHUNK_BYTES", 64)
    tree = {"a": jnp.arange(7 * 9 * 2.0).reshape(7, 9, 2), "b": jnp.arange(100.0)}
    manager = make_manager(tmp_path)
    manager.save(1, tree, {})
    harness.assert_equal(manager.restore(tree)[0], tree)


def test_another_number_of_devices_and_another_sharding(tmp_path):
    eight, four = mesh.make_mesh(), mesh.make_mesh(devices=jax.devices()[:4])
    groups = mesh.make_mesh([[0, 1, 2, 3], [4, 5, 6, 7]])
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    manager = make_manager(tmp_path)
    manager.save(1, {"w": jax.device_put(value, mesh.sharding(eight, "replica"))}, {})
    for place in (
        mesh.sharding(four), mesh.sharding(four, None, "replica"), mesh.sharding(groups, "group", "replica"),
    ):  # fmt: skip
        target = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=place)}
        restored = manager.restore(target)[0]["w"]
        np.testing.assert_array_equal(restored, value)
        assert restored.sharding == place


@pytest.mark.parametrize(
    "change,match",
    [
        (lambda t: t["names"].pop("empty"), "'names/empty' is only in it"),
        (lambda t: t["names"].update(new=jnp.ones(2)), "'names/new' is missing in it"),
        (lambda t: t["names"].update(empty=jnp.ones(2)), r"'names/empty' is float32\[0, 4\] in it, float32\[2\] here"),
        (lambda t: t["names"].update(scalar=jnp.int32(1)), r"float32\[\] in it, int32\[\] here"),
        (lambda t: t.update(keys=[jax.random.key(0, impl="rbg"), t["keys"][1]]), "fry2x32.* in it, rbg"),
    ],
)  # fmt: skip
def test_a_target_that_differs_is_refused_and_the_leaf_named(tmp_path, change, match):
    manager = make_manager(tmp_path)
    manager.save(1, make_tree(), {})
    target = make_tree()
    change(target)
    with pytest.raises(checkpoint.CheckpointError, match=match):
        manager.restore(target)


def test_what_is_kept(tmp_path):
    manager = make_manager(tmp_path, keep_last=2)
    for step in (1, 2, 3, 30):
        manager.save(step, {"a": jnp.full(3, step)}, {})
    manager.save(30, {"a": jnp.full(3, -1)}, {})
    assert manager.all_steps() == [3, 30] and len(list(tmp_path.iterdir())) == 2
    target = {"a": jnp.zeros(3, jnp.int32)}
    assert manager.restore(target)[0]["a"][0] == 30 and manager.restore(target, 3)[0]["a"][0] == 3
    with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint of step 4 .* \[3, 30\]"):
        manager.restore(target, 4)


def test_attempts_that_died_do_not_count_and_are_collected(tmp_path):
    manager, tree = make_manager(tmp_path), {"a": jnp.ones(3)}
    with pytest.raises(
        checkpoint.CheckpointError, match="There is no checkpoint in .* steps there: none"
    ):
        manager.restore(tree)
    manager.save(1, tree, {})
    (committed,) = tmp_path.iterdir()
    dead = tmp_path / "step_00000002.0123abcd"
    shutil.copytree(committed, dead)
    (dead / "COMMIT").unlink()
    assert manager.latest_step() == 1
    manager.save(3, tree, {})
    assert not dead.exists() and manager.all_steps() == [1, 3]


def damage(kind, path):
    content = bytearray(path.read_bytes())
    if kind == "deleted":
        path.unlink()
        return
    if kind == "flipped":
        content[len(content) // 2] ^= 1 << random.Random(str(path.name)).randrange(8)
    elif kind == "zeroed":
        middle = len(content) // 2
        content[middle : middle + 4096] = bytes(len(content[middle : middle + 4096]))
    else:
        del content[len(content) // 2 :]
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["flipped", "zeroed", "truncated", "deleted"])
def test_damage_of_any_file_is_detected_and_the_one_before_taken(tmp_path, kind, caplog):
    tree = {"big": jnp.arange(30_000.0), **make_tree()}
    newer = {**tree, "big": -tree["big"]}
    manager = make_manager(tmp_path / "run")
    manager.save(1, tree, {})
    manager.save(2, newer, {})
    pristine = tmp_path / "pristine"
    shutil.copytree(manager.directory, pristine)
    for path in files_of(manager, 2):
        caplog.clear()
        damage(kind, path)
        restored, _ = make_manager(manager.directory).restore(tree)
        # What process 0 wrote as its own index is not read again after the merge, and a COMMIT that is
        # gone is a checkpoint that does not count.
        unused = path.parent.name == "p0" or (kind == "deleted" and path.name == "COMMIT")
        named = "DAMAGED CHECKPOINT" in caplog.text and "step_00000002" in caplog.text
        if named or path.name == "COMMIT":
            harness.assert_equal(restored, tree)
        else:
            assert unused or is_index(path), path
            harness.assert_equal(restored, newer)
        shutil.rmtree(manager.directory)
        shutil.copytree(pristine, manager.directory)


def is_index(path):
    """Whether a file of process 0's holds nothing but its own index."""
    return path.parent.parent.name == "p0" and path.stat().st_size < 30_000


def test_what_was_found_damaged_is_saved_again_and_takes_no_place(tmp_path):
    manager, tree = make_manager(tmp_path, keep_last=2), {"a": jnp.arange(3.0)}
    for step in (1, 2):
        manager.save(step, tree, {})
    (path,) = tmp_path.glob("step_00000002.*/meta.json")
    damage("flipped", path)
    manager.restore(tree)
    assert manager.all_steps() == [1]
    manager.save(2, tree, {})
    assert manager.all_steps() == [1, 2]
    harness.assert_equal(manager.restore(tree, 2)[0], tree)


def test_all_damaged_says_so(tmp_path):
    manager, tree = make_manager(tmp_path), {"a": jnp.ones(3)}
    manager.save(1, tree, {})
    for path in files_of(manager, 1):
        if path.name == "meta.json":
            damage("flipped", path)
    with pytest.raises(
        checkpoint.CheckpointError, match="All checkpoints in .* damaged.*meta.json"
    ):
        manager.restore(tree)


def test_a_disk_that_is_full_leaves_the_checkpoint_before(tmp_path):
    manager, tree = make_manager(tmp_path), {"a": jnp.ones(300_000)}
    manager.save(1, tree, {})
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(
            checkpoint.CheckpointError, match="Step 2 could not be saved in .*File too large"
        ):
            manager.save(2, tree, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert manager.all_steps() == [1] and len(list(tmp_path.iterdir())) == 1
    harness.assert_equal(manager.restore(tree)[0], tree)
    manager.save(2, tree, {})
    assert manager.latest_step() == 2


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(checkpoint.CheckpointError, match="could not be saved .*Not a directory"):
        make_manager(tmp_path / "file").save(1, {"a": jnp.ones(3)}, {})


@pytest.mark.parametrize("keep_last", [0, -1, 1.5, True])
def test_bad_numbers(tmp_path, keep_last):
    with pytest.raises(checkpoint.CheckpointError, match=r"checkpoint.keep_last=.* at least 1"):
        make_manager(tmp_path, keep_last=keep_last)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(checkpoint.CheckpointError, match="2 processes run"):
        make_manager(tmp_path).save(1, {"a": jnp.ones(1)}, {})
    assert not list(tmp_path.iterdir())


def test_paths_that_collide_are_refused(tmp_path):
    tree = {"a": {"b/c": jnp.ones(1)}, "a/b": {"c": jnp.ones(1)}}
    with pytest.raises(checkpoint.CheckpointError, match="Two leaves .* 'a/b/c'"):
        make_manager(tmp_path).save(1, tree, {})


def saver_state(step):
    return {
        "a": np.full((50, 40), step, np.float32),
        "b": np.arange(step, step + 9, dtype=np.int32),
    }


def test_kill_at_any_instant_leaves_nothing_that_counts_and_is_wrong(tmp_path):
    rng = random.Random(0)
    manager = make_manager(tmp_path, keep_last=2)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.checkpoint.checkpoint_test",
        str(tmp_path),
    ]
    target = {k: jnp.asarray(v) for k, v in saver_state(0).items()}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        for _ in range(30):
            before = manager.latest_step() or 0
            parent.stdin.write("go\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            # Not to wait for anything: the instant of the kill is what is tried.
            time.sleep(rng.random() * 0.15)
            os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "killed\n"
            assert (manager.latest_step() or 0) >= before
            for step in manager.all_steps():
                restored, _ = manager.restore(target, step)
                harness.assert_equal(jax.tree.map(np.asarray, restored), saver_state(step))
        parent.stdin.close()
    assert manager.latest_step() is not None


def save_until_killed(directory):
    """For each line that comes in, a child that saves one step after the other."""
    # Forked before anything has run, so that a child costs no imports and inherits no threads.
    for _ in sys.stdin:
        child = os.fork()
        if child:
            print(child, flush=True)
            os.waitpid(child, 0)
            print("killed", flush=True)
            continue
        manager = make_manager(pathlib.Path(directory), keep_last=2)
        step = manager.latest_step() or 0
        while True:
            step += 1
            manager.save(step, saver_state(step), {})


if __name__ == "__main__":
    save_until_killed(sys.argv[1])
