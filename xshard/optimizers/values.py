"""Stand-ins for arrays while a function is evaluated on shards."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from xshard.optimizers import layouts

# The primitive that joins two reductions of a kind before they are put together, and its function.
JOINED_BY = {"sum": "add", "and": "and", "or": "or"}
_JOIN = {"sum": jnp.add, "and": jnp.logical_and, "or": jnp.logical_or}


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """This replica's shard of an array. Elements that the layout pads with may be anything."""

    array: Any
    layout: layouts.Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Summed(Shard):
    """A shard of a gradient that is summed over the replicas already, before a rule aggregates it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Partial:
    """A reduction of whole arrays before the replicas' parts of it are put together.

    Several that are added up are so put together by one collective.

    Attributes:
      kind: 'sum', 'and' or 'or'.
      own: this replica's number.
      rest: a number that all replicas have alike.
    """

    kind: str
    own: Any
    rest: Any

    def total(self, reduced: Any) -> Any:
        """The result, from the reduction of all replicas' own numbers."""
        return _JOIN[self.kind](reduced, self.rest)


def join(left: Any, right: Any) -> Partial:
    """Joins a `Partial` with another of its kind, or with a number that all replicas have."""
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
    """`x` as a `Shard` of the same array if `value` is one."""
    return Shard(x, value.layout) if isinstance(value, Shard) else x
