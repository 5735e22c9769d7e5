"""Sums, maxima and minima over logical replicas, several of which may share a device.

Exact sums add integers, because the result of an integer sum does not depend on its
order. Each array is rounded to multiples of a power of two that all replicas share,
scaled to the largest magnitude among them. With n replicas, this leaves 30 -
ceil(log2(n)) bits for that magnitude: 23 for 128 replicas, where a float32 has 24.
Scaling by a power of two is exact, so the only other rounding is the last one, to
float32.
"""

import functools
from collections.abc import Callable, Sequence
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
    is_exact: bool,
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
      is_exact: whether floats are summed as integers, so that the order of a sum does
        not matter.
      gather_steps: as `Replicas.gather_steps`.

    Returns:
      For each array, the result, equal on all devices; for a scattered array, a list
      with the shard of each place.
    """
    largest = None
    if is_exact:
        largest = magnitudes(kinds, sent, has_replica)
    combined = terms(kinds, sent, has_replica, largest, count, gather_steps)
    made = results(kinds, sent[0], combined, largest, count)
    for i, kind in enumerate(kinds):
        if kind.name == split.SCATTER:
            made[i] = jnp.split(made[i], len(sent), kind.dim)
    return made


# The steps of a collective. Between any two of them, whatever the replicas of these
# devices have added up may be added to what others have: integers, whose order does not
# matter.


def magnitudes(
    kinds: Sequence[split.Kind],
    sent: Sequence[Sequence[jax.Array]],
    has_replica: jax.Array | None,
) -> jax.Array | None:
    """Returns the largest magnitude in each array that is summed exactly.

    Infinity stands for what is not finite. None if no array is summed exactly. The
    arguments are those of `combine`.
    """
    largest = []
    for i in floating_sums(kinds, sent[0]):
        largest.append(_largest_magnitude(_summands(i, sent, has_replica)))
    if not largest:
        return None
    of_device = jnp.stack(largest)
    # NaN becomes infinity, so that pmax propagates it on every backend.
    of_device = jnp.where(jnp.isfinite(of_device), of_device, jnp.inf)
    return _over_devices(lax.pmax, of_device)


def terms(
    kinds: Sequence[split.Kind],
    sent: Sequence[Sequence[jax.Array]],
    has_replica: jax.Array | None,
    largest: jax.Array | None,
    count: int,
    gather_steps: Sequence[Any] = (None,),
) -> list[jax.Array]:
    """Combines the arrays of the replicas, exact sums as integers.

    The arguments are those of `combine`, and the result of `magnitudes`.

    Returns:
      For each array, one array. Scattered arrays are the device's shards, gathered ones
      have all places, and maxima and minima are integers whose maximum is wanted.
    """
    places = len(sent)
    combined: list[Any] = [None] * len(kinds)
    indices = [] if largest is None else floating_sums(kinds, sent[0])
    for i, kind in enumerate(kinds):
        arrays = [arrays_of_place[i] for arrays_of_place in sent]
        if kind.name == split.GATHER:
            combined[i] = _gathered(arrays, kind.dim, gather_steps)
        elif kind.name in (split.MAX, split.MIN):
            combined[i] = _extreme(kind.name, arrays, has_replica)
        elif i not in indices:
            local_sum = _added(_where(has_replica, arrays))
            if kind.name == split.SUM:
                combined[i] = _over_devices(lax.psum, local_sum)
            else:
                combined[i] = _scattered(local_sum, kind.dim, count, places)
    if largest is None:
        return combined

    bits = _bits(count)
    exponents = _exponents(largest, bits)
    for i, exponent in zip(indices, exponents, strict=True):
        integers = []
        for x in _summands(i, sent, has_replica):
            rounded = jnp.round(x * _power(bits - exponent))
            integers.append(rounded.astype(jnp.int32))
        combined[i] = _added(integers)
    # One psum of the whole list, so that all sums share one collective.
    summed = [i for i in indices if kinds[i].name == split.SUM]
    sums = _over_devices(lax.psum, [combined[i] for i in summed])
    for i, total in zip(summed, sums, strict=True):
        combined[i] = total
    for i in indices:
        if kinds[i].name == split.SCATTER:
            combined[i] = _scattered(combined[i], kinds[i].dim, count, places)
    return combined


def results(
    kinds: Sequence[split.Kind],
    like: Sequence[Any],
    combined: Sequence[jax.Array],
    largest: jax.Array | None,
    count: int,
) -> list[Any]:
    """Returns the results of a collective.

    A sum is all NaN if any element of its array is not finite on any replica.

    Args:
      kinds: the way in which each array is combined.
      like: arrays or shapes as a replica sends them.
      combined: the result of `terms`, of all replicas.
      largest: the result of `magnitudes`, of all replicas.
      count: the number of replicas of a group.
    """
    made: list[Any] = list(combined)
    for i, kind in enumerate(kinds):
        if kind.name == split.GATHER:
            # The arrays of the empty places come last.
            size = like[i].shape[kind.dim] * count
            made[i] = lax.slice_in_dim(made[i], 0, size, axis=kind.dim)
        elif kind.name in (split.MAX, split.MIN):
            made[i] = _from_order(kind.name, made[i], like[i].dtype)
    if largest is None:
        return made
    bits = _bits(count)
    exponents = _exponents(largest, bits)
    indices = floating_sums(kinds, like)
    for i, exponent, x in zip(indices, exponents, largest, strict=True):
        total = combined[i].astype(jnp.float32) * _power(exponent - bits)
        total = jnp.where(jnp.isfinite(x), total, jnp.nan)
        made[i] = total.astype(like[i].dtype)
    return made


def floating_sums(kinds: Sequence[split.Kind], like: Sequence[Any]) -> list[int]:
    """Returns the positions of the arrays of floats that are summed."""
    indices = []
    for i, (kind, x) in enumerate(zip(kinds, like, strict=True)):
        is_sum = kind.name in (split.SUM, split.SCATTER)
        if is_sum and _is_floating(x):
            indices.append(i)
    return indices


def _summands(
    index: int, sent: Sequence[Sequence[jax.Array]], has_replica: jax.Array | None
) -> list[jax.Array]:
    """Returns the summands of an exact sum, for each place of the device."""
    return _where(has_replica, [arrays[index].astype(jnp.float32) for arrays in sent])


def _bits(count: int) -> int:
    """Returns the bits of an integer: the sum of `count` of them fits an int32."""
    return _BITS - (count - 1).bit_length()


def _exponents(largest: jax.Array, bits: int) -> jax.Array:
    """Returns for each array the least n for which its magnitudes are below 2**n.

    The unit of its sum, 2**(n - bits), must be a normal number, which bounds n. If a
    magnitude is not finite, it is any n.
    """
    # The exponent field of a float32 is biased by 127, and its mantissa is below 2.
    biased = lax.bitcast_convert_type(largest, jnp.int32) >> 23
    return jnp.clip(biased - 126, _LEAST_EXPONENT + bits, 128)


def _over_devices(combine: Callable[..., Any], x: Any) -> Any:
    """Combines arrays of all devices."""
    # XLA on CPUs would copy the arrays of the only device.
    if lax.axis_size(mesh_lib.REPLICAS) == 1:
        return x
    return combine(x, mesh_lib.REPLICAS)


def _scattered(x: jax.Array, dim: int, count: int, places: int) -> jax.Array:
    """Sums an array over the devices, each of which keeps the shards of its places."""
    # Pads for the empty places, whose shards follow all others.
    num_empty = places * lax.axis_size(mesh_lib.REPLICAS) - count
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, x.shape[dim] // count * num_empty)
    return lax.psum_scatter(
        jnp.pad(x, padding), mesh_lib.REPLICAS, scatter_dimension=dim, tiled=True
    )


def _gathered(arrays: Sequence[jax.Array], dim: int, steps: Sequence[Any]) -> jax.Array:
    """Concatenates the arrays of all places along a dimension."""
    x = jnp.concatenate(arrays, dim)
    for groups in reversed(steps):
        x = lax.all_gather(
            x, mesh_lib.REPLICAS, axis=dim, tiled=True, axis_index_groups=groups
        )
    return x


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


def _power(exponent: jax.Array) -> jax.Array:
    """Returns 2**exponent, exactly, for the exponents of normal float32 numbers."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _extreme(
    kind: str, arrays: Sequence[jax.Array], has_replica: jax.Array | None
) -> jax.Array:
    """Returns the elementwise maximum or minimum over all replicas, in order."""
    ordered = [_in_order(kind, x) for x in arrays]
    least = jnp.iinfo(ordered[0].dtype).min
    largest = functools.reduce(jnp.maximum, _where(has_replica, ordered, least))
    return _over_devices(lax.pmax, largest)


def _in_order(kind: str, x: jax.Array) -> jax.Array:
    """Converts an array to integers whose maximum is its maximum or minimum.

    A backend's maximum of floats may lose NaN, or the sign of a zero.
    """
    if kind == split.MIN:
        # The least integer has no negative, but every integer has a complement.
        x = jnp.negative(x) if _is_floating(x) else jnp.invert(x)
    if x.dtype == bool:
        return x.astype(jnp.int32)
    if not _is_floating(x):
        return x
    # The bits of NaN without a sign are the largest.
    x = jnp.where(jnp.isnan(x), jnp.asarray(jnp.nan, x.dtype), x)
    return _flipped(lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}"))


def _from_order(kind: str, ordered: jax.Array, dtype: Any) -> jax.Array:
    """Inverts `_in_order`."""
    x = ordered.astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        x = lax.bitcast_convert_type(_flipped(ordered), dtype)
    if kind == split.MIN:
        x = jnp.negative(x) if _is_floating(x) else jnp.invert(x)
    return x


def _flipped(bits: jax.Array) -> jax.Array:
    """Converts the bits of floats to integers of the same order, and back."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


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
