"""Tests of FixedLossScale, DynamicLossScale and MixedPrecisionLossScaleOptimizer."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers import harness
from xshard.optimizers import base, cross_shard, gradients, loss_scale
from xshard.optimizers import optax as optax_optimizer

MAX = float(np.finfo(np.float32).max)


def run_scale(finite_steps, state=None, **kwargs):
    """Returns the scale and the good steps after each step.

    `finite_steps` says of each step whether its gradient is finite.
    """

    def step(grad):
        scale = loss_scale.DynamicLossScale(**kwargs)
        applied = scale.update({"m": {"w": grad}})
        return applied

    step = hk.transform_with_state(step)
    if state is None:
        _, state = step.init(None, jnp.ones(()))
    history = []
    for finite in finite_steps:
        grad = jnp.asarray(1.0 if finite else np.inf)
        applied, state = step.apply({}, state, None, grad)
        assert bool(applied) == finite
        entry = state["dynamic_loss_scale"]
        history.append((float(entry["current_loss_scale"]), int(entry["good_steps"])))
    return history


def tensorflow_rule(finite_steps, scale, period, multiplier):
    """Returns what `run_scale` does, by the rule of TensorFlow's DynamicLossScale."""
    scale = np.float32(scale)
    good = 0
    history = []
    for finite in finite_steps:
        if not finite:
            scale = max(scale / np.float32(multiplier), np.float32(1))
            good = 0
        elif good + 1 >= period:
            with np.errstate(over="ignore"):
                raised = scale * np.float32(multiplier)
            scale = raised if np.isfinite(raised) else scale
            good = 0
        else:
            good += 1
        history.append((float(scale), good))
    return history


@pytest.mark.parametrize(
    "period,multiplier,initial", [(1, 2, 8), (3, 2, 2**15), (2, 3.5, 1), (4, 1.1, MAX)]
)
def test_dynamic_scale_follows_tensorflow(period, multiplier, initial):
    finite = np.random.default_rng(period).random(60) < 0.7
    got = run_scale(
        finite.tolist(),
        initial_loss_scale=initial,
        increment_period=period,
        multiplier=multiplier,
    )
    assert got == tensorflow_rule(finite, initial, period, multiplier)


def test_limits_of_a_dynamic_scale():
    assert run_scale([False, False], initial_loss_scale=1.5) == [(1.0, 0), (1.0, 0)]
    assert run_scale([True, True, True], initial_loss_scale=4, increment_period=2) == [
        (4.0, 1),
        (8.0, 0),
        (8.0, 1),
    ]
    # A raised scale that overflows float32 is discarded, but the count restarts anyway.
    assert run_scale([True, True], initial_loss_scale=MAX, increment_period=2) == [
        (MAX, 1),
        (MAX, 0),
    ]
    # A count beyond the period, as from a checkpoint of a run with a longer period,
    # raises the scale at once.
    state = {
        "dynamic_loss_scale": {
            "current_loss_scale": jnp.float32(4),
            "good_steps": jnp.int32(9),
        }
    }
    assert run_scale([True], state, increment_period=5) == [(8.0, 0)]


def test_defaults_match_tensorflow():
    def read():
        scale = loss_scale.DynamicLossScale()
        return scale.initial_loss_scale, scale.increment_period, scale.multiplier

    assert hk.testing.transform_and_run(read)() == (2.0**15, 2000, 2.0)


@pytest.mark.parametrize(
    "bad", [0.5, 0, -3, float("nan"), float("inf"), 1e39, True, "2", None, [2], 1j]
)
def test_scales_below_1_and_non_numbers_are_refused(bad):
    for make in (loss_scale.FixedLossScale, loss_scale.DynamicLossScale):
        with pytest.raises(
            ValueError, match="must be a number of at least 1; received"
        ):
            hk.testing.transform_and_run(lambda make=make: make(bad))()
    with pytest.raises(ValueError, match="at least 1"):
        hk.testing.transform_and_run(
            lambda: loss_scale.MixedPrecisionLossScaleOptimizer(optax.sgd(1.0), bad)
        )()


@pytest.mark.parametrize(
    "kwargs,match",
    [
        (
            {"increment_period": 0},
            "increment_period must be an integer of at least 1; received 0",
        ),
        ({"increment_period": 2.5}, "received 2.5"),
        ({"increment_period": True}, "received True"),
        ({"multiplier": 1}, "multiplier must be above 1"),
        (
            {"multiplier": 0.5},
            "multiplier must be a number of at least 1; received 0.5",
        ),
    ],
)
def test_invalid_arguments_of_a_dynamic_scale_are_refused(kwargs, match):
    with pytest.raises(ValueError, match=match):
        hk.testing.transform_and_run(lambda: loss_scale.DynamicLossScale(**kwargs))()


