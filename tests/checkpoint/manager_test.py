"""Tests of saving and restoring any tree of arrays, without an experiment."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint import harness
from xshard import checkpoint, mesh

Point = collections.namedtuple("Point", ["x", "y"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    weights: list
    point: Point


def make_tree(seed=0):
    rng = np.random.default_rng(seed)
    sharding = mesh.sharding(mesh.make_mesh(), "replica")
    return {
        "model": Model(
            weights=[rng.normal(size=(3, 4)), jnp.asarray(rng.normal(size=5))],
            point=Point(x=np.float32(seed), y=(jnp.bfloat16(1.5), np.bool_(True))),
        ),
        "sharded": jax.device_put(rng.normal(size=(16, 3)).astype("f4"), sharding),
        "key": jax.random.key(seed),
        "nothing": None,
        "empty": np.zeros((0, 2), np.int8),
    }


def open_manager(folder):
    return checkpoint.Manager(folder, checkpoint.Keep(last=2))


def assert_same(actual, wanted):
    """Asserts that trees have the same structure, kinds of leaves, shardings and
    bits.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for path, leaf in checkpoint.flatten(wanted).items():
        restored = checkpoint.flatten(actual)[path]
        assert harness.bits(restored) == harness.bits(leaf), path
        assert isinstance(restored, np.generic) == isinstance(leaf, np.generic)
        assert isinstance(restored, jax.Array) == isinstance(leaf, jax.Array)
        if isinstance(leaf, jax.Array):
            assert restored.sharding == leaf.sharding, path


def test_any_tree_is_restored_as_it_was_saved(tmp_path):
    with open_manager(tmp_path / "own") as manager:
        for step in (1, 2, 3):
            manager.save(step, make_tree(step))
    # What another program restores into has other values.
    restored = open_manager(tmp_path / "own").restore(make_tree())
    assert restored.step == 3 and restored.metadata == {} and restored.data == [None]
    assert_same(restored.state, make_tree(3))
    assert_same(manager.restore(make_tree(), 2).state, make_tree(2))
    assert manager.all_steps() == [2, 3]


def test_a_changed_array_of_numpy_does_not_change_what_is_saved(tmp_path):
    tree = {"a": np.arange(4.0)}
    with open_manager(tmp_path) as manager:
        manager.save(1, tree)
        tree["a"][:] = 0
    restored = manager.restore(tree).state["a"]
    np.testing.assert_array_equal(restored, np.arange(4.0))
    # It is an array of its own.
    restored[0] = 5
    np.testing.assert_array_equal(manager.restore(tree).state["a"], np.arange(4.0))


def test_shapes_are_enough_to_restore(tmp_path):
    tree = make_tree(1)
    with open_manager(tmp_path) as manager:
        manager.save(1, tree)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    message = "'model/weights/0' is float64, which JAX holds only with jax_enable_x64"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        manager.restore(shapes)
    shapes["model"].weights[0] = np.zeros((3, 4))
    restored = checkpoint.flatten(manager.restore(shapes).state)
    for path, leaf in checkpoint.flatten(tree).items():
        assert harness.bits(restored[path]) == harness.bits(leaf)
    assert isinstance(restored.pop("model/weights/0"), np.ndarray)
    for leaf in restored.values():
        assert leaf.devices() == {jax.devices()[0]}


def with_weights(weights):
    tree = make_tree()
    tree["model"] = Model(weights, tree["model"].point)
    return tree


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            with_weights([np.zeros((3, 4), np.float32), jnp.zeros(5)]),
            r"'model/weights/0' is float64\[3, 4\] in it, float32\[3, 4\] here",
        ),
        (
            with_weights([np.zeros((4, 3)), jnp.zeros(5)]),
            r"'model/weights/0' is float64\[3, 4\] in it, float64\[4, 3\] here",
        ),
        (with_weights([np.zeros((3, 4))]), "'model/weights/1' is only in it"),
        (
            {**make_tree(), "more": np.zeros(2)},
            "'more' is missing from it",
        ),
        (
            {**make_tree(), "key": jnp.zeros(2, jnp.uint32)},
            "'key' is .*threefry.* in it, uint32",
        ),
    ],
)
def test_another_tree_is_refused_by_the_names_of_its_arrays(tmp_path, target, message):
    with open_manager(tmp_path) as manager:
        manager.save(1, make_tree())
    with pytest.raises(checkpoint.CheckpointError, match=message):
        manager.restore(target)


def test_a_folder_without_checkpoints_says_what_is_there(tmp_path):
    def message(folder):
        with pytest.raises(checkpoint.CheckpointError) as error:
            open_manager(folder).restore({"a": np.zeros(2)})
        return str(error.value)

    beginning = f"There is no checkpoint in {tmp_path}"
    assert message(tmp_path) == f"{beginning}; steps there: none; it is empty."
    assert message(tmp_path / "none").endswith("none; there is no such folder.")
    (tmp_path / "notes.txt").write_text("mine")
    assert message(tmp_path).endswith("none; it holds notes.txt.")
    assert message(tmp_path / "notes.txt").startswith("Not a directory (")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint of step 7 in"):
        open_manager(tmp_path).restore({"a": np.zeros(2)}, 7)


def test_a_file_in_place_of_the_folder_is_named_by_a_save(tmp_path):
    (tmp_path / "file").write_text("mine")
    manager = open_manager(tmp_path / "file")
    manager.save(1, {"a": np.zeros(2)})
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(f"{tmp_path}/file")):
        manager.wait()


def test_damage_is_named_and_the_step_before_is_restored(tmp_path, caplog):
    tree = {"a": np.arange(1000.0)}
    with open_manager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"a": tree["a"] + step})
    (newest,) = tmp_path.glob("step_00000002.*")
    for file in newest.rglob("d/*"):
        harness.damage("flipped", file)
    restored = manager.restore(tree)
    assert restored.step == 1 and "DAMAGED CHECKPOINT" in caplog.text
    np.testing.assert_array_equal(restored.state["a"], tree["a"] + 1)
    with pytest.raises(checkpoint.CheckpointError, match="damaged: .*step_00000002"):
        open_manager(tmp_path).restore(tree, 2)


def test_what_is_no_array_is_refused_by_name(tmp_path):
    manager = open_manager(tmp_path)
    for leaf in (3, 0.5, "text", object()):
        with pytest.raises(checkpoint.CheckpointError, match="'a/0' is .* an array"):
            manager.save(1, {"a": [leaf]})
    with pytest.raises(checkpoint.CheckpointError, match="holds no arrays"):
        manager.save(1, {})
    manager.close()


def test_the_end_of_a_context_waits_and_raises_the_error_of_a_save(tmp_path):
    (tmp_path / "file").write_text("")
    refused = pytest.raises(checkpoint.CheckpointError, match="Step 1 could not be")
    with refused, open_manager(tmp_path / "file") as manager:
        manager.save(1, {"a": np.zeros(2)})
    # The folder is free for the next one.
    for step in (1, 2):
        with open_manager(tmp_path / "folder") as manager:
            manager.save(step, {"a": np.zeros(2)})
    assert manager.all_steps() == [1, 2]


def test_what_precedes_a_step_that_counts_is_done_before(tmp_path):
    manager = harness.make_manager(tmp_path)
    seen = []
    note = lambda: seen.append([*tmp_path.glob("*/COMMIT")])
    manager.save(1, {"x": np.zeros(1)}, {}, before_commit=note)
    manager.close()
    assert seen == [[]] and manager.all_steps() == [1]
