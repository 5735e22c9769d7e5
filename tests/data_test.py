"""Batches: which rows, in which order, where."""

import jax
import numpy as np
import pytest

from xshard import data, mesh

DATA = {"x": np.arange(20), "y": np.arange(40).reshape(20, 2)}


def make(the_mesh=None, **kwargs):
    the_mesh = the_mesh or mesh.make_mesh()
    return data.TrainBatches(DATA, the_mesh, **{"batch_size": 8, "seed": 0, **kwargs})


def test_a_batch_is_a_function_of_seed_and_step():
    batches = make()
    forward = [np.asarray(batches(step)["x"]) for step in range(6)]
    backward = [np.asarray(make()(step)["x"]) for step in reversed(range(6))][::-1]
    np.testing.assert_array_equal(forward, backward)
    # Two batches of 8 are an epoch of 20; the rest of 4 is dropped.
    for epoch in range(3):
        assert len(set(np.concatenate(forward[2 * epoch : 2 * epoch + 2]))) == 16
    assert not np.array_equal(forward[0], forward[2])
    assert not np.array_equal(forward[0], np.asarray(make(seed=1)(0)["x"]))


def test_rows_stay_together_and_lie_along_the_replicas():
    batch = make()(3)
    np.testing.assert_array_equal(batch["y"], DATA["y"][np.asarray(batch["x"])])
    assert [shard.data.shape for shard in batch["y"].addressable_shards] == [(1, 2)] * 8


def test_groups_have_orders_of_their_own_and_the_first_is_that_of_a_single_run():
    grouped = make(mesh.make_mesh([[0, 1, 2, 3], [4, 5, 6, 7]]))(0)["x"]
    rows = np.asarray(grouped).reshape(2, 8)
    assert not np.array_equal(*rows)
    np.testing.assert_array_equal(rows[0], make(mesh.make_mesh(devices=jax.devices()[:4]))(0)["x"])


def test_evaluation_takes_each_example_once():
    for the_mesh in (mesh.make_mesh(), mesh.make_mesh([[0, 1, 2, 3], [4, 5, 6, 7]])):
        seen = []
        for batch in data.eval_batches(DATA, the_mesh, 16):
            assert batch["x"].shape == (16,)
            seen += np.asarray(batch["x"])[np.asarray(batch["_mask"])].tolist()
        assert seen == list(range(20))


@pytest.mark.parametrize(
    "kwargs,match",
    [
        (
            {"batch_size": 12},
            "batch_size=12 must be a positive multiple of .*= 8; the nearest: 8 or 16",
        ),
        ({"batch_size": 3}, "the nearest: 8"),
        ({"batch_size": 0}, "batch_size=0 .* the nearest: 8"),
        ({"batch_size": -8}, "batch_size=-8"),
        ({"batch_size": 8, "micro_batches": 2}, "= 16; the nearest: 16"),
        ({"batch_size": 24}, "batch_size=24 must be at most the 20 examples"),
    ],
)
def test_batch_sizes_that_do_not_fit(kwargs, match):
    with pytest.raises(ValueError, match=match):
        make(**kwargs)


def test_other_bad_data():
    with pytest.raises(ValueError, match="eval_batch_size=9 .* replicas = 8; the nearest: 8 or 16"):
        data.eval_batches(DATA, mesh.make_mesh(), 9)
    with pytest.raises(ValueError, match="as many examples"):
        data.num_examples({"x": np.ones(2), "y": np.ones(3)})
    with pytest.raises(ValueError, match="as many examples"):
        data.num_examples({"x": np.ones(0)})
