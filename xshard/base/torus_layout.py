"""A mesh layout of TPU chips in which those that communicate most are neighbors on the
torus.

Devices of other platforms stay in the given order.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xshard.base import torus

# The sizes of a box along each axis of a torus.
_Shape = tuple[int, ...]


def lay_out(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
    """Lays devices out as an array, with neighbors along the last dimension, then along
    the one before it.

    Each dimension of the mesh gets a factor of each axis of the torus, so the devices
    along the last dimension form a box of neighbors. Among these layouts, the function
    selects the one whose later dimensions have the shortest communication paths, the
    last dimension first. Nothing is sent along the first dimension. Devices that
    do not fill a box stay in the given order.

    Args:
      devices: the devices, as many as the product of the sizes.
      sizes: the sizes of the mesh's dimensions.
    """
    sizes = tuple(sizes)
    chips = torus.box(devices)
    if chips is None:
        in_order = np.empty(len(devices), dtype=object)
        in_order[:] = devices
        return in_order.reshape(sizes)
    shape = chips.shape
    split = min(_splits(shape, sizes), key=lambda split: _preference(split, shape))
    # Split each axis of the torus into the factors of all mesh dimensions, the first
    # dimension's outermost.
    chips = chips.reshape(np.transpose(split).ravel())
    # Then group the factors by mesh dimension.
    order = np.arange(chips.ndim).reshape(len(shape), len(sizes))
    return chips.transpose(order.T.ravel()).reshape(sizes)


def whole_axes(shape: Sequence[int]) -> list[int]:
    """Returns the products of the sizes of every subset of a torus's axes, sorted."""
    products = {1}
    for size in shape:
        products |= {size * product for product in products}
    return sorted(products)


def _splits(room: _Shape, sizes: _Shape) -> Iterator[tuple[_Shape, ...]]:
    """Yields all ways to split each axis of a torus into factors, one for each
    dimension of a mesh.

    Args:
      room: the sizes of the torus.
      sizes: the sizes of the mesh's dimensions.

    Yields:
      The box of each dimension: its factor of each axis.
    """
    if len(sizes) == 1:
        yield (room,)
        return
    for last in _boxes(room, sizes[-1]):
        rest = tuple(size // side for size, side in zip(room, last, strict=True))
        for before in _splits(rest, sizes[:-1]):
            yield (*before, last)


def _boxes(room: _Shape, count: int) -> Iterator[_Shape]:
    """Yields the boxes of `count` chips whose sides divide the sides of `room`."""
    if not room:
        if count == 1:
            yield ()
        return
    first = room[0]
    for side in range(1, first + 1):
        if first % side == 0 and count % side == 0:
            for sides in _boxes(room[1:], count // side):
                yield (side, *sides)


def _preference(split: tuple[_Shape, ...], shape: _Shape) -> tuple[Any, ...]:
    """Returns a sort key of a layout, smallest is best.

    It is by communication, then by how much of a dimension's box spans whole axes of
    the torus, then by the order of axes; each of these for the last dimension first.

    Args:
      split: the box of each dimension of the mesh, as from `_splits`.
      shape: the sizes of the torus.
    """
    costs = []
    whole = []
    # The distance between neighbors in a dimension's box, along each axis: as large as
    # the boxes of the later dimensions, which lie within one of its steps.
    strides = [1] * len(shape)
    # Nothing is sent along the first dimension.
    for sides in reversed(split[1:]):
        costs.append(_sum_cost(sides, strides))
        strides = [stride * side for stride, side in zip(strides, sides, strict=True)]
        spanned = 1
        for side, size in zip(sides, shape, strict=True):
            if side == size:
                spanned *= size
        whole.append(-spanned)
    # Between equally good layouts, prefer larger sides along the first axes.
    larger_first = [[-side for side in sides] for sides in reversed(split)]
    return costs, whole, larger_first


def _sum_cost(sides: _Shape, strides: Sequence[int]) -> int:
    """Returns the cost of a sum over a box: the data that it sends, times the links
    that the data crosses.

    The sum is modeled as a reduce-scatter along one axis after another, starting with
    the nearest neighbors. Each reduce-scatter leaves less data for the next one.

    Args:
      sides: the sides of the box.
      strides: the links between neighbors along each of its axes.
    """
    cost = 0
    data = math.prod(sides)
    for stride, side in sorted(zip(strides, sides, strict=True)):
        cost += stride * (data - data // side)
        data //= side
    return cost
