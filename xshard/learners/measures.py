"""What a learner measures of an update, beside its loss: one class for each thing.

A measure sees an update on each replica, and leaves values of two kinds: those of the
replica alone, and those that are equal on all replicas. The learner averages all of the
first over the replicas at once, so that XLA combines their sums with those of the
gradients. Then each measure finishes what it reports and what it keeps.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import ml_collections

from xshard.learners import state as state_lib
from xshard.optimizers import base, phases, replica_calls, shards, trees


class Update(NamedTuple):
    """An update on a replica.

    Attributes:
      state: the learner's state before it.
      opt: the rule, whose state is that after the update.
      batch: the replica's part of the batch.
      grads: the replica's own gradients, before the learner's clip.
      clipped: these after the clip.
      part_sq_norms: the squared norm of the gradients of each micro-batch, before the
        clip; None unless a measure's `reads_parts` asks for them.
      applied: what the rule made of the gradients.
      evaluated_net_state: returns the network's state after a pass over the batch with
        the parameters to evaluate.
    """

    state: state_lib.LearnerState
    opt: base.Optimizer
    batch: Any
    grads: Any
    clipped: Any
    part_sq_norms: Any
    applied: phases.Applied
    evaluated_net_state: Callable[[], Any]


class Measured(NamedTuple):
    """What a measure has of an update.

    Attributes:
      local: a dictionary of the replica's own arrays; `finish` gets their means over
        the replicas of the group.
      equal: anything that is equal on these replicas.
      net_state: arrays of a network's state, of the replica; `finish` gets them
        averaged as the network's own state is. None if there are none.
    """

    local: Any = None
    equal: Any = None
    net_state: Any = None


class Measure:
    """Something that is measured of each update of a learner.

    Attributes:
      name: its name, that of its file. The keys of a measure that a run may lack are in
        `xshard.config`, under this name.
      config: the run's config.
    """

    name: ClassVar[str]

    def __init__(self, config: ml_collections.ConfigDict):
        """Stores the run's config, in which a measure has keys of its own."""
        self.config = config

    def is_on(self) -> bool:
        """Returns whether the config asks for it."""
        return True

    def begin(self, state: state_lib.LearnerState) -> state_lib.LearnerState:
        """Returns a learner's first state, with what the measure keeps in it.

        Args:
          state: the state, with what the measures before it keep.
        """
        return state

    def check(self, opt: base.Optimizer) -> None:
        """Raises UserError if it cannot be measured with a rule."""

    def reads_parts(self, state: state_lib.LearnerState) -> Any:
        """Returns whether it reads the gradients of micro-batches in an update.

        It is a boolean scalar, which may be traced; None if it never does.

        Args:
          state: the learner's state before the update.
        """
        del state

    def measure(self, update: Update) -> Measured:
        """Measures an update, where the rule's state can be read."""
        raise NotImplementedError

    def finish(
        self,
        measured: Measured,
        state: state_lib.LearnerState,
        outcome: state_lib.Outcome,
    ) -> tuple[state_lib.LearnerState, state_lib.Outcome]:
        """Returns the state after the update and its report, with what was measured.

        Args:
          measured: what `measure` returned, with means over the replicas.
          state: the state after the update, in which only what measures keep is that
            before it.
          outcome: the report of the update.
        """
        raise NotImplementedError


def squares(applied: phases.Applied, arrays: dict[str, Any]) -> Measured:
    """Returns the squared norms of trees of arrays, whose sums `total` returns.

    There are local parts only of arrays in shards.

    Args:
      applied: the update.
      arrays: trees of its gradients or parameters, by name.
    """
    local: dict[str, Any] = {}
    equal: dict[str, Any] = {}
    for name, tree in arrays.items():
        if applied.partition is None:
            equal[name] = trees.sum_of_squares(tree)
        else:
            local[name], equal[name] = sums_of_squares(applied.partition, tree)
    return Measured(local=local, equal=equal)


def total(measured: Measured) -> dict[str, Any]:
    """Returns the sums of squares by name, once the local parts are means."""
    sums = {}
    for name, equal in measured.equal.items():
        sums[name] = equal + measured.local.get(name, 0)
    return sums


def sums_of_squares(
    partition: shards.Partition, arrays: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the squares of all elements, as two summands.

    Args:
      partition: how the arrays lie.
      arrays: a tree of global arrays in a function that
        `replica_map.vmap_replicas` maps.

    Returns:
      For the sharded arrays each replica's own number, whose mean over the replicas
      is their sum of squares; and the sum of squares of the other arrays.
    """
    sharded, specs, whole = partition.divide(arrays)

    def of_replica(parts: list[jax.Array]) -> jax.Array:
        return partition.count * trees.sum_of_squares(parts)

    local = replica_calls.on_each_replica(of_replica, in_specs=(specs,))(sharded)
    return local, trees.sum_of_squares(whole)
