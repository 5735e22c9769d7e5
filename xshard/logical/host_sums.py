"""The terms of a collective on the host, where the members of a run combine them.

Each array has a form in which any order of combining gives the same bits: sums and
maxima are of integers, and a gathered array has zeros where other members have values,
so that its bytes are added.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xshard.logical import split


class HostSums:
    """How the terms of one collective are combined on the host.

    Attributes:
      magnitudes: the shape of the magnitudes; None if no array is summed exactly.
      shapes: the shapes of the terms of all replicas.
      like: the shapes of the arrays that members combine.
      operations: how two of each are combined.
    """

    def __init__(
        self,
        kinds: Sequence[split.Kind],
        of_round: Sequence[Sequence[Any]],
        magnitudes: Any,
        rounds: int,
        devices: int,
        leading: int,
    ):
        """Computes nothing yet.

        Args:
          kinds: the way in which each array is combined.
          of_round: the shapes of the terms of a round, in which each device computes
            one replica.
          magnitudes: the shape of the magnitudes; None if there are none.
          rounds: the number of rounds.
          devices: the number of devices of a group.
          leading: the number of dimensions of groups.
        """
        self.magnitudes = magnitudes
        self.like: list[jax.ShapeDtypeStruct] = []
        self.operations: list[np.ufunc] = []
        self._kinds: list[split.Kind] = []
        self._rounds = rounds
        self._devices = devices
        shapes = []
        for kind, term in zip(kinds, of_round, strict=True):
            for x in term:
                kind_of_array = kind._replace(dim=leading + kind.dim)
                shape = self._shape_of_all(kind_of_array, x)
                like = shape
                if kind.name == split.GATHER:
                    size = math.prod(shape.shape) * np.dtype(shape.dtype).itemsize
                    like = jax.ShapeDtypeStruct((size,), np.uint8)
                is_extreme = kind.name in (split.MAX, split.MIN)
                self.operations.append(np.maximum if is_extreme else np.add)
                self._kinds.append(kind_of_array)
                self.like.append(like)
                shapes.append(shape)
        self.shapes = jax.tree.unflatten(jax.tree.structure(of_round), shapes)

    def _shape_of_all(self, kind: split.Kind, shape: Any) -> jax.ShapeDtypeStruct:
        size = list(shape.shape)
        if kind.name == split.GATHER:
            size[kind.dim] *= self._rounds
        return jax.ShapeDtypeStruct(tuple(size), shape.dtype)

    def added(self, numbers: Sequence[int], terms: Sequence[Any]) -> list[np.ndarray]:
        """Returns what members combine, for some rounds and the terms of each."""
        parts = []
        for number, of_round in zip(numbers, terms, strict=True):
            parts.append(self._arrays(number, of_round))
        total, *others = parts
        for part in others:
            pairs = zip(self.operations, total, part, strict=True)
            total = [operation(x, y) for operation, x, y in pairs]
        return total

    def _arrays(self, number: int, terms: Any) -> list[np.ndarray]:
        """Returns what members combine, for the terms of one round."""
        arrays = []
        for kind, term in zip(self._kinds, jax.tree.leaves(terms), strict=True):
            x = np.asarray(term)
            if kind.name == split.GATHER:
                x = self._in_place(x, kind.dim, number)
            arrays.append(x)
        return arrays

    def terms(self, combined: Sequence[np.ndarray]) -> Any:
        """Returns the terms of all replicas, given what all members have combined."""
        shapes, structure = jax.tree.flatten(self.shapes)
        terms = []
        for shape, x in zip(shapes, combined, strict=True):
            terms.append(x.view(shape.dtype).reshape(shape.shape))
        return jax.tree.unflatten(structure, terms)

    def _in_place(self, x: np.ndarray, dim: int, number: int) -> np.ndarray:
        """Returns the bytes of an array of all places, with zeros in other rounds.

        Args:
          x: the arrays of a round, one after the other along `dim`.
          dim: the dimension.
          number: the number of the round.
        """
        before = x.shape[:dim]
        of_devices = x.reshape(*before, self._devices, -1)
        # The replicas of a device are consecutive.
        shape = (*before, self._devices, self._rounds, of_devices.shape[-1])
        whole = np.zeros(shape, x.dtype)
        whole[..., number, :] = of_devices
        return whole.reshape(-1).view(np.uint8)
