"""The terms of a collective on the host, where the members of a run combine them.

Each array has a form in which any order of combining gives the same bits: sums and
maxima are of integers, and a gathered array has zeros where other members have values,
so that its bytes are added.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xshard.logical import split


class HostSums:
    """How the terms of one collective are combined on the host.

    Attributes:
      magnitudes: the shape of the magnitudes; None if no array is summed exactly.
      like: the shapes of the arrays that members combine.
      operations: how two of each are combined.
    """

    def __init__(
        self, kinds: Sequence[split.Kind], shapes: Sequence[Any], magnitudes: Any
    ):
        """Computes nothing yet.

        Args:
          kinds: the way in which each array is combined.
          shapes: the shape of the term of each array.
          magnitudes: the shape of the magnitudes; None if there are none.
        """
        self.magnitudes = magnitudes
        self.like: list[Any] = []
        self.operations: list[np.ufunc] = []
        self._kinds = kinds
        self._shapes = shapes
        for kind, like in zip(kinds, shapes, strict=True):
            is_extreme = kind.name in (split.MAX, split.MIN)
            self.operations.append(np.maximum if is_extreme else np.add)
            if kind.name == split.GATHER:
                size = like.size * np.dtype(like.dtype).itemsize
                like = jax.ShapeDtypeStruct((size,), np.uint8)
            self.like.append(like)

    def arrays(self, terms: Sequence[Any]) -> list[np.ndarray]:
        """Returns what members combine, for the terms of some replicas."""
        arrays = []
        for kind, term in zip(self._kinds, terms, strict=True):
            x = np.asarray(term)
            if kind.name == split.GATHER:
                x = x.reshape(-1).view(np.uint8)
            arrays.append(x)
        return arrays

    def terms(self, combined: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the terms of all replicas, given what all members have combined."""
        terms = []
        for shape, x in zip(self._shapes, combined, strict=True):
            terms.append(x.view(shape.dtype).reshape(shape.shape))
        return terms
