"""What a compiled program sends between devices, as its HLO says.

A reduction that is made twice, or over more devices than it should, shows in no value and in no test of
values: it shows here.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# HLO's names of types, by the bits of an element; what is not here is of no size.
_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64,
    "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f8e4m3fn": 8, "f8e5m2": 8,
}  # fmt: skip
# `%name = RESULT kind(`; of an asynchronous pair the start has it all.
_LINE = re.compile(rf"= (.+?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
# [groups,size]<=[dimensions]T(permutation), as for v2 of the format: an iota, reshaped and transposed.
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
      kind: one of `KINDS`.
      dtypes: the types of what it gives, as HLO names them, each once.
      arrays: how many arrays it gives.
      bytes: their size on one device.
      groups: the devices that take part together, by their place in the mesh; empty: all. For a permutation
        pairs of source and target.
    """

    kind: str
    dtypes: tuple[str, ...]
    arrays: int
    bytes: int
    groups: tuple[tuple[int, ...], ...]


def of(compiled: jax.stages.Compiled) -> list[Collective]:
    """The collectives of a compiled function, in the order of its text.

    One that stands in a loop is counted once, as one in a branch that may not be taken is.

    >>> double = jax.jit(lambda x: 2 * x).lower(1.0).compile()
    >>> of(double)
    []
    """
    text = compiled.as_text()
    found = ((_LINE.search(line), line) for line in (text or "").splitlines())
    return [_collective(match, line) for match, line in found if match]


def axes(mesh: jax.sharding.Mesh, collective: Collective) -> tuple[str, ...]:
    """The mesh axes that a collective goes over; ('?',) if its groups are those of no axes."""
    places = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    groups = {frozenset(group) for group in collective.groups} or {frozenset(range(places.size))}
    names = mesh.axis_names
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), count):
            if groups == _along(places, chosen):
                return tuple(names[i] for i in chosen if mesh.devices.shape[i] > 1)
    return ("?",)


def rows(mesh: jax.sharding.Mesh, collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    """For `metrics.table`: a row for each kind, axes and types."""
    table: dict[tuple[str, ...], list[Collective]] = {}
    for one in collectives:
        over = " x ".join(axes(mesh, one)) or "nothing"
        table.setdefault((one.kind, over, " ".join(one.dtypes)), []).append(one)
    return [
        {
            "kind": kind,
            "over": over,
            "types": dtypes,
            "count": len(ones),
            "arrays": sum(one.arrays for one in ones),
            "bytes": sum(one.bytes for one in ones),
        }
        for (kind, over, dtypes), ones in table.items()
    ]


def _collective(match: re.Match[str], line: str) -> Collective:
    result, kind, asynchronous = match.groups()
    arrays = _ARRAY.findall(result)
    if asynchronous and kind != "all-reduce":
        # Its result holds the operands, too, and for a permutation a context after both.
        arrays = arrays[len(arrays) // 2 :] if kind != "collective-permute" else arrays[1:2]
    sizes = [
        _BITS.get(dtype, 0) * int(np.prod([int(n) for n in shape.split(",") if n]))
        for dtype, shape in arrays
    ]
    dtypes = tuple(dict.fromkeys(dtype for dtype, _ in arrays))
    return Collective(kind, dtypes, len(arrays), sum(sizes) // 8, _groups(line))


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    iota = _IOTA.search(line)
    if iota:
        count, size, shape, order = iota.groups()
        dimensions = [int(n) for n in shape.split(",")]
        ids = np.arange(np.prod(dimensions)).reshape(dimensions)
        if order:
            ids = ids.transpose([int(n) for n in order.split(",")])
        return tuple(map(tuple, ids.reshape(int(count), int(size)).tolist()))
    listed = _LISTED.search(line)
    groups = re.findall(r"\{([\d, ]*)\}", listed[1]) if listed else []
    return tuple(tuple(int(n) for n in group.split(",")) for group in groups if group)


def _along(places: np.ndarray, chosen: tuple[int, ...]) -> set[frozenset[int]]:
    """The groups of places that differ in the chosen dimensions only."""
    last = np.moveaxis(places, chosen, range(-len(chosen), 0)) if chosen else places
    size = int(np.prod([places.shape[i] for i in chosen], dtype=int))
    return {frozenset(group) for group in last.reshape(-1, size).tolist()}
