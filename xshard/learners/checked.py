"""The place of an update in a program that is not to be run, but looked into: see `xshard.stored.held`.

There it says what the update, which is the framework's, is given and what it returns.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xshard.learners import within
from xshard.learners.state import LearnerState, Outcome
from xshard.optimizers import gathering, trees, varying

# By these names the program shows arrays that are to be whole, parameters that are to be shards, and what is a replica's own.
USED_AS_WHOLE, USED_AS_SHARDS, REPLICAS_OWN = "used_as_whole", "used_as_shards", "replicas_own"


def update(
    state: LearnerState,
    lossed: Any,
    batch: Any,
    updated: Callable[[], tuple[LearnerState, Outcome]],
) -> tuple[LearnerState, Outcome]:
    """Stands for an update.

    Args:
      state: before it.
      lossed: what the loss has returned.
      batch: the replica's part of the batch.
      updated: the update itself, of which only shapes are asked.

    Returns:
      The state as it was, and an outcome of zeros.
    """
    shards = gathering.held(state.params, state.rules.held)
    whole = gathering.not_held(state.params, state.rules.held)
    used = whole, state.net_state, state.opt_state, state.global_step, lossed
    varying.marked(USED_AS_WHOLE, used)
    with within.looked_into(False):
        _, outcome = jax.eval_shape(updated)
    outcome = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outcome)
    rows = varying.marked(REPLICAS_OWN, outcome.aux, batch)
    shards = varying.marked(USED_AS_SHARDS, shards)
    return state.replace(params=trees.replace(state.params, shards)), outcome._replace(aux=rows)
