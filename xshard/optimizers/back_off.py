"""A factor on a rule's updates, kept in its state.

Each roll-back that passes over data multiplies it by `roll_back.learning_rate_factor`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from xshard.optimizers import extra_arguments

_SCALE = "update_scale"


class BackOffState(NamedTuple):
    """The factor, 1 at first.

    Attributes:
      hyperparams: `{'update_scale': factor}`, a float32 scalar. The name is that of the
        state of `optax.inject_hyperparams`, so that a run logs the factor.
    """

    hyperparams: dict[str, jax.Array]


def with_back_off(transformation: Any) -> optax.GradientTransformation:
    """Returns a transformation that multiplies the updates of another by the factor.

    Args:
      transformation: an `optax.GradientTransformation`, or another object with its two
        functions `init(params)` and `update(grads, state, params)`.

    Returns:
      A transformation whose state is a pair: that of `transformation`, and a
      `BackOffState`.

    >>> from xshard.optimizers import back_off
    >>> rule = back_off.with_back_off(optax.adam(1e-3))
    >>> rule.init({'w': jnp.zeros(2)})[-1].hyperparams['update_scale'].item()
    1.0
    """

    def init(params: Any) -> BackOffState:
        del params
        return BackOffState({_SCALE: jnp.ones([], jnp.float32)})

    def update(
        updates: Any, state: BackOffState, params: Any = None
    ) -> tuple[Any, BackOffState]:
        del params
        scale = state.hyperparams[_SCALE]
        scaled = jax.tree.map(lambda x: x * scale.astype(x.dtype), updates)
        return scaled, state

    # optax.chain unpacks tuples, and `transformation` may be another object with these
    # two methods.
    first = extra_arguments.with_support(transformation)
    return optax.chain(first, optax.GradientTransformation(init, update))


def is_scale(name: str) -> bool:
    """Returns whether the name of a rule's state array is that of the factor."""
    return f"/{name}".endswith(f"/hyperparams/{_SCALE}")
