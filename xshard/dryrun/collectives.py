"""The collectives of a compiled program, as its HLO has them.

A reduction that is made twice, or over more devices than it should, shows in no value and in no test of
values: it shows here.

A program for several TPU slices is one slice's: what stays within a slice is written with the numbers of
that slice's devices, and what goes between slices as a transfer by the hosts.
"""

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
    return [
        dataclasses.replace(one, times=times[name])
        for name, computation in program.computations.items()
        if times[name]
        for one in _in_computation(name, computation)
    ]


def axes(mesh: jax.sharding.Mesh, collective: Collective) -> tuple[str, ...]:
    """The mesh axes that a collective goes over; ('?',) if its groups are those of no axes."""
    slices = _slices(mesh)
    if collective.between_slices:
        return tuple(
            name
            for axis, name in enumerate(mesh.axis_names)
            if (slices != slices.take([0], axis)).any()
        )
    return _over(mesh, collective, lambda groups, lines: groups == lines) or ("?",)


def sent(mesh: jax.sharding.Mesh, collective: Collective) -> int:
    """The bytes that a device must send at least, each time.

    Of n devices each sends (n - 1) / n of an all-gather's result, of a reduce-scatter's operand and of an
    all-to-all's, and twice that of an all-reduce's: Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", 2009. Networks that add up on the way could do with less.
    """
    size = collective.bytes
    if collective.kind == "collective-permute":
        return size
    count = len(np.unique(_slices(mesh))) if collective.between_slices else mesh.devices.size
    if not collective.between_slices:
        count //= len(np.unique(_slices(mesh)))
        count = len(collective.groups[0]) if collective.groups else count
    if collective.kind == "reduce-scatter":
        return (count - 1) * size
    return (2 if collective.kind == "all-reduce" else 1) * (count - 1) * size // count


def hops(mesh: jax.sharding.Mesh, collectives: Sequence[Collective]) -> list[int]:
    """The links from chip to chip within the groups of collectives, as `xshard.torus.hops` counts them.

    None between slices, and none of devices that are no TPUs.
    """
    slices = _slices(mesh)
    devices = list(mesh.devices[slices == slices.flat[0]].flat)
    found: list[int] = []
    for groups in {one.groups for one in collectives if not one.between_slices}:
        found += torus.hops(devices, groups or [range(len(devices))])
    return found


def rows(mesh: jax.sharding.Mesh, collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    """For `metrics.table`: a row for each kind, axes and types; what is in a loop counts each time."""
    table: dict[tuple[Any, ...], list[Collective]] = {}
    for one in collectives:
        over = _show_axes(mesh, one)
        key = (one.kind, over, " ".join(one.dtypes), one.between_slices)
        table.setdefault(key, []).append(one)
    found = []
    for (kind, over, dtypes, between), ones in table.items():
        links = hops(mesh, ones)
        row = {
            "kind": kind,
            "over": over,
            "types": dtypes,
            "count": sum(one.times for one in ones),
            "arrays": sum(one.times * one.arrays for one in ones),
            "bytes": sum(one.times * one.bytes for one in ones),
            "sent": sum(one.times * sent(mesh, one) for one in ones),
            "between_slices": between,
            "hops": max(links, default=None),
            "mean_hops": sum(links) / len(links) if links else None,
        }
        found.append(row)
    return found


def _in_computation(name: str, computation: hlo.Computation) -> Iterator[Collective]:
    again = any(_DONE in one.attributes for one in computation.instructions.values())
    if again or name.startswith(_MEANWHILE):
        return
    fused = name.startswith(_FUSED_SCATTER)
    for one in computation.instructions.values():
        start = one.opcode.endswith("-start")
        kind = one.opcode.removesuffix("-start")
        between = _BETWEEN.search(one.attributes) if kind == "recv" else None
        if between:
            # The transfer itself: its buffer, and what it waits with.
            kind = between[1].lower().replace("_", "-")
            kind = kind if kind in KINDS else "collective-permute"
            yield _collective(kind, one.arrays[:1], one.attributes, between_slices=True)
        elif kind in KINDS and fused:
            yield _collective(
                "reduce-scatter", computation.instructions[computation.root].arrays, one.attributes
            )
        elif kind in KINDS:
            yield _collective(kind, _results(kind, start, one.arrays), one.attributes)


def _results(kind: str, asynchronous: bool, arrays: list[hlo.Array]) -> list[hlo.Array]:
    if not asynchronous or kind == "all-reduce":
        return arrays
    # The result of a start holds the operands, too, and for a permutation a context after both.
    return arrays[1:2] if kind == "collective-permute" else arrays[len(arrays) // 2 :]


def _collective(
    kind: str, arrays: list[hlo.Array], attributes: str, *, between_slices: bool = False
) -> Collective:
    return Collective(
        kind,
        tuple(dict.fromkeys(array.dtype for array in arrays)),
        len(arrays),
        sum(array.bytes for array in arrays),
        () if between_slices else _groups(attributes),
        between_slices=between_slices,
    )


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
