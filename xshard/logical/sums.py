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
    """Computes the results of an exchange of a group's replicas. Call it in a
    `jax.shard_map` over the devices.

    Args:
      kinds: the way in which each array is exchanged.
      sent: for each place on the device, the arrays that the replica at that place
        sends.
      has_replica: for each place on the device, whether it has a replica; None if every
        place has one.
      count: the number of replicas of a group.
      num_words: the number of integers that represent each floating-point summand, so that
        the order of a sum does not matter; 0 to sum in floating point.
      gather_steps: as `Replicas.gather_steps`.

    Returns:
      For each array, the result, equal on all devices; for a scattered array, a list
      with the shard of each place.
    """
    results: list[Any] = [None] * len(kinds)
    exactly = []
    for i, (kind, *arrays) in enumerate(zip(kinds, *sent, strict=True)):
        if kind.name == split.GATHER:
            results[i] = _gathered(arrays, kind.dim, count, gather_steps)
        elif kind.name in (split.MAX, split.MIN):
            results[i] = _extreme(kind.name, arrays, has_replica)
        elif num_words and jnp.issubdtype(arrays[0].dtype, jnp.floating):
            exactly.append(i)
        else:
            ((results[i],),) = _totals(
                [kind], [[_added(_where(has_replica, arrays))]], count, len(arrays)
            )
    wide = [
        _where(has_replica, [of[i].astype(jnp.float32) for of in sent]) for i in exactly
    ]
    totals = _exact_sums([kinds[i] for i in exactly], wide, count, num_words)
    for i, total in zip(exactly, totals, strict=True):
        results[i] = total.astype(sent[0][i].dtype)
    for i, kind in enumerate(kinds):
        if kind.name == split.SCATTER:
            results[i] = jnp.split(results[i], len(sent), kind.dim)
    return results


def _exact_sums(
    kinds: Sequence[split.Kind],
    sent: Sequence[list[jax.Array]],
    count: int,
    num_words: int,
) -> list[jax.Array]:
    """The sums of float32 arrays over all replicas. A sum is all NaN if any element of
    its array is not finite.

    Args:
      kinds: the way in which each array is exchanged, a sum or a scatter.
      sent: for each array, the summands of the device's replicas.
      count: the number of replicas of a group.
      num_words: the number of integers for each element.
    """
    if not sent:
        return []
    # The sum of `count` integers of this many bits fits an int32.
    bits = _BITS - (count - 1).bit_length()
    largest = jnp.stack([_largest(arrays) for arrays in sent])
    # NaN becomes infinity, so that pmax propagates it on every backend.
    largest = jnp.where(jnp.isfinite(largest), largest, jnp.inf)
    largest = lax.pmax(largest, mesh_lib.REPLICAS)
    exponents = _exponent(largest, _LEAST_EXPONENT + num_words * bits)
    summands = []
    for exponent, arrays in zip(exponents, sent, strict=True):
        of_replicas = [
            _integers(x * _power(bits - exponent), bits, num_words) for x in arrays
        ]
        summands.append([_added(limb) for limb in zip(*of_replicas, strict=True)])
    sums = _totals(kinds, summands, count, len(sent[0]))
    return [
        jnp.where(jnp.isfinite(x), _float(limb_sums, exponent, bits), jnp.nan)
        for x, limb_sums, exponent in zip(largest, sums, exponents, strict=True)
    ]


def _totals(
    kinds: Sequence[split.Kind],
    summands: Sequence[list[jax.Array]],
    count: int,
    places: int,
) -> list[list[jax.Array]]:
    """The sums over the devices, of several arrays for each kind. A scattered sum has
    only this device's shards.
    """
    whole = [i for i, kind in enumerate(kinds) if kind.name == split.SUM]
    # One psum of the whole list, so that all sums share one collective.
    of_whole = lax.psum([summands[i] for i in whole], mesh_lib.REPLICAS)
    results = dict(zip(whole, of_whole, strict=True))
    for i, kind in enumerate(kinds):
        if kind.name == split.SCATTER:
            results[i] = [_scattered(x, kind.dim, count, places) for x in summands[i]]
    return [results[i] for i in range(len(kinds))]


