"""Means over the replicas of a group, and over the micro-batches of a replica.

Equal numbers have no mean to take: their sum is rounded, and on 3 replicas it is not 3
times the number; or it overflows. So the state of a network stays as it is where all
replicas hold the same, such as a table that nothing sets.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xshard.base import mesh_axes
from xshard.learners import run_context
from xshard.optimizers import replica_calls, trees

# The number of bits of the integers that float32 represents.
_EXACT_BITS = 24

# The multipliers of a hash function with two rounds, and one that spreads positions
# (https://github.com/skeeto/hash-prospector, lowbias32).
_ROUNDS = (0x7FEB352D, 0x846CA68B)
_POSITION = 0x9E3779B1


def over_replicas(tree: Any) -> Any:
    """Averages a tree's floating-point arrays over the replicas of a group.

    The means are float32 or wider. Other arrays stay as they are. Call it where the
    axes `mesh.REPLICAS`, 'slice' and 'replica', are mapped.
    """

    def mean(x: jax.Array) -> jax.Array:
        if not _is_averaged(x):
            return x
        # A sum of narrow numbers may overflow where their mean does not.
        return lax.pmean(trees.widen(x), mesh_axes.REPLICAS)

    return jax.tree.map(mean, tree)


def over_parts(tree: Any) -> Any:
    """Averages a tree's floating-point arrays over micro-batches, their first axis.

    The means are float32 or wider; of equal numbers it is exactly that number. Of any
    other array, such as a count, it is the last value.
    """

    def mean(x: jax.Array) -> jax.Array:
        if not _is_averaged(x):
            return x[-1]
        wide = trees.widen(x)
        is_equal = jnp.all(wide == wide[0], axis=0)
        return jnp.where(is_equal, wide[0], jnp.mean(wide, axis=0))

    return jax.tree.map(mean, tree)


def of_state(tree: Any, like: Any) -> Any:
    """Averages the floating-point arrays of a network's state over the replicas.

    An array that is equal on all of them stays as it is, bit by bit. Where replicas are
    logical ones, so does each element that is equal.

    Args:
      tree: the replica's own arrays, as the network or `over_parts` returned them.
      like: a tree of arrays, of whose types the results are.
    """
    leaves, structure = jax.tree.flatten(tree)
    averaged = [i for i, x in enumerate(leaves) if _is_averaged(x)]
    own = [trees.widen(leaves[i]) for i in averaged]
    means = over_replicas(own)
    if own and lax.axis_size(mesh_axes.REPLICAS) > 1:
        if isinstance(run_context.current().mesh, jax.sharding.Mesh):
            means = _keep_equal_arrays(own, means)
        else:
            means = _keep_equal_elements(own, means)
    for i, mean in zip(averaged, means, strict=True):
        leaves[i] = mean
    result = jax.tree.unflatten(structure, leaves)
    return jax.tree.map(lambda x, y: x.astype(y.dtype), result, like)


def _is_averaged(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _keep_equal_arrays(
    own: Sequence[jax.Array], means: Sequence[jax.Array]
) -> list[jax.Array]:
    """Replaces the means of arrays that are equal on all replicas by these.

    Replicas compare hashes of 64 bits, by sums in float32, which XLA combines with
    others: by no collective of their own, and by few bytes.

    Args:
      own: the replica's own arrays, in float32 or wider.
      means: their means over the replicas.
    """
    count = lax.axis_size(mesh_axes.REPLICAS)
    hashes = jnp.stack([_hash(x) for x in own])
    # Each hash is cut into integers so small that float32 adds their squares exactly.
    bits = (_EXACT_BITS - (count - 1).bit_length()) // 2
    pieces = []
    for begin in range(0, 32, bits):
        piece = (hashes >> jnp.uint32(begin)) & jnp.uint32(2**bits - 1)
        pieces.append(piece.astype(jnp.float32))
    stacked = jnp.stack(pieces)
    sums = lax.psum(jnp.stack([stacked, stacked * stacked]), mesh_axes.REPLICAS)
    totals, squares = sums.astype(jnp.int32)
    # Integers are equal if and only if their squares add up to that of their mean.
    mean = totals // count
    is_equal = (mean * count == totals) & (mean * mean * count == squares)
    is_equal = jnp.all(is_equal, axis=(0, 2))
    kept = []
    for i, (x, average) in enumerate(zip(own, means, strict=True)):
        kept.append(jnp.where(is_equal[i], x, average))
    # The program does not show that an array is equal where its hash is.
    declared: list[jax.Array] = replica_calls.equal_on_replicas(kept)
    return declared


def _hash(x: jax.Array) -> jax.Array:
    """Returns two hashes of the bits of an array, uint32 of shape (2,)."""
    words = jnp.ravel(_words(x))
    positions = lax.iota(jnp.uint32, words.size) * jnp.uint32(_POSITION)
    hashes = []
    mixed = words ^ positions
    for multiplier in _ROUNDS:
        mixed = (mixed ^ (mixed >> jnp.uint32(16))) * jnp.uint32(multiplier)
        mixed = mixed ^ (mixed >> jnp.uint32(15))
        hashes.append(jnp.sum(mixed, dtype=jnp.uint32))
    return jnp.stack(hashes)


def _keep_equal_elements(
    own: Sequence[jax.Array], means: Sequence[jax.Array]
) -> list[jax.Array]:
    """Replaces the means of elements that are equal on all replicas by these.

    Of a replica's own values only what a collective returns is known after it, where
    several replicas share a device. So it returns the elements themselves.

    Args:
      own: the replica's own arrays, in float32 or wider.
      means: their means over the replicas.
    """
    # As integers, so that NaN and the sign of zero count as any other bits.
    words = [lax.bitcast_convert_type(_words(x), jnp.int32) for x in own]
    joined = jnp.concatenate([jnp.ravel(x) for x in words])
    sent = jnp.stack([joined, jnp.invert(joined)])
    largest, complement = lax.pmax(sent, mesh_axes.REPLICAS)
    is_equal = largest == jnp.invert(complement)
    kept = []
    begin = 0
    for x, average in zip(words, means, strict=True):
        end = begin + x.size
        element = _from_words(largest[begin:end].reshape(x.shape), average)
        has_element = jnp.all(is_equal[begin:end].reshape(x.shape), axis=-1)
        kept.append(jnp.where(has_element, element, average))
        begin = end
    return kept


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of an array, uint32 with a last dimension of an element's."""
    shape = x.shape
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    words = lax.bitcast_convert_type(x, jnp.uint32)
    # Of an array without elements, no size follows from the others.
    return words.reshape(*shape, math.prod(words.shape[len(shape) :]))


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """Inverts `_words`, given an array of the same shape and type."""
    part = jnp.finfo(like.dtype).dtype
    is_complex = jnp.iscomplexobj(like)
    shape = like.shape
    if is_complex:
        shape = (*shape, 2)
    if part.itemsize > words.dtype.itemsize:
        shape = (*shape, part.itemsize // words.dtype.itemsize)
    values = lax.bitcast_convert_type(words.reshape(shape), part)
    if is_complex:
        return lax.complex(values[..., 0], values[..., 1])
    return values
