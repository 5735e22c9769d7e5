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
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from xshard import mesh as mesh_lib
from xshard import torus
from xshard.dryrun import hlo

_Groups = set[frozenset[int]]

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
# Version 2 of the format, [groups,size]<=[dimensions]T(permutation): an iota, reshaped
# and transposed.
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# Version 3 of the format, mesh['a'=16,'b'=16] {'a'}: groups of the places in a mesh
# that differ only along 'a'.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
# The operation that the hosts perform on the data of a transfer between slices.
_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# The TPU compiler writes a reduce-scatter as an all-reduce and a slice in one fusion
# with this name.
_FUSED_SCATTER = "all-reduce-scatter"
# The TPU compiler writes an asynchronous collective three times: at its start, in the
# computation that overlaps it, and at its end. Only the first counts.
_MEANWHILE, _DONE = "async_collective_fusion", '"AsyncCollectiveDone"'


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
    """

    kind: str
    dtypes: tuple[str, ...]
    arrays: int
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    times: int = 1
    between_slices: bool = False


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
    collectives = []
    for name, computation in program.computations.items():
        if times[name]:
            for collective in _in_computation(name, computation):
                collectives.append(dataclasses.replace(collective, times=times[name]))
    return collectives


def axes(mesh: jax.sharding.Mesh, collective: Collective) -> tuple[str, ...]:
    """Returns the mesh axes that a collective runs over; ('?',) if its groups match no
    axes.
    """
    if not collective.between_slices:
        return _over(mesh, collective, lambda groups, lines: groups == lines) or ("?",)
    slices = _slices(mesh)
    names = enumerate(mesh.axis_names)
    return tuple(
        name for axis, name in names if (slices != slices.take([0], axis)).any()
    )


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
    slices = len(np.unique(_slices(mesh)))
    if collective.between_slices:
        count = slices
    elif collective.groups:
        count = len(collective.groups[0])
    else:
        count = mesh.devices.size // slices
    others = (count - 1) * size
    if collective.kind == "reduce-scatter":
        # The result is one of `count` parts of the operand.
        return others
    if collective.kind == "all-reduce":
        others *= 2
    return others // count


def hops(mesh: jax.sharding.Mesh, collectives: Sequence[Collective]) -> list[int]:
    """Returns the distances within the groups of collectives, in links from chip to
    chip: see `xshard.torus.hops`.

    Collectives between slices, and devices that are not TPUs, have none.
    """
    slices = _slices(mesh)
    devices = list(mesh.devices[slices == slices.flat[0]].flat)
    # Collectives with the same groups count once.
    groups = {
        collective.groups for collective in collectives if not collective.between_slices
    }
    links: list[int] = []
    for members in groups:
        links += torus.hops(devices, members or [range(len(devices))])
    return links


def rows(
    mesh: jax.sharding.Mesh, collectives: Sequence[Collective]
) -> list[dict[str, Any]]:
    """Returns a row for each combination of kind, axes and dtypes; collectives in a
    loop count once per round.
    """
    alike = collections.defaultdict(list)
    for collective in collectives:
        over, dtypes = _show_axes(mesh, collective), " ".join(collective.dtypes)
        alike[collective.kind, over, dtypes, collective.between_slices].append(
            collective
        )
    table = []
    for (kind, over, dtypes, between_slices), members in alike.items():
        count = arrays = size = sent_bytes = 0
        for collective in members:
            times = collective.times
            count += times
            arrays += times * collective.arrays
            size += times * collective.bytes
            sent_bytes += times * sent(mesh, collective)
        links = hops(mesh, members)
        row = {
            "kind": kind,
            "over": over,
            "types": dtypes,
            "count": count,
            "arrays": arrays,
            "bytes": size,
            "sent": sent_bytes,
            "between_slices": between_slices,
            "hops": max(links, default=None),
            "mean_hops": sum(links) / len(links) if links else None,
        }
        table.append(row)
    return table


def _in_computation(name: str, computation: hlo.Computation) -> Iterator[Collective]:
    instructions = computation.instructions.values()
    is_done = any(_DONE in instruction.attributes for instruction in instructions)
    if is_done or name.startswith(_MEANWHILE):
        return
    for instruction in instructions:
        kind = instruction.opcode.removesuffix("-start")
        between = _BETWEEN.search(instruction.attributes)
        if kind == "recv" and between:
            kind = between[1].lower().replace("_", "-")
            if kind not in KINDS:
                kind = "collective-permute"
            # The first array is the transfer's buffer; the others serve for
            # synchronization.
            collective = _collective(kind, instruction.arrays[:1], ())
            yield dataclasses.replace(collective, between_slices=True)
        elif kind in KINDS and name.startswith(_FUSED_SCATTER):
            arrays = computation.instructions[computation.root].arrays
            yield _collective("reduce-scatter", arrays, _groups(instruction.attributes))
        elif kind in KINDS:
            yield _collective(
                kind, _results(instruction), _groups(instruction.attributes)
            )


def _results(instruction: hlo.Instruction) -> list[hlo.Array]:
    """Returns the results of a collective."""
    arrays = instruction.arrays
    # A start's result contains operands and results; for a permutation, a context
    # follows them.
    if instruction.opcode == "collective-permute-start":
        return arrays[1:2]
    if (
        instruction.opcode.endswith("-start")
        and instruction.opcode != "all-reduce-start"
    ):
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
    inside = lambda groups, lines: all(
        any(group <= line for line in lines) for group in groups
    )
    return f"within {' x '.join(_over(mesh, collective, inside) or found)}"


def _over(
    mesh: jax.sharding.Mesh,
    collective: Collective,
    fits: Callable[[_Groups, _Groups], bool],
) -> tuple[str, ...] | None:
    """Returns the fewest axes whose lines fit the groups; a line has the devices that
    differ only in these axes.
    """
    # Only one slice's part of the mesh counts.
    slices = _slices(mesh)
    chosen = np.ix_(
        *(np.unique(where) for where in np.nonzero(slices == slices.flat[0]))
    )
    places = np.arange(slices[chosen].size).reshape(slices[chosen].shape)
    groups = {frozenset(group) for group in collective.groups} or {
        frozenset(range(places.size))
    }
    for count in range(len(mesh.axis_names) + 1):
        for dimensions in itertools.combinations(range(len(mesh.axis_names)), count):
            if fits(groups, _along(places, dimensions)):
                return tuple(
                    mesh.axis_names[i] for i in dimensions if mesh.devices.shape[i] > 1
                )
    return None


def _slices(mesh: jax.sharding.Mesh) -> np.ndarray:
    """Returns the slice number of each device of a mesh."""
    numbers = [mesh_lib.slice_number(device) for device in mesh.devices.flat]
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
    return tuple(tuple(map(int, group.split(","))) for group in groups if group)


def _along(places: np.ndarray, chosen: tuple[int, ...]) -> _Groups:
    """Returns the groups of places that differ only in the chosen dimensions."""
    last = np.moveaxis(places, chosen, range(-len(chosen), 0)) if chosen else places
    size = int(np.prod([places.shape[i] for i in chosen], dtype=int))
    return {frozenset(group) for group in last.reshape(-1, size).tolist()}
