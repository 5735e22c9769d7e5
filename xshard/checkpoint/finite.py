"""A check that a checkpoint's arrays are finite, by its writers, on their own bytes."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from xshard.checkpoint import ownership

# So many elements are looked at at a time: what is made of them stays in a processor's cache.
_LOOKED_AT = 1 << 16


def noting_nonfinite(
    chunks: Iterator[ownership.Chunk | None], watched: Callable[[str], Any], found: set[str]
) -> Iterator[ownership.Chunk | None]:
    """The chunks as they come; the paths of those that are not finite are added to `found`.

    Args:
      chunks: what a process writes.
      watched: whether the array of a path is looked at.
      found: takes the paths.
    """
    for chunk in chunks:
        if chunk is not None:
            piece, value = chunk
            if piece.path not in found and watched(piece.path) and not is_finite(value):
                found.add(piece.path)
        yield chunk


def is_finite(value: np.ndarray) -> bool:
    """Returns whether all elements are finite; of a type that knows nothing else, True."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return True
    flat, bad = value.reshape(-1), _nonfinite
    if value.dtype.itemsize == 2:
        # NumPy takes ten times as long for these: those whose exponent is all ones are infinite or NaN.
        info = jnp.finfo(value.dtype)
        exponent = np.uint16(((1 << info.nexp) - 1) << info.nmant)
        flat, bad = flat.view(np.uint16), lambda part: (part & exponent).max() == exponent
    return not any(bad(flat[i : i + _LOOKED_AT]) for i in range(0, flat.size, _LOOKED_AT))


def _nonfinite(part: np.ndarray) -> bool:
    return not np.isfinite(part).all()
