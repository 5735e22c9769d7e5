"""Tests of runs whose slices train apart under an outer rule."""

import json

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests import toy
from tests.optimizers import harness
from xshard import config as config_lib
from xshard import loop
from xshard import mesh as mesh_lib
from xshard.export import files
from xshard.replay import replayer
from xshard.run import checkpoints, slices

EVERYTHING = {
    "dtype": "int8",
    "fragments": 2,
    "delay_steps": 1,
}


class Plain(toy.Wide):
    """Trains by SGD, without noise or a loss scale."""

    def forward(self, batch, *, is_training):
        del is_training
        return hk.nets.MLP([self.config.hidden, 1], name="mlp")(batch["x"])[:, 0]

    def optimizer(self):
        return xshard.CrossShardOptimizer(
            optax.sgd(0.1), slice_axis_name="slice", **self.config.reduction
        )


class Own(Plain):
    """Has an outer rule of its own."""

    def optimizer(self):
        inner = xshard.CrossShardOptimizer(optax.sgd(0.1))
        return xshard.OuterOptimizer(inner, optax.adam(0.01), every_steps=4)


class Bare(Plain):
    """Trains parameters by hand, without a learner."""

    def init(self, key, batch):
        del key, batch
        return {"w": jnp.zeros(3)}

    def train_step(self, state, batch, key):
        del key
        loss = lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
        gradient = jax.lax.pmean(jax.grad(loss)(state["w"]), ("slice", "replica"))
        return {"w": state["w"] - 0.1 * gradient}, {}

    def eval_step(self, state, batch, key):
        del key
        return {"error": (batch["x"] @ state["w"] - batch["y"]) ** 2}

    def predict(self, state, batch, key=None):
        del key
        return batch["x"] @ state["w"]


class Others(Plain):
    """Has a learner that takes the config of another run."""

    def __init__(self, config):
        super().__init__(config)
        network = lambda batch: self.forward(batch, is_training=True)
        self.learner = xshard.Learner(network, self.optimizer, toy.get_config())

    def train_step(self, state, batch, key):
        def loss(state, batch, key):
            outputs, net_state = self.learner.apply(state, key, batch)
            return jnp.mean((outputs - batch["y"]) ** 2), net_state, {}

        return self.learner.update(state, loss, batch, key)

    def init(self, key, batch):
        return self.learner.init(key, batch)


def config(outer=None, *, devices=4, **changes):
    made = toy.get_config()
    made.experiment = changes.pop("experiment", "tests.toy.Wide")
    made.log_every_steps = 100
    for key in ("shard_update", "shard_params", "arithmetic", "slice_dtype"):
        if key in changes:
            made.reduction[key] = changes.pop(key)
    made.checkpoint.every_steps = changes.pop("save_every", 5)
    made.outer.update({"every_steps": 4, **(outer or {})})
    # The replicas are the first of eight devices, and the others compute a model.
    made.model_parallel = 8 // devices
    made.slices = 2
    made.update(changes)
    return made.lock()


def train(directory, *args, **changes):
    """Trains a run; returns the run and its final state."""
    run = loop.Run(config(*args, **changes), str(directory))
    with run.opened():
        state, _ = run.train()
    return run, state


def host(state):
    """A state on the host, without its key."""
    return jax.device_get((state.step, state.experiment))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "outer, changes",
    [
        ({}, {}),
        (EVERYTHING, {"overflow_above": 2.0}),
        (EVERYTHING, {"shard_params": True, "hidden": 1024}),
    ],
)
def test_a_run_that_stops_within_a_round_resumes_to_the_same_bits(
    tmp_path, outer, changes
):
    _, whole = train(tmp_path / "whole", outer, **changes)
    # The run has exchanged after step 4, and would again after step 8.
    _, part = train(tmp_path / "parts", outer, **changes, steps=6)
    assert int(part.step) == 6
    _, resumed = train(tmp_path / "parts", outer, **changes)
    harness.assert_equal(host(resumed), host(whole))


def test_an_exchange_after_each_step_is_a_sum_of_gradients(tmp_path):
    """Slices see the same batches as replicas do."""
    average = {"every_steps": 1, "learning_rate": 1.0, "momentum": 0.0}
    plain = "tests.run.slices_test.Plain"
    of_runs = []
    for number, outer in enumerate([average, {"every_steps": 0}]):
        _, state = train(tmp_path / str(number), outer, experiment=plain)
        of_runs.append(jax.device_get(state.experiment.params))
    apart, together = of_runs
    assert jax.tree.leaves(apart)[0].shape[0] == 2
    for slice_number in range(2):
        of_slice = jax.tree.map(lambda x, i=slice_number: x[i], apart)
        # The mean of two steps, and a step along the mean, round differently.
        harness.assert_close(of_slice, together, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "step, outer, lost",
    [
        (20, {}, None),
        (25, {}, "20"),
        (7, {}, "0"),
        # The parameters after step 20 are sent during step 21.
        (20, {"delay_steps": 1}, "10"),
        (21, {"delay_steps": 1}, "20"),
        (20, {"fragments": 2}, "15 or 20 (by fragment)"),
        (26, {"fragments": 2, "delay_steps": 3}, "20 or 25 (by fragment)"),
    ],
)
def test_what_is_lost_is_what_was_trained_since_the_last_exchange(step, outer, lost):
    options = config({"every_steps": 10, **outer}).outer
    said = slices.describe(2, 4, step, options)
    if lost is None:
        assert "is lost" not in said
    else:
        assert f"since step {lost} is lost" in said


