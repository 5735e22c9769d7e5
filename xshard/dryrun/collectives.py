"""The collectives of a compiled program, from its HLO.

A reduction that runs twice, or over too many devices, changes no value, so no test of
values detects it. It is visible here.

A program for several TPU slices is the program of one slice. Collectives within the
slice use the numbers of that slice's devices; communication between slices appears as
transfers by the hosts.
"""

import collections
import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xshard.base import torus
from xshard.dryrun import hlo
from xshard.dryrun import result as result_lib

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
# The groups of devices of a collective are written in one of three formats. The first
# lists them: replica_groups={{0,1},{2,3}}.
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
# The second, [groups,size]<=[dimensions]T(permutation), is an iota, reshaped and
# transposed.
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# The third, mesh['a'=16,'b'=16] {'a'}, has the groups of the places in a mesh that
# differ only along 'a'.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
# The operation that the hosts perform on the data of a transfer between slices.
_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# The TPU compiler writes a reduce-scatter as an all-reduce and a slice in one fusion
# with this name.
_FUSED_SCATTER = "all-reduce-scatter"
# The TPU compiler writes an asynchronous collective three times: at its start, in the
# computation that overlaps it, and at its end. Only the first counts.
_MEANWHILE = "async_collective_fusion"
_DONE = '"AsyncCollectiveDone"'
# On these chips every axis of the torus is a ring if the slice consists of whole 4x4x4
# cubes.
_WITH_CUBES = ("TPU v4", "TPU v5", "TPU v5p")
_CUBE = 4
# On chips with a two-dimensional torus, an axis is a ring if it spans a whole pod.
_POD = 16