def test_two_loss_scales_are_refused():
    def nest(wrap=lambda opt: opt):
        inner = loss_scale.MixedPrecisionLossScaleOptimizer(optax.sgd(1.0), 2)
        loss_scale.MixedPrecisionLossScaleOptimizer(wrap(inner), 2)

    for wrap in (lambda opt: opt, cross_shard.CrossShardOptimizer):
        with pytest.raises(ValueError, match="already scales losses"):
            hk.testing.transform_and_run(lambda wrap=wrap: nest(wrap))()


@pytest.mark.parametrize("opt", [None, 3, "adam", optax.adam, object()])
def test_an_opt_that_is_no_optimizer_is_refused(opt):
    with pytest.raises(
        ValueError, match="opt must be an xshard Optimizer or an optax transformation"
    ):
        hk.testing.transform_and_run(
            lambda: loss_scale.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
        )()


def dynamic(**kwargs):
    return loss_scale.MixedPrecisionLossScaleOptimizer(
        optax_optimizer.OptaxOptimizer(
            optax.adam(optax.exponential_decay(0.1, 1, 0.9)), name="adam"
        ),
        loss_scale.DynamicLossScale(**kwargs),
    )


def test_the_value_is_unscaled_even_if_the_scaled_value_overflows():
    step = harness.transform_step(
        lambda: dynamic(), lambda p, x: jnp.sum(p["m"]["w"]).astype(x.dtype)
    )
    params = {"m": {"w": jnp.full((3,), 2.0)}}
    x = jnp.zeros((), jnp.float16)
    _, state = step.init(None, params, x)
    (value, params, _), _ = step.apply({}, state, None, params, x)
    assert value.dtype == jnp.float16 and float(value) == 6.0
    assert np.all(np.isfinite(params["m"]["w"]))


def test_a_tiny_float16_gradient_survives():
    def compute(params):
        opt = loss_scale.MixedPrecisionLossScaleOptimizer(optax.sgd(1.0), 2**15)
        loss = lambda p: (
            (p["m"]["w"] * jnp.float16(0.5)).astype(jnp.float32).sum() * 4e-8
        )
        return opt.compute_gradients(loss, params)[1]["m"]["w"]

    grad = hk.testing.transform_and_run(compute)(
        {"m": {"w": jnp.ones((2,), jnp.float16)}}
    )
    assert np.float16(2e-8) == 0 and grad.dtype == jnp.float32
    # The scaled gradient passes through float16, which keeps 11 bits.
    np.testing.assert_allclose(grad, 2e-8, rtol=2**-11)


def test_a_skipped_step_leaves_every_leaf_unchanged():
    step = harness.transform_step(dynamic)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    apply = jax.jit(harness.one_device(step))
    (_, params, n), state = apply(params, state, x, 3)
    assert int(n) == 4
    (value, skipped_params, n), skipped_state = apply(params, state, x * jnp.inf, n)
    assert not np.isfinite(value)
    assert int(n) == 4
    harness.assert_equal(skipped_params, params)
    harness.assert_equal(skipped_state["adam"], state["adam"])
    assert float(skipped_state["dynamic_loss_scale"]["current_loss_scale"]) == 2.0**14
    (_, went_on, n), _ = apply(skipped_params, skipped_state, x, n)
    (_, expected, _), _ = apply(params, state, x, n)
    assert int(n) == 5
    # Scales are powers of two, so the lower scale after the skip does not change the
    # next step.
    harness.assert_equal(went_on, expected)


def test_a_fixed_scale_skips_no_step():
    step = harness.transform_step(
        lambda: loss_scale.MixedPrecisionLossScaleOptimizer(optax.sgd(0.1), 128)
    )
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    assert not jax.tree.leaves(state)
    (_, new, n), _ = step.apply({}, state, None, params, x * jnp.inf, 0)
    assert int(n) == 1 and not np.all(np.isfinite(new["mlp/linear_0"]["w"]))


def test_state_is_strongly_typed_and_steps_do_not_recompile():
    step = harness.transform_step(dynamic)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    entry = state["dynamic_loss_scale"]
    assert (
        entry["current_loss_scale"].dtype == jnp.float32
        and entry["good_steps"].dtype == jnp.int32
    )
    apply = jax.jit(harness.one_device(step))
    n = jnp.int32(0)
    for _ in range(3):
        assert not any(leaf.weak_type for leaf in jax.tree.leaves((params, state, n)))
        (_, params, n), state = apply(params, state, x, n)
    assert apply._cache_size() == 1


