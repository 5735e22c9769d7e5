"""Sums, maxima and minima over logical replicas, of which each device holds some.

Exact sums are of integers, whose sum has no order: each array is rounded to multiples of a power of two that all replicas
share, small enough for the largest magnitude among them. With n replicas 30 - log2(n) bits are left of that, rounded up:
23 for 128, where a float32 has 24. The rest is exact: scaling by a power of two, and the one rounding to float32 at the end.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xshard import mesh as mesh_lib
from xshard.logical import split

# Below 2**-96 a power of two times 2**30, and its inverse, would not be a float32 of full precision.
_LEAST_EXPONENT = -96
_BITS = 30


def combine(
    kinds: Sequence[str],
    brought: Sequence[Sequence[jax.Array]],
    is_one: jax.Array,
    count: int,
    *,
    exact: bool,
) -> list[jax.Array]:
    """The results of an exchange of a group's replicas, on each device alike; to be called in a `jax.shard_map` over them.

    Args:
      kinds: of each array one of `split.COLLECTIVES`.
      brought: for each place on the device the arrays that the replica at it brings.
      is_one: for each place whether there is a replica at it.
      count: the replicas of a group.
      exact: whether sums of floating-point numbers are free of their order.
    """
    made: list[Any] = [None] * len(kinds)
    exactly = []
    for i, (kind, *held) in enumerate(zip(kinds, *brought, strict=True)):
        if kind != split.SUM:
            made[i] = _extreme(kind, held, is_one)
        elif exact and jnp.issubdtype(held[0].dtype, jnp.floating):
            exactly.append(i)
        else:
            made[i] = lax.psum(_added(_where(is_one, held)), mesh_lib.REPLICAS)
    wide = [_where(is_one, [of[i].astype(jnp.float32) for of in brought]) for i in exactly]
    for i, total in zip(exactly, _exact_sums(wide, count), strict=True):
        made[i] = total.astype(brought[0][i].dtype)
    return made


def _exact_sums(brought: Sequence[list[jax.Array]], count: int) -> list[jax.Array]:
    """The sums of float32 arrays over all replicas; NaN where some element of an array is not finite.

    Args:
      brought: of each array those of the replicas of a device.
      count: the replicas of a group.
    """
    if not brought:
        return []
    bits = _BITS - (count - 1).bit_length()
    largest = jnp.stack([jnp.max(_largest(held), initial=0) for held in brought])
    # NaN is larger than all numbers here, too.
    largest = jnp.where(jnp.isfinite(largest), largest, jnp.inf)
    largest = lax.pmax(largest, mesh_lib.REPLICAS)
    exponents = _exponent(largest)
    up, down = _power(bits - exponents), _power(exponents - bits)
    scaled = [
        _added([jnp.round(x * up[i]).astype(jnp.int32) for x in held])
        for i, held in enumerate(brought)
    ]
    sums = lax.psum(scaled, mesh_lib.REPLICAS)
    finite = jnp.isfinite(largest)
    return [
        jnp.where(finite[i], x.astype(jnp.float32) * down[i], jnp.nan) for i, x in enumerate(sums)
    ]


def _added(held: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, held)


def _largest(held: Sequence[jax.Array]) -> jax.Array:
    """The largest magnitudes, or NaN, of the elements at each place of arrays."""
    return functools.reduce(jnp.maximum, map(jnp.abs, held))


def _exponent(x: jax.Array) -> jax.Array:
    """The least n, from `_LEAST_EXPONENT`, for which x < 2**n; for what is not finite any."""
    biased = lax.bitcast_convert_type(x, jnp.int32) >> 23
    return jnp.clip(biased - 126, _LEAST_EXPONENT, 128)


def _power(exponent: jax.Array) -> jax.Array:
    """2**exponent, exact, for exponents of full precision."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _extreme(kind: str, held: Sequence[jax.Array], is_one: jax.Array) -> jax.Array:
    """The maximum or minimum over all replicas."""
    is_whole = jnp.issubdtype(held[0].dtype, jnp.integer)
    if kind == split.MIN:
        mirrored = jnp.invert if is_whole else jnp.negative
        return mirrored(_extreme(split.MAX, list(map(mirrored, held)), is_one))
    least = jnp.iinfo(held[0].dtype).min if is_whole else -jnp.inf
    return lax.pmax(functools.reduce(jnp.maximum, _where(is_one, held, least)), mesh_lib.REPLICAS)


def _where(is_one: jax.Array, held: Sequence[jax.Array], other: Any = 0) -> list[jax.Array]:
    """The arrays of replicas, with another value at the places where there is none."""
    return [jnp.where(is_one[i], x, jnp.asarray(other, x.dtype)) for i, x in enumerate(held)]
