"""Tests of saving in the background: when the caller waits, and how failures are
raised.
"""

import concurrent.futures
import functools
import pathlib
import signal
import subprocess
import sys
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.harness import FOREVER, environment, make_manager, make_tree
from tests.optimizers import harness
from xshard import checkpoint, mesh
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import host_copy, leaves, progress, saver, writer


@pytest.fixture
def release_writes(monkeypatch):
    """Returns an event; the arrays that a save has copied are not written until it is
    set.
    """
    release = threading.Event()
    original = writer.write_part

    def write_part(*args):
        release.wait()
        return original(*args)

    monkeypatch.setattr(writer, "write_part", write_part)
    yield release
    release.set()


def test_a_step_may_donate_the_arrays_while_they_are_written(tmp_path, release_writes):
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    place = mesh.sharding(mesh.make_mesh(), "replica")
    state = {"large": jnp.arange(1e6), "small": jnp.arange(5.0), "n": jnp.int32(3)}
    state["sharded"] = jax.device_put(jnp.arange(8e5), place)
    state["everywhere"] = jax.device_put(jnp.arange(8e5), mesh.sharding(place.mesh))
    wanted = jax.tree.map(lambda x: np.array(x), state)
    manager = make_manager(tmp_path)
    manager.save(1, state, {})
    for _ in range(3):
        state = jax.block_until_ready(step(state))
    release_writes.set()
    manager.wait()
    target = jax.tree.map(jnp.asarray, wanted)
    harness.assert_equal(manager.restore(target).state, wanted)
    assert float(state["n"]) == 6


def test_numpy_arrays_may_change_while_they_are_written(tmp_path, release_writes):
    array = np.arange(5.0, dtype=np.float32)
    manager = make_manager(tmp_path)
    manager.save(1, {"a": array}, {})
    array[:] = -1
    release_writes.set()
    manager.wait()
    restored = manager.restore({"a": jnp.zeros(5)}).state["a"]
    np.testing.assert_array_equal(restored, np.arange(5.0))


def frames_of(thread):
    """Lists the frames in which a thread is now."""
    return [frame for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]


def test_a_save_goes_on_after_ctrl_c_interrupted_a_wait_for_it(
    tmp_path, release_writes
):
    manager = make_manager(tmp_path)
    manager.save(1, {"a": jnp.zeros(5)}, {})
    (thread,) = [t for t in threading.enumerate() if t.name == "checkpoint"]
    main = threading.main_thread().ident
    interrupted = threading.Event()

    def interrupt():
        # The signal arrives while `manager.wait` is in a function of `threading`, which
        # waits for a lock.
        wanted = {manager.wait.__code__.co_filename, threading.__file__}
        while not wanted <= {frame.f_code.co_filename for frame in frames_of(main)}:
            pass
        # Python may look for signals just before it waits for the lock, and then sees
        # this one only when another interrupts the wait.
        while not interrupted.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            interrupted.wait(0.1)

    def raise_once(*args):
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    # A shell starts a job in the background with the signal ignored.
    previous = signal.signal(signal.SIGINT, raise_once)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        manager.wait()
    signal.signal(signal.SIGINT, previous)
    # An exit of the program waits for the thread as long as it counts as alive.
    assert thread.is_alive()
    release_writes.set()
    manager.wait()
    assert manager.all_steps() == [1]


def wait_until_ended(manager):
    """Waits for the save under way, and leaves its error to the manager."""
    concurrent.futures.wait([manager._saving.end])


def test_a_failed_save_is_raised_and_is_not_the_latest_step(tmp_path, monkeypatch):
    manager, tree = make_manager(tmp_path), make_tree()
    manager.save(1, tree, {})
    manager.wait()
    with monkeypatch.context() as patch:
        patch.setattr(
            saver,
            "_checksums",
            lambda *args: (_ for _ in ()).throw(OSError(28, "No space")),
        )
        manager.save(2, tree, {})
        wait_until_ended(manager)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"Step 2 could not be saved in .*No space"
    ):
        manager.check()
    # The error is raised only once.
    manager.check()
    assert manager.all_steps() == [1] and len(list(tmp_path.glob("step_*"))) == 1
    manager.save(2, tree, {})
    manager.wait()
    assert manager.latest_step() == 2