def _scattered(x: jax.Array, dim: int, count: int, places: int) -> jax.Array:
    # Pads for the empty places, whose shards follow all others.
    missing = places * lax.axis_size(mesh_lib.REPLICAS) - count
    pads = [(0, 0)] * x.ndim
    pads[dim] = (0, x.shape[dim] // count * missing)
    return lax.psum_scatter(
        jnp.pad(x, pads), mesh_lib.REPLICAS, scatter_dimension=dim, tiled=True
    )


def _gathered(
    arrays: Sequence[jax.Array], dim: int, count: int, steps: Sequence[Any]
) -> jax.Array:
    """Concatenates the arrays of all replicas along a dimension."""
    x = jnp.concatenate(arrays, dim)
    for groups in reversed(steps):
        how = {"axis": dim, "tiled": True, "axis_index_groups": groups}
        x = lax.all_gather(x, mesh_lib.REPLICAS, **how)
    return lax.slice_in_dim(x, 0, arrays[0].shape[dim] * count, axis=dim)


def _integers(x: jax.Array, bits: int, num_words: int) -> list[jax.Array]:
    """Integers that together approximate a float32 array; the unit of each is 2**-bits
    of the one before.
    """
    whole = jnp.round(x)
    rest = (
        _integers((x - whole) * 2.0**bits, bits, num_words - 1) if num_words > 1 else []
    )
    return [whole.astype(jnp.int32), *rest]


def _float(words: Sequence[jax.Array], exponent: jax.Array, bits: int) -> jax.Array:
    """Combines such integers into a float32 array. The unit of the first is
    2**(exponent - bits).
    """
    units = [_power(exponent - bits * (i + 1)) for i in range(len(words))]
    # Adds the smallest first, so that rounding loses little of it.
    parts = [x.astype(jnp.float32) * unit for x, unit in zip(words, units, strict=True)]
    return _added(parts[::-1])


def _added(arrays: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, arrays)


def _largest(arrays: Sequence[jax.Array]) -> jax.Array:
    """The largest magnitude in arrays, or NaN."""
    # The bits of non-negative floats, read as integers, have the order of the floats.
    # Those of NaN are the largest. XLA's maximum of a large array of floats may lose
    # them on the CPU.
    bits = [lax.bitcast_convert_type(jnp.abs(x), jnp.int32) for x in arrays]
    largest = jnp.max(functools.reduce(jnp.maximum, bits), initial=0)
    return lax.bitcast_convert_type(largest, jnp.float32)


def _exponent(x: jax.Array, least: int) -> jax.Array:
    """The least n of at least `least` for which x < 2**n; any n if x is not finite."""
    biased = lax.bitcast_convert_type(x, jnp.int32) >> 23
    return jnp.clip(biased - 126, least, 128)


def _power(exponent: jax.Array) -> jax.Array:
    """2**exponent, exactly, for the exponents of normal float32 numbers."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _extreme(
    kind: str, arrays: Sequence[jax.Array], has_replica: jax.Array | None
) -> jax.Array:
    """The elementwise maximum or minimum over all replicas."""
    dtype = arrays[0].dtype
    mirrored, least = jnp.negative, -jnp.inf
    if jnp.issubdtype(dtype, jnp.integer):
        # The least integer has no negative.
        mirrored, least = jnp.invert, jnp.iinfo(dtype).min
    if kind == split.MIN:
        return mirrored(_extreme(split.MAX, list(map(mirrored, arrays)), has_replica))
    return lax.pmax(
        functools.reduce(jnp.maximum, _where(has_replica, arrays, least)),
        mesh_lib.REPLICAS,
    )


def _where(
    has_replica: jax.Array | None, arrays: Sequence[jax.Array], other: Any = 0
) -> list[jax.Array]:
    """The arrays of replicas, with `other` in place of each array at an empty place."""
    if has_replica is None:
        return list(arrays)
    return [
        jnp.where(has_replica[i], x, jnp.asarray(other, x.dtype))
        for i, x in enumerate(arrays)
    ]
