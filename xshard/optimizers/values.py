"""Values that stand for whole arrays while a function is evaluated on shards."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xshard.optimizers import layouts, primitives

# For each kind of reduction, the primitive that joins two of them before replicas are combined, and its function.
JOINED_BY = {"sum": "add", "and": "and", "or": "or"}
_JOIN = {"sum": jnp.add, "and": jnp.logical_and, "or": jnp.logical_or}


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """This replica's shard of an array. Padding elements may have any value."""

    array: Any
    layout: layouts.Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Summed(Shard):
    """A shard of a gradient that is already summed over the replicas, before a rule aggregates it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Partial:
    """A reduction of whole arrays whose per-replica parts are not yet combined.

    Several such reductions can be joined first, and then combined by one collective.

    Attributes:
      kind: 'sum', 'and' or 'or'.
      own: this replica's part.
      rest: a further operand that is equal on all replicas.
    """

    kind: str
    own: Any
    rest: Any

    def total(self, reduced: Any) -> Any:
        """The result, given the reduction of all replicas' parts."""
        return _JOIN[self.kind](reduced, self.rest)


@dataclasses.dataclass(frozen=True, eq=False)
class Layers:
    """The whole layers of an array that this replica holds, including padding. The leading dimension is of layers."""

    array: Any


def join(left: Any, right: Any) -> Partial:
    """Joins a `Partial` with another of its kind, or with a number that is equal on all replicas."""
    if not isinstance(left, Partial):
        left, right = right, left
    function = _JOIN[left.kind]
    if not isinstance(right, Partial):
        return Partial(left.kind, left.own, function(left.rest, right))
    return Partial(left.kind, function(left.own, right.own), function(left.rest, right.rest))


def shard(layout: layouts.Layout, x: Any) -> Any:
    """A `Shard`, or the array itself if its layout does not shard it."""
    return x if layout.dim is None else Shard(x, layout)


def raw(value: Any) -> Any:
    """The array of a `Shard`, or the array itself."""
    return value.array if isinstance(value, Shard) else value


def like(value: Any, x: Any) -> Any:
    """`x` as a `Shard` with the layout of `value`, if `value` is one; otherwise `x` itself."""
    return Shard(x, value.layout) if isinstance(value, Shard) else x


def joins(eqn: Any, operands: list[Any]) -> bool:
    """Returns whether an equation joins a reduction with another of its kind, or with a scalar."""
    partials = [value for value in operands if isinstance(value, Partial)]
    if not partials or eqn.outvars[0].aval.shape:
        return False
    return all(JOINED_BY[partial.kind] == eqn.primitive.name for partial in partials)


def reduces_shards(eqn: Any, sharded: list[Shard]) -> bool:
    """Returns whether each replica can reduce its own shard, so that only small results are exchanged."""
    layout = sharded[0].layout
    if primitives.contracts_all(eqn):
        return len(sharded) == 2 and layout == sharded[1].layout
    if not primitives.reduces(eqn):
        return False
    # A reshaped array has different rows, but the same layers if its first dimension is unchanged. A flat layout keeps
    # neither.
    shape = eqn.invars[0].aval.shape
    in_place = shape == layout.shape or (
        primitives.reduces_layers(eqn) and shape[0] == layout.shape[0]
    )
    return primitives.reduces_all(eqn) or (in_place and not layout.flat)


def whole(value: Any, shape: tuple[int, ...]) -> jax.Array:
    """The array of this shape that a value stands for."""
    array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    return array if array.shape == shape else jnp.broadcast_to(array, shape)


def on_whole(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation on whole arrays, where a scalar may stand for an array of equal elements."""
    name = eqn.primitive.name
    # Equal elements stay one scalar through broadcasts and elementwise operations, which saves memory and time.
    if all(jnp.ndim(value) == 0 for value in operands):
        if name == "broadcast_in_dim":
            return list(operands)
        if name in primitives.ELEMENTWISE:
            return primitives.bind(eqn, *operands)
    shapes = [atom.aval.shape for atom in eqn.invars]
    return primitives.bind(eqn, *map(whole, operands, shapes))
