"""The division of chunks among processes: each is written once, and each process writes about as many bytes."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from xshard.checkpoint import arrays as arrays_lib


@dataclasses.dataclass(frozen=True)
class Piece:
    """A chunk that this process writes, and where it has it.

    Attributes:
      path: the array's path.
      chunk: the chunk's place in the array's grid.
      shard: which of the process's shards of the array holds it.
      start, shape: which part of the shard it is.
    """

    path: str
    chunk: tuple[int, ...]
    shard: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


# A piece, and its values.
Chunk = tuple[Piece, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan of how a tree is written.

    Attributes:
      arrays: how each array is stored, by path.
      pieces: what this process writes, array after array.
      loads: the bytes that each process writes.
    """

    arrays: dict[str, arrays_lib.ArrayMeta]
    pieces: list[Piece]
    loads: list[int]


def plan(leaves: dict[str, Any], index: int, count: int) -> Plan:
    """Shares a tree among processes; each of them finds the same shares by itself.

    Args:
      leaves: the arrays by path. One without a sharding, such as NumPy's, is what every process has.
      index: this process.
      count: the number of processes.
    """
    arrays: dict[str, arrays_lib.ArrayMeta] = {}
    choices: list[tuple[str, tuple[int, ...], list[int]]] = []
    for path, leaf in leaves.items():
        holders = _holders(leaf, count)
        meta = arrays_lib.describe(leaf, min(map(len, holders.values())))
        arrays[path] = meta
        for chunk in meta.chunks():
            choices.append((path, chunk, holders[_block(holders, meta.box(chunk))]))
    loads = [0] * count
    mine = []
    # What only one process holds first, then the largest: the small ones even out what is left.
    for path, chunk, owners in sorted(
        choices, key=lambda c: (len(c[2]) > 1, -arrays[c[0]].chunk_bytes, c[0], c[1])
    ):
        owner = min(owners, key=lambda process: (loads[process], process))
        loads[owner] += arrays[path].chunk_bytes
        if owner == index:
            mine.append((path, chunk))
    return Plan(arrays, _pieces(leaves, arrays, mine), loads)


def _holders(leaf: Any, count: int) -> dict[arrays_lib.Box, list[int]]:
    """The processes that hold each distinct block."""
    data, _ = arrays_lib.key_data(leaf)
    if not isinstance(leaf, jax.Array) or count == 1:
        return {tuple((0, size) for size in data.shape): list(range(count))}
    found: dict[arrays_lib.Box, set[int]] = {}
    for device, block in data.sharding.devices_indices_map(data.shape).items():
        found.setdefault(as_box(block, data.shape), set()).add(device.process_index)
    return {block: sorted(processes) for block, processes in found.items()}


def _block(blocks: Iterable[arrays_lib.Box], box: arrays_lib.Box) -> arrays_lib.Box:
    """The block that a box lies in; blocks are of one size."""
    sizes = [high - low for low, high in next(iter(blocks))]
    starts = [low // size * size for (low, _), size in zip(box, sizes, strict=True)]
    return tuple((low, low + size) for low, size in zip(starts, sizes, strict=True))


def _pieces(
    leaves: dict[str, Any],
    arrays: dict[str, arrays_lib.ArrayMeta],
    mine: list[tuple[str, tuple[int, ...]]],
) -> list[Piece]:
    pieces = []
    blocks: dict[str, dict[arrays_lib.Box, int]] = {}
    for path, chunk in sorted(mine):
        if path not in blocks:
            blocks[path] = _local_blocks(leaves[path])
        box = arrays[path].box(chunk)
        block = _block(blocks[path], box)
        start = tuple(b[0] - s[0] for b, s in zip(box, block, strict=True))
        shape = tuple(high - low for low, high in box)
        pieces.append(Piece(path, chunk, blocks[path][block], start, shape))
    return pieces


def _local_blocks(leaf: Any) -> dict[arrays_lib.Box, int]:
    data, _ = arrays_lib.key_data(leaf)
    if not isinstance(data, jax.Array):
        return {tuple((0, size) for size in np.shape(data)): 0}
    shards = enumerate(data.addressable_shards)
    # Of equal shards the first.
    return {as_box(shard.index, data.shape): i for i, shard in reversed(list(shards))}


def as_box(index: tuple[slice, ...], shape: tuple[int, ...]) -> arrays_lib.Box:
    """The bounds of an index of slices."""
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
