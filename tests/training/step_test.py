"""Tests of the step: replicas, groups, micro-batches, precision, skipped steps,
shardings.
"""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests import toy
from tests.optimizers import harness
from xshard import errors, mesh
from xshard.data import batches
from xshard.optimizers import trees
from xshard.training import state as state_lib
from xshard.training import step

NORMS = ("gradient_norm", "parameter_norm")
GROUPS = ((0, 2, 4, 6), (1, 3, 5, 7))


def make(experiment=toy.Toy, devices=8, shard_update=False, **changes):
    config = toy.get_config()
    config.reduction.shard_update = shard_update
    config.update({k: v for k, v in changes.items() if k != "group_assignment"})
    config.group_assignment = changes.get("group_assignment", ())
    config.lock()
    devices = jax.devices()[:devices]
    the_mesh = mesh.make_mesh(
        config.group_assignment or None,
        slices=config.slices,
        model=config.model_parallel,
        devices=devices,
    )
    return experiment(config), the_mesh


def run(experiment, the_mesh, steps, state=None):
    config = experiment.config
    examples = experiment.train_data()
    train = batches.TrainBatches(
        experiment.train_batches,
        the_mesh,
        batch_size=config.batch_size,
        seed=config.seed,
        micro_batches=config.micro_batches,
    )
    state = state or state_lib.init(experiment, the_mesh, config.seed, examples)
    for _ in range(int(state.step)):
        next(train)
    apply = jax.jit(step.make_train_step(experiment, the_mesh), donate_argnums=0)
    history = []
    for _ in range(steps):
        state, metrics = apply(state, next(train))
        history.append(jax.device_get(metrics))
    return state, history


class Quiet(toy.Toy):
    """A linear model without noise, so that the number of replicas does not matter."""

    def forward(self, batch, *, is_training):
        return hk.Linear(1, name="linear")(batch["x"])[:, 0]


