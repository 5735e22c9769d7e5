"""The state of a learner, and what an update of it says of itself."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xshard.optimizers import layouts, trees

# What can be said of an update. STUCK: it was skipped, and no loss scale was lowered for the next one.
FINE, STUCK, TROUBLE = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Rules:
    """The properties of a learner's rules that decide how their state lies on the mesh.

    They do not tell one structure of a state from another: a run goes on with a sharded update, and without.

    Attributes:
      shards_update: whether slots lie in shards over the replicas.
      averages_module: the name under which the rules keep averages of the parameters; None if they do not.
      held: how parameters and slots lie where parameters, too, are held in shards; else empty.
      reduce_dtype: the type in which the gradients of these are summed.
    """

    shards_update: bool = dataclasses.field(default=False, compare=False)
    averages_module: str | None = dataclasses.field(default=None, compare=False)
    held: layouts.Layouts = dataclasses.field(default_factory=dict, compare=False)
    reduce_dtype: str = dataclasses.field(default="float32", compare=False)


@dataclasses.dataclass(frozen=True)
class LearnerState:
    """All that a learner needs to go on: a pytree, equal on all replicas of a group.

    Attributes:
      params: the network's parameters.
      net_state: the network's Haiku state.
      opt_state: the state of the update rules: slots, counts, loss scale.
      global_step: the number of updates applied, int32: a skipped step does not advance it.
      rules: what the rules are like.
    """

    params: Any
    net_state: Any
    opt_state: Any
    global_step: Any
    rules: Rules = Rules()

    def replace(self, **changes: Any) -> "LearnerState":
        """The state with other values for some attributes."""
        return dataclasses.replace(self, **changes)


jax.tree_util.register_dataclass(
    LearnerState,
    data_fields=("params", "net_state", "opt_state", "global_step"),
    meta_fields=("rules",),
)


def is_learner(x: Any) -> bool:
    """Returns whether a node of an experiment's state is a learner's."""
    return isinstance(x, LearnerState)


def held_like(
    states: Collection[LearnerState],
) -> Callable[[str, Any], layouts.Layout | None]:
    """Returns what tells how arrays beside learners lie that are copies of their parameters in shards.

    Args:
      states: of the learners.

    Returns:
      A function of an array's path in the experiment's state and of the array: a copy's path ends in a parameter's, and it
      has that one's shape. Its result is None for what is no copy, or may be one of parameters that lie otherwise.
    """
    params: dict[str, list[tuple[Any, Any]]] = {}
    for state in states if any(state.rules.held for state in states) else ():
        for path, x in trees.leaves_by_path(state.params).items():
            params.setdefault(path, []).append((x.shape, state.rules.held.get(path)))

    def find(path: str, x: Any) -> layouts.Layout | None:
        for ending in trees.endings(path):
            found = [layout for shape, layout in params.get(ending, ()) if shape == x.shape]
            if found:
                first, *others = found
                is_held = first is not None and first.held
                return first if is_held and all(other == first for other in others) else None
        return None

    return find


class Observed(NamedTuple):
    """The observations of an update.

    Attributes:
      verdict: FINE, STUCK or TROUBLE, an int32 scalar.
      loss: the mean over the replicas.
      gradients: for each parameter whether its gradient, as the update is given it, was not finite.
    """

    verdict: Any
    loss: Any
    gradients: Any


def observe(applied: jax.Array, lowered: jax.Array, loss: jax.Array, bad: jax.Array) -> Observed:
    """The observations of an update: whether it was applied or has lowered a scale, its loss, and its gradients."""
    trouble = jnp.any(bad) | ~jnp.isfinite(loss)
    of_applied = jnp.where(trouble, TROUBLE, FINE)
    of_skipped = jnp.where(lowered, FINE, STUCK)
    verdict = jnp.where(applied, of_applied, of_skipped).astype(jnp.int32)
    return Observed(verdict, loss, bad)


class Outcome(NamedTuple):
    """The account of an update, which `Experiment.train_step` returns among its metrics.

    Attributes:
      metrics: what is logged, by name: the same on all replicas of a group.
      observed: what is watched.
      aux: the fourth of what the loss returned, with a row for each example of the replica, before the update.
    """

    metrics: dict[str, jax.Array]
    observed: Observed
    aux: Any = None
