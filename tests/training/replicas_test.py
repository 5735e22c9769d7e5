"""Tests of state that differs by replica (`PerReplica`) on other numbers of replicas
than it was trained on.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xshard
from tests import rows, toy
from xshard import errors, export, loop, mesh
from xshard import experiment as experiment_lib
from xshard.modes import continuous_eval

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
PAIRS = ((0, 1), (2, 3))


class Counting(toy.Wide):
    """Sums the inputs of each replica. If the config has `reads`, evaluation and
    prediction depend on the sum.
    """

    def init(self, key, batch):
        return {
            "line": super().init(key, batch),
            "seen": xshard.PerReplica(jnp.zeros(2)),
        }

    def train_step(self, state, batch, key):
        line, outcome = super().train_step(state["line"], batch, key)
        seen = state["seen"].value + jnp.sum(batch["x"])
        return {"line": line, "seen": xshard.PerReplica(seen)}, {"line": outcome}

    def _mean(self, state):
        # `pmean` makes the value equal on all replicas. A prediction from values that
        # differ is refused.
        seen = jax.lax.pmean(state["seen"].value, ("slice", "replica"))
        return jnp.sum(seen) * (1.0 if self.config.reads else 0.0)

    def eval_step(self, state, batch, key):
        values = super().eval_step(state["line"], batch, key)
        if self.config.reads:
            values["seen"] = jnp.full(len(batch["y"]), self._mean(state))
        return values

    def predict(self, state, batch):
        outputs = super().predict(state["line"], batch)
        return outputs + self._mean(state) if self.config.reads else outputs


def config(**changes):
    settings = toy.get_config()
    settings.experiment = "tests.training.replicas_test.Counting"
    settings.reads = False
    settings.update_from_flattened_dict({"steps": 4, **changes})
    return settings.lock()


@pytest.fixture
def use_devices(monkeypatch):
    """Returns a function that limits runs to a number of devices."""

    def take(count):
        devices = jax.devices()[:count]
        limited_mesh = lambda config: mesh.make_mesh(
            config.group_assignment or None, devices=devices
        )
        monkeypatch.setattr(experiment_lib, "mesh_of", limited_mesh)

    return take


def files(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.mark.sample(0.4)
def test_a_run_on_another_number_of_replicas_is_refused_before_it_begins(
    tmp_path, use_devices
):
    assert loop.run(config(), str(tmp_path), "") == 0
    before = files(tmp_path)
    use_devices(4)
    with pytest.raises(errors.UserError) as e:
        loop.run(config(steps=6), str(tmp_path), "")
    text = str(e.value)
    assert (
        "'seen/value' differs by replica" in text
        and "of 8 replicas per group, and this run has 4" in text
    )
    assert files(tmp_path) == before
    use_devices(8)
    assert loop.run(config(steps=6), str(tmp_path), "") == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("groups", [(), HALVES])
def test_load_keeps_the_values_of_all_replicas(tmp_path, groups):
    changes = {"group_assignment": groups, "reduction.shard_update": True}
    assert loop.run(config(**changes), str(tmp_path), "") == 0
    run = loop.Run(config(**changes), str(tmp_path))
    wanted = run.checkpoints.manager.restore(run.target).state.experiment["seen"].value
    trained = xshard.load(str(tmp_path))
    seen = trained.state.experiment["seen"].value
    assert seen.shape == ((2, 4, 2) if groups else (8, 2))
    np.testing.assert_array_equal(seen, wanted)
    assert trained.params["line"]["mlp/~/linear_0"]["w"].ndim == (3 if groups else 2)
    # A prediction that does not read the state accepts any number of rows.
    for count in (1, 5):
        batch = {"x": np.ones((count, 3), np.float32), "y": np.zeros(count, np.float32)}
        assert trained.predict(batch).shape == (count,)


def test_a_method_that_reads_the_state_on_other_replicas_is_refused(
    tmp_path, use_devices
):
    assert loop.run(config(reads=True), str(tmp_path), "") == 0
    trained = xshard.load(str(tmp_path))
    batch = {"x": np.ones((5, 3), np.float32), "y": np.zeros(5, np.float32)}
    message = (
        r"Counting\.{} \(.* reads the state 'seen/value'.*\n?.*values of 8 replicas "
        r"per group, and this mesh has {}"
    )
    with pytest.raises(errors.UserError, match=message.format("predict", 1)):
        trained.predict(batch)
    use_devices(4)
    with pytest.raises(errors.UserError, match=message.format("eval_step", 4)):
        continuous_eval.run(config(reads=True), str(tmp_path), "", None)
    # On the original number of replicas the evaluation returns the same value.
    use_devices(8)
    assert continuous_eval.run(config(reads=True), str(tmp_path), "", None) == 0
    assert (
        rows.read(tmp_path / "eval")[-1]["eval/seen"]
        == rows.results(tmp_path)["eval"]["seen"]
    )


@pytest.mark.parametrize("devices", [1, 4])
def test_an_evaluation_without_the_state_runs_on_other_replicas(
    tmp_path, use_devices, devices
):
    assert loop.run(config(), str(tmp_path), "") == 0
    use_devices(devices)
    assert continuous_eval.run(config(), str(tmp_path), "", None) == 0
    evaluated = rows.read(tmp_path / "eval")[-1]
    # The tolerance is for float32 sums of ten numbers in another order.
    wanted = rows.results(tmp_path)["eval"]["error"]
    assert evaluated["step"] == 4 and evaluated["eval/error"] == pytest.approx(
        wanted, rel=1e-5
    )


class Drawing(Counting):
    """Draws a key in predictions, too."""

    def forward(self, batch, *, is_training):
        noise = jax.random.normal(hk.next_rng_key(), ())
        return super().forward(batch, is_training=is_training) + noise

    def predict(self, state, batch, key=None):
        return toy.Wide.predict(self, state["line"], batch, key)


def test_an_export_has_a_key_also_beside_state_of_each_replica(tmp_path):
    drawing = config(experiment=f"{__name__}.Drawing", hidden=4)
    assert loop.run(drawing, str(tmp_path / "run"), "") == 0
    trained = xshard.load(str(tmp_path / "run"))
    text = export.write(trained, tmp_path / "a.stablehlo")
    assert "predict of x float32[batch,3], a random key -> " in text
