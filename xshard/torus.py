"""TPU chips on their torus, laid out so that those that communicate most are neighbors.

A TPU device has coordinates, and a slice is a box of them. Devices of other platforms
stay in the given order.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_Shape = tuple[int, ...]

# On these chips every axis is a ring if the slice consists of whole 4x4x4 cubes.
_CUBES = ("TPU v4", "TPU v5", "TPU v5p")
_CUBE = 4
# On chips with a two-dimensional torus, an axis is a ring if it spans a whole pod.
_POD = 16


def box(devices: Sequence[Any]) -> np.ndarray | None:
    """Arranges TPU devices by their coordinates.

    Returns:
      An array of devices with a dimension for each coordinate, and a last one for the
      cores of a chip. None if the devices are not TPUs or do not fill a box.
    """
    if any(device.platform != "tpu" for device in devices):
        return None
    places = _places(devices)
    # A slice may be a part of a pod, so its box need not begin at 0.
    places -= places.min(axis=0)
    chips = np.full(places.max(axis=0) + 1, None, dtype=object)
    for device, place in zip(devices, places, strict=True):
        chips[tuple(place)] = device
    # Equal sizes are not enough: two devices with the same coordinates would leave
    # another place empty.
    has_gaps = any(device is None for device in chips.flat)
    if chips.size != len(devices) or has_gaps:
        return None
    return chips


def lay_out(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
    """Lays devices out as an array, with neighbors along the last dimensions.

    Each dimension of the mesh gets a factor of each axis of the torus, so the devices
    along the last dimension form a box of neighbors. Among these layouts, the function
    selects the one whose later dimensions have the shortest communication paths, the
    last dimension first. Nothing is exchanged along the first dimension. Devices that
    do not fill a box stay in the given order.

    Args:
      devices: the devices, as many as the product of the sizes.
      sizes: the sizes of the mesh's dimensions.
    """
    sizes = tuple(sizes)
    chips = box(devices)
    if chips is None:
        chips = np.empty(len(devices), dtype=object)
        chips[:] = devices
        return chips.reshape(sizes)
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


def hops(devices: Sequence[Any], groups: Sequence[Sequence[int]]) -> list[int]:
    """Returns the distances between the members of groups, in links from chip to chip;
    neighbors have distance 1.

    The members of a group are connected by a minimum spanning tree, since the compiler
    decides their order along the torus.

    Args:
      devices: the devices of one slice.
      groups: indices in `devices`.

    Returns:
      The length of each edge of each group's tree; empty for devices without
      coordinates.
    """
    if any(device.platform != "tpu" for device in devices):
        return []
    places = _places(devices)[:, :-1]
    shape = tuple(places.max(axis=0) - places.min(axis=0) + 1)
    # The length of each axis that is a ring; 0 for others.
    rings = np.where(_rings(devices[0].device_kind, shape), shape, 0)
    lengths = []
    for group in groups:
        lengths += _tree(places[list(group)], rings)
    return lengths


def _places(devices: Sequence[Any]) -> np.ndarray:
    return np.array([(*device.coords, device.core_on_chip) for device in devices])


def _rings(kind: str, shape: _Shape) -> list[bool]:
    """Returns whether each axis of a slice is a ring.

    Sources: for v4 and v5p https://docs.cloud.google.com/tpu/docs/v5p, "All 4x4x4 and
    larger slices have full 3D torus"; for v5e and v6e
    https://jax-ml.github.io/scaling-book/tpus. A twisted torus closes its short axes
    with a shift along the long one. Coordinates do not show the shift, and no layout
    here relies on it.
    """
    if kind in _CUBES:
        return [all(size % _CUBE == 0 for size in shape)] * len(shape)
    return [size == _POD for size in shape]


def _tree(places: np.ndarray, rings: np.ndarray) -> list[int]:
    """Returns the lengths of the edges of the minimum spanning tree over places.

    The algorithm is Prim's.
    """
    lengths = []
    far = np.iinfo(int).max
    nearest = np.full(len(places), far)
    outside = np.ones(len(places), dtype=bool)
    last = 0
    for _ in range(len(places) - 1):
        outside[last] = False
        # The place that joined the tree last may be closer to the remaining places than
        # the rest of the tree.
        nearest = np.minimum(nearest, _distances(places, places[last], rings))
        last = int(np.argmin(np.where(outside, nearest, far)))
        lengths.append(int(nearest[last]))
    return lengths


def _distances(places: np.ndarray, place: np.ndarray, rings: np.ndarray) -> np.ndarray:
    """Returns the number of links from a place to each of `places`.

    On a ring, it is that in the shorter direction.
    """
    apart = np.abs(places - place)
    around = np.where(rings > 0, rings - apart, apart)
    return np.minimum(apart, around).sum(axis=1)


def _splits(room: _Shape, sizes: _Shape) -> Iterator[tuple[_Shape, ...]]:
    """Yields all ways to split each axis of a torus into factors.

    An axis has one factor for each dimension of a mesh. The ways are tuples with an
    entry for each dimension, which has a factor of each axis.
    """
    if len(sizes) == 1:
        yield (room,)
        return
    for part in _parts(room, sizes[-1]):
        rest = tuple(size // side for size, side in zip(room, part, strict=True))
        for before in _splits(rest, sizes[:-1]):
            yield (*before, part)


def _parts(room: _Shape, count: int) -> Iterator[_Shape]:
    """Yields the boxes of `count` chips whose sides divide the sides of `room`."""
    if not room:
        if count == 1:
            yield ()
        return
    first, *others = room
    for side in range(1, first + 1):
        if first % side == 0 and count % side == 0:
            for sides in _parts(tuple(others), count // side):
                yield (side, *sides)


def _preference(split: tuple[_Shape, ...], shape: _Shape) -> tuple[Any, ...]:
    """Returns a sort key of a layout, of which the smallest is best.

    It is ordered by communication, then by whole axes, then by the order of axes.
    """
    costs = []
    whole_axes = []
    strides = np.ones(len(shape), dtype=int)
    # Nothing is exchanged along the first dimension.
    for part in reversed(split[1:]):
        costs.append(_sum_cost(part, strides))
        strides = strides * part
        # The negative number of chips along the axes that the dimension has whole.
        whole = [side for side, size in zip(part, shape, strict=True) if side == size]
        whole_axes.append(-math.prod(whole))
    # Between equally good layouts, prefer larger sides along the first axes.
    sides = [[-side for side in part] for part in reversed(split)]
    return costs, whole_axes, sides


def _sum_cost(part: _Shape, strides: Sequence[int] | np.ndarray) -> int:
    """Returns the cost of a sum over a box.

    It is the data that the sum sends, times the links that the data crosses. The sum is
    modeled as a reduce-scatter along one axis after another, starting with the nearest
    neighbors. Each reduce-scatter leaves less data for the next one.
    """
    cost = 0
    data = math.prod(part)
    for stride, side in sorted(zip(strides, part, strict=True)):
        cost += stride * (data - data // side)
        data //= side
    return cost
