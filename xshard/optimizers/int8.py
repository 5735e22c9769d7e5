"""Sums of int8, for networks that are slow; what rounding loses is kept for the next sum.

Sources: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014 (error feedback);
Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016, https://arxiv.org/abs/1511.04561.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xshard.optimizers import trees

# Elements that share a scale: it adds 4 bytes to as many.
BLOCK = 256


def all_reduce_tree(
    sums: trees.Gradients, lost: Mapping[str, jax.Array], axis_name: str
) -> tuple[trees.Gradients, dict[str, jax.Array]]:
    """Does as `all_reduce` with each array of a tree.

    Args:
      sums: the arrays.
      lost: of each array that is there, by path, what rounding has lost, with a leading dimension for the slice.
      axis_name: the mapped axis.
    """
    leaves = trees.leaves_by_path(sums)
    arrays = [leaves[path] for path in lost]
    before = [error[0] for error in lost.values()]
    totals, after = all_reduce(arrays, before, axis_name)
    errors = {path: error[None] for path, error in zip(lost, after, strict=True)}
    return trees.replace(sums, dict(zip(lost, totals, strict=True))), errors


def all_reduce(
    arrays: Sequence[jax.Array], errors: Sequence[jax.Array], axis_name: str
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The sums over an axis of `array + error`, each rounded to int8.

    Each device sends its numbers once to each other one, in 1 + 4 / BLOCK bytes an element: less than a sum
    in float32 sends where the axis has less than eight devices.

    Args:
      arrays: what to sum, in float32 or wider. A number that is not finite makes its block of the sum not
        finite.
      errors: what rounding has lost before, of the same shapes in float32.
      axis_name: the mapped axis.

    Returns:
      The sums in the arrays' types, equal on all devices bit by bit, and what rounding has lost now (at most
      half a 127th of the largest of a block; 0 where an array is not finite).
    """
    all_codes, all_scales, lost = [], [], []
    for array, error in zip(arrays, errors, strict=True):
        wanted = array.astype(jnp.float32) + error
        codes, scales = quantize(wanted)
        rounding = wanted - dequantize(codes, scales, array.shape)
        # One number that is not finite would spoil its block of every later sum.
        lost.append(jnp.where(jnp.isfinite(rounding), rounding, jnp.zeros_like(rounding)))
        all_codes.append(codes)
        all_scales.append(scales)
    # All arrays in one message.
    message = jnp.concatenate(all_codes), jnp.concatenate(all_scales)
    codes, scales = lax.all_gather(message, axis_name)
    # Each device adds the same numbers in the same order, so that all have the same bits.
    total = jnp.sum(codes.astype(jnp.float32) * scales, axis=0)
    sums = []
    begin = 0
    for array, codes in zip(arrays, all_codes, strict=True):
        end = begin + len(codes)
        elements = jnp.ravel(total[begin:end])[: array.size]
        sums.append(elements.reshape(array.shape).astype(array.dtype))
        begin = end
    return sums, lost


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes, int8 of shape (blocks, BLOCK), and scales, float32 of shape (blocks, 1)."""
    blocks = jnp.pad(jnp.ravel(x), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=1, keepdims=True) / 127
    # A block of zeros has the scale 0, and codes of 0 by any divisor.
    codes = jnp.round(blocks / jnp.where(scales == 0, jnp.ones_like(scales), scales))
    # What is not finite has a scale that is not finite, which spoils its block whatever the code is.
    codes = jnp.where(jnp.isfinite(codes), codes, jnp.ones_like(codes))
    return codes.astype(jnp.int8), scales


def dequantize(codes: jax.Array, scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of a shape that was quantized, rounded."""
    elements = jnp.ravel(codes.astype(jnp.float32) * scales)
    return elements[: math.prod(shape)].reshape(shape)
