"""Published peak figures of TPUs and GPUs, and the available TPU slices.

The rates are peaks for dense matrices, and serve as lower bounds of times. The TPU
figures were read in November 2026. Where editions of a page differ, such as 819 and 800
GB/s for the memory of v5e, the table has the larger figure, so that the bound holds.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from xshard import errors

_PAGE = "https://docs.cloud.google.com/tpu/docs/"
_GIB = 2**30
_GB = 1e9
_TERA = 1e12
# The slices of v5e and v6e, from their pages. Slices of v4 and v5p consist of 4x4x4
# cubes, or are parts of one cube.
_PLANES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_PARTS = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip.

    Attributes:
      name: the name in a topology, such as 'v5e'.
      flops: bfloat16 matrix-product FLOPs per second.
      hbm: bytes of memory.
      hbm_rate: bytes per second from and to memory.
      ici_rate: bytes per second that it can send to its neighbors over all links: half
        of the published bidirectional rate; for v4, the pod's all-reduce bandwidth per
        chip.
      dcn_rate: bytes per second of its share of the host's network cards; None: not
        published.
      dimensions: the number of dimensions of the torus.
      largest: the number of chips of the largest slice.
      source: the page with these figures.
    """

    name: str
    flops: float
    hbm: int
    hbm_rate: float
    ici_rate: float
    dcn_rate: float | None
    dimensions: int
    largest: int
    source: str


_V4 = Chip(
    name="v4",
    flops=275 * _TERA,
    hbm=32 * _GIB,
    hbm_rate=1200 * _GB,
    # All-reduce bandwidth per pod of 4096 chips: 1.1 PB/s.
    ici_rate=1.1e15 / 4096,
    dcn_rate=None,
    dimensions=3,
    largest=4096,
    source=f"{_PAGE}v4",
)
_V5E = Chip(
    name="v5e",
    flops=197 * _TERA,
    hbm=16 * _GIB,
    hbm_rate=819 * _GB,
    # Bidirectional: 400 GB/s.
    ici_rate=200 * _GB,
    # Two cards of 100 Gb/s for 8 chips.
    dcn_rate=25 / 8 * _GB,
    dimensions=2,
    largest=256,
    source=f"{_PAGE}v5e",
)
_V5P = Chip(
    name="v5p",
    flops=459 * _TERA,
    hbm=95 * _GIB,
    hbm_rate=2765 * _GB,
    # Bidirectional: 1200 GB/s.
    ici_rate=600 * _GB,
    # 50 Gb/s per chip.
    dcn_rate=50 / 8 * _GB,
    dimensions=3,
    largest=6144,
    source=f"{_PAGE}v5p",
)
_V6E = Chip(
    name="v6e",
    flops=918 * _TERA,
    hbm=32 * _GIB,
    # 1600 GB/s in other editions of the page.
    hbm_rate=1640 * _GB,
    # Bidirectional: 800 GB/s.
    ici_rate=400 * _GB,
    # Four cards of 200 Gb/s for 8 chips.
    dcn_rate=100 / 8 * _GB,
    dimensions=2,
    largest=256,
    source=f"{_PAGE}v6e",
)
CHIPS = {chip.name: chip for chip in (_V4, _V5E, _V5P, _V6E)}

# The chips by JAX's device kinds, as in jax/_src/pallas/mosaic/tpu_info.py. Each of
# these devices is a whole chip.
_TPUS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}
# bfloat16 and float16 peaks by the driver's device names:
# https://www.nvidia.com/en-us/data-center/a100/ and the pages h100 and h200 beside it.
# The published figures of H100 and H200 (1979, NVL 1671, PCIe 1513) are for matrices
# with 2:4 sparsity: twice the dense rate. The rates agree with those that TorchTitan
# uses (312, 989, 835, 756). The names are as others report them, since there was no
# such device here.
_GPUS = {
    "NVIDIA A100-SXM4-40GB": 312 * _TERA,
    "NVIDIA A100-SXM4-80GB": 312 * _TERA,
    "NVIDIA A100-PCIE-40GB": 312 * _TERA,
    "NVIDIA A100 80GB PCIe": 312 * _TERA,
    "NVIDIA H100 80GB HBM3": 1979 / 2 * _TERA,
    "NVIDIA H100 NVL": 1671 / 2 * _TERA,
    "NVIDIA H100 PCIe": 1513 / 2 * _TERA,
    "NVIDIA H200": 1979 / 2 * _TERA,
}


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Returns the peak FLOPs per second of matrix products on a device.

    Args:
      device_kind: the kind of a `jax.Device`, such as 'TPU v5 lite' or 'NVIDIA H200'.
      dtype: the dtype of the operands: 'bfloat16', on GPUs also 'float16'.

    Returns:
      The rate; None if no rate is published for the device and dtype, or the device is
      unknown.
    """
    if device_kind in _TPUS and dtype == "bfloat16":
        return CHIPS[_TPUS[device_kind]].flops
    if device_kind in _GPUS and dtype in ("bfloat16", "float16"):
        return _GPUS[device_kind]
    return None


def slice_shape(topology: str) -> tuple[int, ...]:
    """Returns the chips along each axis of a slice with a name such as 'v5e:4x8'."""
    _, _, sizes = topology.partition(":")
    return tuple(map(int, sizes.split("x")))


def parse_topology(topology: str) -> Chip:
    """Returns the chip of a slice with a name such as 'v5e:4x8' or 'v5p:4x4x8'.

    Raises:
      ValueError: if no such slice is offered. libtpu does not check this: it accepts
        slices that Google does not offer, and ends the process at one of size 0.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", topology)
    if match is None:
        raise errors.UserError(
            f"--topology={topology} must be a chip and the shape of a slice, as "
            "v5e:16x16 or v5p:4x4x8."
        )
    name = match[1]
    if name not in CHIPS:
        raise errors.UserError(
            f"--topology={topology}: there is no chip '{name}' here; it must be one of "
            f"{', '.join(CHIPS)}."
        )
    chip = CHIPS[name]
    shape = slice_shape(topology)
    if not _exists(chip, shape):
        raise errors.UserError(
            f"--topology={topology}: there is no such slice of {name}; {_rule(chip)}."
        )
    return chip


def _exists(chip: Chip, shape: tuple[int, ...]) -> bool:
    """Returns whether Google offers a slice of this shape."""
    if chip.dimensions == 2:
        return shape in _PLANES
    if shape in _PARTS:
        return True
    if len(shape) != 3 or sorted(shape) != list(shape):
        return False
    # Larger slices consist of whole 4x4x4 cubes.
    is_of_cubes = shape[0] > 0 and all(size % 4 == 0 for size in shape)
    return is_of_cubes and math.prod(shape) <= chip.largest


def _rule(chip: Chip) -> str:
    """Describes the slices of a chip that are offered."""
    if chip.dimensions == 2:
        return f"there are {_shown(_PLANES)}"
    return (
        f"there are {_shown(_PARTS)} and AxBxC of multiples of 4 in ascending order, "
        f"such as 4x4x4 or 4x8x8, of at most {chip.largest} chips"
    )


def _shown(shapes: Sequence[tuple[int, ...]]) -> str:
    """Formats shapes, such as '2x2, 2x4'."""
    texts = ["x".join(map(str, shape)) for shape in shapes]
    return ", ".join(texts)
