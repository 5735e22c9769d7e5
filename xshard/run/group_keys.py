"""Notes on random keys and numbers that are alike in all groups of a run."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.base import formatting
from xshard.optimizers import trees
from xshard.training import group_randomness
from xshard.training import state as state_lib


def notes(
    experiment: experiment_lib.Experiment,
    state: state_lib.TrainState,
    example: Any,
) -> Iterator[str]:
    """Yields warnings of random state that is alike in all groups.

    All processes must call it.

    Args:
      experiment: the experiment.
      state: the state that the run begins with.
      example: a few examples.
    """
    mesh = state.step.sharding.mesh
    keys, others = state_lib.random_alike(
        experiment, mesh, experiment.config.seed, example
    )
    if others:
        yield (
            f"warning: all groups begin with the same {formatting.listed(others)}, "
            "which is a random key, or drawn with one, that is not the group's. Where "
            "groups should differ, use the key that init is given, as "
            "hk.next_rng_key() does in a module, or in a rule jax.random.key."
        )
    # A new state has other keys in each group. One of an earlier version has not, nor
    # has one that takes its keys from another run's.
    equal = _equal_keys(mesh, state, keys) if keys else []
    if equal:
        yield (
            "warning: all groups hold the same random keys "
            f"{formatting.listed(equal)}, which come from a checkpoint of an earlier "
            "version, or of another run, so their rules draw the same numbers. The "
            "keys stay as they are, because others would make it another run: begin a "
            "new one, with keys of its own, for groups that are independent."
        )


def _equal_keys(
    mesh: jax.sharding.Mesh, state: state_lib.TrainState, keys: frozenset[str]
) -> list[str]:
    """Returns the paths of keys that are equal in all groups."""
    found = {}
    for key_path, x in jax.tree_util.tree_leaves_with_path(state):
        path = trees.path_name(key_path)
        if path in keys:
            found[path] = x

    def are_equal(found: dict[str, jax.Array]) -> jax.Array:
        return jnp.stack([group_randomness.equal_in_groups(x) for x in found.values()])

    equal = jax.jit(are_equal, out_shardings=mesh_lib.sharding(mesh))(found)
    are_equal_by_path = zip(sorted(found), np.asarray(equal), strict=True)
    return [path for path, is_equal in are_equal_by_path if is_equal]
