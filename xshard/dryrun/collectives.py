"""The collectives of a compiled program, as its HLO has them.

A reduction that is made twice, or over more devices than it should, shows in no value and in no test of
values: it shows here.

A program for several TPU slices is one slice's: what stays within a slice is written with the numbers of
that slice's devices, and what goes between slices as a transfer by the hosts.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from xshard import torus
from xshard.dryrun import hlo

_Groups = set[frozenset[int]]

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
# [groups,size]<=[dimensions]T(permutation), as for v2 of the format: an iota, reshaped and transposed.
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# mesh['a'=16,'b'=16] {'a'}, as for v3: of the places in a mesh those that differ along 'a' only.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
# What the hosts are told to do with what a chip hands over, and receives.
_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# A TPU's reduce-scatter is spelt as an all-reduce and a slice in one fusion, whose name says what it is.
_FUSED_SCATTER = "all-reduce-scatter"
# What goes on beside a TPU's computation is spelt three times: where it starts, in what is computed meanwhile,
# and where it is done. The first counts.
_MEANWHILE, _DONE = "async_collective_fusion", '"AsyncCollectiveDone"'


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
      kind: one of `KINDS`.
      dtypes: the types of what it gives, as HLO names them, each once.
      arrays: how many arrays it gives.
      bytes: their size on one device.
      groups: the devices that take part together, by their place in the mesh, or in a slice's part of it;
        empty: all. For a permutation pairs of source and target.
      times: how often a run does it: more than once in a loop.
      between_slices: whether it goes over the network of the hosts, from slice to slice.
    """

    kind: str
    dtypes: tuple[str, ...]
    arrays: int
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    times: int = 1
    between_slices: bool = False


def of(compiled: jax.stages.Compiled) -> list[Collective]:
    """The collectives of a compiled function, in the order of its text.

    One in a branch that may not be taken counts as if it were.

    >>> double = jax.jit(lambda x: 2 * x).lower(1.0).compile()
    >>> of(double)
    []
    """
    return in_program(hlo.parse(compiled.as_text() or ""))


def in_program(program: hlo.Program) -> list[Collective]:
    """The collectives of a program that has been read."""
    times = program.times()
    collectives = []
    for name, computation in program.computations.items():
        if times[name]:
            for collective in _in_computation(name, computation):
                collectives.append(dataclasses.replace(collective, times=times[name]))
    return collectives


def axes(mesh: jax.sharding.Mesh, collective: Collective) -> tuple[str, ...]:
    """The mesh axes that a collective goes over; ('?',) if its groups are those of no axes."""
    if not collective.between_slices:
        return _over(mesh, collective, lambda groups, lines: groups == lines) or ("?",)
    slices = _slices(mesh)
    names = enumerate(mesh.axis_names)
    return tuple(name for axis, name in names if (slices != slices.take([0], axis)).any())


def sent(mesh: jax.sharding.Mesh, collective: Collective) -> int:
    """The bytes that a device must send at least, each time.

    Of n devices each sends (n - 1) / n of an all-gather's result, of a reduce-scatter's operand and of an
    all-to-all's, and twice that of an all-reduce's: Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", 2009. Networks that add up on the way could do with less.
    """
    size = collective.bytes
    if collective.kind == "collective-permute":
        return size
    slices = len(np.unique(_slices(mesh)))
    if collective.between_slices:
        count = slices
    elif collective.groups:
        count = len(collective.groups[0])
    else:
        count = mesh.devices.size // slices
    if collective.kind == "reduce-scatter":
        # Its size is that of a part, of which there are as many as devices.
        return (count - 1) * size
    part = (count - 1) * size
    return (2 * part if collective.kind == "all-reduce" else part) // count


def hops(mesh: jax.sharding.Mesh, collectives: Sequence[Collective]) -> list[int]:
    """The links from chip to chip within the groups of collectives, as `xshard.torus.hops` counts them.

    None between slices, and none of devices that are no TPUs.
    """
    slices = _slices(mesh)
    devices = list(mesh.devices[slices == slices.flat[0]].flat)
    links: list[int] = []
    for groups in {one.groups for one in collectives if not one.between_slices}:
        links += torus.hops(devices, groups or [range(len(devices))])
    return links