@pytest.mark.parametrize(
    "steps, outer, said",
    [
        (20, {}, None),
        (9, {}, "the parameters are not exchanged by then"),
        (10, {"delay_steps": 1}, "the parameters are not exchanged by then"),
        (11, {"delay_steps": 1}, "up to step 10"),
        (9, {"fragments": 2}, "some parameters are not exchanged by then"),
        (25, {}, "after step 25, the parameters of the last exchange are of what"),
        (10, {"every_steps": 0}, None),
    ],
)
def test_a_run_says_what_its_last_exchange_leaves_out(steps, outer, said):
    made = config({"every_steps": 10, **outer}, steps=steps)
    notes = list(slices.notes(made, num_slices=2))
    assert len(notes) == (said is not None)
    if said:
        assert said in notes[0]
    if made.outer.every_steps:
        (alone, *others) = slices.notes(made, num_slices=1)
        assert "one slice: it exchanges nothing" in alone
        assert others == notes


def test_a_reader_has_the_parameters_of_the_last_exchange_alone(tmp_path, capfd):
    run, _ = train(tmp_path, steps=6, save_every=3)
    said = capfd.readouterr().out
    assert "after step 6, the parameters of the last exchange" in said
    trained = xshard.load(str(tmp_path))
    said = capfd.readouterr().err
    assert "Checkpoints of 2 slice(s) are read as 1" in said and "go on" not in said
    with pytest.raises(xshard.UserError, match="the slices of this run train apart"):
        files.write(trained, tmp_path / "raw.safetensors", raw=True)
    # A job that evaluates each checkpoint says it once.
    example = xshard.experiment.example(run.experiment)
    mesh = trained.state.step.sharding.mesh
    reader = checkpoints.States(run.experiment, mesh, example, run.workdir)
    for step in (3, 6):
        reader.restore_state(step, fits=True)
    assert capfd.readouterr().err.count("are read as 1") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("now", [4, 1])
def test_another_number_of_slices_goes_on_from_the_last_exchange(tmp_path, capfd, now):
    outer = {"dtype": "int8"}
    _, before = train(tmp_path, outer, steps=6, save_every=6)
    run = loop.Run(config(outer, slices=now, steps=12), str(tmp_path))
    state = run.resume_or_init().state
    _, error = capfd.readouterr()
    assert f"is of 2 slice(s), and there are now {now}" in error
    assert "since step 4 is lost" in error
    slots = state.experiment.opt_state["OuterOptimizer"]
    old_slots = before.experiment.opt_state["OuterOptimizer"]
    for path in ("mlp/~/linear_0/w", "mlp/~/linear_1/b"):
        module, _, name = path.rpartition("/")
        exchanged = np.asarray(old_slots[f"exchanged/{path}"])
        assert np.array_equal(exchanged[0], exchanged[1])
        params = np.asarray(state.experiment.params[module][name])
        wanted = np.stack([exchanged[0]] * now) if now > 1 else exchanged[0]
        np.testing.assert_array_equal(params, wanted)
        assert not np.any(slots[f"residual/{path}"])
    # A number alone in its block may be sent exactly.
    assert np.any(old_slots["residual/mlp/~/linear_0/w"])
    assert np.all(np.asarray(slots["steps"]) == 6)
    # It trains on to the end, in the same directory.
    _, end = train(tmp_path, outer, slices=now)
    assert int(end.step) == 12


def test_a_step_of_other_slices_is_not_replayed(tmp_path):
    train(tmp_path, steps=4, save_every=4, log_every_steps=2)
    train(tmp_path, steps=8, slices=1, log_every_steps=2)
    run = replayer.Replayer(str(tmp_path))
    # No step was skipped when the slices changed.
    with pytest.raises(xshard.UserError, match="4 rows of training .* no step was ski"):
        run.suspect_steps()
    *_, repeated = run.steps(range(6, 7))
    assert repeated.number == 6 and run.difference(repeated) is None
    *_, repeated = run.steps(range(2, 3))
    with pytest.raises(xshard.UserError, match="Step 2 was made by 2 slice.* by the 1"):
        run.difference(repeated)


def test_an_evaluation_is_of_the_parameters_of_the_last_exchange(tmp_path):
    run, state = train(tmp_path, steps=6, save_every=6)
    metrics = run.evaluate(state)
    assert isinstance(metrics["error"], float)
    trained = xshard.load(str(tmp_path))
    exchanged = state.experiment.opt_state["OuterOptimizer"]
    examples = trained.experiment.eval_data()
    params = trained.state.experiment.params
    for module, arrays in params.items():
        for name, x in arrays.items():
            stored = np.asarray(exchanged[f"exchanged/{module}/{name}"])
            np.testing.assert_array_equal(x, stored[0])
    error = np.mean((trained.predict(examples) - examples["y"]) ** 2)
    # A sum over examples in another order.
    np.testing.assert_allclose(metrics["error"], error, rtol=1e-5)
    # The slices themselves have trained on, apart.
    own = np.asarray(state.experiment.params["mlp/~/linear_0"]["w"])
    assert not np.array_equal(own[0], own[1])


