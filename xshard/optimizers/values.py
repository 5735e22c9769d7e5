"""Stand-ins for arrays while a function is evaluated on shards."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from xshard.optimizers import layouts

# What puts two reductions of a kind together, so that several take one collective.
JOINED_BY = {"sum": "add", "and": "and", "or": "or"}
_JOIN = {"sum": jnp.add, "and": jnp.logical_and, "or": jnp.logical_or}


@dataclasses.dataclass(frozen=True)
class Shard:
    """This replica's shard of an array. Elements that the layout pads with may be anything."""

    array: Any
    layout: layouts.Layout


@dataclasses.dataclass(frozen=True)
class Partial:
    """A reduction of whole arrays before what replicas have of it is put together.

    Attributes:
      kind: 'sum', 'and' or 'or'.
      own: this replica's number.
      rest: what all replicas have alike.
    """

    kind: str
    own: Any
    rest: Any

    def with_rest(self, total: Any) -> "Filled":
        """The result, of what replicas have put together."""
        return Filled(_JOIN[self.kind](total, self.rest), ())


@dataclasses.dataclass(frozen=True)
class Filled:
    """An array of one value."""

    value: Any
    shape: tuple[int, ...]

    def array(self) -> jax.Array:
        """The array itself."""
        return jnp.broadcast_to(self.value, self.shape)


def shard(layout: layouts.Layout, x: Any) -> Any:
    """A `Shard`, or the array itself if its layout does not shard it."""
    return x if layout.dim is None else Shard(x, layout)


def raw(value: Any) -> Any:
    """The array of what stands for one."""
    return value.array if isinstance(value, Shard) else getattr(value, "value", value)


def like(value: Any, x: Any) -> Any:
    """`x` as what `value` is."""
    if isinstance(value, Shard):
        return dataclasses.replace(value, array=x)
    if isinstance(value, Filled):
        return dataclasses.replace(value, value=x)
    return x


def joins(name: str, values: list[Any]) -> bool:
    """Returns whether a primitive puts reductions of one kind together, with one another or with a number."""
    kinds = {value.kind for value in values if isinstance(value, Partial)}
    scalars = [
        x for x in values if isinstance(x, Partial) or (isinstance(x, Filled) and not x.shape)
    ]
    return len(scalars) == len(values) == 2 and [JOINED_BY[kind] for kind in kinds] == [name]


def join(values: list[Any]) -> Partial:
    """The result of such a primitive."""
    partials = [value for value in values if isinstance(value, Partial)]
    rests = [value.rest if isinstance(value, Partial) else value.value for value in values]
    how = _JOIN[partials[0].kind]
    return Partial(
        partials[0].kind,
        functools.reduce(how, [partial.own for partial in partials]),
        functools.reduce(how, rests),
    )


def as_filled(value: Any) -> Any:
    """The value, a scalar as an array of one value."""
    if isinstance(value, Shard | Partial | Filled) or jnp.ndim(value):
        return value
    return Filled(value, ())
