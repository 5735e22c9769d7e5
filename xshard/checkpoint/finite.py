"""Whether arrays on the host are finite."""

import re
from collections.abc import Iterable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from xshard.checkpoint import leaves as leaves_lib

# The number of elements that are checked at a time, so that intermediate results stay
# in the processor's cache.
_ELEMENTS_AT_ONCE = 1 << 16
# The most arrays that are named.
_MOST_PATHS = 8


class Finite:
    """Which arrays of a checkpoint must be finite."""

    def __init__(self, patterns: Sequence[str], *, refuse: bool):
        """Compiles the patterns.

        Args:
          patterns: regular expressions, which are searched for in the paths of arrays;
            others are not checked. Those that match the first are named first.
          refuse: whether a checkpoint with an array that is not finite fails to count.
        """
        self.patterns = [re.compile(pattern) for pattern in patterns if pattern]
        self.refuse = refuse

    def note(
        self,
        chunks: Iterator[tuple[leaves_lib.Chunk, np.ndarray] | None],
        nonfinite: set[str],
    ) -> Iterator[tuple[leaves_lib.Chunk, np.ndarray] | None]:
        """Passes chunks through, and notes the arrays that are not finite.

        Args:
          chunks: the chunks that a process writes; None is passed through.
          nonfinite: the set to which paths are added.
        """
        for item in chunks:
            if item is not None:
                chunk, value = item
                path = chunk.path
                is_checked = path not in nonfinite and self._rank(path) is not None
                if is_checked and not is_finite(value):
                    nonfinite.add(path)
            yield item

    def first(self, nonfinite: Iterable[str]) -> list[str]:
        """Returns the first paths of arrays that are not finite, in order of the
        patterns.
        """
        ordered = sorted(nonfinite, key=lambda path: (self._rank(path), path))
        return ordered[:_MOST_PATHS]

    def _rank(self, path: str) -> int | None:
        """Returns the index of the first pattern that matches; None if none does."""
        for i, pattern in enumerate(self.patterns):
            if pattern.search(path):
                return i
        return None


def is_finite(value: np.ndarray) -> bool:
    """Returns whether all elements are finite.

    It is True for types without infinities and NaN, such as integers.
    """
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return True
    flat = value.reshape(-1)
    for start in range(0, flat.size, _ELEMENTS_AT_ONCE):
        part = flat[start : start + _ELEMENTS_AT_ONCE]
        if value.dtype.itemsize == 2:
            part_is_finite = _is_finite_half(part)
        else:
            part_is_finite = bool(np.isfinite(part).all())
        if not part_is_finite:
            return False
    return True


def _is_finite_half(value: np.ndarray) -> bool:
    """Checks a two-byte floating-point type by its bits.

    NumPy's `isfinite` takes ten times as long for these types.
    """
    info = jnp.finfo(value.dtype)
    # Infinities and NaN, and no other values, have an exponent of all ones.
    exponent = np.uint16(((1 << info.nexp) - 1) << info.nmant)
    return bool((value.view(np.uint16) & exponent).max() != exponent)
