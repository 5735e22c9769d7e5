"""Codes of int8 for summands that slow networks carry, with error feedback.

Each device rounds its summand to integers, keeps the rounding error, and adds it to its
next summand. So errors do not add up.

Sources: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014 (error
feedback); Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016,
https://arxiv.org/abs/1511.04561.
"""

import math

import jax
import jax.numpy as jnp

# The number of elements that share a scale. Each scale adds 4 bytes to a block.
BLOCK = 256


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
