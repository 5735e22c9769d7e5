"""Estimates for a step on each chip: its memory, and lower bounds on its time."""

import math
from typing import Any, NamedTuple

import jax

from xshard import jax_internals
from xshard.dryrun import costs
from xshard.metrics import chips
from xshard.optimizers import primitives


class Bound(NamedTuple):
    """A lower bound on a step's time by one resource.

    Attributes:
      name: the resource: 'compute', 'memory', 'ICI' or 'DCN'.
      amount: a chip's use of it in a step: FLOPs, or bytes.
      rate: the peak per second; None: not published.
      seconds: amount / rate; None: unknown.
    """

    name: str
    amount: int
    rate: float | None
    seconds: float | None


class Prepared(NamedTuple):
    """A step, prepared up to its compilation.

    Attributes:
      chip: the chip.
      mesh: the run's mesh.
      experiment: the run's experiment.
      state: the shapes of its state, with shardings.
      batch: the shapes of a batch.
      result: the result of the dry run so far.
    """

    chip: chips.Chip
    mesh: jax.sharding.Mesh
    experiment: Any
    state: Any
    batch: Any
    result: dict[str, Any]


def bounds(chip: chips.Chip, cost: costs.Cost, ici: int, dcn: int) -> list[Bound]:
    """Returns the bounds on a step's time. The largest one counts, since at best all
    resources are used at once.

    Args:
      chip: the chip.
      cost: the chip's work and memory traffic in a step.
      ici: the bytes that it sends to other chips of its slice.
      dcn: the bytes that it sends to other slices.
    """
    limits = [
        ("compute", cost.flops, chip.flops),
        ("memory", cost.hbm_bytes, chip.hbm_rate),
        ("ICI", ici, chip.ici_rate),
        ("DCN", dcn, chip.dcn_rate),
    ]
    return [
        Bound(name, amount, rate, _seconds(amount, rate))
        for name, amount, rate in limits
    ]


def _seconds(amount: int, rate: float | None) -> float | None:
    """Returns the least time for an amount; None if the rate is not published."""
    if not amount:
        return 0.0
    return amount / rate if rate else None


def shard_bytes(tree: Any) -> int:
    """Returns the bytes that one device holds of a tree of shapes with shardings."""
    return sum(map(_leaf_bytes, jax.tree.leaves(tree)))


def largest(tree: Any, count: int) -> list[tuple[str, int]]:
    """Returns the paths and bytes of the arrays that take most memory on a device."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sizes = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), _leaf_bytes(leaf))
        for path, leaf in leaves
    ]
    return sorted(sizes, key=lambda pair: -pair[1])[:count]


def stacked_bytes(program: Any) -> int:
    """Returns the bytes of the largest stacked outputs of a scan in a program: arrays
    kept for a gradient, or gradients.

    Args:
      program: a jaxpr. Within `jax.shard_map`, sizes are per replica.
    """
    most = 0
    for eqn in primitives.all_equations(jax_internals.opened(program)):
        if eqn.primitive.name == "scan":
            _, carries = jax_internals.scan_counts(eqn)
            stacks: list[Any] = eqn.outvars[carries:]
            sizes = [x.aval.size * x.aval.dtype.itemsize for x in stacks]
            most = max(most, sum(sizes))
    return most


def _leaf_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