# Groups of devices, by their numbers.
_Groups = tuple[tuple[int, ...], ...]
# The same groups, where their order and that of their devices do not matter.
_GroupSet = set[frozenset[int]]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
      kind: one of `KINDS`.
      dtypes: the distinct dtypes of its results, in HLO's names.
      arrays: the number of its results.
      bytes: the size of its results on one device.
      groups: the groups of devices that communicate, by their places in the mesh, or in
        a slice's part of it; empty: all devices. For a permutation, pairs of source and
        target.
      times: how often a run of the program performs it: more than once in a loop.
      between_slices: whether it uses the hosts' network between slices.
      is_conditional: whether it is in a branch. In a training step only the exchange of
        an outer rule is.
    """

    kind: str
    dtypes: tuple[str, ...]
    arrays: int
    bytes: int
    groups: _Groups
    times: int = 1
    between_slices: bool = False
    is_conditional: bool = False


def of(compiled: jax.stages.Compiled) -> list[Collective]:
    """Returns the collectives of a compiled function, in the order of its text.

    Collectives in all branches of a conditional count.

    >>> double = jax.jit(lambda x: 2 * x).lower(1.0).compile()
    >>> of(double)
    []
    """
    return in_program(hlo.parse(compiled.as_text() or ""))


def in_program(program: hlo.Program) -> list[Collective]:
    """Returns the collectives of a parsed program."""
    times = program.times()
    always = program.times(takes_branches=False)
    found = []
    for name, computation in program.computations.items():
        instructions = computation.instructions.values()
        is_done = any(_DONE in instruction.attributes for instruction in instructions)
        if not times[name] or is_done or name.startswith(_MEANWHILE):
            continue
        for instruction in instructions:
            kind = instruction.opcode.removesuffix("-start")
            between = _BETWEEN.search(instruction.attributes)
            groups: _Groups = ()
            if kind == "recv" and between:
                kind = between[1].lower().replace("_", "-")
                if kind not in KINDS:
                    kind = "collective-permute"
                # The first array is the transfer's buffer; the others serve for
                # synchronization.
                arrays = instruction.arrays[:1]
            elif kind in KINDS:
                between = None
                arrays = _results(instruction)
                groups = _groups(instruction.attributes)
                if name.startswith(_FUSED_SCATTER):
                    kind = "reduce-scatter"
                    arrays = computation.instructions[computation.root].arrays
            else:
                continue
            collective = Collective(
                kind=kind,
                # Each dtype once, in the order of the arrays.
                dtypes=tuple(dict.fromkeys(array.dtype for array in arrays)),
                arrays=len(arrays),
                bytes=sum(array.bytes for array in arrays),
                groups=groups,
                times=times[name],
                between_slices=between is not None,
                is_conditional=not always[name],
            )
            found.append(collective)
    return found


def _results(instruction: hlo.Instruction) -> list[hlo.Array]:
    """Returns the results of a collective."""
    arrays = instruction.arrays
    # A start's result contains operands and results; for a permutation, a context
    # follows them.
    if instruction.opcode == "collective-permute-start":
        return arrays[1:2]
    if instruction.opcode == "all-reduce-start":
        return arrays
    if instruction.opcode.endswith("-start"):
        return arrays[len(arrays) // 2 :]
    return arrays


def _groups(attributes: str) -> _Groups:
    """Parses the groups of a collective; empty if they are all devices."""
    iota = _IOTA.search(attributes)
    if iota:
        # The numbers of an array in order, transposed.
        count, size, shape, order = iota.groups()
        dimensions = _integers(shape)
        numbers = np.arange(math.prod(dimensions)).reshape(dimensions)
        if order:
            numbers = numbers.transpose(_integers(order))
        return tuple(map(tuple, numbers.reshape(int(count), int(size)).tolist()))
    mesh = _MESH.search(attributes)
    if mesh:
        return _groups_of_mesh(*mesh.groups())
    groups = []
    listed = _LISTED.search(attributes)
    if listed:
        for group in re.findall(r"\{([\d, ]+)\}", listed[1]):
            groups.append(_integers(group))
    return tuple(groups)


def _groups_of_mesh(axes: str, over: str) -> _Groups:
    """Returns the groups of devices that differ only along some axes of a mesh.

    Args:
      axes: the axes of the mesh with their sizes: `'a'=16,'b'=16`.
      over: the axes along which they differ: `'a'`.
    """
    names = []
    dimensions = []
    for axis in axes.split(","):
        name, _, size = axis.partition("=")
        names.append(name)
        dimensions.append(int(size))
    numbers = np.arange(math.prod(dimensions)).reshape(dimensions)
    chosen = [names.index(name) for name in over.split(",") if name]
    lines = [tuple(sorted(line)) for line in _lines_along(numbers, chosen)]
    return tuple(sorted(lines))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def axes(mesh: jax.sharding.Mesh, collective: Collective) -> tuple[str, ...]:
    """Returns the mesh axes that a collective runs over; ('?',) if its groups match no
    axes.
    """
    if collective.between_slices:
        slices = _slices(mesh)
        across = []
        for dimension, name in enumerate(mesh.axis_names):
            # Whether there are several slices along the axis.
            if (slices != slices.take([0], dimension)).any():
                across.append(name)
        return tuple(across)
    found = _axes_that_fit(mesh, collective, lambda groups, lines: groups == lines)
    return found or ("?",)


def _show_axes(mesh: jax.sharding.Mesh, collective: Collective) -> str:
    """Formats the mesh axes that a collective runs over, or that contain its groups."""
    found = axes(mesh, collective)
    if found != ("?",):
        return " x ".join(found) or "nothing"

    def are_inside(groups: _GroupSet, lines: _GroupSet) -> bool:
        return all(any(group <= line for line in lines) for group in groups)

    containing = _axes_that_fit(mesh, collective, are_inside)
    return f"within {' x '.join(containing or found)}"


def _axes_that_fit(
    mesh: jax.sharding.Mesh,
    collective: Collective,
    fits: Callable[[_GroupSet, _GroupSet], bool],
) -> tuple[str, ...] | None:
    """Returns the fewest mesh axes whose lines fit a collective's groups; None if no
    axes do.

    Args:
      mesh: the mesh.
      collective: a collective within a slice.
      fits: takes the groups, and the lines along some axes, which have the devices that
        differ only in these axes; returns whether they fit.
    """
    # Only one slice's part of the mesh counts.
    slices = _slices(mesh)
    in_slice = np.nonzero(slices == slices.flat[0])
    shape = [len(np.unique(coordinates)) for coordinates in in_slice]
    places = np.arange(math.prod(shape)).reshape(shape)
    groups = {frozenset(group) for group in collective.groups}
    if not groups:
        groups = {frozenset(range(places.size))}
    num_axes = len(mesh.axis_names)
    for count in range(num_axes + 1):
        for chosen in itertools.combinations(range(num_axes), count):
            if fits(groups, _lines_along(places, chosen)):
                # An axis of size 1 adds no devices to a line.
                names = []
                for axis in chosen:
                    if mesh.devices.shape[axis] > 1:
                        names.append(mesh.axis_names[axis])
                return tuple(names)
    return None


def _lines_along(places: np.ndarray, dimensions: Sequence[int]) -> _GroupSet:
    """Returns the sets of places that differ only in these dimensions."""
    last = range(places.ndim - len(dimensions), places.ndim)
    size = math.prod(places.shape[dimension] for dimension in dimensions)
    lines = np.moveaxis(places, dimensions, last).reshape(-1, size)
    return {frozenset(line) for line in lines.tolist()}


def _slices(mesh: jax.sharding.Mesh) -> np.ndarray:
    """Returns the slice number of each device of a mesh."""
    numbers = [torus.slice_number(device) for device in mesh.devices.flat]
    return np.array(numbers).reshape(mesh.devices.shape)


def sent(mesh: jax.sharding.Mesh, collective: Collective) -> int:
    """Returns the bytes that a device must send at least, each time.

    With n devices, each sends (n - 1) / n of an all-gather's result, or of a
    reduce-scatter's or all-to-all's operand; and twice that for an all-reduce:
    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009. Networks that reduce data on the way could send less.
    """
    size = collective.bytes
    if collective.kind == "collective-permute":
        return size
    num_slices = len(np.unique(_slices(mesh)))
    if collective.between_slices:
        count = num_slices
    elif collective.groups:
        count = len(collective.groups[0])
    else:
        count = mesh.devices.size // num_slices
    if collective.kind == "reduce-scatter":
        # The result is one of `count` parts of the operand.
        return (count - 1) * size
    if collective.kind == "all-reduce":
        return 2 * (count - 1) * size // count
    return (count - 1) * size // count


def distances(devices: Sequence[Any], groups: Sequence[Sequence[int]]) -> list[int]:
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
    places = np.array([device.coords for device in devices])
    shape = places.max(axis=0) - places.min(axis=0) + 1
    # The length of each axis that is a ring; 0 for others. Sources: for v4 and v5p
    # https://docs.cloud.google.com/tpu/docs/v5p, "All 4x4x4 and larger slices have full
    # 3D torus"; for v5e and v6e https://jax-ml.github.io/scaling-book/tpus. A twisted
    # torus closes its short axes with a shift along the long one. Coordinates do not
    # show the shift, and no layout here relies on it.
    are_rings = shape == _POD
    if devices[0].device_kind in _WITH_CUBES:
        are_rings = (shape % _CUBE == 0).all()
    rings = np.where(are_rings, shape, 0)
    lengths = []
    for group in groups:
        lengths += _tree(places[list(group)], rings)
    return lengths


def _tree(places: np.ndarray, rings: np.ndarray) -> list[int]:
    """Returns the lengths of the edges of the minimum spanning tree over places, by
    Prim's algorithm.
    """
    lengths = []
    far = np.iinfo(int).max
    # The distance of each place from the tree.
    nearest = np.full(len(places), far)
    is_outside = np.ones(len(places), dtype=bool)
    last = 0
    for _ in range(len(places) - 1):
        is_outside[last] = False
        # The place that joined the tree last may be closer to the remaining places than
        # the rest of the tree.
        # On a ring, the number of links to it is that in the shorter direction.
        apart = np.abs(places - places[last])
        around = np.where(rings > 0, rings - apart, apart)
        nearest = np.minimum(nearest, np.minimum(apart, around).sum(axis=1))
        last = int(np.argmin(np.where(is_outside, nearest, far)))
        lengths.append(int(nearest[last]))
    return lengths


def rows(
    mesh: jax.sharding.Mesh, collectives: Sequence[Collective]
) -> list[result_lib.Collective]:
    """Returns a row for each combination of kind, axes and dtypes; collectives in a
    loop count once per round.
    """
    slices = _slices(mesh)
    devices = list(mesh.devices[slices == slices.flat[0]].flat)
    alike = collections.defaultdict(list)
    for collective in collectives:
        over = _show_axes(mesh, collective)
        dtypes = " ".join(collective.dtypes)
        key = (
            collective.kind,
            over,
            dtypes,
            collective.between_slices,
            collective.is_conditional,
        )
        alike[key].append(collective)
    table = []
    for (kind, over, dtypes, between_slices, is_conditional), members in alike.items():
        count = 0
        num_arrays = 0
        num_bytes = 0
        sent_bytes = 0
        for collective in members:
            times = collective.times
            count += times
            num_arrays += times * collective.arrays
            num_bytes += times * collective.bytes
            sent_bytes += times * sent(mesh, collective)
        # Groups that are alike count once.
        lengths = []
        if not between_slices:
            for groups in dict.fromkeys(collective.groups for collective in members):
                lengths += distances(devices, groups or [range(len(devices))])
        row: result_lib.Collective = {
            "kind": kind,
            "over": over,
            "types": dtypes,
            "count": count,
            "arrays": num_arrays,
            "bytes": num_bytes,
            "sent": sent_bytes,
            "between_slices": between_slices,
            "is_conditional": is_conditional,
            "hops": max(lengths) if lengths else None,
            "mean_hops": statistics.fmean(lengths) if lengths else None,
        }
        table.append(row)
    return table
