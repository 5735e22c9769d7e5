"""The place of an update in a program that is not to be run, but looked into: see `xshard.stored.held`.

There it says what the update, which is the framework's, is given and what it returns.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xshard.learners import within
from xshard.learners.state import LearnerState, Outcome
from xshard.optimizers import gathering, trees


def update(
    state: LearnerState, lossed: Any, batch: Any, made: Callable[[], tuple[LearnerState, Outcome]]
) -> tuple[LearnerState, Outcome]:
    """Stands for an update.

    Args:
      state: before it.
      lossed: what the loss has returned.
      batch: the replica's part of the batch.
      made: the update itself, of which only shapes are asked.

    Returns:
      The state as it was, and an outcome of zeros.
    """
    shards = gathering.held(state.params, state.rules.held)
    whole = gathering.not_held(state.params, state.rules.held)
    used_as_whole((whole, state.net_state, state.opt_state, state.global_step, lossed))
    with within.run_only():
        _, outcome = jax.eval_shape(made)
    outcome = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outcome)
    rows = replicas_own(outcome.aux, batch)
    new = state.replace(params=trees.replace(state.params, used_as_shards(shards)))
    return new, outcome._replace(aux=rows)


# By these names the program shows them.


def used_as_whole(tree: Any) -> None:
    """Says that each array is to be whole."""

    def used_as_whole(tree: Any) -> Any:
        return tree

    jax.jit(used_as_whole)(tree)


def used_as_shards(tree: Any) -> Any:
    """The same tree, said to be of parameters in shards."""

    def used_as_shards(tree: Any) -> Any:
        return tree

    return jax.jit(used_as_shards)(tree)


def replicas_own(tree: Any, given: Any) -> Any:
    """The same tree, said to be a replica's own.

    Args:
      tree: arrays.
      given: what it is of.
    """

    def replicas_own(tree: Any, given: Any) -> Any:
        del given
        return tree

    return jax.jit(replicas_own)(tree, given)