def test_one_device_and_eight_train_alike():
    one, eight = (run(*make(Quiet, devices=n), 6) for n in (1, 8))
    for a, b in zip(
        jax.tree.leaves(one[0].experiment.params),
        jax.tree.leaves(eight[0].experiment.params),
        strict=True,
    ):
        # Over six steps of Adam, float32 sums are computed in another order.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    losses = [[float(m["loss"]) for m in history] for _, history in (one, eight)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_micro_batches_train_like_the_whole_batch():
    whole, parts = (run(*make(Quiet, devices=2, micro_batches=n), 6) for n in (1, 4))
    for a, b in zip(
        jax.tree.leaves(whole[0].experiment.params),
        jax.tree.leaves(parts[0].experiment.params),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(whole[1][-1]["loss"], parts[1][-1]["loss"], rtol=1e-4)


def test_gradients_are_reduced_once_for_all_micro_batches():
    experiment, the_mesh = make(Quiet, micro_batches=2)
    examples = experiment.train_data()
    state = state_lib.init(experiment, the_mesh, 0, examples)
    train = batches.TrainBatches(
        experiment.train_batches, the_mesh, batch_size=16, seed=0, micro_batches=2
    )
    batch = next(train)
    text = (
        jax.jit(step.make_train_step(experiment, the_mesh))
        .lower(state, batch)
        .compile()
        .as_text()
    )
    # XLA may merge the all-reduce of the gradients with the all-reduce of the metrics,
    # or not.
    assert text.count(" all-reduce(") <= 2


def test_each_group_trains_its_own_model():
    experiment, the_mesh = make(group_assignment=GROUPS)
    state, history = run(experiment, the_mesh, 4)
    w = np.asarray(state.experiment.params["linear"]["w"])
    assert w.shape == (2, 3, 1) and not np.array_equal(w[0], w[1])
    assert state.experiment.params["linear"]["w"].sharding.spec[0] == "group"
    assert (
        history[0]["loss"].shape == (2,)
        and history[0]["loss"][0] != history[0]["loss"][1]
    )
    assert state.experiment.global_step.shape == (2,) and state.step.shape == ()


def test_the_first_group_equals_a_run_of_one_group():
    grouped, _ = run(*make(Quiet, group_assignment=((0, 1, 2, 3), (4, 5, 6, 7))), 3)
    alone, _ = run(*make(Quiet, devices=4), 3)
    first = jax.tree.map(lambda a: np.asarray(a)[0], grouped.experiment.params)
    for a, b in zip(
        jax.tree.leaves(first), jax.tree.leaves(alone.experiment.params), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_each_group_skips_steps_independently():
    experiment, the_mesh = make(group_assignment=GROUPS, overflow_above=2.0)
    state, history = run(experiment, the_mesh, 12)
    skipped = np.array([m["skipped"] for m in history])
    assert skipped.any(axis=0).all() and (skipped[:, 0] != skipped[:, 1]).any()
    np.testing.assert_array_equal(
        state.experiment.global_step, 12 - skipped.sum(axis=0)
    )
    np.testing.assert_array_equal(
        state.experiment.opt_state["adam"]["0/count"], state.experiment.global_step
    )
    for leaf in jax.tree.leaves((state.experiment.params, state.experiment.net_state)):
        assert np.all(np.isfinite(leaf))


class Plain(toy.Wide):
    """A model with a hidden layer, without noise."""

    def forward(self, batch, *, is_training):
        return hk.nets.MLP([self.config.hidden, 1], name="mlp")(batch["x"])[:, 0]

    def sharding_rules(self):
        rules = (("linear_0/w$", jax.P(None, "model")), ("linear_0/b$", jax.P("model")))
        return rules if self.config.model_parallel > 1 else ()


def global_norm(tree):
    return np.sqrt(
        sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree))
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batches": 2},
        {"model_parallel": 2},
        # With 20 hidden units, the arrays are flattened and padded, and the last bias
        # is whole.
        {"shard_update": True, "hidden": 20},
        {"shard_update": True, "slices": 2},
    ],
    ids=str,
)
def test_norms_are_of_the_whole_batch_and_of_the_new_parameters(changes):
    experiment, the_mesh = make(Plain, log_norms_every_steps=1, **changes)
    examples = experiment.train_data()
    state = state_lib.init(experiment, the_mesh, 0, examples)
    train = batches.TrainBatches(
        experiment.train_batches,
        the_mesh,
        batch_size=16,
        seed=0,
        micro_batches=experiment.config.micro_batches,
    )
    batch = next(train)

    def loss(params):
        of_params = state.experiment.replace(params=params)
        outputs, _ = experiment.learner.apply(of_params, None, batch, is_training=True)
        return experiment.loss(outputs, batch)[0]

    apply = jax.jit(step.make_watched_step(experiment, the_mesh))
    stepped = apply(state, batch)
    metrics = stepped.metrics
    batch = jax.device_get(batch)
    old = jax.device_get(state.experiment.params)
    new = jax.device_get(stepped.state.experiment.params)
    gradients = jax.grad(loss)(old)
    assert {metrics[name].dtype for name in NORMS} == {np.dtype(np.float32)}
    # Scaling the loss by 2**15 loses no precision, but float32 sums are computed in
    # another order.
    np.testing.assert_allclose(
        metrics["gradient_norm"], global_norm(gradients), rtol=1e-5
    )
    np.testing.assert_allclose(metrics["parameter_norm"], global_norm(new), rtol=1e-6)
    norms = stepped.norms[""]
    assert norms.paths == tuple(trees.leaves_by_path(old))
    assert norms.values.dtype == np.float32
    updates = jax.tree.map(np.subtract, new, old)
    for of_kind, tree in zip(norms.values, (gradients, new, updates), strict=True):
        expected = [global_norm(x) for x in trees.leaves_by_path(tree).values()]
        np.testing.assert_allclose(of_kind, expected, rtol=1e-5)


