"""The state of a learner, and what an update of it says of itself."""

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

import jax

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


def held_like(states: Collection[LearnerState], path: str, x: Any) -> layouts.Layout | None:
    """Returns how an array beside the learners lies, if it is a copy, by its name and shape, of a parameter in shards.

    Args:
      states: of the learners.
      path: the array's in the experiment's state, which ends in the parameter's.
      x: the array.
    """
    if not any(state.rules.held for state in states):
        return None
    for ending in trees.endings(path):
        found = []
        for state in states:
            param = trees.leaves_by_path(state.params).get(ending)
            if param is not None and param.shape == x.shape:
                found.append(state.rules.held.get(ending))
        if found:
            # Of two that lie in other ways it is not known whose it is.
            alike = all(layout == found[0] for layout in found)
            return found[0] if alike and found[0] is not None and found[0].held else None
    return None


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