def test_gradients_are_scaled_and_unscaled_exactly():
    params = harness.params()
    x = harness.batch()

    def compute(opt, **kwargs):
        return hk.testing.transform_and_run(
            lambda: opt().compute_gradients(
                lambda p: harness.loss(p, x), params, **kwargs
            )
        )()

    bare = compute(lambda: optax_optimizer.OptaxOptimizer(optax.sgd(1.0)))
    harness.assert_equal(compute(dynamic), bare)
    weighted = compute(dynamic, grad_loss=jnp.float32(4))[1]
    harness.assert_equal(weighted, jax.tree.map(lambda g: 4 * g, bare[1]))


def test_names_and_slots_follow_tensorflow():
    def names():
        opt = dynamic()
        assert isinstance(opt, base.Optimizer)
        opt.apply_gradients(harness.params(), harness.params())
        queried = (
            opt.get_slot("mlp/linear_0/w", "mu"),
            opt.get_slot("mlp/linear_0/w", "nothing"),
        )
        return opt.get_name(), opt.get_slot_names(), queried, len(opt.variables())

    name, slots, (mu, nothing), count = hk.testing.transform_and_run(names)()
    assert (name, slots, nothing) == ("adam", ["mu", "nu"], None)
    # Two slots for each of three parameters, two step counts, the loss scale and the
    # good steps.
    assert mu.shape == (3, 4) and count == 10


def test_several_losses_share_the_scale_and_the_vote():
    params = harness.params()
    x = harness.batch()

    def step(params, x):
        halves = [
            lambda p, half=half: harness.loss(p, half) / 2 for half in jnp.split(x, 2)
        ]
        return dynamic().minimize(
            halves,
            params,
            0,
            aggregation_method=gradients.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N,
        )

    step = hk.transform_with_state(step)
    _, state = step.init(None, params, x)
    (value, new, n), _ = step.apply({}, state, None, params, x)
    whole = harness.transform_step(dynamic)
    (expected_value, expected, _), _ = whole.apply(
        {}, whole.init(None, params, x)[1], None, params, x
    )
    # The two halves are summed in another order than the whole batch.
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    harness.assert_close(new, expected, rtol=1e-5)
    assert int(n) == 1
    (_, new, n), _ = step.apply({}, state, None, params, x.at[0, 0].set(jnp.inf))
    harness.assert_equal(new, params)
    assert int(n) == 0


def counting_loss(p, x):
    """Returns the loss.

    Keeps the sum of all inputs in Haiku's state, and a count in the state of a module.
    """
    seen = hk.get_state("seen", [], jnp.float32, jnp.zeros)
    hk.set_state("seen", seen + jnp.sum(x))
    with jax.numpy_dtype_promotion("standard"):
        hk.ExponentialMovingAverage(0.9, name="ema")(jnp.mean(x))
    return harness.loss(p, x)


def scale_outside(**kwargs):
    adam = optax_optimizer.OptaxOptimizer(optax.adam(0.1), name="adam")
    return dynamic_around(cross_shard.CrossShardOptimizer(adam, **kwargs))


def scale_inside(**kwargs):
    adam = optax_optimizer.OptaxOptimizer(optax.adam(0.1), name="adam")
    return cross_shard.CrossShardOptimizer(dynamic_around(adam), **kwargs)


def dynamic_around(opt):
    return loss_scale.MixedPrecisionLossScaleOptimizer(
        opt, loss_scale.DynamicLossScale()
    )


def separate_calls(opt, x, params, n):
    value, grads = opt.compute_gradients(lambda p: counting_loss(p, x), params)
    grads = jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)
    return value, *opt.apply_gradients(grads, params, n)


def minimized(opt, x, params, n):
    return opt.minimize(lambda p: counting_loss(p, x), params, n)


def in_micro_batches(opt, x, params, n):
    parts = gradients.MicroBatches(counting_loss, x.reshape(2, -1, 3))
    return opt.minimize(parts, params, n)


def in_two_losses(opt, x, params, n):
    losses = [lambda p, part=part: counting_loss(p, part) for part in (x[:1], x[1:])]
    return opt.minimize(losses, params, n)


def loss_state(state):
    return {name: state[name] for name in ("~", "ema")}


