"""Checks that a checkpoint's arrays are finite. Each process checks the chunks that it
writes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from xshard.checkpoint import ownership

# The number of elements that are checked at a time, so that intermediate results stay
# in the processor's cache.
_BLOCK_ELEMENTS = 1 << 16


def recording_nonfinite(
    chunks: Iterator[ownership.Chunk | None],
    watched: Callable[[str], Any],
    nonfinite: set[str],
) -> Iterator[ownership.Chunk | None]:
    """Passes chunks through, and adds the paths of arrays that are not finite to
    `nonfinite`.

    Args:
      chunks: the chunks that a process writes; None is passed through.
      watched: returns whether to check the array of a path.
      nonfinite: the set to which paths are added.
    """
    for chunk in chunks:
        if chunk is not None:
            piece, value = chunk
            is_checked = piece.path not in nonfinite and watched(piece.path)
            if is_checked and not is_finite(value):
                nonfinite.add(piece.path)
        yield chunk


def is_finite(value: np.ndarray) -> bool:
    """Returns whether all elements are finite; True for types without infinities and
    NaN, such as integers.
    """
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return True
    flat = value.reshape(-1)
    parts = (
        flat[i : i + _BLOCK_ELEMENTS] for i in range(0, flat.size, _BLOCK_ELEMENTS)
    )
    if value.dtype.itemsize == 2:
        return all(_is_finite_half(part) for part in parts)
    return all(np.isfinite(part).all() for part in parts)


def _is_finite_half(part: np.ndarray) -> bool:
    """Checks a two-byte floating-point type by its bits: NumPy's `isfinite` takes ten
    times as long for these types.
    """
    info = jnp.finfo(part.dtype)
    # Infinities and NaN, and no other values, have an exponent of all ones.
    exponent = np.uint16(((1 << info.nexp) - 1) << info.nmant)
    return bool((part.view(np.uint16) & exponent).max() != exponent)
