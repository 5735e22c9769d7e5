"""Sums in int8 for slow networks, with error feedback.

Each device rounds its summand to integers, keeps the rounding error, and adds it to its
next summand. So errors do not add up over steps.

Sources: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014 (error
feedback); Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016,
https://arxiv.org/abs/1511.04561.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xshard.optimizers import marks, trees

# The number of elements that share a scale. Each scale adds 4 bytes to a block.
BLOCK = 256


def all_reduce_tree(
    sums: trees.Gradients, rounding_errors: Mapping[str, jax.Array], axis_name: str
) -> tuple[trees.Gradients, dict[str, jax.Array]]:
    """Applies `all_reduce` to the arrays of a tree.

    Args:
      sums: the arrays.
      rounding_errors: the rounding error of each array that is not None, by path, with
        a leading dimension of 1: a slice's part of the dimension of slices.
      axis_name: the mapped axis.

    Returns:
      The tree of sums, and the new rounding errors.
    """
    leaves = trees.leaves_by_path(sums)
    paths = list(rounding_errors)
    totals, new_errors = all_reduce(
        arrays=[leaves[path] for path in paths],
        errors=[rounding_errors[path][0] for path in paths],
        axis_name=axis_name,
    )
    total_of = dict(zip(paths, totals, strict=True))
    error_of = {
        path: error[None] for path, error in zip(paths, new_errors, strict=True)
    }
    error_of = marks.marked(marks.SLICES_ERROR, error_of)
    return trees.replace(sums, total_of), error_of


def all_reduce(
    arrays: Sequence[jax.Array], errors: Sequence[jax.Array], axis_name: str
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the sums over an axis of `array + error`, each rounded to int8.

    Each device sends its elements once to every other device, at 1 + 4 / BLOCK bytes
    per element. That is less than a float32 sum sends if the axis has fewer than eight
    devices.

    Args:
      arrays: the arrays to sum, in float32 or wider. An element that is not finite
        makes its whole block of the sum not finite.
      errors: the rounding errors of earlier sums, float32 arrays of the same shapes.
      axis_name: the mapped axis.

    Returns:
      The sums in the arrays' types, equal on all devices bit by bit; and the new
      rounding errors (at most half a 127th of the largest magnitude of a block; 0 where
      an array is not finite).
    """
    local_codes = []
    local_scales = []
    new_errors = []
    for array, error in zip(arrays, errors, strict=True):
        wanted = array.astype(jnp.float32) + error
        codes, scales = quantize(wanted)
        rounding = wanted - dequantize(codes, scales, array.shape)
        # An error that is not finite would spoil its block of every later sum, so it is
        # dropped.
        is_finite = jnp.isfinite(rounding)
        new_errors.append(jnp.where(is_finite, rounding, jnp.zeros_like(rounding)))
        local_codes.append(codes)
        local_scales.append(scales)

    if all(not array.size for array in arrays):
        # There is nothing to send, which XLA refuses to gather.
        return list(arrays), new_errors
    # All arrays share one message, since many small messages would cost more.
    message = (jnp.concatenate(local_codes), jnp.concatenate(local_scales))
    all_codes, all_scales = lax.all_gather(message, axis_name)
    # Each device adds the same numbers in the same order, so all of them get the same
    # bits.
    total = jnp.sum(values(all_codes, all_scales), axis=0)

    # Now the blocks of all arrays lie one after the other.
    sums = []
    begin = 0
    for array, codes in zip(arrays, local_codes, strict=True):
        end = begin + len(codes)
        elements = jnp.ravel(total[begin:end])[: array.size]
        sums.append(elements.reshape(array.shape).astype(array.dtype))
        begin = end
    return sums, new_errors


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds a float32 array to integers, in blocks that have a scale each.

    Args:
      x: the array, of any shape.

    Returns:
      The codes, int8 of shape (blocks, BLOCK), the last of them padded; and the scales,
      float32 of shape (blocks, 1).
    """
    padding = -x.size % BLOCK
    blocks = jnp.pad(jnp.ravel(x), (0, padding)).reshape(-1, BLOCK)
    # NaN counts as infinity, since XLA's maximum of a large array may lose NaN on the
    # CPU.
    magnitudes = jnp.where(jnp.isnan(blocks), jnp.inf, jnp.abs(blocks))
    scales = jnp.max(magnitudes, axis=1, keepdims=True) / 127
    # A block of zeros has the scale 0. Any other divisor gives its codes of 0.
    divisors = jnp.where(scales == 0, jnp.ones_like(scales), scales)
    codes = jnp.round(blocks / divisors)
    # A block with a non-finite element has a non-finite scale, which makes the whole
    # block non-finite for any codes.
    codes = jnp.where(jnp.isfinite(codes), codes, jnp.ones_like(codes))
    return codes.astype(jnp.int8), scales


def values(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns what codes stand for, float32 of shape (..., blocks, BLOCK).

    Args:
      codes: the codes of `quantize`, with any leading dimensions.
      scales: its scales.
    """
    return codes.astype(jnp.float32) * scales


def dequantize(
    codes: jax.Array, scales: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Restores a quantized array, up to rounding.

    Args:
      codes: the codes of `quantize`.
      scales: its scales.
      shape: the array's shape.
    """
    elements = jnp.ravel(values(codes, scales))
    # Without the padding of the last block.
    elements = elements[: math.prod(shape)]
    return elements.reshape(shape)
