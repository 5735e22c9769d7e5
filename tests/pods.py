"""Stand-ins for the chips of TPU pods, with the attributes that libtpu reports; the
tests have no TPU.
"""

import dataclasses

import numpy as np

from xshard.metrics import chips

KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}
# A host has a square of 2x2 chips.
_HOST = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Chip:
    """The attributes of a TPU chip's `jax.Device`."""

    id: int
    coords: tuple[int, ...]
    device_kind: str
    process_index: int
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"


def shape(topology):
    """Returns the number of chips along each axis of a topology such as 'v5e:4x8' or
    'v5p:4x4x8'.
    """
    chips.parse_topology(topology)
    sizes = topology.split(":")[1].split("x")
    return tuple(map(int, sizes))


def make(topology, slices=1):
    """Returns the chips of slices in the order of `jax.devices()`: host by host, each
    with a square of 2x2.
    """
    name, sizes = topology.split(":")[0], shape(topology)
    sizes += (1,) * (3 - len(sizes))
    hosts = [
        -(-size // side) for size, side in zip(sizes, (_HOST, _HOST, 1), strict=True)
    ]
    devices = []
    for part in range(slices):
        # The device numbers of different slices are not consecutive.
        first = 100_000 * (part + 1) if slices > 1 else 0
        for z, y, x in np.ndindex(sizes[::-1]):
            number = first + (z * sizes[1] + y) * sizes[0] + x
            host = (z * hosts[1] + y // _HOST) * hosts[0] + x // _HOST
            process = part * int(np.prod(hosts)) + host
            devices.append(Chip(number, (x, y, z), KINDS[name], process, part))
    return sorted(devices, key=lambda chip: (chip.process_index, chip.id))