def test_groups_have_norms_by_array_of_their_own():
    experiment, the_mesh = make(
        toy.Wide, group_assignment=GROUPS, overflow_above=2.0, log_norms_every_steps=1
    )
    state = state_lib.init(experiment, the_mesh, 0, experiment.train_data())
    train = batches.TrainBatches(
        experiment.train_batches, the_mesh, batch_size=16, seed=0
    )
    apply = jax.jit(step.make_watched_step(experiment, the_mesh))
    seen = set()
    for _ in range(12):
        before = jax.device_get(state.experiment.params)
        stepped = apply(state, next(train))
        state = stepped.state
        after = jax.device_get(state.experiment.params)
        gradient, _, update = np.moveaxis(stepped.norms[""].values, 1, 0)
        skipped = np.asarray(stepped.metrics["skipped"]) > 0
        seen.add(tuple(skipped.tolist()))
        for group in range(2):
            moved = jax.tree.map(lambda x, y, g=group: x[g] - y[g], after, before)
            expected = [global_norm(x) for x in trees.leaves_by_path(moved).values()]
            # A skipped step has an update of exactly zero.
            np.testing.assert_allclose(update[group], expected, rtol=1e-6)
            assert np.any(update[group]) != skipped[group]
            # The infinite loss of a skipped step is that of every gradient.
            assert np.all(np.isfinite(gradient[group])) != skipped[group]
    assert len(seen) > 1


def test_the_evaluated_parameters_of_shards_are_whole():
    experiment, the_mesh = make(
        toy.Averaged, devices=2, hidden=128, reduction={"shard_params": True}
    )
    state = state_lib.init(experiment, the_mesh, 0, experiment.train_data())
    layouts = state.experiment.meta.param_layouts.values()
    assert {layout.shards_param for layout in layouts} == {True, False}
    evaluate = jax.jit(step.make_for_evaluation(experiment, the_mesh))
    # At first the averages are the parameters.
    harness.assert_equal(
        jax.device_get(evaluate(state).experiment.params),
        jax.device_get(state.experiment.params),
    )


class OwnApply(toy.Wide):
    """Has a rule that hides its gradients."""

    def optimizer(self):
        class Rule(xshard.CrossShardOptimizer):
            def apply_gradients(self, *args, **kwargs):
                return super().apply_gradients(*args, **kwargs)

        return Rule(optax.sgd(0.1))


def test_norms_by_array_need_the_gradients():
    experiment, the_mesh = make(OwnApply, log_norms_every_steps=5)
    with pytest.raises(errors.UserError, match="steps=5 cannot .* Rule"):
        run(experiment, the_mesh, 1)


@pytest.mark.parametrize("shard_update", [False, True])
def test_each_group_has_its_own_norms_and_a_skipped_step_shows(shard_update):
    experiment, the_mesh = make(
        toy.Wide, group_assignment=GROUPS, overflow_above=2.0, shard_update=shard_update
    )
    state, history = run(experiment, the_mesh, 12)
    skipped = np.array([m["skipped"] for m in history]).astype(bool)
    norms = np.array([m["gradient_norm"] for m in history])
    assert norms.shape == (12, 2) and skipped.any() and not skipped.all()
    np.testing.assert_array_equal(np.isfinite(norms), ~skipped)
    assert np.all(norms[~skipped.any(axis=1), 0] != norms[~skipped.any(axis=1), 1])
    # A skipped step keeps the parameters of the step before it.
    parameter_norms = np.array([m["parameter_norm"] for m in history])
    for step_number, group in zip(*np.nonzero(skipped[1:]), strict=True):
        assert (
            parameter_norms[step_number + 1, group]
            == parameter_norms[step_number, group]
        )
    final_norms = [
        global_norm(jax.tree.map(lambda x, g=g: x[g], state.experiment.params))
        for g in range(2)
    ]
    np.testing.assert_allclose(parameter_norms[-1], final_norms, rtol=1e-6)


def test_norms_have_the_same_bits_on_all_replicas():
    experiment, the_mesh = make(toy.Wide, shard_update=True, hidden=20)
    state = state_lib.init(experiment, the_mesh, 0, experiment.train_data())
    train = batches.TrainBatches(
        experiment.train_batches, the_mesh, batch_size=16, seed=0
    )
    _, metrics = jax.jit(step.make_train_step(experiment, the_mesh))(state, next(train))
    for name in NORMS:
        copies = {shard.data.tobytes() for shard in metrics[name].addressable_shards}
        assert len(metrics[name].addressable_shards) == 8 and len(copies) == 1


