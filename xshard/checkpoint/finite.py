"""A check that a checkpoint's arrays are finite, by its writers, on their own bytes."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from xshard.checkpoint import ownership

# So many elements are looked at at a time: what is made of them stays in a processor's cache.
_LOOKED_AT = 1 << 16


def noting_nonfinite(
    chunks: Iterator[ownership.Chunk | None], watched: Callable[[str], Any], nonfinite: set[str]
) -> Iterator[ownership.Chunk | None]:
    """The chunks as they come; the paths of those that are not finite are added to `nonfinite`.

    Args:
      chunks: what a process writes.
      watched: whether the array of a path is looked at.
      nonfinite: takes the paths.
    """
    for chunk in chunks:
        if chunk is not None:
            piece, value = chunk
            is_asked = piece.path not in nonfinite and watched(piece.path)
            if is_asked and not is_finite(value):
                nonfinite.add(piece.path)
        yield chunk


def is_finite(value: np.ndarray) -> bool:
    """Returns whether all elements are finite; of a type that knows nothing else, True."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return True
    flat = value.reshape(-1)
    parts = (flat[i : i + _LOOKED_AT] for i in range(0, flat.size, _LOOKED_AT))
    if value.dtype.itemsize == 2:
        return all(_is_finite_half(part) for part in parts)
    return all(np.isfinite(part).all() for part in parts)


def _is_finite_half(part: np.ndarray) -> bool:
    """Tells by the bits of a type of two bytes, for which NumPy takes ten times as long."""
    info = jnp.finfo(part.dtype)
    # An exponent of all ones stands for the infinite and NaN.
    exponent = np.uint16(((1 << info.nexp) - 1) << info.nmant)
    return bool((part.view(np.uint16) & exponent).max() != exponent)
