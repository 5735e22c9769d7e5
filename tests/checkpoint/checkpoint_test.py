"""Tests that a checkpoint is restored bit by bit or not at all."""

import errno
import json
import random
import resource
import shutil
import signal
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from tests import forks
from tests.checkpoint.harness import (
    DTYPES,
    FOREVER,
    damage,
    environment,
    make_manager,
    make_tree,
    save,
    save_until_killed,
    saved_state,
)
from tests.optimizers import harness
from xshard import checkpoint, errors, mesh
from xshard.checkpoint import __main__ as tool
from xshard.checkpoint import array_reader, reader
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import store as store_lib


def files_of(manager, step):
    (directory,) = manager.store.path.glob(f"step_{step:08d}.*")
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_every_type_is_restored_bit_by_bit(tmp_path):
    manager, tree = make_manager(tmp_path / "new" / "dir"), make_tree()
    assert manager.latest_step() is None and manager.all_steps() == []
    save(manager, 7, tree, {"note": [1, "x"]})
    restored = manager.restore(tree)
    harness.assert_equal(restored.state, tree)
    assert (
        restored.metadata == {"note": [1, "x"]}
        and restored.step == manager.latest_step() == 7
    )
    harness.assert_equal(
        make_manager(tmp_path / "new" / "dir").restore(tree, step=7)[0], tree
    )


# Together with DTYPES these are all types that JAX has without 64-bit mode and that
# zarr can hold.
MORE_TYPES = (
    "int4", "int2", "int16", "uint16", "float4_e2m1fn", "float8_e3m4", "float8_e8m0fnu",
    "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip


@pytest.mark.parametrize("large", [1, 10**9])
@pytest.mark.parametrize("shape", [(7, 9, 2), (100,), (1, 1), (3, 0), ()])
def test_every_type_and_shape_is_restored_and_readable_by_tensorstore(
    tmp_path, monkeypatch, large, shape
):
    monkeypatch.setattr(arrays_lib, "LARGE_BYTES", large)
    monkeypatch.setattr(arrays_lib, "CHUNK_BYTES", 64)
    rng = np.random.default_rng(0)
    tree = {
        name: jnp.asarray(rng.integers(0, 2, size=shape)).astype(name)
        for name in (*DTYPES, *MORE_TYPES)
    }
    manager = make_manager(tmp_path)
    save(manager, 1, tree)
    harness.assert_equal(manager.restore(tree).state, tree)
    (folder,) = tmp_path.glob("step_*")
    for name, array in tree.items():
        base = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
        opened = ts.open({"driver": "zarr3", "kvstore": base}, open=True).result()
        assert opened.dtype.name == name and opened.shape == shape
        assert opened.read().result().tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize("size", [(), 3, (300_000, 2)])
@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">u2", "<f4"])
def test_the_values_of_any_byte_order_are_restored(tmp_path, size, dtype):
    values = np.full(size, 1, dtype)
    mapped = np.memmap(tmp_path / "values", dtype, "w+", shape=values.shape)
    mapped[...] = values
    tree = {"values": values, "transposed": values.T, "mapped": mapped}
    manager = make_manager(tmp_path / "checkpoints")
    save(manager, 1, tree)
    restored = manager.restore(tree).state
    for name, array in restored.items():
        assert array.dtype.isnative and array.dtype == values.dtype.newbyteorder("=")
        np.testing.assert_array_equal(array, tree[name])


@pytest.mark.parametrize("size", [3, arrays_lib.LARGE_BYTES])
def test_a_state_that_is_a_single_array_is_restored(tmp_path, size):
    array = jnp.arange(size, dtype=jnp.int32)
    manager = make_manager(tmp_path)
    save(manager, 1, array)
    harness.assert_equal(manager.restore(array).state, array)


def test_an_array_is_restored_to_other_devices_and_shardings(tmp_path):
    eight, four = mesh.make_mesh(), mesh.make_mesh(devices=jax.devices()[:4])
    groups = mesh.make_mesh([[0, 1, 2, 3], [4, 5, 6, 7]])
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    manager = make_manager(tmp_path)
    save(manager, 1, {"w": jax.device_put(value, mesh.sharding(eight, "replica"))})
    for place in (
        mesh.sharding(four),
        mesh.sharding(four, None, "replica"),
        mesh.sharding(groups, "group", "replica"),
    ):
        target = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=place)}
        restored = manager.restore(target)[0]["w"]
        np.testing.assert_array_equal(restored, value)
        assert restored.sharding == place


