"""The division of chunks among processes. Each chunk is written once, and processes
write about equally many bytes.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import leaves as leaves_lib


class Piece(NamedTuple):
    """A chunk that this process writes, and its place in the process's shards.

    Attributes:
      path: the array's path.
      chunk: the chunk's place in the array's grid.
      shard: the index of the shard that holds the chunk, among this process's shards of
        the array.
      start, shape: the chunk's offset in the shard, and its shape.
    """

    path: str
    chunk: arrays_lib.GridIndex
    shard: int
    start: tuple[int, ...]
    shape: arrays_lib.Shape


# A piece and its values.
Chunk = tuple[Piece, np.ndarray]


class Plan(NamedTuple):
    """A plan for writing a tree.

    Attributes:
      arrays: how each array is stored, by path.
      pieces: the chunks that this process writes, ordered by array.
      loads: the number of bytes that each process writes.
    """

    arrays: arrays_lib.ArrayMetas
    pieces: list[Piece]
    loads: list[int]


def plan(leaves: dict[str, Any], index: int, count: int) -> Plan:
    """Divides a tree among processes. Every process computes the same division, without
    communication.

    Args:
      leaves: the arrays by path. Every process must hold the whole of an array without
        a sharding, such as NumPy's.
      index: the index of this process.
      count: the number of processes.
    """
    arrays: arrays_lib.ArrayMetas = {}
    choices = []
    for path, leaf in leaves.items():
        holders = _holders(leaf, count)
        fewest = min(len(processes) for processes in holders.values())
        meta = leaves_lib.describe(leaf, fewest)
        arrays[path] = meta
        for chunk in meta.chunks():
            block = _block(holders, meta.index_of(chunk))
            choices.append(_Choice(path, chunk, meta.chunk_bytes, holders[block]))
    loads = [0] * count
    own = []
    for choice in sorted(choices, key=_order):
        # `min` returns the first of equals, so that every process chooses the same
        # owner.
        owner = min(choice.holders, key=lambda process: loads[process])
        loads[owner] += choice.nbytes
        if owner == index:
            own.append(choice)
    return Plan(arrays, _pieces(leaves, arrays, own), loads)


class _Choice(NamedTuple):
    """A chunk, its size in bytes, and the processes that hold it, one of which will
    write it.
    """

    path: str
    chunk: arrays_lib.GridIndex
    nbytes: int
    holders: list[int]


def _order(choice: _Choice) -> tuple[Any, ...]:
    # Chunks without a choice come first, then the largest ones. The small ones, at the
    # end, even out the loads.
    return len(choice.holders) > 1, -choice.nbytes, choice.path, choice.chunk


def _holders(leaf: Any, count: int) -> dict[arrays_lib.Index, list[int]]:
    """Returns the processes that hold each distinct block of an array, in ascending
    order.
    """
    data, _ = leaves_lib.key_data(leaf)
    if not isinstance(leaf, jax.Array) or count == 1:
        return {arrays_lib.full_index(data.shape): list(range(count))}
    holders: dict[arrays_lib.Index, set[int]] = {}
    for device, index in data.sharding.devices_indices_map(data.shape).items():
        block = arrays_lib.as_index(index, data.shape)
        holders.setdefault(block, set()).add(device.process_index)
    return {block: sorted(processes) for block, processes in holders.items()}


def _block(
    blocks: Iterable[arrays_lib.Index], box: arrays_lib.Index
) -> arrays_lib.Index:
    """Returns the block that contains a box; all blocks of an array have the same size."""
    sizes = arrays_lib.index_shape(next(iter(blocks)))
    block = []
    for (low, _), size in zip(box, sizes, strict=True):
        start = low // size * size
        block.append((start, start + size))
    return tuple(block)


def _pieces(
    leaves: dict[str, Any], arrays: arrays_lib.ArrayMetas, own: list[_Choice]
) -> list[Piece]:
    """Locates each chunk that this process writes in the process's shards; ordered by
    array.
    """
    pieces = []
    blocks: dict[str, dict[arrays_lib.Index, int]] = {}
    for choice in sorted(own):
        path = choice.path
        if path not in blocks:
            blocks[path] = _local_blocks(leaves[path])
        box = arrays[path].index_of(choice.chunk)
        block = _block(blocks[path], box)
        start = tuple(
            low - first for (low, _), (first, _) in zip(box, block, strict=True)
        )
        shape = arrays_lib.index_shape(box)
        pieces.append(Piece(path, choice.chunk, blocks[path][block], start, shape))
    return pieces


def _local_blocks(leaf: Any) -> dict[arrays_lib.Index, int]:
    """Returns the index of the first of this process's shards that holds each block."""
    data, _ = leaves_lib.key_data(leaf)
    if not isinstance(data, jax.Array):
        return {arrays_lib.full_index(np.shape(data)): 0}
    blocks: dict[arrays_lib.Index, int] = {}
    for i, shard in enumerate(data.addressable_shards):
        blocks.setdefault(arrays_lib.as_index(shard.index, data.shape), i)
    return blocks
