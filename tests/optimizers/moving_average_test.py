"""Tests of averages of the parameters.

TensorFlow's formula, in every place of a chain, whole and sharded.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests.optimizers import harness
from xshard.optimizers import cross_shard, loss_scale, moving_average
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import optax as optax_optimizer

Averaged = moving_average.MovingAverageOptimizer
NAME = "MovingAverageOptimizer"
W0 = "mlp/linear_0/w"
B0 = "mlp/linear_0/b"
W1 = "mlp/linear_1/w"
DECAY = 0.8
PLACES = ["inside", "between", "outside", "scale inside"]


def adam():
    return optax_optimizer.OptaxOptimizer(optax.adam(0.1), name="opt")


def nest(place, shard_update=False, **kwargs):
    """Wraps Adam in both rules and the averages."""
    average = functools.partial(Averaged, average_decay=DECAY, **kwargs)
    scale = lambda opt: loss_scale.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
    reduce = functools.partial(
        cross_shard.CrossShardOptimizer, shard_update=shard_update
    )
    if place == "scale inside":
        return reduce(average(scale(adam())))
    if place == "inside":
        return scale(reduce(average(adam())))
    if place == "between":
        return scale(average(reduce(adam())))
    return average(scale(reduce(adam())))


def averages_of(state):
    return {path: state[NAME][f"average/{path}"] for path in (W0, B0, W1)}


def by_path(params):
    return {
        f"{module}/{name}": np.asarray(x, np.float64)
        for module, arrays in params.items()
        for name, x in arrays.items()
    }


def follow(make, steps=5, var_list=None):
    """Returns the parameters and the states, at first and after each step."""

    def step(params, x):
        loss = lambda p: harness.loss(p, x)
        _, params = make().minimize(loss, params, var_list=var_list)
        return params

    step = hk.transform_with_state(step)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    history = [params]
    states = [state]
    apply = jax.jit(step.apply)
    for _ in range(steps):
        params, state = apply({}, state, None, params, x)
        history.append(params)
        states.append(state)
    return history, states


@pytest.mark.parametrize("num_updates", [None, "count", 7])
def test_averages_follow_the_formula(num_updates):
    history, states = follow(lambda: Averaged(adam(), DECAY, num_updates))
    wanted = by_path(history[0])
    harness.assert_close(averages_of(states[0]), wanted, rtol=0)
    for updates, (params, state) in enumerate(
        zip(history[1:], states[1:], strict=True), start=1
    ):
        count = updates if num_updates == "count" else num_updates
        decay = DECAY if count is None else min(DECAY, (1 + count) / (10 + count))
        now = by_path(params)
        wanted = {path: decay * wanted[path] + (1 - decay) * now[path] for path in now}
        # float32 rounds a few times in each of five steps.
        harness.assert_close(averages_of(state), wanted, rtol=1e-6, atol=1e-7)
        if num_updates == "count":
            assert int(state[NAME]["num_updates"]) == updates


def test_averages_match_the_incremental_update_of_optax():
    history, states = follow(lambda: Averaged(adam(), DECAY))
    average = history[0]
    for params in history[1:]:
        average = optax.incremental_update(params, average, 1 - DECAY)
    # optax writes the same formula in another form, which rounds differently in each of
    # five steps.
    result = moving_average.averages(states[-1][NAME], average)
    harness.assert_close(result, average, rtol=1e-6, atol=1e-7)


def test_averages_do_not_change_the_parameters():
    averaged = follow(lambda: Averaged(adam(), DECAY))
    bare = follow(adam)
    harness.assert_equal(averaged[0], bare[0])
    harness.assert_equal(averaged[1][-1]["opt"], bare[1][-1]["opt"])


def test_the_average_of_an_untrained_parameter_is_the_parameter():
    history, states = follow(lambda: Averaged(adam(), DECAY), var_list=[W0])
    assert all(list(state[NAME]) == [f"average/{W0}"] for state in states)
    averages = moving_average.averages(states[-1][NAME], history[-1])
    assert averages["mlp/linear_0"]["w"] is states[-1][NAME][f"average/{W0}"]
    for module, name in (("mlp/linear_0", "b"), ("mlp/linear_1", "w")):
        harness.assert_equal(averages[module][name], history[-1][module][name])
    assert not np.array_equal(
        *(state[NAME][f"average/{W0}"] for state in (states[0], states[-1]))
    )


def test_a_gradient_for_a_parameter_without_an_average_is_refused():
    _, states = follow(lambda: Averaged(optax.sgd(0.1), DECAY), steps=0, var_list=[W0])
    step = harness.transform_step(lambda: Averaged(optax.sgd(0.1), DECAY))
    with pytest.raises(
        ValueError, match=f"'{B0}' has a gradient, but {NAME} has no slot for it"
    ):
        step.apply({}, states[0], None, harness.params(), harness.batch())


def test_a_parameter_that_is_no_longer_trained_keeps_its_average():
    history, states = follow(lambda: Averaged(adam(), DECAY), steps=1)

    def step(params, x):
        opt = Averaged(adam(), DECAY)
        return opt.minimize(lambda p: harness.loss(p, x), params, var_list=[W0])[1]

    params = history[-1]
    state = states[-1]
    _, after = hk.transform_with_state(step).apply(
        {}, state, None, params, harness.batch()
    )
    before = averages_of(state)
    after = averages_of(after)
    harness.assert_equal((after[B0], after[W1]), (before[B0], before[W1]))
    assert np.all(after[B0] != by_path(params)[B0])


@pytest.mark.parametrize(
    "place, shard_update", [*((place, True) for place in PLACES), ("outside", False)]
)
def test_a_skipped_step_changes_no_bit(place, shard_update):
    make = functools.partial(nest, place, shard_update, num_updates="count")
    step = harness.transform_step(make)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    run = harness.sharded(step, make, 4)
    (_, params, n), state = run(params, state, x)
    (_, new, new_n), after = run(params, state, x.at[3, 0].set(jnp.inf), n)
    harness.assert_equal((new, new_n, after[NAME]), (params, n, state[NAME]))
    assert int(after[NAME]["num_updates"]) == 1
    (_, _, new_n), after = run(new, after, x, new_n)
    assert int(new_n) == int(after[NAME]["num_updates"]) == 2
    assert not np.array_equal(
        after[NAME][f"average/{B0}"], state[NAME][f"average/{B0}"]
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("place, replicas", [*zip(PLACES, (4, 8, 8, 4), strict=True)])
def test_sharded_averages_match_replicated_ones_in_every_place(place, replicas):
    # 4 divides a dimension of every array; 8 replicas hold the (3, 4) array whole.
    ends = []
    for shard_update in (False, True):
        make = functools.partial(nest, place, shard_update)
        step = harness.transform_step(make)
        params = harness.params()
        x = harness.batch()
        _, state = step.init(None, params, x)
        run = harness.sharded(step, make, replicas)
        for _ in range(4):
            (_, params, _), state = run(params, state, x)
        ends.append((params, state[NAME]))
        of_params = layouts_lib.of_params(params, replicas)
        sharded_paths = {
            path for path, layout in of_params.items() if layout.dim is not None
        }
        found = {
            name
            for name, x in ends[-1][1].items()
            if layouts_lib.of_slot(of_params, name, x.shape)
        }
        assert found == {f"average/{path}" for path in sharded_paths}
        average_spec = state[NAME][f"average/{W1}"].sharding.spec
        assert any(average_spec) == (shard_update and bool(sharded_paths))
    # float32 sums are in another order in each of four steps of Adam.
    harness.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-6)


def test_averages_between_two_reductions_with_the_outer_one_sharded():
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("pod", "replica"), axis_types=axes)
    params = {"m": {"w": jnp.zeros(8)}}

    def make():
        inner = cross_shard.CrossShardOptimizer(adam(), "sum", axis_name="pod")
        return cross_shard.CrossShardOptimizer(
            Averaged(inner, 0.5), "sum", shard_update=True
        )

    step = hk.transform_with_state(
        lambda: make().apply_gradients({"m": {"w": jnp.ones(8)}}, params)
    )
    _, state = step.init(None)
    whole = jax.P()
    update = lambda state: step.apply({}, state, None)
    run = xshard.vmap_replicas(update, mesh, in_specs=whole, out_specs=whole)
    new, state = jax.jit(run)(state)
    # Adam's first step has the size of the learning rate, whatever the gradient.
    np.testing.assert_allclose(new["m"]["w"], np.full(8, -0.1), rtol=1e-5)
    np.testing.assert_allclose(state[NAME]["average/m/w"], np.full(8, -0.05), rtol=1e-5)
    np.testing.assert_allclose(state["opt"]["0/mu/m/w"], np.full(8, 0.8), rtol=1e-6)


def test_narrow_parameters_have_float32_averages():
    step = harness.transform_step(lambda: Averaged(adam(), 0.999))
    params = harness.params(jnp.bfloat16)
    x = harness.batch(jnp.bfloat16)
    _, state = step.init(None, params, x)
    (_, new, _), after = step.apply({}, state, None, params, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(after[NAME])} == {
        jnp.dtype(jnp.float32)
    }
    wanted = 0.999 * by_path(params)[W0] + 0.001 * by_path(new)[W0]
    # bfloat16 would round this change away.
    np.testing.assert_allclose(after[NAME][f"average/{W0}"], wanted, rtol=1e-6)


def test_initial_averages_share_no_memory_with_the_parameters():
    step = harness.transform_step(lambda: Averaged(adam(), DECAY))
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    # Donating one buffer twice is an error.
    donating = jax.jit(harness.one_device(step), donate_argnums=(0, 1))
    jax.block_until_ready(donating(params, state, x))
    assert params["mlp/linear_0"]["w"].is_deleted()


def test_averages_are_slots():
    def step(params, x):
        opt = nest("between")
        names = opt.get_slot_names()
        opt.minimize(lambda p: harness.loss(p, x), params)
        result = {name: opt.get_slot(W0, name) for name in ("average", "mu", "nothing")}
        assert result["nothing"] is None and opt.get_slot("mlp/none", "average") is None
        assert opt.get_slot_names() == ["average", "mu", "nu"]
        assert names == ([] if hk.running_init() else opt.get_slot_names())
        return result["average"], len(opt.variables())

    step = hk.transform_with_state(step)
    _, state = step.init(None, harness.params(), harness.batch())
    (average, count), after = step.apply(
        {}, state, None, harness.params(), harness.batch()
    )
    harness.assert_equal(average, after[NAME][f"average/{W0}"])
    assert count == len(jax.tree.leaves(after))


@pytest.mark.parametrize("bad", [1.0, 1, -0.1, float("nan"), "0.9", True, None])
def test_a_decay_out_of_range_is_refused(bad):
    with pytest.raises(
        ValueError, match="average_decay must be .* below 1.*; received"
    ):
        hk.testing.transform_and_run(lambda: Averaged(adam(), bad))()


@pytest.mark.parametrize("bad", [1.5, "steps", True, jnp.ones(2, jnp.int32)])
def test_an_invalid_num_updates_is_refused(bad):
    with pytest.raises(
        ValueError, match="num_updates must be an integer scalar, 'count'"
    ):
        hk.testing.transform_and_run(lambda: Averaged(adam(), 0.9, bad))()


def test_nested_averages_and_an_invalid_opt_are_refused():
    with pytest.raises(
        ValueError, match="already keeps averages .*MovingAverageOptimizer"
    ):
        hk.testing.transform_and_run(lambda: Averaged(nest("inside")))()
    with pytest.raises(ValueError, match="opt must be an xshard Optimizer or an optax"):
        hk.testing.transform_and_run(lambda: Averaged("adam"))()
