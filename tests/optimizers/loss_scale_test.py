"""FixedLossScale, DynamicLossScale and MixedPrecisionLossScaleOptimizer."""

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
    """The scales and good steps after each of some steps, given whether each is finite."""

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
    """The rule of TensorFlow's DynamicLossScale, written out on numbers."""
    scale, good, history = np.float32(scale), 0, []
    for finite in finite_steps:
        if not finite:
            scale, good = max(scale / np.float32(multiplier), np.float32(1)), 0
        elif good + 1 >= period:
            with np.errstate(over="ignore"):
                raised = scale * np.float32(multiplier)
            scale, good = (raised if np.isfinite(raised) else scale), 0
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
        finite.tolist(), initial_loss_scale=initial, increment_period=period, multiplier=multiplier
    )
    assert got == tensorflow_rule(finite, initial, period, multiplier)


def test_dynamic_scale_edges():
    assert run_scale([False, False], initial_loss_scale=1.5) == [(1.0, 0), (1.0, 0)]
    assert run_scale([True, True, True], initial_loss_scale=4, increment_period=2) == [
        (4.0, 1),
        (8.0, 0),
        (8.0, 1),
    ]
    # A product that overflows float32 is not taken, and the count starts again all the same.
    assert run_scale([True, True], initial_loss_scale=MAX, increment_period=2) == [
        (MAX, 1),
        (MAX, 0),
    ]
    # A count beyond the period, as from a checkpoint of a run with a longer one, is due at once.
    state = {
        "dynamic_loss_scale": {"current_loss_scale": jnp.float32(4), "good_steps": jnp.int32(9)}
    }
    assert run_scale([True], state, increment_period=5) == [(8.0, 0)]


def test_defaults_are_tensorflows():
    def read():
        scale = loss_scale.DynamicLossScale()
        return scale.initial_loss_scale, scale.increment_period, scale.multiplier

    assert hk.testing.transform_and_run(read)() == (2.0**15, 2000, 2.0)


@pytest.mark.parametrize(
    "bad", [0.5, 0, -3, float("nan"), float("inf"), 1e39, True, "2", None, [2], 1j]
)
def test_scales_below_1_or_no_numbers_are_refused(bad):
    for make in (loss_scale.FixedLossScale, loss_scale.DynamicLossScale):
        with pytest.raises(ValueError, match="must be a number of at least 1; received"):
            hk.testing.transform_and_run(lambda make=make: make(bad))()
    with pytest.raises(ValueError, match="at least 1"):
        hk.testing.transform_and_run(
            lambda: loss_scale.MixedPrecisionLossScaleOptimizer(optax.sgd(1.0), bad)
        )()


@pytest.mark.parametrize(
    "kwargs,match",
    [
        ({"increment_period": 0}, "increment_period must be an integer of at least 1; received 0"),
        ({"increment_period": 2.5}, "received 2.5"),
        ({"increment_period": True}, "received True"),
        ({"multiplier": 1}, "multiplier must be above 1"),
        ({"multiplier": 0.5}, "multiplier must be a number of at least 1; received 0.5"),
    ],
)
def test_bad_arguments_of_a_dynamic_scale(kwargs, match):
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


def test_value_is_unscaled_also_where_the_scaled_one_overflows():
    step = harness.transform_step(
        lambda: dynamic(), lambda p, x: jnp.sum(p["m"]["w"]).astype(x.dtype)
    )
    params, x = {"m": {"w": jnp.full((3,), 2.0)}}, jnp.zeros((), jnp.float16)
    _, state = step.init(None, params, x)
    (value, params, _), _ = step.apply({}, state, None, params, x)
    assert value.dtype == jnp.float16 and float(value) == 6.0
    assert np.all(np.isfinite(params["m"]["w"]))


