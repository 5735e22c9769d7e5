"""Sums, maxima and minima over logical replicas, of which each device holds some.

Exact sums are of integers, whose sum has no order: each array is rounded to multiples of a power of two that all replicas
share, small enough for the largest magnitude among them. With n replicas 30 - log2(n) bits are left of that, rounded up:
23 for 128, where a float32 has 24. The rest is exact: scaling by a power of two, and the one rounding to float32 at the end.
"""

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
    kinds: Sequence[str], held: Sequence[jax.Array], is_one: jax.Array, count: int, *, exact: bool
) -> list[jax.Array]:
    """What the replicas of a group exchange, on each device alike; to be called in a `jax.shard_map` over them.

    Args:
      kinds: of each array one of `split.COLLECTIVES`.
      held: arrays with a leading dimension of the replicas that the device holds.
      is_one: for each place on the device whether there is a replica at it.
      count: the replicas of a group.
      exact: whether sums of floating-point numbers are free of their order.
    """
    made: list[Any] = [None] * len(kinds)
    floats = []
    for i, (kind, x) in enumerate(zip(kinds, held, strict=True)):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        if kind != split.SUM:
            made[i] = _extreme(kind, x, is_one)
        elif is_float and exact:
            floats.append(i)
        else:
            made[i] = lax.psum(jnp.sum(_where(is_one, x), axis=0, dtype=x.dtype), mesh_lib.REPLICAS)
    wide = [_where(is_one, held[i].astype(jnp.float32)) for i in floats]
    for i, total in zip(floats, _exact_sums(wide, count), strict=True):
        made[i] = total.astype(held[i].dtype)
    return made


def _exact_sums(held: Sequence[jax.Array], count: int) -> list[jax.Array]:
    """The sums of float32 arrays over all replicas; NaN where some element of an array is not finite."""
    if not held:
        return []
    bits = _BITS - (count - 1).bit_length()
    largest = jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in held])
    # NaN is larger than all numbers here, too.
    largest = jnp.where(jnp.isfinite(largest), largest, jnp.inf)
    largest = lax.pmax(largest, mesh_lib.REPLICAS)
    exponents = _exponent(largest)
    up, down = _power(bits - exponents), _power(exponents - bits)
    scaled = [jnp.round(x * up[i]).astype(jnp.int32) for i, x in enumerate(held)]
    sums = lax.psum([jnp.sum(x, axis=0, dtype=jnp.int32) for x in scaled], mesh_lib.REPLICAS)
    finite = jnp.isfinite(largest)
    return [
        jnp.where(finite[i], x.astype(jnp.float32) * down[i], jnp.nan) for i, x in enumerate(sums)
    ]


def _exponent(x: jax.Array) -> jax.Array:
    """The least n, from `_LEAST_EXPONENT`, for which x < 2**n; for what is not finite any."""
    biased = lax.bitcast_convert_type(x, jnp.int32) >> 23
    return jnp.clip(biased - 126, _LEAST_EXPONENT, 128)


def _power(exponent: jax.Array) -> jax.Array:
    """2**exponent, exact, for exponents of full precision."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _extreme(kind: str, x: jax.Array, is_one: jax.Array) -> jax.Array:
    """The maximum or minimum over all replicas."""
    if kind == split.MIN:
        return (
            ~_extreme(split.MAX, ~x, is_one) if _is_whole(x) else -_extreme(split.MAX, -x, is_one)
        )
    least = jnp.iinfo(x.dtype).min if _is_whole(x) else -jnp.inf
    return lax.pmax(jnp.max(_where(is_one, x, least), axis=0), mesh_lib.REPLICAS)


def _is_whole(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)


def _where(is_one: jax.Array, x: jax.Array, other: Any = 0) -> jax.Array:
    """The arrays of replicas, with another value at the places where there is none."""
    places = is_one.reshape(-1, *(1 for _ in x.shape[1:]))
    return jnp.where(places, x, jnp.asarray(other, x.dtype))
