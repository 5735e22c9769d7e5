"""What is a replica's own, where there are other numbers of replicas than it was made on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xshard
from tests import rows, toy
from xshard import errors, loop, mesh
from xshard import experiment as experiment_lib
from xshard.modes import follow

HALVES, PAIRS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1), (2, 3))


class Counting(toy.Wide):
    """Counts on each replica what it has seen, and may judge and predict by it."""

    def init(self, key, batch):
        return {"line": super().init(key, batch), "seen": xshard.PerReplica(jnp.zeros(2))}

    def train_step(self, state, batch, key):
        line, outcome = super().train_step(state["line"], batch, key)
        seen = state["seen"].value + jnp.sum(batch["x"])
        return {"line": line, "seen": xshard.PerReplica(seen)}, {"line": outcome}

    def _mean(self, state):
        # Unless it is declared equal, a prediction by it is refused.
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
    made = toy.get_config()
    made.experiment = "tests.stored.replicas_test.Counting"
    made.reads = False
    made.update_from_flattened_dict({"steps": 4, **changes})
    return made.lock()


@pytest.fixture
def on(monkeypatch):
    """Makes runs take so many devices."""

    def take(count):
        devices = jax.devices()[:count]
        of = lambda config: mesh.make_mesh(config.group_assignment or None, devices=devices)
        monkeypatch.setattr(experiment_lib, "mesh_of", of)

    return take


def files(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_a_run_on_other_numbers_is_refused_by_name_before_it_begins(tmp_path, on):
    assert loop.run(config(), str(tmp_path), "") == 0
    before = files(tmp_path)
    on(4)
    with pytest.raises(errors.UserError) as e:
        loop.run(config(steps=6), str(tmp_path), "")
    text = str(e.value)
    assert (
        "'seen/value' differs by replica" in text
        and "of 8 replicas per group, and this run has 4" in text
    )
    assert files(tmp_path) == before
    on(8)
    assert loop.run(config(steps=6), str(tmp_path), "") == 0


@pytest.mark.parametrize("groups", [(), HALVES])
def test_load_keeps_those_of_all_replicas(tmp_path, groups):
    changes = {"group_assignment": groups, "reduction.shard_update": True}
    assert loop.run(config(**changes), str(tmp_path), "") == 0
    run = loop.Run(config(**changes), str(tmp_path))
    wanted = run.checkpoints.manager.restore(run._target).state.experiment["seen"].value
    trained = xshard.load(str(tmp_path))
    seen = trained.state.experiment["seen"].value
    assert seen.shape == ((2, 4, 2) if groups else (8, 2))
    np.testing.assert_array_equal(seen, wanted)
    assert trained.params["line"]["mlp/~/linear_0"]["w"].ndim == (3 if groups else 2)
    # What does not read it predicts for any number of rows.
    for count in (1, 5):
        batch = {"x": np.ones((count, 3), np.float32), "y": np.zeros(count, np.float32)}
        assert trained.predict(batch).shape == (count,)


def test_what_reads_it_elsewhere_is_refused_by_name(tmp_path, on):
    assert loop.run(config(reads=True), str(tmp_path), "") == 0
    trained = xshard.load(str(tmp_path))
    batch = {"x": np.ones((5, 3), np.float32), "y": np.zeros(5, np.float32)}
    message = r"Counting\.{} \(.* reads the state 'seen/value'.*\n?.*values of 8 replicas per group, and this mesh has {}"
    with pytest.raises(errors.UserError, match=message.format("predict", 1)):
        trained.predict(batch)
    on(4)
    with pytest.raises(errors.UserError, match=message.format("eval_step", 4)):
        follow.run(config(reads=True), str(tmp_path), "", None)
    # On as many it is what it was.
    on(8)
    assert follow.run(config(reads=True), str(tmp_path), "", None) == 0
    assert rows.read(tmp_path / "eval")[-1]["eval/seen"] == rows.results(tmp_path)["eval"]["seen"]


@pytest.mark.parametrize("devices", [1, 4])
def test_a_job_that_does_not_read_it_judges_on_other_numbers(tmp_path, on, devices):
    assert loop.run(config(), str(tmp_path), "") == 0
    on(devices)
    assert follow.run(config(), str(tmp_path), "", None) == 0
    judged = rows.read(tmp_path / "eval")[-1]
    # Sums of ten numbers in float32, in another order.
    wanted = rows.results(tmp_path)["eval"]["error"]
    assert judged["step"] == 4 and judged["eval/error"] == pytest.approx(wanted, rel=1e-5)
