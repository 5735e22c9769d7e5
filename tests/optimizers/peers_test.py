"""Tests of failures of common building blocks, combined, that xshard avoids.

Each test but that of the common vote reproduces the failure first, so it fails when the
other library fixes it.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax

from tests.optimizers import harness
from xshard.optimizers import cross_shard, loss_scale

PARAMS = {"m": {"w": jnp.ones(())}}
BAD = {"m": {"w": jnp.inf}}
GOOD = {"m": {"w": jnp.ones(())}}


def run_peer(transformation, grads):
    """Returns the parameter after each gradient, with optax alone."""
    params = PARAMS
    state = transformation.init(PARAMS)
    history = []
    with jax.numpy_dtype_promotion("standard"):
        for grad in grads:
            updates, state = transformation.update(grad, state, params)
            params = optax.apply_updates(params, updates)
            history.append(float(params["m"]["w"]))
    return history


def run_here(transformation, grads):
    """Returns the parameter after each gradient, with optax wrapped by both rules."""

    def step(params, grads):
        opt = cross_shard.CrossShardOptimizer(transformation)
        opt = loss_scale.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
        return opt.apply_gradients(grads, params)

    step = hk.transform_with_state(step)
    _, state = step.init(None, PARAMS, GOOD)
    params = PARAMS
    history = []
    for grad in grads:
        params, state = step.apply({}, state, None, params, grad)
        history.append(float(params["m"]["w"]))
    return history


def test_an_infinite_micro_batch_makes_parameters_nan_only_in_optax():
    accumulate = optax.MultiSteps(optax.sgd(0.5), 2)
    assert np.all(np.isnan(run_peer(accumulate, [BAD, GOOD, GOOD, GOOD])[1:]))
    # xshard leaves the bad micro-batch out: two good ones make the next step, which is
    # correct.
    assert run_here(accumulate, [GOOD, BAD, GOOD, GOOD, GOOD]) == [
        1.0,
        1.0,
        0.5,
        0.5,
        0.0,
    ]


def test_an_infinite_micro_batch_freezes_the_run_only_in_optax():
    accumulate = optax.MultiSteps(optax.apply_if_finite(optax.sgd(0.5), 100), 2)
    history = run_peer(accumulate, [BAD, GOOD] + [GOOD] * 20)
    assert history == [1.0] * 22
    assert run_here(accumulate, [BAD, GOOD, GOOD, GOOD, GOOD]) == [
        1.0,
        1.0,
        0.5,
        0.5,
        0.0,
    ]


def test_micro_batches_are_voted_on_together_and_reduced_once():
    def step(params, x, losses=3):
        opt = cross_shard.CrossShardOptimizer(optax.sgd(1.0))
        opt = loss_scale.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
        parts = [
            lambda p, i=i: jnp.sum(p["m"]["w"] * x[i]) / losses for i in range(losses)
        ]
        return opt.minimize(parts, params, 0)

    step = hk.transform_with_state(step)
    _, state = step.init(None, PARAMS, jnp.ones(3))

    def local(x):
        (_, params, n), _ = step.apply({}, state, None, PARAMS, x[0])
        return params["m"]["w"], n

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=harness.mesh(),
            in_specs=jax.P("replica"),
            out_specs=jax.P(),
            check_vma=False,
        )
    )
    x = jnp.ones((8, 3))
    assert tuple(map(float, run(x))) == (0.0, 1.0)
    assert tuple(map(float, run(x.at[5, 1].set(jnp.inf)))) == (1.0, 0.0)
    assert run.lower(x).compile().as_text().count(" all-reduce(") == 1


def test_loss_scales_differ_between_replicas_only_in_jmp():
    bad_on_one = jnp.array([1.0, jnp.inf, 1.0, 1.0])
    spec = jax.P("replica")

    def peer(x):
        scale = jmp.DynamicLossScale(jnp.float32(2**15))
        return scale.adjust(jmp.all_finite({"w": x})).loss_scale[None]

    mesh = harness.mesh(4)
    with jax.numpy_dtype_promotion("standard"):
        scales = jax.shard_map(peer, mesh=mesh, in_specs=spec, out_specs=spec)(
            bad_on_one
        )
    np.testing.assert_array_equal(scales, [2**15, 2**14, 2**15, 2**15])

    for scale_outside in (True, False):

        def step(params, x, scale_outside=scale_outside):
            scale = loss_scale.DynamicLossScale()
            scaled = lambda opt: loss_scale.MixedPrecisionLossScaleOptimizer(opt, scale)
            shard = cross_shard.CrossShardOptimizer
            sgd = optax.sgd(1.0)
            opt = scaled(shard(sgd)) if scale_outside else shard(scaled(sgd))
            opt.minimize(lambda p: jnp.sum(p["m"]["w"] * x), params)
            return scale()

        step = hk.transform_with_state(step)
        _, state = step.init(None, PARAMS, 1.0)

        def here(x, step=step, state=state):
            scale, _ = step.apply({}, state, None, PARAMS, x)
            return scale[None]

        scales = jax.shard_map(
            here, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )(bad_on_one)
        np.testing.assert_array_equal(scales, [2**14] * 4)


def test_a_float16_mean_overflows_in_pmean_but_not_in_xshard():
    x = jnp.full((4,), 3e4, jnp.float16)
    mesh = harness.mesh(4)
    spec = jax.P("replica")
    peer = jax.shard_map(
        lambda x: jax.lax.pmean(x, "replica")[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    assert np.all(np.isinf(peer(x)))

    def step(x):
        opt = cross_shard.CrossShardOptimizer(optax.sgd(1.0))
        params = {"m": {"w": jnp.zeros((), jnp.float16)}}
        return opt.minimize(lambda p: jnp.sum(p["m"]["w"] * x), params)[1]["m"]["w"]

    step = hk.transform_with_state(step)
    here = lambda x: step.apply({}, {}, None, x)[0][None]
    mean = jax.shard_map(
        here, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )(x)
    np.testing.assert_array_equal(mean, np.full(4, -3e4, np.float16))
