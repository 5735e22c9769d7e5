"""Sums, maxima and minima over logical replicas, several of which may share a device.

Exact sums add integers, because the result of an integer sum does not depend on its
order. Each array is rounded to multiples of a power of two that all replicas share,
scaled to the largest magnitude among them. With n replicas, this leaves 30 -
ceil(log2(n)) bits for that magnitude: 23 for 128 replicas, where a float32 has 24. The
rounding error may be added up as a second integer. All other operations are exact
(scaling by a power of two, and computing the rounding error), except the final rounding
to float32.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xshard import mesh as mesh_lib
from xshard.logical import split

# The exponent of the smallest normal float32, 2**-126.
_LEAST_EXPONENT = -126
_BITS = 30


def combine(
    kinds: Sequence[split.Kind],
    sent: Sequence[Sequence[jax.Array]],
    has_replica: jax.Array | None,
    count: int,
    num_words: int,
    gather_steps: Sequence[Any] = (None,),
) -> list[Any]:
    """Computes the results of a collective of a group's replicas.

    Call it in a `jax.shard_map` over the devices.

    Args:
      kinds: the way in which each array is combined.
      sent: for each place of the device, the arrays that the replica in it sends.
      has_replica: for each place of the device, whether it has a replica; None if every
        place has one.
      count: the number of replicas of a group.
      num_words: the number of integers that represent each floating-point summand, so
        that the order of a sum does not matter; 0 to sum in floating point.
      gather_steps: as `Replicas.gather_steps`.

    Returns:
      For each array, the result, equal on all devices; for a scattered array, a list
      with the shard of each place.
    """
    places = len(sent)
    results: list[Any] = [None] * len(kinds)
    # The exact sums are computed together, so that they share their collectives.
    exact = []
    for i, kind in enumerate(kinds):
        arrays = [arrays_of_place[i] for arrays_of_place in sent]
        if kind.name == split.GATHER:
            results[i] = _gathered(arrays, kind.dim, count, gather_steps)
        elif kind.name in (split.MAX, split.MIN):
            results[i] = _extreme(kind.name, arrays, has_replica)
        elif num_words and jnp.issubdtype(arrays[0].dtype, jnp.floating):
            exact.append(i)
        else:
            local_sum = _added(_where(has_replica, arrays))
            if kind.name == split.SUM:
                results[i] = lax.psum(local_sum, mesh_lib.REPLICAS)
            else:
                results[i] = _scattered(local_sum, kind.dim, count, places)

    summands = []
    for i in exact:
        arrays = [arrays_of_place[i].astype(jnp.float32) for arrays_of_place in sent]
        summands.append(_where(has_replica, arrays))
    totals = _exact_sums([kinds[i] for i in exact], summands, count, num_words)
    for i, total in zip(exact, totals, strict=True):
        results[i] = total.astype(sent[0][i].dtype)

    for i, kind in enumerate(kinds):
        if kind.name == split.SCATTER:
            results[i] = jnp.split(results[i], places, kind.dim)
    return results


def _exact_sums(
    kinds: Sequence[split.Kind],
    summands: Sequence[list[jax.Array]],
    count: int,
    num_words: int,
) -> list[jax.Array]:
    """Sums float32 arrays over all replicas.

    A sum is all NaN if any element of its array is not finite on any replica.

    Args:
      kinds: the way in which each array is combined, a sum or a scatter.
      summands: for each array, the summands of the device's replicas.
      count: the number of replicas of a group.
      num_words: the number of integers for each element.
    """
    if not summands:
        return []
    # The sum of `count` integers of this many bits fits an int32.
    bits = _BITS - (count - 1).bit_length()
    largest = jnp.stack([_largest_magnitude(arrays) for arrays in summands])
    # NaN becomes infinity, so that pmax propagates it on every backend.
    largest = jnp.where(jnp.isfinite(largest), largest, jnp.inf)
    largest = lax.pmax(largest, mesh_lib.REPLICAS)
    # The units of all words must be normal numbers.
    exponents = _exponent(largest, _LEAST_EXPONENT + num_words * bits)

    local_sums = []
    for exponent, arrays in zip(exponents, summands, strict=True):
        words = [
            _integers(x * _power(bits - exponent), bits, num_words) for x in arrays
        ]
        local_sums.append([_added(word) for word in zip(*words, strict=True)])
    sums = _integer_sums(kinds, local_sums, count, places=len(summands[0]))

    results = []
    for word_sums, exponent, x in zip(sums, exponents, largest, strict=True):
        total = _float(word_sums, exponent, bits)
        results.append(jnp.where(jnp.isfinite(x), total, jnp.nan))
    return results


def _integer_sums(
    kinds: Sequence[split.Kind],
    local_sums: Sequence[list[jax.Array]],
    count: int,
    places: int,
) -> list[list[jax.Array]]:
    """Sums the words of several arrays over the devices.

    Args:
      kinds: the way in which each array is combined, a sum or a scatter.
      local_sums: for each array, the sum of each of its words on this device.
      count: the number of replicas of a group.
      places: the number of places of a device.

    Returns:
      The sums of each array's words; of a scattered array, this device's shards.
    """
    # One psum of the whole list, so that all sums share one collective.
    summed = [i for i, kind in enumerate(kinds) if kind.name == split.SUM]
    sums = lax.psum([local_sums[i] for i in summed], mesh_lib.REPLICAS)
    results: list[Any] = [None] * len(kinds)
    for i, sums_of_words in zip(summed, sums, strict=True):
        results[i] = sums_of_words
    for i, kind in enumerate(kinds):
        if kind.name == split.SCATTER:
            results[i] = [_scattered(x, kind.dim, count, places) for x in local_sums[i]]
    return results


def _scattered(x: jax.Array, dim: int, count: int, places: int) -> jax.Array:
    """Sums an array over the devices, each of which keeps the shards of its places."""
    # Pads for the empty places, whose shards follow all others.
    num_empty = places * lax.axis_size(mesh_lib.REPLICAS) - count
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, x.shape[dim] // count * num_empty)
    return lax.psum_scatter(
        jnp.pad(x, padding), mesh_lib.REPLICAS, scatter_dimension=dim, tiled=True
    )


def _gathered(
    arrays: Sequence[jax.Array], dim: int, count: int, steps: Sequence[Any]
) -> jax.Array:
    """Concatenates the arrays of all replicas along a dimension."""
    x = jnp.concatenate(arrays, dim)
    for groups in reversed(steps):
        x = lax.all_gather(
            x, mesh_lib.REPLICAS, axis=dim, tiled=True, axis_index_groups=groups
        )
    # The arrays of the empty places come last.
    return lax.slice_in_dim(x, 0, arrays[0].shape[dim] * count, axis=dim)


def _integers(x: jax.Array, bits: int, num_words: int) -> list[jax.Array]:
    """Approximates a float32 array by integers.

    The first has the unit 1, and the unit of each is 2**-bits of the one before.
    """
    words = []
    for _ in range(num_words):
        rounded = jnp.round(x)
        words.append(rounded.astype(jnp.int32))
        # Both are exact: the rounding error has no more bits than x.
        x = (x - rounded) * 2.0**bits
    return words


def _float(words: Sequence[jax.Array], exponent: jax.Array, bits: int) -> jax.Array:
    """Combines such integers into a float32 array.

    The unit of the first is 2**(exponent - bits).
    """
    parts = []
    for i, word in enumerate(words):
        unit = _power(exponent - bits * (i + 1))
        parts.append(word.astype(jnp.float32) * unit)
    # Adds the smallest first, so that rounding loses little of it.
    return _added(parts[::-1])


def _added(arrays: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, arrays)


def _largest_magnitude(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the largest magnitude in arrays, or NaN."""
    # The bits of non-negative floats, read as integers, have the order of the floats.
    # Those of NaN are the largest. XLA's maximum of a large array of floats may lose
    # them on the CPU.
    bits = [lax.bitcast_convert_type(jnp.abs(x), jnp.int32) for x in arrays]
    largest = jnp.max(functools.reduce(jnp.maximum, bits), initial=0)
    return lax.bitcast_convert_type(largest, jnp.float32)