def test_a_skipped_step_keeps_the_parameters_and_network_state():
    experiment, the_mesh = make(overflow_above=-1e9)
    state = state_lib.init(experiment, the_mesh, 0, experiment.train_data())
    before = jax.tree.map(np.asarray, state.experiment)
    after, (metrics,) = run(experiment, the_mesh, 1, state)
    for name in ("params", "net_state", "global_step"):
        for a, b in zip(
            jax.tree.leaves(getattr(before, name)),
            jax.tree.leaves(getattr(after.experiment, name)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
    assert metrics["skipped"] == 1 and int(after.step) == 1
    assert metrics["loss_scale"] == 2.0**14


def test_network_state_is_equal_on_all_replicas():
    state, _ = run(*make(), 3)
    for leaf in jax.tree.leaves(state.experiment.net_state):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(copies[0], copy) for copy in copies)
    assert int(state.experiment.net_state["~"]["count"]) == 3


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_a_precision_policy_sets_the_dtypes(compute):
    seen = []

    class Spy(toy.Toy):
        def forward(self, batch, *, is_training):
            outputs = super().forward(batch, is_training=is_training)
            seen.append((is_training, batch["x"].dtype, outputs.dtype))
            return outputs

        def loss(self, outputs, batch):
            assert outputs.dtype == jnp.float32
            return super().loss(outputs, batch)

    state, _ = run(
        *make(Spy, precision=f"params=float32,compute={compute},output=float32"), 2
    )
    assert (True, jnp.dtype(compute), jnp.dtype(compute)) in seen
    assert all(
        leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.experiment.params)
    )


def test_the_state_is_donated_and_nothing_compiles_again():
    experiment, the_mesh = make()
    examples = experiment.train_data()
    train = batches.TrainBatches(
        experiment.train_batches, the_mesh, batch_size=16, seed=0
    )
    state = state_lib.init(experiment, the_mesh, 0, examples)
    apply = jax.jit(step.make_train_step(experiment, the_mesh), donate_argnums=0)
    first = state.experiment.params["linear"]["w"]
    state, _ = apply(state, next(train))
    assert first.is_deleted()
    prepared = [next(train), next(train)]
    count = harness.compile_count()
    for batch in prepared:
        state, _ = apply(state, batch)
    assert harness.compile_count() == count