def test_a_tiny_float16_gradient_survives():
    def compute(params):
        opt = loss_scale.MixedPrecisionLossScaleOptimizer(optax.sgd(1.0), 2**15)
        loss = lambda p: (p["m"]["w"] * jnp.float16(0.5)).astype(jnp.float32).sum() * 4e-8
        return opt.compute_gradients(loss, params)[1]["m"]["w"]

    grad = hk.testing.transform_and_run(compute)({"m": {"w": jnp.ones((2,), jnp.float16)}})
    assert np.float16(2e-8) == 0 and grad.dtype == jnp.float32
    # The scaled gradient passed through float16, which keeps 11 bits.
    np.testing.assert_allclose(grad, 2e-8, rtol=2**-11)


def test_a_skipped_step_leaves_every_leaf_as_it_was():
    step = harness.transform_step(dynamic)
    params, x = harness.params(), harness.batch()
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
    # Scales are powers of two, so that the next step does not depend on the skip.
    harness.assert_equal(went_on, expected)


def test_a_fixed_scale_updates_without_a_vote():
    step = harness.transform_step(
        lambda: loss_scale.MixedPrecisionLossScaleOptimizer(optax.sgd(0.1), 128)
    )
    params, x = harness.params(), harness.batch()
    _, state = step.init(None, params, x)
    assert not jax.tree.leaves(state)
    (_, new, n), _ = step.apply({}, state, None, params, x * jnp.inf, 0)
    assert int(n) == 1 and not np.all(np.isfinite(new["mlp/linear_0"]["w"]))


def test_state_is_strong_and_the_second_step_does_not_compile_again():
    step = harness.transform_step(dynamic)
    params, x = harness.params(), harness.batch()
    _, state = step.init(None, params, x)
    entry = state["dynamic_loss_scale"]
    assert (
        entry["current_loss_scale"].dtype == jnp.float32 and entry["good_steps"].dtype == jnp.int32
    )
    apply = jax.jit(harness.one_device(step))
    n = jnp.int32(0)
    for _ in range(3):
        assert not any(leaf.weak_type for leaf in jax.tree.leaves((params, state, n)))
        (_, params, n), state = apply(params, state, x, n)
    assert apply._cache_size() == 1


def test_gradients_are_scaled_and_unscaled_exactly():
    params, x = harness.params(), harness.batch()

    def compute(opt, **kwargs):
        return hk.testing.transform_and_run(
            lambda: opt().compute_gradients(lambda p: harness.loss(p, x), params, **kwargs)
        )()

    bare = compute(lambda: optax_optimizer.OptaxOptimizer(optax.sgd(1.0)))
    harness.assert_equal(compute(dynamic), bare)
    weighted = compute(dynamic, grad_loss=jnp.float32(4))[1]
    harness.assert_equal(weighted, jax.tree.map(lambda g: 4 * g, bare[1]))


def test_names_of_tensorflow():
    def names():
        opt = dynamic()
        assert isinstance(opt, base.Optimizer)
        opt.apply_gradients(harness.params(), harness.params())
        found = opt.get_slot("mlp/linear_0/w", "mu"), opt.get_slot("mlp/linear_0/w", "nothing")
        return opt.get_name(), opt.get_slot_names(), found, len(opt.variables())

    name, slots, (mu, nothing), count = hk.testing.transform_and_run(names)()
    assert (name, slots, nothing) == ("adam", ["mu", "nu"], None)
    # Two slots of three parameters, two counts of steps, the loss scale and the good steps.
    assert mu.shape == (3, 4) and count == 10


def test_several_losses_share_the_scale_and_a_vote():
    params, x = harness.params(), harness.batch()

    def step(params, x):
        halves = [lambda p, half=half: harness.loss(p, half) / 2 for half in jnp.split(x, 2)]
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
    # The two halves sum in another order than the whole.
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    harness.assert_close(new, expected, rtol=1e-5)
    assert int(n) == 1
    (_, new, n), _ = step.apply({}, state, None, params, x.at[0, 0].set(jnp.inf))
    harness.assert_equal(new, params)
    assert int(n) == 0
