"""A stand-in for an update in a program that is analyzed and never run: see `xshard.stored.shard_usage`.

It marks the inputs and the results of the update for the analysis, which trusts the framework's own update.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xshard.learners import run_context
from xshard.learners.state import LearnerState, Outcome
from xshard.optimizers import gathering, trees, varying

# Names of marks in the program: on arrays that must be whole, on parameters that must be shards, and on a replica's
# own values.
USED_AS_WHOLE, USED_AS_SHARDS, REPLICAS_OWN = "used_as_whole", "used_as_shards", "replicas_own"


def update(
    state: LearnerState,
    lossed: Any,
    batch: Any,
    updated: Callable[[], tuple[LearnerState, Outcome]],
) -> tuple[LearnerState, Outcome]:
    """Stands for an update.

    Args:
      state: the state before the update.
      lossed: the return value of the loss.
      batch: the replica's part of the batch.
      updated: the update itself, which is evaluated for its shapes only.

    Returns:
      The unchanged state, and an outcome of zeros.
    """
    shards = gathering.sharded(state.params, state.rules.sharding)
    whole = gathering.unsharded(state.params, state.rules.sharding)
    used = whole, state.net_state, state.opt_state, state.global_step, lossed
    varying.marked(USED_AS_WHOLE, used)
    with run_context.analysis_only(False):
        _, outcome = jax.eval_shape(updated)
    outcome = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outcome)
    rows = varying.marked(REPLICAS_OWN, outcome.aux, batch)
    shards = varying.marked(USED_AS_SHARDS, shards)
    return state.replace(params=trees.replace(state.params, shards)), outcome._replace(aux=rows)
