"""Tests of `xshard.load`, which loads a run's trained model elsewhere."""

import subprocess
import sys

import haiku as hk
import jax
import numpy as np
import pytest

import xshard
from tests import toy
from xshard import checkpoint, errors, loop

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
BATCH = {"x": np.ones((5, 3), np.float32), "y": np.zeros(5, np.float32)}


def train(directory, **changes):
    config = toy.get_config()
    config.experiment = "tests.toy.Averaged"
    config.checkpoint.keep_last = 10
    config.update_from_flattened_dict({"hidden": 20, "steps": 10, **changes})
    assert loop.run(config.lock(), str(directory), "") == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reduction.shard_update": True, "model_parallel": 2},
        {"group_assignment": HALVES, "reduction.shard_update": True},
    ],
    ids=str,
)
def test_a_loaded_model_predicts_with_the_run_s_parameters(tmp_path, changes):
    train(tmp_path, **changes)
    trained = xshard.load(str(tmp_path))
    assert int(trained.state.step) == 10
    mlp = trained.params
    w = [np.asarray(mlp[f"mlp/~/linear_{i}"]["w"]) for i in (0, 1)]
    b = [np.asarray(mlp[f"mlp/~/linear_{i}"]["b"]) for i in (0, 1)]
    outputs = (
        np.maximum(BATCH["x"] @ w[0] + b[0][..., None, :], 0) @ w[1]
        + b[1][..., None, :]
    )
    # A prediction is the mean over groups. float32 sums of 20 numbers are computed in
    # another order.
    wanted = outputs[..., 0].reshape(-1, 5).mean(axis=0)
    np.testing.assert_allclose(trained.predict(BATCH), wanted, rtol=1e-5, atol=1e-6)


class Noisy(toy.Toy):
    """A network that draws a key whenever it is called, and predicts with one."""

    def forward(self, batch, *, is_training):
        outputs = super().forward(batch, is_training=is_training)
        return outputs + jax.random.normal(hk.next_rng_key(), outputs.shape)

    def samples(self, predict, key):
        return str(predict(BATCH, key)[0])


def test_a_network_that_draws_keys_predicts_with_one(tmp_path):
    config = toy.get_config()
    config.experiment = "tests.trained_test.Noisy"
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    trained = xshard.load(str(tmp_path))
    first, again = (trained.predict(BATCH, jax.random.key(0)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != trained.predict(BATCH, jax.random.key(1)))
    with pytest.raises(errors.UserError, match=r"predict\(batch, key\) gives one"):
        trained.predict(BATCH)


def test_loading_takes_any_checkpoint_and_changes_no_file(tmp_path):
    train(tmp_path)
    assert int(xshard.load(f"{tmp_path}@5").state.step) == 5
    with pytest.raises(checkpoint.CheckpointError, match="7"):
        xshard.load(f"{tmp_path}@7")
    with pytest.raises(xshard.UserError, match="no config.json"):
        xshard.load(str(tmp_path / "elsewhere"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    xshard.load(str(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_script_of_three_lines_predicts_on_one_device(tmp_path):
    train(tmp_path, **{"reduction.shard_update": True})
    script = (
        "import numpy as np, xshard\ntrained = "
        f"xshard.load({str(tmp_path)!r})\nprint(trained.predict({{'x': np.ones((5, 3), "
        "np.float32), 'y': np.zeros(5, np.float32)}))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    alone = np.array(finished.stdout.strip(" []\n").split(), np.float32)
    # The script prints eight digits.
    np.testing.assert_allclose(
        alone, xshard.load(str(tmp_path)).predict(BATCH), rtol=1e-6
    )


def test_each_group_needs_a_device(tmp_path):
    train(tmp_path, group_assignment=HALVES)
    with pytest.raises(xshard.UserError, match="as 2 group"):
        xshard.load(str(tmp_path), jax.devices()[:1])