@pytest.mark.parametrize("make", [scale_outside, scale_inside])
@pytest.mark.parametrize(
    "way", [minimized, separate_calls, in_micro_batches, in_two_losses]
)
def test_a_skipped_step_restores_state_that_the_loss_wrote(make, way):
    step = hk.transform_with_state(lambda p, x, n: way(make(), x, p, n))
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x, 0)
    run = jax.jit(lambda p, s, x, n: step.apply({}, s, None, p, x, n))
    (_, params, n), state = run(params, state, x, jnp.int32(0))
    assert float(state["~"]["seen"]) != 0 and int(n) == 1
    (_, new, new_n), after = run(params, state, x.at[0, 0].set(jnp.inf), n)
    harness.assert_equal(
        (new, new_n, loss_state(after)), (params, n, loss_state(state))
    )
    (_, _, new_n), after = run(params, state, x, n)
    assert int(new_n) == 2 and int(after["ema"]["counter"]) > int(
        state["ema"]["counter"]
    )


def test_a_skip_in_one_group_keeps_the_loss_state_of_the_other():
    make = lambda: scale_outside(group_assignment=[[0, 2], [1, 3]])
    step = hk.transform_with_state(lambda p, x, n: minimized(make(), x, p, n))
    params = harness.params()
    x = harness.batch().reshape(4, 4, 3)
    _, state = step.init(None, params, x[0], 0)
    run = jax.jit(harness.per_replica(step, 4))
    stacked = harness.stack((params, state), 4)
    (_, _, n), after = run(
        *stacked, x.at[2, 0, 0].set(jnp.nan), jnp.zeros(4, jnp.int32)
    )
    np.testing.assert_array_equal(n, [0, 1, 0, 1])
    np.testing.assert_array_equal(after["ema"]["counter"], [0, 1, 0, 1])
    np.testing.assert_array_equal(
        np.asarray(after["~"]["seen"]) == 0, [True, False, True, False]
    )


def many_steps(way, **kwargs):
    """Transforms several steps in an hk.scan.

    They return the parameters, and the number of updates after each step.
    """

    def many(params, xs):
        opt = scale_outside(**kwargs)

        def body(carry, x):
            _, params, n = way(opt, x, *carry)
            return (params, n), n

        (params, _), ns = hk.scan(body, (params, jnp.int32(0)), xs)
        return params, ns

    return hk.transform_with_state(many)


@pytest.mark.parametrize("way", [minimized, in_micro_batches])
def test_a_skipped_step_in_a_loop_restores_the_state_before_it(way):
    params = harness.params()
    x = harness.batch()
    xs = jnp.stack([x, x.at[0, 0].set(jnp.inf), 2 * x])
    many = many_steps(way)
    _, state = many.init(None, params, xs)
    (new, ns), after = jax.jit(many.apply)({}, state, None, params, xs)
    np.testing.assert_array_equal(ns, [1, 1, 2])
    (expected, _), expected_state = jax.jit(many.apply)(
        {}, state, None, params, xs[::2]
    )
    for tree in (after, expected_state):
        # Only the run with the skipped step lowered the scale.
        del tree["dynamic_loss_scale"]
    # The scale is a power of 2, so scaling rounds nothing.
    harness.assert_close((new, after), (expected, expected_state), rtol=1e-6)


def test_a_skipped_step_in_a_loop_restores_sharded_slots():
    params = harness.params()
    x = harness.batch()
    xs = jnp.stack([x, x.at[0, 0].set(jnp.inf), 2 * x])
    many = many_steps(minimized, shard_update=True)
    _, state = many.init(None, params, xs)

    def steps(state, xs):
        out, state = many.apply({}, state, None, params, xs)
        return out, state["adam"]

    run = harness.vmapped(steps, (jax.P(), jax.P(None, "replica")), jax.P(), 4)
    stored = harness.placed(state, params, 4)
    (new, ns), slots = run(stored, xs)
    np.testing.assert_array_equal(ns, [1, 1, 2])
    (expected, _), expected_slots = run(stored, xs[::2])
    harness.assert_close((new, slots), (expected, expected_slots), rtol=1e-6)


def test_state_written_after_the_loss_survives_a_skipped_step():
    def step(p, x):
        opt = scale_outside()
        _, grads = opt.compute_gradients(lambda p: counting_loss(p, x), p)
        hk.set_state("seen", jnp.float32(7))
        return opt.apply_gradients(grads, p, 0)[1]

    step = hk.transform_with_state(step)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    n, after = step.apply({}, state, None, params, x * jnp.inf)
    assert int(n) == 0 and float(after["~"]["seen"]) == 7
    harness.assert_equal(after["ema"], state["ema"])
