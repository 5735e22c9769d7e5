"""TPU chips on their torus: which are neighbours, and a layout in which those that exchange most are.

A TPU device has coordinates, and a slice is a box of them. Other devices have no coordinates here, and stay in
the order given.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_Shape = tuple[int, ...]

# Each axis is closed to a ring where the slice is made of whole cubes of 4x4x4.
_CUBES = ("TPU v4", "TPU v5", "TPU v5p")
_CUBE = 4
# Of the chips on a plane an axis is closed where it is a whole pod's.
_POD = 16


def box(devices: Sequence[Any]) -> np.ndarray | None:
    """TPU devices by their coordinates; None where they have none, or do not fill a box.

    Returns:
      An array of devices with a dimension for each coordinate, and a last one for the cores of a chip.
    """
    if any(device.platform != "tpu" for device in devices):
        return None
    places = _places(devices)
    # A slice may be a part of a pod: its box need not begin at 0.
    places -= places.min(axis=0)
    chips = np.full(places.max(axis=0) + 1, None, dtype=object)
    for device, place in zip(devices, places, strict=True):
        chips[tuple(place)] = device
    # Two devices at one place leave another one empty.
    is_full = chips.size == len(devices) and all(device is not None for device in chips.flat)
    return chips if is_full else None


def lay_out(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
    """Devices as an array, neighbours along the last dimension, and then along the one before it.

    Each dimension of the mesh takes a part of each axis of the torus, so that what lies along the last one is
    a box of neighbours. Of all such layouts the one is taken in which the dimension before it has the least
    way to go; nothing is exchanged along the first. Devices that fill no box stay in the order given.

    Args:
      devices: as many as the product of the sizes.
      sizes: of the mesh's dimensions.
    """
    sizes = tuple(sizes)
    chips = box(devices)
    if chips is None:
        chips = np.empty(len(devices), dtype=object)
        chips[:] = devices
        return chips.reshape(sizes)
    shape = chips.shape
    split = min(_splits(shape, sizes), key=lambda split: _preference(split, shape))
    # Of each axis of the torus the parts of all dimensions, the first one's outermost.
    chips = chips.reshape(np.transpose(split).ravel())
    # Then the parts of each dimension together.
    order = np.arange(chips.ndim).reshape(len(shape), len(sizes))
    return chips.transpose(order.T.ravel()).reshape(sizes)


def whole_axes(shape: Sequence[int]) -> list[int]:
    """The numbers of chips that some of the axes of a torus hold together."""
    products = {1}
    for size in shape:
        products |= {size * product for product in products}
    return sorted(products)


def hops(devices: Sequence[Any], groups: Sequence[Sequence[int]]) -> list[int]:
    """The links from chip to chip between the members of groups, which 1 says are neighbours.

    Members are joined by the shortest tree, since it is the compiler that orders a group along the torus.

    Args:
      devices: those of one slice.
      groups: places in `devices`.

    Returns:
      The length of each branch of each group's tree; nothing for devices without coordinates.
    """
    if any(device.platform != "tpu" for device in devices):
        return []
    places = _places(devices)[:, :-1]
    shape = tuple(places.max(axis=0) - places.min(axis=0) + 1)
    # The length of each axis that is a ring, 0 of one that is not.
    rings = np.where(_closed(devices[0].device_kind, shape), shape, 0)
    lengths = []
    for group in groups:
        lengths += _tree(places[list(group)], rings)
    return lengths


def _places(devices: Sequence[Any]) -> np.ndarray:
    return np.array([(*device.coords, device.core_on_chip) for device in devices])


def _closed(kind: str, shape: _Shape) -> list[bool]:
    """Returns whether each axis of a slice is a ring.

    As of v4 and v5p: https://docs.cloud.google.com/tpu/docs/v5p, "All 4x4x4 and larger slices have full 3D
    torus"; of v5e and v6e: https://jax-ml.github.io/scaling-book/tpus. A twisted torus closes its short axes
    with a shift along the long one, which coordinates do not show and no layout here counts on.
    """
    if kind in _CUBES:
        return [all(size % _CUBE == 0 for size in shape)] * len(shape)
    return [size == _POD for size in shape]


def _tree(places: np.ndarray, rings: np.ndarray) -> list[int]:
    """The lengths of the branches of the shortest tree over places, by Prim's algorithm."""
    lengths = []
    far = np.iinfo(int).max
    nearest = np.full(len(places), far)
    outside = np.ones(len(places), dtype=bool)
    last = 0
    for _ in range(len(places) - 1):
        outside[last] = False
        # What is nearest to the tree may now be so through the place that was joined last.
        nearest = np.minimum(nearest, _distances(places, places[last], rings))
        last = int(np.argmin(np.where(outside, nearest, far)))
        lengths.append(int(nearest[last]))
    return lengths


def _distances(places: np.ndarray, place: np.ndarray, rings: np.ndarray) -> np.ndarray:
    """The links from a place to each of these; a ring may be gone the other way round."""
    apart = np.abs(places - place)
    around = np.where(rings > 0, rings - apart, apart)
    return np.minimum(apart, around).sum(axis=1)


def _splits(room: _Shape, sizes: _Shape) -> Iterator[tuple[_Shape, ...]]:
    """All ways to give each dimension of a mesh its part of each axis of a torus."""
    if len(sizes) == 1:
        yield (room,)
        return
    for part in _parts(room, sizes[-1]):
        rest = tuple(size // side for size, side in zip(room, part, strict=True))
        for before in _splits(rest, sizes[:-1]):
            yield (*before, part)


def _parts(room: _Shape, count: int) -> Iterator[_Shape]:
    """The boxes of so many chips whose sides divide those of a box."""
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
    """Less is better: the way that is gone, then axes of the torus that are shared, then later ones."""
    ways, whole = [], []
    strides = [1] * len(shape)
    # Nothing goes along the first dimension.
    for part in reversed(split[1:]):
        ways.append(_way(part, strides))
        strides = [stride * side for stride, side in zip(strides, part, strict=True)]
        whole_sides = [side for side, size in zip(part, shape, strict=True) if side == size]
        whole.append(-math.prod(whole_sides))
    # Of two that are as good, the one with the larger sides along the first axes.
    sides = [[-side for side in part] for part in reversed(split)]
    return ways, whole, sides


def _way(part: _Shape, strides: Sequence[int]) -> int:
    """Returns what a sum over a box sends, times the links that it goes over.

    As a reduce-scatter along one axis after another, that of the nearest neighbours first, whose data the
    next ones have a part of.
    """
    way, data = 0, math.prod(part)
    for stride, side in sorted(zip(strides, part, strict=True)):
        way += stride * (data - data // side)
        data //= side
    return way
