"""Published peak figures of TPUs and GPUs, and the available TPU slices.

The rates are peaks for dense matrices, and serve as lower bounds of times. The TPU
figures were read in November 2026. Where editions of a page differ, such as 819 and 800
GB/s for the memory of v5e, the table has the larger figure, so that the bound holds.
"""

import dataclasses
import math
import re

from xshard import errors

_PAGE = "https://docs.cloud.google.com/tpu/docs/"
_GIB, _GB, _TERA = 2**30, 1e9, 1e12
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


CHIPS = {
    chip.name: chip
    for chip in (
        # 275 TFLOPs; 32 GiB, 1200 GBps; all-reduce bandwidth per Pod of 4096 chips 1.1
        # PB/s.
        Chip("v4", 275 * _TERA, 32 * _GIB, 1200 * _GB, 1.1e15 / 4096, None, 3, 4096, f"{_PAGE}v4"),
        # 197 TFLOPs; 16 GB, 819 GBps; bidirectional ICI 400 GBps; 2 x 100 Gbps NIC for
        # 8 chips.
        Chip(
            "v5e", 197 * _TERA, 16 * _GIB, 819 * _GB, 200 * _GB, 25 / 8 * _GB, 2, 256, f"{_PAGE}v5e"
        ),
        # 459 TFLOPs; 95 GiB, 2765 GBps; bidirectional ICI 1200 GBps; DCN 50 Gbps per
        # chip.
        Chip(
            "v5p", 459 * _TERA, 95 * _GIB, 2765 * _GB, 600 * _GB, 50 / 8 * _GB, 3, 6144, f"{_PAGE}v5p"
        ),
        # 918 TFLOPs; 32 GB, 1640 GBps (1600 in other editions); bidirectional ICI 800
        # GBps; 4 x 200 Gbps NIC for 8 chips.
        Chip(
            "v6e", 918 * _TERA, 32 * _GIB, 1640 * _GB, 400 * _GB, 100 / 8 * _GB, 2, 256, f"{_PAGE}v6e"
        ),
    )
}  # fmt: skip


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


def parse_topology(topology: str) -> Chip:
    """Returns the chip of a slice with a name such as 'v5e:4x8' or 'v5p:4x4x8'.

    Raises:
      ValueError: if no such slice is offered. libtpu does not check this: it accepts
        slices that Google does not offer, and ends the process at one of size 0.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", topology)
    if match is None:
        raise errors.UserError(
            f"--topology={topology} must be a chip and the shape of a slice, as v5e:16x16 or v5p:4x4x8."
        )
    name, sizes = match.groups()
    if name not in CHIPS:
        raise errors.UserError(
            f"--topology={topology}: there is no chip '{name}' here; it must be one of {', '.join(CHIPS)}."
        )
    chip, shape = CHIPS[name], tuple(map(int, sizes.split("x")))
    if not _exists(chip, shape):
        raise errors.UserError(
            f"--topology={topology}: there is no such slice of {name}; {_rule(chip)}."
        )
    return chip


def _exists(chip: Chip, shape: tuple[int, ...]) -> bool:
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
    show = lambda shapes: ", ".join("x".join(map(str, shape)) for shape in shapes)
    if chip.dimensions == 2:
        return f"there are {show(_PLANES)}"
    return (
        f"there are {show(_PARTS)} and AxBxC of multiples of 4 in ascending order, such as 4x4x4 or 4x8x8, "
        f"of at most {chip.largest} chips"
    )
