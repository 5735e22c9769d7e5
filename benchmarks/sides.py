"""One training step, with xshard's rules and by hand: AdamW, with the mean of the
gradients over all devices.

The sides differ in who writes the step, and in the dynamic loss scale. A side takes a
loss and returns two functions. The first maps
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
        del x
        adam = params, ADAM.init(params)
        return adam, jnp.float32(FIRST_SCALE), jnp.int32(0)

    return init, local


SIDES: dict[str, Callable[[Loss], Side]] = {
    "rules": functools.partial(by_rules, scale=True),
    "rules, unscaled": functools.partial(by_rules, scale=False),
    "hand": functools.partial(by_hand, conditional=True),
    "hand, where": functools.partial(by_hand, conditional=False),
}


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
