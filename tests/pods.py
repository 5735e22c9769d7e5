"""Stand-ins for the chips of TPU pods, of which there are none here, as libtpu describes them."""

import dataclasses

import numpy as np

from xshard.metrics import chips

KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}
_HOST = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Chip:
    """What `jax.Device` says of a TPU chip."""

    id: int
    coords: tuple[int, ...]
    device_kind: str
    process_index: int
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"


def shape(topology):
    """The chips along each axis, of 'v5e:4x8' or 'v5p:4x4x8'."""
    chips.parse_topology(topology)
    sizes = topology.split(":")[1].split("x")
    return tuple(map(int, sizes))


def make(topology, slices=1):
    """The chips of slices, in the order of `jax.devices()`: host by host, of which each has a square of 2x2."""
    name, sizes = topology.split(":")[0], shape(topology)
    sizes += (1,) * (3 - len(sizes))
    hosts = [-(-size // side) for size, side in zip(sizes, (_HOST, _HOST, 1), strict=True)]
    found = []
    for part in range(slices):
        # Numbers of several slices do not follow one another.
        first = 100_000 * (part + 1) if slices > 1 else 0
        for z, y, x in np.ndindex(sizes[::-1]):
            number = first + (z * sizes[1] + y) * sizes[0] + x
            host = (z * hosts[1] + y // _HOST) * hosts[0] + x // _HOST
            process = part * int(np.prod(hosts)) + host
            found.append(Chip(number, (x, y, z), KINDS[name], process, part))
    return sorted(found, key=lambda chip: (chip.process_index, chip.id))
