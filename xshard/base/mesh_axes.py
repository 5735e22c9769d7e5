"""The axes of a run's mesh: their names, the groups of replicas along them, and the
specs of arrays.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from xshard import errors
from xshard.base import arguments

GROUP = "group"
SLICE = "slice"
REPLICA = "replica"
MODEL = "model"
AXES = (GROUP, SLICE, REPLICA, MODEL)
# The axes that a reduction over a whole group runs over, and the axes that the rows of
# a batch are sharded along.
REPLICAS = (SLICE, REPLICA)
BATCH = (GROUP, *REPLICAS)
# Pairs of a regular expression for paths, and a spec over 'model'.
ShardingRules = Sequence[tuple[str, jax.P]]
# A mesh; without devices, for tracing only.
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
# The longest group assignment that an error shows whole, in characters.
_MAX_SHOWN = 200


def check_groups(groups: Any) -> list[list[int]] | None:
    """Returns a group assignment as lists of integers, or None.

    Raises:
      ValueError: unless it is a list of lists of one size that hold the numbers from 0
        on once each.
    """
    if groups is None:
        return None
    is_nested = isinstance(groups, list | tuple) and all(
        isinstance(group, list | tuple) for group in groups
    )
    if not is_nested or not groups:
        raise errors.UserError(
            "group_assignment must be a list of lists of replica numbers, as [[0, 1], "
            f"[2, 3]] is; received {shortened(groups)}."
        )
    sizes = [len(group) for group in groups]
    if len(set(sizes)) > 1 or sizes[0] == 0:
        raise errors.UserError(
            "The groups of group_assignment must be of one size; received "
            f"{shortened(groups)}, of sizes {shortened(sizes)}."
        )
    replicas = list(itertools.chain.from_iterable(groups))
    are_integers = all(arguments.is_integer(replica) for replica in replicas)
    if not are_integers or sorted(replicas) != list(range(len(replicas))):
        raise errors.UserError(
            "group_assignment must hold each replica number once, that is a "
            f"permutation of range({len(replicas)}); received {shortened(groups)}."
        )
    return [list(map(int, group)) for group in groups]


def shortened(groups: Any) -> str:
    """Returns the groups as text, of which errors show at most the two ends."""
    text = repr(groups)
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:80]} ... {text[-80:]}"


def step_groups(sizes: Sequence[int]) -> list[list[list[int]]]:
    """Returns the groups of replicas of each step of `torus.steps`.

    In the mixed radix of `sizes`, the replica numbers of a group differ in one digit,
    which belongs to the step.
    """
    replicas = np.arange(math.prod(sizes)).reshape(sizes)
    groups = []
    for digit, size in enumerate(sizes):
        groups_of_step = np.moveaxis(replicas, digit, -1).reshape(-1, size)
        groups.append(groups_of_step.tolist())
    return groups


def axes_of(spec: Iterable[Any]) -> list[str]:
    """Returns the mesh axes that occur in an array's spec."""
    axes: list[str] = []
    for entry in spec:
        if isinstance(entry, tuple):
            axes += entry
        elif entry is not None:
            axes.append(entry)
    return axes


def spec_of(path: str, rules: ShardingRules) -> tuple[Any, ...]:
    """Returns the spec of the first rule that matches anywhere in a leaf's path.

    It is empty if none does.
    """
    for pattern, spec in rules:
        if re.search(pattern, path):
            return tuple(spec)
    return ()