@pytest.mark.parametrize(
    "change,match",
    [
        (
            lambda tree: tree["names"].pop("empty"),
            "'names/empty' is only in it",
        ),
        (
            lambda tree: tree["names"].update(new=jnp.ones(2)),
            "'names/new' is missing from it",
        ),
        (
            lambda tree: tree["names"].update(empty=jnp.ones(2)),
            r"'names/empty' is float32\[0, 4\] in it, float32\[2\] here",
        ),
        (
            lambda tree: tree["names"].update(scalar=jnp.int32(1)),
            r"float32\[\] in it, int32\[\] here",
        ),
        (
            lambda tree: tree.update(
                keys=[jax.random.key(0, impl="rbg"), tree["keys"][1]]
            ),
            "fry2x32.* in it, rbg",
        ),
    ],
)
def test_a_target_that_differs_is_refused_and_the_leaf_is_named(
    tmp_path, change, match
):
    manager = make_manager(tmp_path)
    save(manager, 1, make_tree())
    target = make_tree()
    change(target)
    with pytest.raises(checkpoint.CheckpointError, match=match):
        manager.restore(target)


def test_only_the_newest_are_kept_and_a_saved_step_is_not_overwritten(tmp_path):
    manager = make_manager(tmp_path, keep_last=2)
    for step in (1, 2, 3, 30):
        save(manager, step, {"a": jnp.full(3, step)})
    save(manager, 30, {"a": jnp.full(3, -1)})
    assert manager.all_steps() == [3, 30] and len(list(tmp_path.glob("step_*"))) == 2
    target = {"a": jnp.zeros(3, jnp.int32)}
    assert (
        manager.restore(target)[0]["a"][0] == 30
        and manager.restore(target, 3)[0]["a"][0] == 3
    )
    with pytest.raises(
        checkpoint.CheckpointError, match=r"no checkpoint of step 4 .* \[3, 30\]"
    ):
        manager.restore(target, 4)


def test_restored_arrays_do_not_stay_in_host_memory(tmp_path, monkeypatch):
    tree = {str(i): jnp.full(100, i, jnp.float32) for i in range(20)}
    manager = make_manager(tmp_path, budget_bytes=1)
    save(manager, 1, tree)
    allocate, to_device = array_reader._aligned, jax.device_put
    references, alive = [], []

    def tracked_aligned(*args):
        alive.append(sum(reference() is not None for reference in references))
        array = allocate(*args)
        references.append(weakref.ref(array))
        return array

    # Copies, as on devices with their own memory: an array on CPU may share the host's
    # memory.
    put_copy = lambda values, devices: to_device(
        jax.tree.map(np.array, values), devices
    )
    monkeypatch.setattr(array_reader, "_aligned", tracked_aligned)
    monkeypatch.setattr(reader, "_PLACED_AT_ONCE", 2)
    monkeypatch.setattr(jax, "device_put", put_copy)
    harness.assert_equal(manager.restore(tree).state, tree)
    # The two arrays that are placed together, and the array that was read last.
    assert len(alive) == 20 and max(alive) <= 3


def metrics_of_first(manager):
    """Returns the metrics of the first checkpoint in a manager's folder."""
    return checkpoint.read_catalog(manager.store).entries[0].metrics


