"""The division of chunks among processes: each is written once, and each process writes about as many bytes."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from xshard.checkpoint import arrays as arrays_lib


class Piece(NamedTuple):
    """A chunk that this process writes, and where it has it.

    Attributes:
      path: the array's path.
      chunk: the chunk's place in the array's grid.
      shard: which of the process's shards of the array holds it.
      start, shape: which part of the shard it is.
    """

    path: str
    chunk: arrays_lib.Place
    shard: int
    start: tuple[int, ...]
    shape: arrays_lib.Shape


# A piece, and its values.
Chunk = tuple[Piece, np.ndarray]


class Plan(NamedTuple):
    """A plan of how a tree is written.

    Attributes:
      arrays: how each array is stored, by path.
      pieces: what this process writes, array after array.
      loads: the bytes that each process writes.
    """

    arrays: arrays_lib.ArrayMetas
    pieces: list[Piece]
    loads: list[int]


def plan(leaves: dict[str, Any], index: int, count: int) -> Plan:
    """Shares a tree among processes; each of them finds the same shares by itself.

    Args:
      leaves: the arrays by path. One without a sharding, such as NumPy's, is what every process has.
      index: this process.
      count: the number of processes.
    """
    arrays: arrays_lib.ArrayMetas = {}
    choices = []
    for path, leaf in leaves.items():
        holders = _holders(leaf, count)
        fewest = min(len(processes) for processes in holders.values())
        meta = arrays_lib.describe(leaf, fewest)
        arrays[path] = meta
        for chunk in meta.chunks():
            block = _block(holders, meta.box(chunk))
            choices.append(_Choice(path, chunk, meta.chunk_bytes, holders[block]))
    loads = [0] * count
    own = []
    for choice in sorted(choices, key=_order):
        # Of those that have least to write the first, as on every other process.
        owner = min(choice.holders, key=lambda process: loads[process])
        loads[owner] += choice.nbytes
        if owner == index:
            own.append(choice)
    return Plan(arrays, _pieces(leaves, arrays, own), loads)


class _Choice(NamedTuple):
    """A chunk, its size, and the processes that hold it, of which one writes it."""

    path: str
    chunk: arrays_lib.Place
    nbytes: int
    holders: list[int]


def _order(choice: _Choice) -> tuple[Any, ...]:
    # What only one process holds first, then the largest: the small ones even out what is left.
    return len(choice.holders) > 1, -choice.nbytes, choice.path, choice.chunk


def _holders(leaf: Any, count: int) -> dict[arrays_lib.Box, list[int]]:
    """The processes that hold each distinct block, in ascending order."""
    data, _ = arrays_lib.key_data(leaf)
    if not isinstance(leaf, jax.Array) or count == 1:
        return {arrays_lib.whole_box(data.shape): list(range(count))}
    holders: dict[arrays_lib.Box, set[int]] = {}
    for device, index in data.sharding.devices_indices_map(data.shape).items():
        block = arrays_lib.as_box(index, data.shape)
        holders.setdefault(block, set()).add(device.process_index)
    return {block: sorted(processes) for block, processes in holders.items()}


def _block(blocks: Iterable[arrays_lib.Box], box: arrays_lib.Box) -> arrays_lib.Box:
    """The block that a box lies in; blocks are of one size."""
    sizes = arrays_lib.box_shape(next(iter(blocks)))
    block = []
    for (low, _), size in zip(box, sizes, strict=True):
        start = low // size * size
        block.append((start, start + size))
    return tuple(block)


def _pieces(
    leaves: dict[str, Any], arrays: arrays_lib.ArrayMetas, own: list[_Choice]
) -> list[Piece]:
    """Finds where this process has each of its own chunks, array after array."""
    pieces = []
    blocks: dict[str, dict[arrays_lib.Box, int]] = {}
    for choice in sorted(own):
        path = choice.path
        if path not in blocks:
            blocks[path] = _local_blocks(leaves[path])
        box = arrays[path].box(choice.chunk)
        block = _block(blocks[path], box)
        start = tuple(low - first for (low, _), (first, _) in zip(box, block, strict=True))
        shape = arrays_lib.box_shape(box)
        pieces.append(Piece(path, choice.chunk, blocks[path][block], start, shape))
    return pieces


def _local_blocks(leaf: Any) -> dict[arrays_lib.Box, int]:
    """The first of this process's shards that holds each block."""
    data, _ = arrays_lib.key_data(leaf)
    if not isinstance(data, jax.Array):
        return {arrays_lib.whole_box(np.shape(data)): 0}
    blocks: dict[arrays_lib.Box, int] = {}
    for i, shard in enumerate(data.addressable_shards):
        blocks.setdefault(arrays_lib.as_box(shard.index, data.shape), i)
    return blocks
