"""Estimates of what a compiled step needs of each chip: its memory, and bounds on its time from below."""

import math
from typing import Any, NamedTuple

import jax
from jax.extend import core

from xshard.dryrun import costs
from xshard.metrics import chips


class Bound(NamedTuple):
    """One reason why a step cannot be faster.

    Attributes:
      name: what limits: 'compute', 'memory', 'ICI' or 'DCN'.
      amount: what a chip does in a step: floating-point operations, or bytes.
      rate: what it does in a second at most; None: not published.
      seconds: the first divided by the second; None: not known.
    """

    name: str
    amount: int
    rate: float | None
    seconds: float | None


class Prepared(NamedTuple):
    """A step as far as it is known before it is compiled.

    Attributes:
      chip: the chip.
      mesh: of the run.
      experiment: of the run.
      state: the shapes of its state, with shardings.
      batch: the shapes of a batch.
      result: what a dry run says of it so far.
    """

    chip: chips.Chip
    mesh: jax.sharding.Mesh
    experiment: Any
    state: Any
    batch: Any
    result: dict[str, Any]


def bounds(chip: chips.Chip, cost: costs.Cost, ici: int, dcn: int) -> list[Bound]:
    """The bounds on a step's time; what bounds it is the largest, since at best all overlap.

    Args:
      chip: the chip.
      cost: what it computes and moves in a step.
      ici: the bytes that it sends to others of its slice.
      dcn: the bytes that it sends to other slices.
    """
    limits = [
        ("compute", cost.flops, chip.flops),
        ("memory", cost.hbm_bytes, chip.hbm_rate),
        ("ICI", ici, chip.ici_rate),
        ("DCN", dcn, chip.dcn_rate),
    ]
    return [Bound(name, amount, rate, _seconds(amount, rate)) for name, amount, rate in limits]


def _seconds(amount: int, rate: float | None) -> float | None:
    """The least time for an amount; None if the rate is not published."""
    if not amount:
        return 0.0
    return amount / rate if rate else None


def shard_bytes(tree: Any) -> int:
    """The bytes that a device holds of a tree of shapes with shardings."""
    return sum(map(_leaf_bytes, jax.tree.leaves(tree)))


def largest(tree: Any, count: int) -> list[tuple[str, int]]:
    """The paths of the arrays of which a device holds most, and the bytes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sizes = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), _leaf_bytes(leaf))
        for path, leaf in leaves
    ]
    return sorted(sizes, key=lambda pair: -pair[1])[:count]


def stacked_bytes(program: Any) -> int:
    """The bytes of the largest stack that one of a program's scans makes: what it keeps for a gradient, or gradients.

    Args:
      program: a jaxpr. Within `jax.shard_map` its sizes are those of one replica.
    """
    jaxpr = program.jaxpr if isinstance(program, core.ClosedJaxpr) else program
    most = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            stacks = eqn.outvars[eqn.params["num_carry"] :]
            sizes = [x.aval.size * x.aval.dtype.itemsize for x in stacks]
            most = max(most, sum(sizes))
        for inner in jax.tree.leaves(dict(eqn.params)):
            if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                most = max(most, stacked_bytes(inner))
    return most


def _leaf_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
