"""One training step, with xshard's rules and by hand: AdamW, with the mean of the
gradients over all devices.

The sides differ in who writes the step, and in the dynamic loss scale: none, by hand,
`jmp.DynamicLossScale`, or `flax.training.dynamic_scale.DynamicScale`, each used as its
documentation shows. A side takes a loss and returns two functions. The first maps
parameters to the first state. The second maps a state and a device's part of a batch to
the next state and the loss, on each device.
"""

import functools
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import optax

import xshard

Local = Callable[[Any, jax.Array], Any]
Loss = Callable[[Any, jax.Array], jax.Array]
Side = tuple[Callable[[Any], Any], Local]

# The learning rate is so low that even the widest model, which is not tuned, stays
# finite in float16.
ADAM = optax.adamw(1e-5)
# The scale is low enough for float16, because a skipped step would do less work than
# the steps to be timed.
FIRST_SCALE = 2.0**10
PERIOD = 2000


def by_rules(loss: Loss, scale: bool) -> Side:
    """Returns the step with xshard's rules."""

    def step(params: Any, x: jax.Array) -> Any:
        opt: Any = xshard.CrossShardOptimizer(ADAM)
        if scale:
            dynamic = xshard.DynamicLossScale(FIRST_SCALE, PERIOD)
            opt = xshard.MixedPrecisionLossScaleOptimizer(opt, dynamic)
        return opt.minimize(
            lambda p: loss(p, x), params, gate_gradients=xshard.Optimizer.GATE_NONE
        )

    rules = hk.transform_with_state(step)

    def init(params: Any) -> Any:
        return params, rules.init(None, params, jnp.ones((1, _width(params))))[1]

    def local(state: Any, x: jax.Array) -> Any:
        (value, params), rule_state = rules.apply({}, state[1], None, state[0], x)
        return (params, rule_state), jax.lax.pmean(value, "replica")

    return init, local


def unscaled_by_hand(loss: Loss) -> Side:
    """Returns the step written by hand, without a loss scale."""

    def local(state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state[0], x)
        new = _adam(jax.lax.pmean(grads, "replica"), state)
        return new, jax.lax.pmean(value, "replica")

    return _with_adam, local


def by_hand(loss: Loss, conditional: bool) -> Side:
    """Returns the step written by hand, with a dynamic loss scale that skips a step by
    `cond` or by `where`.
    """

    def local(state: Any, x: jax.Array) -> Any:
        old, scale, good = state
        value, grads = jax.value_and_grad(lambda p: loss(p, x) * scale)(old[0])
        grads = jax.tree.map(lambda g: g / scale, jax.lax.pmean(grads, "replica"))
        finite = jnp.all(
            jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])
        )
        due = good + 1 >= PERIOD
        raised = jnp.where(due, scale * 2, scale)
        new_scale = jnp.where(finite, raised, jnp.maximum(scale / 2, 1))
        new_good = jnp.where(finite & ~due, good + 1, 0)
        if conditional:
            new = jax.lax.cond(finite, _adam, lambda _, state: state, grads, old)
        else:
            new = jax.tree.map(
                functools.partial(jnp.where, finite), _adam(grads, old), old
            )
        return (new, new_scale, new_good), jax.lax.pmean(value / scale, "replica")

    return lambda params: (
        _with_adam(params),
        jnp.float32(FIRST_SCALE),
        jnp.int32(0),
    ), local


def with_jmp(loss: Loss) -> Side:
    """Returns the step written by hand around jmp's loss scale, in the order of jmp's
    README.
    """

    def local(state: Any, x: jax.Array) -> Any:
        old, scale = state
        value, grads = jax.value_and_grad(lambda p: scale.scale(loss(p, x)))(old[0])
        grads = scale.unscale(jax.lax.pmean(grads, "replica"))
        finite = jmp.all_finite(grads)
        new = jmp.select_tree(finite, _adam(grads, old), old)
        return (new, scale.adjust(finite)), jax.lax.pmean(
            scale.unscale(value), "replica"
        )

    def init(params: Any) -> Any:
        scale = jmp.DynamicLossScale(jnp.float32(FIRST_SCALE), jnp.int32(0), PERIOD)
        return _with_adam(params), scale

    return init, local


def with_flax(loss: Loss) -> Side:
    """Returns the step written by hand around flax's loss scale, as its examples do."""
    from flax.training import dynamic_scale

    def local(state: Any, x: jax.Array) -> Any:
        old, scale = state
        grad = scale.value_and_grad(lambda p: loss(p, x), axis_name="replica")
        scale, finite, value, grads = grad(old[0])
        new = jax.tree.map(functools.partial(jnp.where, finite), _adam(grads, old), old)
        return (new, scale), jax.lax.pmean(value, "replica")

    def init(params: Any) -> Any:
        scale = dynamic_scale.DynamicScale(
            fin_steps=jnp.int32(0),
            scale=jnp.float32(FIRST_SCALE),
            growth_interval=PERIOD,
        )
        return _with_adam(params), scale

    return init, local


SIDES: dict[str, Callable[[Loss], Side]] = {
    "rules": functools.partial(by_rules, scale=True),
    "rules, unscaled": functools.partial(by_rules, scale=False),
    "hand": functools.partial(by_hand, conditional=True),
    "hand, where": functools.partial(by_hand, conditional=False),
    "hand, unscaled": unscaled_by_hand,
    "jmp": with_jmp,
    "flax": with_flax,
}


def _with_adam(params: Any) -> Any:
    return params, ADAM.init(params)


def _adam(grads: Any, state: Any) -> Any:
    updates, adam = ADAM.update(grads, state[1], state[0])
    return optax.apply_updates(state[0], updates), adam


def _width(params: Any) -> int:
    return next(iter(params.values()))["w"].shape[0]


def jitted(local: Local) -> Any:
    """Returns the step jitted for all devices; it donates the state."""
    specs = {"in_specs": (jax.P(), jax.P("replica")), "out_specs": jax.P()}
    mapped = jax.shard_map(local, mesh=mesh(), check_vma=False, **specs)
    return jax.jit(mapped, donate_argnums=0)


def mesh() -> jax.sharding.Mesh:
    """Returns a mesh with all devices as replicas."""
    return jax.sharding.Mesh(jax.devices(), "replica")
