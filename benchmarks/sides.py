"""One training step, with xshard's rules and by hand: AdamW, with the mean of the
gradients over all devices.

The sides differ in who writes the step, and in the dynamic loss scale: none, by hand,
`jmp.DynamicLossScale`, or `flax.training.dynamic_scale.DynamicScale`, each used as its
documentation shows. A side takes a loss and returns two functions. The first maps
parameters and an input to the first state. The second maps a state and a device's part
of a batch to the next state and the loss, on each device. `Timed` compiles and times a
side.
"""

import functools
import time
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
Side = tuple[Callable[[Any, jax.Array], Any], Local]

# The learning rate is so low that even the widest model, which is not tuned, stays
# finite in float16.
ADAM = optax.adamw(1e-5)
# The scale is low enough for float16, because a skipped step would do less work than
# the steps to be timed.
FIRST_SCALE = 2.0**10
PERIOD = 2000
# The approximate time of one side's turn.
_TURN_SECONDS = 0.05


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

    def init(params: Any, x: jax.Array) -> Any:
        return params, rules.init(None, params, x)[1]

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

    def init(params: Any, x: jax.Array) -> Any:
        return _with_adam(params, x), jnp.float32(FIRST_SCALE), jnp.int32(0)

    return init, local


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

    def init(params: Any, x: jax.Array) -> Any:
        scale = jmp.DynamicLossScale(jnp.float32(FIRST_SCALE), jnp.int32(0), PERIOD)
        return _with_adam(params, x), scale

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

    def init(params: Any, x: jax.Array) -> Any:
        scale = dynamic_scale.DynamicScale(
            fin_steps=jnp.int32(0),
            scale=jnp.float32(FIRST_SCALE),
            growth_interval=PERIOD,
        )
        return _with_adam(params, x), scale

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


def _with_adam(params: Any, x: jax.Array) -> Any:
    del x
    return params, ADAM.init(params)


def _adam(grads: Any, state: Any) -> Any:
    updates, adam = ADAM.update(grads, state[1], state[0])
    return optax.apply_updates(state[0], updates), adam


def jitted(local: Local) -> Any:
    """Returns the step jitted for all devices; it donates the state."""
    specs = {"in_specs": (jax.P(), jax.P("replica")), "out_specs": jax.P()}
    mapped = jax.shard_map(local, mesh=mesh(), check_vma=False, **specs)
    return jax.jit(mapped, donate_argnums=0)


def mesh() -> jax.sharding.Mesh:
    """Returns a mesh with all devices as replicas."""
    return jax.sharding.Mesh(jax.devices(), "replica")


class Timed:
    """A step with its state, compiled and executed a few times.

    Attributes:
      count: the number of steps of a turn.
      loss: the loss of the last step.
    """

    def __init__(self, name: str, loss: Loss, params: Callable[[], Any], x: jax.Array):
        """Compiles the step, and chooses the number of steps of a turn.

        Args:
          name: the name of a side.
          loss: a function of parameters and input.
          params: returns the first parameters.
          x: the input of all devices together.
        """
        init, local = SIDES[name](loss)
        everywhere = jax.sharding.NamedSharding(mesh(), jax.P())
        # Created in its final place, because a copy that is moved there would count as
        # the step's memory.
        create = jax.jit(lambda: init(params(), x[:1]), out_shardings=everywhere)
        self._state = create()
        self._x = jax.device_put(
            x, jax.sharding.NamedSharding(mesh(), jax.P("replica"))
        )
        # Compiled by the first call, because jmp's scale cannot be lowered ahead of
        # time.
        self._step = jitted(local)
        self._wait_for_each = jax.default_backend() == "cpu"
        seconds = min(self.steps(1) for _ in range(3))
        self.count = max(3, round(_TURN_SECONDS / seconds))

    def steps(self, count: int) -> float:
        """Returns the seconds per step of this many steps."""
        begin = time.perf_counter()
        for _ in range(count):
            self._state, self.loss = self._step(self._state, self._x)
            # XLA's CPU collectives deadlock with many steps in flight. On other
            # backends a wait would add to the time.
            if self._wait_for_each:
                jax.block_until_ready(self.loss)
        jax.block_until_ready((self._state, self.loss))
        return (time.perf_counter() - begin) / count

    def turn(self) -> float:
        """Returns the seconds per step of a turn, after one step that refills the
        caches.
        """
        self.steps(1)
        return self.steps(self.count)