def rows(mesh: jax.sharding.Mesh, collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    """For `metrics.table`: a row for each kind, axes and types; what is in a loop counts each time."""
    alike = collections.defaultdict(list)
    for one in collectives:
        key = (one.kind, _show_axes(mesh, one), " ".join(one.dtypes), one.between_slices)
        alike[key].append(one)
    table = []
    for (kind, over, dtypes, between_slices), members in alike.items():
        links = hops(mesh, members)
        row = {
            "kind": kind,
            "over": over,
            "types": dtypes,
            "count": sum(one.times for one in members),
            "arrays": sum(one.times * one.arrays for one in members),
            "bytes": sum(one.times * one.bytes for one in members),
            "sent": sum(one.times * sent(mesh, one) for one in members),
            "between_slices": between_slices,
            "hops": max(links, default=None),
            "mean_hops": sum(links) / len(links) if links else None,
        }
        table.append(row)
    return table


def _in_computation(name: str, computation: hlo.Computation) -> Iterator[Collective]:
    instructions = computation.instructions.values()
    if name.startswith(_MEANWHILE) or any(_DONE in one.attributes for one in instructions):
        return
    for one in instructions:
        kind = one.opcode.removesuffix("-start")
        between = _BETWEEN.search(one.attributes)
        if kind == "recv" and between:
            kind = between[1].lower().replace("_", "-")
            if kind not in KINDS:
                kind = "collective-permute"
            # The first array is the buffer of the transfer, the others are what it waits with.
            collective = _collective(kind, one.arrays[:1], ())
            yield dataclasses.replace(collective, between_slices=True)
        elif kind in KINDS and name.startswith(_FUSED_SCATTER):
            arrays = computation.instructions[computation.root].arrays
            yield _collective("reduce-scatter", arrays, _groups(one.attributes))
        elif kind in KINDS:
            yield _collective(kind, _results(one), _groups(one.attributes))


def _results(one: hlo.Instruction) -> list[hlo.Array]:
    """The arrays that a collective gives."""
    arrays = one.arrays
    # The result of a start holds the operands, too, and for a permutation a context after both.
    if one.opcode == "collective-permute-start":
        return arrays[1:2]
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        return arrays[len(arrays) // 2 :]
    return arrays


def _collective(
    kind: str, arrays: Sequence[hlo.Array], groups: tuple[tuple[int, ...], ...]
) -> Collective:
    dtypes = tuple(dict.fromkeys(array.dtype for array in arrays))
    size = sum(array.bytes for array in arrays)
    return Collective(kind, dtypes, len(arrays), size, groups)


def _show_axes(mesh: jax.sharding.Mesh, collective: Collective) -> str:
    found = axes(mesh, collective)
    if found != ("?",):
        return " x ".join(found) or "nothing"
    inside = lambda groups, lines: all(any(group <= line for line in lines) for group in groups)
    return f"within {' x '.join(_over(mesh, collective, inside) or found)}"


def _over(
    mesh: jax.sharding.Mesh, collective: Collective, fits: Callable[[_Groups, _Groups], bool]
) -> tuple[str, ...] | None:
    """The fewest axes of which the lines, of devices that differ in these axes only, fit the groups."""
    # The places of one slice's devices.
    slices = _slices(mesh)
    chosen = np.ix_(*(np.unique(where) for where in np.nonzero(slices == slices.flat[0])))
    places = np.arange(slices[chosen].size).reshape(slices[chosen].shape)
    groups = {frozenset(group) for group in collective.groups} or {frozenset(range(places.size))}
    for count in range(len(mesh.axis_names) + 1):
        for dimensions in itertools.combinations(range(len(mesh.axis_names)), count):
            if fits(groups, _along(places, dimensions)):
                return tuple(mesh.axis_names[i] for i in dimensions if mesh.devices.shape[i] > 1)
    return None


def _slices(mesh: jax.sharding.Mesh) -> np.ndarray:
    """The number of the slice of each device of a mesh."""
    numbers = [getattr(device, "slice_index", None) or 0 for device in mesh.devices.flat]
    return np.array(numbers).reshape(mesh.devices.shape)


def _groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    iota = _IOTA.search(attributes)
    if iota:
        count, size, shape, order = iota.groups()
        dimensions = [int(n) for n in shape.split(",")]
        ids = np.arange(np.prod(dimensions)).reshape(dimensions)
        if order:
            ids = ids.transpose([int(n) for n in order.split(",")])
        return tuple(map(tuple, ids.reshape(int(count), int(size)).tolist()))
    named = _MESH.search(attributes)
    if named:
        sizes = dict(entry.split("=") for entry in named[1].split(","))
        chosen = tuple(list(sizes).index(name) for name in named[2].split(",") if name)
        shape = [int(size) for size in sizes.values()]
        along = _along(np.arange(np.prod(shape)).reshape(shape), chosen)
        return tuple(sorted(tuple(sorted(group)) for group in along))
    listed = _LISTED.search(attributes)
    groups = re.findall(r"\{([\d, ]*)\}", listed[1]) if listed else []
    return tuple(tuple(int(n) for n in group.split(",")) for group in groups if group)


def _along(places: np.ndarray, chosen: tuple[int, ...]) -> _Groups:
    """The groups of places that differ in the chosen dimensions only."""
    last = np.moveaxis(places, chosen, range(-len(chosen), 0)) if chosen else places
    size = int(np.prod([places.shape[i] for i in chosen], dtype=int))
    return {frozenset(group) for group in last.reshape(-1, size).tolist()}