def test_the_abstract_state_matches_the_initial_state():
    for changes in ({}, {"group_assignment": GROUPS}):
        experiment, the_mesh = make(**changes)
        args = (experiment, the_mesh, 0, experiment.train_data())
        real = state_lib.init(*args)
        abstract = state_lib.abstract_state(*args)
        assert jax.tree.structure(real) == jax.tree.structure(abstract)
        for a, b in zip(jax.tree.leaves(real), jax.tree.leaves(abstract), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


class Wide(Quiet):
    """A model with one wide layer, which is sharded over the axis 'model'."""

    def forward(self, batch, *, is_training):
        hidden = hk.Linear(16, name="wide")(batch["x"])
        return hk.Linear(1, name="linear")(jnp.tanh(hidden))[:, 0]

    def sharding_rules(self):
        return (("wide/w$", jax.P(None, "model")), ("wide/b$", jax.P("model")))


def test_the_model_axis_shards_parameters_and_slots_and_changes_no_numbers():
    sharded, _ = run(*make(Wide, devices=8, model_parallel=2), 4)
    alone, _ = run(*make(Wide, devices=4), 4)
    for leaf in (
        sharded.experiment.params["wide"]["w"],
        sharded.experiment.opt_state["adam"]["0/mu/wide/w"],
    ):
        assert leaf.sharding.spec == jax.P(None, "model")
        assert leaf.addressable_shards[0].data.shape == (3, 8)
    for a, b in zip(
        jax.tree.leaves(sharded.experiment.params),
        jax.tree.leaves(alone.experiment.params),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_does_not_reduce_is_refused():
    experiment, the_mesh = make(toy.Drifting)
    with pytest.raises(ValueError, match="does not reduce over the axis 'replica'"):
        state_lib.init(experiment, the_mesh, 0, experiment.train_data())


def test_evaluation_counts_each_example_once_and_adds_an_ensemble():
    experiment, the_mesh = make(Quiet, group_assignment=GROUPS)
    state, _ = run(experiment, the_mesh, 2)
    evaluate = jax.jit(step.make_eval_step(experiment, the_mesh))
    examples = experiment.eval_data()
    sums = [evaluate(state, b) for b in batches.EvalBatches(examples, the_mesh, 8)]
    total = jax.tree.map(lambda *xs: np.sum([np.asarray(x) for x in xs], axis=0), *sums)
    np.testing.assert_array_equal(total["count"], [10, 10])
    w, b = (np.asarray(state.experiment.params["linear"][name]) for name in ("w", "b"))
    outputs = np.stack([(examples["x"] @ w[g] + b[g])[:, 0] for g in range(2)])
    np.testing.assert_allclose(
        total["error"], ((outputs - examples["y"]) ** 2).sum(1), rtol=1e-5
    )
    ensemble = ((outputs.mean(0) - examples["y"]) ** 2).sum()
    np.testing.assert_allclose(total["ensemble/error"], ensemble, rtol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        # With 20 hidden units, 8 divides no dimension, so the averages are stored
        # flattened and padded.
        {"shard_update": True, "hidden": 20},
        {"shard_update": True, "group_assignment": GROUPS, "hidden": 18},
        {"shard_update": True, "model_parallel": 2},
    ],
    ids=str,
)
def test_averages_are_evaluated_beside_the_parameters(changes):
    experiment, the_mesh = make(toy.Averaged, **changes)
    state, _ = run(experiment, the_mesh, 3)
    evaluate = jax.jit(step.make_eval_step(experiment, the_mesh))
    batch = next(iter(batches.EvalBatches(experiment.eval_data(), the_mesh, 8)))
    sums = jax.device_get(evaluate(state, batch))
    averages = state.experiment.opt_state["MovingAverageOptimizer"]
    params = jax.tree_util.tree_map_with_path(
        lambda path, _: averages[
            "average/" + jax.tree_util.keystr(path, simple=True, separator="/")
        ],
        state.experiment.params,
    )
    averaged = dataclasses.replace(
        state, experiment=state.experiment.replace(params=params)
    )
    wanted = jax.device_get(evaluate(averaged, batch))
    # Here the averages replace the parameters that train.
    np.testing.assert_allclose(sums["error"], wanted["raw/error"], rtol=1e-6)
    np.testing.assert_allclose(sums["error"], wanted["error"], rtol=1e-6)
    assert np.all(sums["raw/error"] != sums["error"])
    assert sums["raw/error"].shape == sums["error"].shape and "raw/count" not in sums


def test_a_run_without_averages_evaluates_none():
    experiment, the_mesh = make()
    state = state_lib.init(experiment, the_mesh, 0, experiment.train_data())
    assert experiment.learner.for_evaluation(state.experiment) is state.experiment
    batch = next(iter(batches.EvalBatches(experiment.eval_data(), the_mesh, 8)))
    assert jax.eval_shape(
        step.make_eval_step(experiment, the_mesh), state, batch
    ).keys() == {
        "error",
        "count",
    }


def test_gradients_can_be_clipped_per_replica():
    class Clipped(Quiet):
        def clip_gradients(self, grads):
            return jax.tree.map(jnp.zeros_like, grads)

    experiment, the_mesh = make(Clipped)
    before = state_lib.init(
        experiment, the_mesh, 0, experiment.train_data()
    ).experiment.params
    after, _ = run(experiment, the_mesh, 1)
    np.testing.assert_array_equal(
        after.experiment.params["linear"]["w"], before["linear"]["w"]
    )


class Normed(Wide):
    """Clips the global norm of gradients that are sharded over 'model', which needs a
    sum over that axis.
    """

    def optimizer(self):
        opt = xshard.CrossShardOptimizer(
            optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
        )
        return xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic")


def test_groups_with_a_model_axis_skip_steps_independently():
    groups = ((0, 2), (1, 3))
    experiment, the_mesh = make(
        Normed, model_parallel=2, group_assignment=groups, overflow_above=2.0
    )
    state, history = run(experiment, the_mesh, 12)
    skipped = np.array([m["skipped"] for m in history])
    assert (skipped[:, 0] != skipped[:, 1]).any() and (skipped == 0).any(axis=0).all()
    assert state.experiment.params["wide"]["w"].sharding.spec == jax.P(
        "group", None, "model"
    )
    assert all(
        np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state.experiment.params)
    )