def test_the_next_save_raises_a_failure_and_still_saves_its_own_step(
    tmp_path, monkeypatch
):
    manager, tree = make_manager(tmp_path), {"a": jnp.ones(3)}
    with monkeypatch.context() as patch:
        patch.setattr(saver, "_merge", lambda *args: 1 / 0)
        manager.save(1, tree, {})
        wait_until_ended(manager)
    with pytest.raises(checkpoint.CheckpointError, match="Step 1 could not be saved"):
        manager.save(2, tree, {})
    manager.wait()
    assert manager.all_steps() == [2]


class Series:
    """What has an array's attributes, and another order of rows."""

    ndim, shape, dtype = 1, (3,), np.dtype(np.float32)

    def __array__(self, dtype=None, copy=None):
        return np.zeros(3, np.float32)


@pytest.mark.parametrize(
    "state,extra,match",
    [
        ({}, {}, "holds no arrays"),
        ({"a": {"b": 3}}, {}, "'a/b' is 3, of type int; make it an array"),
        ({"a": np.array(["x"])}, {}, "'a' is of type <U1, which zarr cannot hold"),
        ({"a": np.array([None])}, {}, "'a' is of type object"),
        ({"a": jnp.zeros(3, jnp.uint4)}, {}, "'a' is of type uint4"),
        (
            {"a": jnp.zeros(3)},
            {"metadata": {"x": jnp}},
            "metadata of step 1 must be JSON-serializable",
        ),
        ({"a": jnp.zeros(3)}, {"data": {1, 2}}, "data of step 1 must be"),
        ({"a": np.ma.array([1.0], mask=[True])}, {}, "(?s)'a' .* of type MaskedArray"),
        ({"a": np.zeros((2, 2)).view(np.matrix)}, {}, "(?s)'a' .* of type matrix"),
        ({"a": Series()}, {}, r"'a' .* of type Series; .* np.asarray\("),
        ({"a\ud800": jnp.zeros(3)}, {}, r"path 'a\\ud800' is no text"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path, state, extra, match):
    manager = make_manager(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match=match):
        manager.save(1, state, **{"metadata": {}, **extra})
    manager.close()
    assert manager.all_steps() == []


@pytest.mark.parametrize(
    "step", [True, 1.0, "5", None, -1, jnp.int32(5), np.bool_(True), 1 << 63]
)
def test_a_step_that_is_no_number_of_one_is_refused_at_once(tmp_path, step):
    manager = make_manager(tmp_path)
    refused = pytest.raises(
        checkpoint.CheckpointError, match=rf"of type {type(step).__name__}.*an integer"
    )
    with refused:
        manager.save(step, {"a": jnp.zeros(3)}, {})
    manager.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [0, np.int64(7), np.uint8(7), (1 << 63) - 1])
def test_a_step_of_any_integer_type_is_saved(tmp_path, step):
    manager = make_manager(tmp_path)
    manager.save(step, {"a": jnp.zeros(3)}, {})
    manager.wait()
    assert manager.all_steps() == [int(step)]
    assert manager.restore({"a": jnp.zeros(3)}).step == int(step)
    manager.close()


DEEP = functools.reduce(lambda inner, _: [inner], range(199), 1)
CYCLE = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"metadata": {1: "a"}}, "the key 1 of {1: 'a'}"),
        ({"metadata": {"x": {True: 1}}}, "the key True of {True: 1}"),
        ({"metadata": {1: "a", "1": "b"}}, "the key 1"),
        ({"metadata": {"x": {"not finite": "nan"}}}, "'nan'} has the form"),
        ({"metadata": {"not finite": "inf"}}, "'inf'} has the form"),
        ({"metadata": {"x": "\ud83d\ude00"}}, r"'\\ud83d\\ude00' has halves"),
        ({"metadata": {"\ud83d\ude00": 1}}, r"'\\ud83d\\ude00' has halves"),
        ({"metadata": {"x": np.float32(1)}}, r"float32\(1.0\) is of type float32"),
        ({"metadata": {"x": DEEP}}, "nested too deeply"),
        ({"metadata": {"x": CYCLE}}, "nested too deeply"),
        ({"metadata": [1]}, r"Expected `object`, got `array`: \[1\]"),
        ({"data": {(1, 2): 3}}, r"the key \(1, 2\)"),
        (
            {"metrics": {"error": "low"}},
            "got `str` - at .*: {'error': 'low'}",
        ),
        (
            {"metrics": {"error": True}},
            "got `bool` - at .*: {'error': True}",
        ),
    ],
    ids=lambda x: str(x)[:40].encode("ascii", "replace").decode(),
)
def test_what_json_would_change_is_refused_at_once(tmp_path, extra, match):
    manager = make_manager(tmp_path)
    kind = next(iter(extra))
    with pytest.raises(
        checkpoint.CheckpointError, match=f"(?s)The {kind} of step 1 .*{match}"
    ):
        manager.save(1, {"a": jnp.zeros(3)}, **extra)
    manager.close()
    assert list(tmp_path.iterdir()) == []


