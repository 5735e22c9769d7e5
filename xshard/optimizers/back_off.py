"""A factor of a rule's updates that is part of its state, for a run that goes back to lower: `roll_back.learning_rate_factor`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

_SCALE = "update_scale"


class BackOffState(NamedTuple):
    """The factor, 1 at first, under the name by which what `optax.inject_hyperparams` keeps is logged."""

    hyperparams: dict[str, jax.Array]


def after(transformation: Any) -> optax.GradientTransformation:
    """A transformation with the factor behind it.

    >>> from xshard.optimizers import back_off
    >>> rule = back_off.after(optax.adam(1e-3))
    >>> rule.init({'w': jnp.zeros(2)})[-1].hyperparams['update_scale'].item()
    1.0
    """

    def init(params: Any) -> BackOffState:
        del params
        return BackOffState({_SCALE: jnp.ones([], jnp.float32)})

    def update(updates: Any, state: BackOffState, params: Any = None) -> tuple[Any, BackOffState]:
        del params
        scale = state.hyperparams[_SCALE]
        return jax.tree.map(lambda x: x * scale.astype(x.dtype), updates), state

    first = optax.GradientTransformation(transformation.init, transformation.update)
    return optax.chain(first, optax.GradientTransformation(init, update))


def is_scale(name: str) -> bool:
    """Returns whether a state of a rule's is such a factor, by its name."""
    return f"/{name}".endswith(f"/hyperparams/{_SCALE}")
