"""TPU chips on their torus, and the steps of collectives along its axes.

A TPU device has coordinates, and a slice is a box of them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xshard.base import mesh_axes


def box(devices: Sequence[Any]) -> np.ndarray | None:
    """Arranges TPU devices by their coordinates.

    Returns:
      An array of devices with a dimension for each coordinate, and a last one for the
      cores of a chip. None if the devices are not TPUs or do not fill a box.
    """
    if any(device.platform != "tpu" for device in devices):
        return None
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    # A slice may be a part of a pod, so its box need not begin at 0.
    places -= places.min(axis=0)
    chips = np.full(places.max(axis=0) + 1, None, dtype=object)
    for device, place in zip(devices, places, strict=True):
        chips[tuple(place)] = device
    if chips.size != len(devices):
        return None
    # Two devices with the same coordinates leave another place empty.
    if any(device is None for device in chips.flat):
        return None
    return chips


def hardware_slices(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """Returns the devices of each hardware slice, in the order of their numbers."""
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(slice_number(device), []).append(device)
    return [slices[number] for number in sorted(slices)]


def slice_number(device: jax.Device) -> int:
    """Returns the number of a device's hardware slice; 0 if there is only one."""
    # Devices other than TPUs lack the attribute; devices of a single slice may have
    # None.
    return getattr(device, "slice_index", None) or 0


def steps(mesh: jax.sharding.Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the sizes of the steps in which to scatter, and to gather, over
    `replica`.

    There are several steps if `replica` is a whole TPU slice.

    The TPU compiler (libtpu 0.0.51) keeps a reduce-scatter or an all-gather over a part
    of a slice's chips. Over all of them it turns most into an all-reduce, which sends
    twice the bytes. So the collective is split into two steps: one along the last axis
    of the torus and one along the rest. On a torus of three axes, a gather in two steps
    moves more memory than it saves on the wire, so it stays one step.

    Returns:
      The sizes for a scatter and for a gather. Empty means one step, for example
      because the devices are not in the order of the torus, so that the replicas of a
      step would not be neighbors.
    """
    one_step: tuple[int, ...] = ()
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return one_step, one_step
    slices = hardware_slices(list(mesh.devices.flat))
    # Slices that train apart are groups.
    num_parts = mesh.shape[mesh_axes.GROUP] * mesh.shape[mesh_axes.SLICE]
    if mesh.shape[mesh_axes.MODEL] > 1 or len(slices) != num_parts:
        return one_step, one_step
    # All slices have one shape and one layout, so the first one decides.
    chips = box(slices[0])
    if chips is None or list(chips.flat) != list(mesh.devices[0, 0].flat):
        return one_step, one_step
    sides = [size for size in chips.shape if size > 1]
    if len(sides) < 2:
        return one_step, one_step
    two_steps = (chips.size // sides[-1], sides[-1])
    gather_steps = two_steps if len(sides) == 2 else one_step
    return two_steps, gather_steps