def test_metadata_of_every_kind_are_given_back(tmp_path):
    metadata = {
        "a": [1, -(10**30), 0.1, True, None, ""],
        "not finite": ["nan"],
        "é\n": {"not finite": 1, "x": {}, "\udc80": "\ud83d \N{GRINNING FACE}"},
        "infinite": [float("inf"), {"x": -float("inf")}],
    }
    manager = make_manager(tmp_path)
    manager.save(1, {"a": jnp.zeros(3)}, metadata, data=DEEP[0])
    manager.wait()
    restored = manager.restore({"a": jnp.zeros(3)})
    assert restored.metadata == metadata
    assert restored.data == [DEEP[0]]
    manager.close()


@pytest.mark.parametrize("place", ["folder", "file/folder"])
def test_a_program_that_exits_without_waiting_saves_or_reports_a_failure(
    tmp_path, place
):
    (tmp_path / "file").write_text("")
    program = f"""
import jax.numpy as jnp
from xshard import checkpoint
manager = checkpoint.Manager({str(tmp_path / place)!r}, checkpoint.Keep(1))
manager.save(1, {{"a": jnp.ones(3)}}, {{}})
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env=environment(),
        capture_output=True,
        text=True,
    )
    if place == "folder":
        assert make_manager(tmp_path / place).all_steps() == [1]
    else:
        assert "NOT SAVED: Step 1 could not be saved" in done.stderr


def test_deleted_arrays_raise_in_the_caller_and_the_next_save_works(tmp_path):
    manager = make_manager(tmp_path)
    for step in (1, 2):
        arrays = {"a": jnp.ones(3), "b": jnp.ones(3)}
        if step == 2:
            arrays["b"].delete()
            with pytest.raises(RuntimeError, match="deleted"):
                manager.save(step, arrays, {})
            with pytest.raises(
                checkpoint.CheckpointError, match="copying to the host failed"
            ):
                manager.wait()
        else:
            manager.save(step, arrays, {})
    manager.save(3, {"a": jnp.ones(3), "b": jnp.ones(3)}, {})
    manager.wait()
    assert manager.all_steps() == [1, 3]


def test_the_caller_waits_while_the_budget_is_exhausted(tmp_path, monkeypatch):
    tree = {str(i): jnp.full(1000, i, jnp.float32) for i in range(20)}
    peak = [0]
    original = host_copy.Budget.take

    def take(self, nbytes):
        original(self, nbytes)
        peak[0] = max(peak[0], self._in_use)

    monkeypatch.setattr(host_copy.Budget, "take", take)
    for limit in (9000, 1, 10**6):
        peak[0] = 0
        manager = make_manager(tmp_path / str(limit), budget_bytes=limit)
        manager.save(1, tree, {})
        manager.close()
        # An array that is larger than the budget is copied alone.
        assert peak[0] == {9000: 8000, 1: 4000, 10**6: 80000}[limit]
        harness.assert_equal(
            make_manager(tmp_path / str(limit)).restore(tree).state, tree
        )


def test_a_failed_write_releases_a_caller_that_waits_for_the_budget(
    tmp_path, monkeypatch
):
    def write_part(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_part", write_part)
    manager = make_manager(tmp_path, budget_bytes=1)
    tree = {str(i): jnp.ones(3) for i in range(20)}
    caller = threading.Thread(target=manager.save, args=(1, tree, {}), daemon=True)
    caller.start()
    caller.join(FOREVER)
    assert not caller.is_alive()
    with pytest.raises(checkpoint.CheckpointError, match="No space left"):
        manager.wait()


def test_only_the_chunk_is_copied_from_a_device_with_its_own_memory():
    # `start_copy` takes another path for arrays on CPU, so the function is called
    # directly.
    array = jnp.arange(24.0).reshape(4, 6)
    whole = leaves.Chunk("a", (0, 0), 0, (0, 0), (4, 6))
    part = leaves.Chunk("a", (1, 0), 0, (2, 0), (2, 6))
    np.testing.assert_array_equal(host_copy.start_device_copy(array, whole)(), array)
    np.testing.assert_array_equal(host_copy.start_device_copy(array, part)(), array[2:])


def test_a_save_from_devices_with_their_own_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(host_copy, "start_copy", host_copy.start_device_copy)
    monkeypatch.setattr(arrays_lib, "CHUNK_BYTES", 256)
    devices = mesh.make_mesh([[0, 1, 2, 3], [4, 5, 6, 7]])
    by_replica = mesh.sharding(devices, "replica")
    by_both = mesh.sharding(devices, "group", "replica")
    tree = {
        "whole": jnp.arange(300.0).reshape(15, 20),
        "sharded": jax.device_put(jnp.ones((8, 30)), by_replica),
        "both": jax.device_put(jnp.arange(640.0).reshape(8, 80), by_both),
        **make_tree(),
    }
    # The budget holds only a few chunks, so the copies start in several rounds.
    manager = make_manager(tmp_path, budget_bytes=1000)
    manager.save(1, tree, {})
    manager.close()
    harness.assert_equal(make_manager(tmp_path).restore(tree).state, tree)


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_saves(tmp_path):
    # The state has 5 MB: if each save kept it, 100 saves would keep half a gigabyte.
    state = {f"large{i}": jnp.full(1 << 18, i, jnp.float32) for i in range(4)}
    state |= {f"small{i}": jnp.full(1000, i, jnp.float32) for i in range(250)}
    manager = make_manager(tmp_path, keep_last=1)
    sizes = []
    for number in range(100):
        manager.save(number, state, {})
        manager.wait()
        sizes.append(resident_bytes())
    # Allocators keep pages, so the limit is ten states above the peak of the first 20
    # saves.
    assert max(sizes[20:]) - max(sizes[:20]) < 50e6


def test_the_progress_of_a_long_save_is_reported():
    messages, now = [], [0.0]
    reporter = progress.ProgressReporter(
        "saving step 4", 4 * 10**9, messages.append, clock=lambda: now[0]
    )
    for seconds in (3.0, 9.0, 10.0, 12.0, 20.0):
        now[0] = seconds
        reporter.add(10**9 // 2)
    assert messages == [
        "saving step 4: 1.50 of 4.00 GB, 150 MB/s, 17 s left",
        "saving step 4: 2.50 of 4.00 GB, 125 MB/s, 12 s left",
    ]