def test_metrics_added_after_a_save_count_for_the_best(tmp_path, monkeypatch):
    keep = checkpoint.Keep(1, best=1, metric="error", mode="min")
    messages = []
    manager = checkpoint.Manager(tmp_path / "run", keep, log=messages.append)
    tree = {"a": jnp.arange(3.0)}
    save(manager, 1, tree)
    manager.add_metrics(1, {"error": 0.5})
    assert metrics_of_first(manager) == {"error": 0.5}
    save(manager, 2, tree)
    assert manager.all_steps() == [1, 2]
    (path,) = manager.store.path.glob("step_00000001.*/METRICS")
    # Metrics that cannot be read now may still exist, so no checkpoint is deleted.
    intact, read = path.read_bytes(), store_lib.Disk.read

    def unavailable(self, name):
        if name.endswith("METRICS"):
            raise checkpoint.CheckpointError("UNAVAILABLE: not now")
        return read(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(store_lib.Disk, "read", unavailable)
        save(manager, 3, tree)
    assert manager.all_steps() == [1, 2, 3] and "METRICS cannot be read" in messages[-1]
    # Damage to METRICS is detected and loses only the metrics. The next `add_metrics`
    # repairs it.
    path.write_bytes(intact[:-3])
    assert metrics_of_first(manager) == {} and manager.restore(tree, 1).step == 1
    assert tool.main(["verify", str(manager.store.path), "1"]) == 1
    manager.add_metrics(1, {"error": 0.25})
    assert metrics_of_first(manager) == {"error": 0.25}
    assert tool.main(["verify", str(manager.store.path), "1"]) == 0
    manager.close()


def test_attempts_without_commit_do_not_count_and_are_deleted(tmp_path):
    manager, tree = make_manager(tmp_path), {"a": jnp.ones(3)}
    with pytest.raises(
        checkpoint.CheckpointError,
        match="There is no checkpoint in .* steps there: none",
    ):
        manager.restore(tree)
    save(manager, 1, tree)
    (committed,) = tmp_path.glob("step_*")
    dead = tmp_path / "step_00000002.0123abcd"
    shutil.copytree(committed, dead)
    (dead / "COMMIT").unlink()
    assert manager.latest_step() == 1
    save(manager, 3, tree)
    assert not dead.exists() and manager.all_steps() == [1, 3]


@pytest.mark.parametrize("at", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("kind", ["flipped", "zeroed", "truncated", "deleted"])
def test_damage_to_any_file_is_detected_and_the_older_step_restored(
    tmp_path, kind, at, caplog
):
    tree = {"big": jnp.arange(500_000.0), "middle": jnp.arange(30_000.0), **make_tree()}
    newer = {**tree, "big": -tree["big"], "middle": -tree["middle"]}
    manager = make_manager(tmp_path / "run")
    save(manager, 1, tree)
    save(manager, 2, newer)
    detected = []
    for path in files_of(manager, 2):
        intact = path.read_bytes()
        caplog.clear()
        damage(kind, path, at)
        restored, *_ = make_manager(manager.store.path).restore(tree)
        reported = (
            "DAMAGED CHECKPOINT" in caplog.text and "step_00000002" in caplog.text
        )
        if reported or (kind == "deleted" and path.name == "COMMIT"):
            # A checkpoint without COMMIT does not count, so its damage is not reported.
            harness.assert_equal(restored, tree)
            detected.append(
                path.name if path.parent.name != "d" else path.parent.parent.name
            )
        else:
            # Only damage to a process's own index stays undetected: it is not read
            # after the merge.
            assert is_index(path, intact), path
            harness.assert_equal(restored, newer)
        path.write_bytes(intact)
    wanted = {"COMMIT", "meta.json", "manifest.ocdbt", "p0", manager_folder(manager)}
    assert set(detected) == wanted


def manager_folder(manager):
    (folder,) = manager.store.path.glob("step_00000002.*")
    return folder.name


def is_index(path, content):
    """Returns whether a file holds only process 0's own index, judged by its folder and
    its size.
    """
    own = "p0" in (path.parent.name, path.parent.parent.name)
    return own and len(content) < 30_000


def test_a_damaged_checkpoint_is_marked_and_never_deleted(tmp_path, caplog):
    manager, tree = make_manager(tmp_path, keep_last=2), {"a": jnp.arange(3.0)}
    for step in (1, 2):
        save(manager, step, tree)
    (path,) = tmp_path.glob("step_00000002.*/meta.json")
    damage("flipped", path)
    manager.restore(tree)
    assert "meta.json is not what was written" in caplog.text
    # Another manager sees the mark. The damaged checkpoint does not count toward
    # `keep_last`, and nothing deletes it.
    manager.close()
    other = make_manager(tmp_path, keep_last=2)
    assert other.all_steps() == [1]
    for step in (3, 4, 5):
        save(other, step, tree)
    assert other.all_steps() == [4, 5]
    note = json.loads((path.parent / "DAMAGED").read_text())
    assert "meta.json is not what was written" in note["damage"] and path.exists()
    other.close()


def test_a_damaged_step_is_saved_again_and_does_not_count_as_kept(tmp_path):
    manager, tree = make_manager(tmp_path, keep_last=2), {"a": jnp.arange(3.0)}
    for step in (1, 2):
        save(manager, step, tree)
    (path,) = tmp_path.glob("step_00000002.*/meta.json")
    damage("flipped", path)
    manager.restore(tree)
    assert manager.all_steps() == [1]
    save(manager, 2, tree)
    assert manager.all_steps() == [1, 2]
    harness.assert_equal(manager.restore(tree, 2)[0], tree)


def test_an_error_reports_that_all_checkpoints_are_damaged(tmp_path):
    manager, tree = make_manager(tmp_path), {"a": jnp.ones(3)}
    save(manager, 1, tree)
    for path in files_of(manager, 1):
        if path.name == "meta.json":
            damage("flipped", path)
    with pytest.raises(
        checkpoint.CheckpointError, match="All checkpoints in .* damaged.*meta.json"
    ):
        manager.restore(tree)


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    manager, tree = make_manager(tmp_path), {"a": jnp.ones(300_000)}
    save(manager, 1, tree)
    # A limit on the size of files stands in for a full disk.
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(
            checkpoint.CheckpointError,
            match="Step 2 could not be saved in .*File too large",
        ):
            save(manager, 2, tree)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert manager.all_steps() == [1] and len(list(tmp_path.glob("step_*"))) == 1
    harness.assert_equal(manager.restore(tree)[0], tree)
    save(manager, 2, tree)
    assert manager.latest_step() == 2


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        checkpoint.CheckpointError,
        match="could not be saved .*cannot be written: File exists",
    ):
        save(make_manager(tmp_path / "file"), 1, {"a": jnp.ones(3)})


def test_an_action_on_process_0_keeps_the_message_of_an_error_and_the_type_of_a_bug(
    tmp_path,
):
    on_process_0 = make_manager(tmp_path).on_process_0

    def fail(e):
        raise e

    with pytest.raises(checkpoint.CheckpointError, match=r"^a=1 must be 2\.$"):
        on_process_0(lambda: fail(errors.UserError("a=1 must be 2.")))
    full = OSError(errno.ENOSPC, "No space left", "file")
    with pytest.raises(checkpoint.CheckpointError, match=r"^No space left \(file\)$"):
        on_process_0(lambda: fail(full))
    # As a CheckpointError, this would be printed as a user's mistake, without its
    # traceback.
    with pytest.raises(KeyError):
        on_process_0(lambda: fail(KeyError("step")))


@pytest.mark.parametrize("keep_last", [0, -1, 1.5, True])
def test_keep_last_must_be_a_positive_integer(tmp_path, keep_last):
    with pytest.raises(
        checkpoint.CheckpointError, match=r"checkpoint.keep_last=.* at least 1"
    ):
        make_manager(tmp_path, keep_last=keep_last)


def test_paths_that_collide_are_refused(tmp_path):
    tree = {"a": {"b/c": jnp.ones(1)}, "a/b": {"c": jnp.ones(1)}}
    with pytest.raises(checkpoint.CheckpointError, match="Two leaves .* 'a/b/c'"):
        save(make_manager(tmp_path), 1, tree)


def test_a_kill_at_any_instant_leaves_no_bad_checkpoint_that_counts(tmp_path):
    rng = random.Random(0)
    manager = make_manager(tmp_path, keep_last=2)
    target = {k: jnp.asarray(v) for k, v in saved_state(0).items()}
    for trial in range(30):
        before = manager.latest_step() or 0
        with forks.Process(
            save_until_killed, str(tmp_path), env=environment()
        ) as saver:
            assert saver.stdout.readline() == "begin\n"
            # Even trials may kill the process during its first save; odd trials kill it
            # after at least one save.
            end = time.monotonic() + FOREVER
            while trial % 2 and (manager.latest_step() or 0) == before:
                assert time.monotonic() < end
            time.sleep(rng.random() * 0.05)
            saver.kill()
        assert saver.returncode == -signal.SIGKILL
        assert (manager.latest_step() or 0) >= before
        for step in manager.all_steps():
            restored, *_ = manager.restore(target, step)
            harness.assert_equal(jax.tree.map(np.asarray, restored), saved_state(step))
    assert manager.latest_step() is not None
