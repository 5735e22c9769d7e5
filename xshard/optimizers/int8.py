"""Sums of int8, for networks that are slow; what rounding loses is kept for the next sum.

Sources: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014 (error feedback);
Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016, https://arxiv.org/abs/1511.04561.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

# Elements that share a scale: it adds 4 bytes to as many.
BLOCK = 256


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
    wanted = [x.astype(jnp.float32) + error for x, error in zip(arrays, errors, strict=True)]
    pairs = [quantize(x) for x in wanted]
    lost = [x - dequantize(*pair, x.shape) for x, pair in zip(wanted, pairs, strict=True)]
    # All arrays in one message.
    joined = [jnp.concatenate(blocks) for blocks in zip(*pairs, strict=True)]
    codes, scales = lax.all_gather(joined, axis_name)
    total = jnp.sum(codes.astype(jnp.float32) * scales, axis=0)
    ends = list(itertools.accumulate(len(codes) for codes, _ in pairs))[:-1]
    sums = [
        jnp.ravel(blocks)[: x.size].reshape(x.shape).astype(x.dtype)
        for blocks, x in zip(jnp.split(total, ends), arrays, strict=True)
    ]
    return sums, [jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) for x in lost]


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes, int8 of shape (blocks, BLOCK), and scales, float32 of shape (blocks, 1)."""
    blocks = jnp.pad(jnp.ravel(x), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=1, keepdims=True) / 127
    codes = jnp.round(blocks / jnp.where(scales == 0, jnp.ones_like(scales), scales))
    # What is not finite has a scale that is not finite, which spoils its block whatever the code is.
    return jnp.where(jnp.isfinite(codes), codes, jnp.ones_like(codes)).astype(jnp.int8), scales


def dequantize(codes: jax.Array, scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of a shape that was quantized, rounded."""
    return jnp.ravel(codes.astype(jnp.float32) * scales)[: math.prod(shape)].reshape(shape)