def _exponent(x: jax.Array, least: int) -> jax.Array:
    """Returns the least n of at least `least` for which x < 2**n.

    If x is not finite, it is any n.
    """
    # The exponent field of a float32 is biased by 127, and its mantissa is below 2.
    biased = lax.bitcast_convert_type(x, jnp.int32) >> 23
    return jnp.clip(biased - 126, least, 128)


def _power(exponent: jax.Array) -> jax.Array:
    """Returns 2**exponent, exactly, for the exponents of normal float32 numbers."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _extreme(
    kind: str, arrays: Sequence[jax.Array], has_replica: jax.Array | None
) -> jax.Array:
    """Returns the elementwise maximum or minimum over all replicas."""
    if kind == split.MIN:
        # The least integer has no negative, but every integer has a complement.
        is_integer = jnp.issubdtype(arrays[0].dtype, jnp.integer)
        mirror = jnp.invert if is_integer else jnp.negative
        mirrored = [mirror(x) for x in arrays]
        return mirror(_extreme(split.MAX, mirrored, has_replica))
    dtype = arrays[0].dtype
    least: float = -jnp.inf
    if jnp.issubdtype(dtype, jnp.integer):
        least = jnp.iinfo(dtype).min
    largest = functools.reduce(jnp.maximum, _where(has_replica, arrays, least))
    return lax.pmax(largest, mesh_lib.REPLICAS)


def _where(
    has_replica: jax.Array | None, arrays: Sequence[jax.Array], other: Any = 0
) -> list[jax.Array]:
    """Returns the arrays of the places, with `other` in those of empty places."""
    if has_replica is None:
        return list(arrays)
    masked = []
    for place, x in enumerate(arrays):
        filler = jnp.asarray(other, x.dtype)
        masked.append(jnp.where(has_replica[place], x, filler))
    return masked
