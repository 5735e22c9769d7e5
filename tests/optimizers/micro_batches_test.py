"""Tests of MicroBatches: one loss at several inputs, summed in float32 by a scan."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers import harness
from xshard.optimizers import base, cross_shard, gradients, loss_scale

Method = gradients.AggregationMethod
TREE = Method.EXPERIMENTAL_TREE
RUNNING = Method.EXPERIMENTAL_ACCUMULATE_N


def computed(loss, params, **options):
    """Returns the result of `compute_gradients` of a plain optimizer."""
    step = hk.transform_with_state(
        lambda p: base.Optimizer(name="opt").compute_gradients(loss, p, **options)
    )
    (value, grads), _ = step.apply({}, {}, None, params)
    return value, grads


@pytest.mark.parametrize("method", [None, TREE, RUNNING])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8])
def test_micro_batches_match_a_list_of_losses(method, count):
    params = harness.params()
    x = harness.batch(examples=4 * count).reshape(count, 4, 3)
    losses = [lambda p, i=i: (harness.loss(p, x[i]), i) for i in range(count)]
    wanted = computed(losses, params, has_aux=True, aggregation_method=method)
    loss = gradients.MicroBatches(
        lambda p, x: (harness.loss(p, x[0]), x[1]), (x, jnp.arange(count))
    )
    (value, aux), grads = computed(
        loss, params, has_aux=True, aggregation_method=method
    )
    np.testing.assert_allclose(value, wanted[0][0], rtol=1e-6)
    np.testing.assert_array_equal(aux, np.arange(count))
    # The sums have the same order, but XLA fuses them differently.
    harness.assert_close(grads, wanted[1], rtol=1e-5, atol=1e-6)


def rounding(method, count=4096):
    """Returns the error of the sum of `count` float32 gradients of one number each."""
    x = jnp.asarray(np.random.default_rng(0).uniform(size=count), jnp.float32)
    loss = gradients.MicroBatches(lambda p, x: p["m"]["w"] * x, x)
    run = jax.jit(lambda p: computed(loss, p, aggregation_method=method)[1]["m"]["w"])
    return abs(
        float(run({"m": {"w": jnp.ones(())}})) - np.sum(np.asarray(x, np.float64))
    )


def test_a_sum_in_pairs_rounds_less_than_a_running_sum():
    # A sum in pairs rounds log2(4096) = 12 times, and a running sum 4096 times. The sum
    # is about 2048.
    ulp = 2.0**-24 * 2048
    assert rounding(TREE) < 12 * ulp
    assert rounding(RUNNING) > 4 * rounding(TREE)


def test_half_precision_is_summed_in_float32():
    params = {"m": {"w": jnp.zeros((), jnp.float16)}}
    loss = gradients.MicroBatches(
        lambda p, x: p["m"]["w"] * x, jnp.full((8,), 3e4, jnp.float16)
    )
    value, grads = computed(loss, params)
    assert grads["m"]["w"].dtype == jnp.float32 and value.dtype == jnp.float32
    np.testing.assert_array_equal(grads["m"]["w"], 8 * np.float32(np.float16(3e4)))


@pytest.mark.parametrize("method", [TREE, RUNNING])
def test_the_program_contains_the_loss_once(method):
    def tanh_count(count):
        x = harness.batch(examples=4 * count).reshape(count, 4, 3)
        loss = gradients.MicroBatches(harness.loss, x)
        run = jax.jit(lambda p: computed(loss, p, aggregation_method=method))
        return run.lower(harness.params()).as_text().count("tanh")

    assert tanh_count(16) == tanh_count(2)


@pytest.mark.parametrize("method", [TREE, RUNNING])
@pytest.mark.parametrize("check_vma", [True, False])
def test_both_rules_treat_micro_batches_as_one_step(method, check_vma):
    def step(params, x, n=0):
        opt = cross_shard.CrossShardOptimizer(optax.sgd(0.1))
        opt = loss_scale.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
        parts = gradients.MicroBatches(
            lambda p, x: harness.loss(p, x) / 2, x.reshape(2, -1, 3)
        )
        return opt.minimize(parts, params, n, aggregation_method=method)

    step = hk.transform_with_state(step)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    run = jax.jit(harness.replicated(step, check_vma=check_vma))
    (value, new, n), after = run(params, state, x)
    expected = jax.grad(harness.loss)(params, x)
    harness.assert_close(
        new,
        jax.tree.map(lambda p, g: p - 0.1 * g, params, expected),
        rtol=1e-5,
        atol=1e-6,
    )
    np.testing.assert_allclose(value, harness.loss(params, x), rtol=1e-6)
    (_, skipped, new_n), _ = run(new, after, x.at[9, 2].set(jnp.inf), n)
    harness.assert_equal((skipped, new_n), (new, n))


def test_a_loss_may_use_state_and_keys():
    def loss(p, x):
        count = hk.get_state("count", [], jnp.int32, jnp.zeros)
        hk.set_state("count", count + 1)
        return p["m"]["w"] * x, jax.random.uniform(hk.next_rng_key())

    def step(params):
        parts = gradients.MicroBatches(loss, jnp.arange(4.0))
        return base.Optimizer(name="opt").compute_gradients(parts, params, has_aux=True)

    step = hk.transform_with_state(step)
    params = {"m": {"w": jnp.ones(())}}
    key = jax.random.key(0)
    _, state = step.init(key, params)
    ((value, aux), grads), after = step.apply({}, state, key, params)
    assert (float(value), float(grads["m"]["w"])) == (6.0, 6.0)
    assert int(after["~"]["count"]) == int(state["~"]["count"]) + 4
    assert len(np.unique(aux)) == 4


@pytest.mark.parametrize(
    "inputs", [{}, jnp.ones(()), jnp.ones((0, 3)), [jnp.ones(2), jnp.ones(3)]]
)
def test_inputs_without_one_leading_dimension_are_refused(inputs):
    loss = gradients.MicroBatches(lambda p, x: jnp.sum(p["m"]["w"]), inputs)
    with pytest.raises(
        ValueError, match="MicroBatches must be arrays of one leading dimension"
    ):
        computed(loss, {"m": {"w": jnp.ones(())}})


def test_an_unknown_method_is_refused():
    with pytest.raises(
        ValueError, match="aggregation_method='tree' must be one of ADD_N, DEFAULT"
    ):
        gradients.method("tree")