def test_another_run_begins_with_the_parameters_of_the_last_exchange(tmp_path):
    _, state = train(tmp_path / "first", steps=6, save_every=6)
    source = xshard.checkpoint.Source(str(tmp_path / "first"))
    run = loop.Run(config(slices=4), str(tmp_path / "second"), init=source)
    begun = run.resume_or_init().state.experiment
    slot = "exchanged/mlp/~/linear_0/w"
    stored = np.asarray(state.experiment.opt_state["OuterOptimizer"][slot])[0]
    for x in (
        begun.params["mlp/~/linear_0"]["w"],
        begun.opt_state["OuterOptimizer"][slot],
    ):
        np.testing.assert_array_equal(x, np.stack([stored] * 4))


def test_exact_sums_within_a_slice_do_not_depend_on_its_devices(tmp_path):
    ends = []
    for devices in (2, 4):
        _, state = train(
            tmp_path / str(devices),
            EVERYTHING,
            devices=devices,
            logical_replicas=2,
            arithmetic="exact",
            model_parallel=1,
        )
        ends.append(host(state))
    harness.assert_equal(*ends)


def test_an_experiment_may_have_an_outer_rule_of_its_own(tmp_path):
    own = "tests.run.slices_test.Own"
    _, state = train(tmp_path / "own", experiment=own)
    assert "OuterOptimizer/~/outer" in state.experiment.opt_state
    names = state.experiment.opt_state["OuterOptimizer/~/outer"]
    assert any(name.startswith("0/mu/") for name in names)
    with pytest.raises(xshard.UserError, match="set config.outer.every_steps=4"):
        loop.Run(config({"every_steps": 0}, experiment=own, slices=1), "unused")
    with pytest.raises(xshard.UserError, match="every_steps=4, and config"):
        loop.Run(config({"every_steps": 2}, experiment=own), "unused")
    # What the rule does not take would have no effect.
    with pytest.raises(xshard.UserError, match="dtype='float32', and config.outer.dt"):
        loop.Run(config({"dtype": "int8"}, experiment=own), "unused")
    run = loop.Run(config({"momentum": 0.5}, experiment=own), "unused")
    assert "outer.momentum" in config_lib.unread(run.experiment.config, run.config)
    run = loop.Run(config({"momentum": 0.5}), "unused")
    assert "outer.momentum" not in config_lib.unread(run.experiment.config, run.config)


@pytest.mark.parametrize(
    "experiment, message",
    [("Bare", "whose state has no learner"), ("Others", "was given another config")],
)
def test_slices_that_never_exchange_are_refused(experiment, message):
    with pytest.raises(xshard.UserError, match=message):
        loop.Run(config(experiment=f"tests.run.slices_test.{experiment}"), "unused")


@pytest.mark.parametrize(
    "outer, changes, message",
    [
        ({"every_steps": 0, "dtype": "int8"}, {}, "no effect without outer.every"),
        ({"every_steps": -1}, {}, "outer.every_steps=-1 must be an integer"),
        ({"momentum": 1.0}, {}, "outer.momentum=1.0 must be a number"),
        ({"dtype": "int2"}, {}, "dtype must be one of"),
        ({"delay_steps": 4}, {}, "delay_steps must be"),
        ({}, {"slices": 3}, "slices=3 must divide"),
        ({}, {"batch_size": 18, "slices": 4}, "slices x replicas x micro_batches"),
        ({}, {"group_assignment": ((0, 1), (2, 3))}, "each group is a model"),
        ({}, {"slice_dtype": "bfloat16"}, "Set outer.dtype instead"),
        ({}, {"experiment": "tests.toy.Averaged"}, "Leave the averages out"),
    ],
)
def test_what_makes_no_sense_is_refused(outer, changes, message):
    with pytest.raises(xshard.UserError, match=message):
        loop.Run(config(outer, **changes), "unused")


def test_the_slices_of_a_run_are_groups_of_its_mesh():
    mesh = mesh_lib.make_mesh(slices=2, separate_slices=True)
    assert dict(mesh.shape) == {"group": 2, "slice": 1, "replica": 4, "model": 1}
    together = mesh_lib.make_mesh(slices=2)
    assert np.array_equal(mesh.devices.reshape(-1), together.devices.reshape(-1))
    with pytest.raises(xshard.UserError, match="cannot be used with groups"):
        mesh_lib.make_mesh([[0, 1], [2, 3], [4, 5], [6, 7]], separate_slices=True)


def test_rows_have_a_value_for_each_slice(tmp_path):
    run, _ = train(tmp_path, steps=4)
    lines = run.workdir.metrics.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    training = [row for row in rows if "loss" in row]
    assert all(len(row["loss"]) == 2 for row in training)
