"""The division of a state's chunks among processes.

Each chunk is written once, and processes write about equally many bytes.
"""

import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import leaves as leaves_lib


class Chunk(NamedTuple):
    """A chunk that this process writes, and where it lies in the process's shards.

    Attributes:
      path: the array's path.
      grid_index: the chunk's place in the array's grid.
      shard: the index of the shard that holds the chunk, among this process's shards of
        the array.
      start: the chunk's offset in the shard.
      shape: the chunk's shape, without padding.
    """

    path: str
    grid_index: arrays_lib.GridIndex
    shard: int
    start: tuple[int, ...]
    shape: arrays_lib.Shape


class Plan(NamedTuple):
    """A plan for writing a state.

    Attributes:
      arrays: how each array is stored, by path.
      chunks: the chunks that this process writes, ordered by array.
      loads: the number of bytes that each process writes.
      digest: a checksum of what must be equal on all processes.
    """

    arrays: arrays_lib.ArrayMetas
    chunks: list[Chunk]
    loads: list[int]
    digest: int


class _Candidate(NamedTuple):
    """A chunk that any one of its holders can write.

    Attributes:
      path: the array's path.
      grid_index: the chunk's place in the array's grid.
      nbytes: its size in bytes.
      holders: the processes with a shard that contains the chunk, in ascending order.
    """

    path: str
    grid_index: arrays_lib.GridIndex
    nbytes: int
    holders: list[int]


def plan(leaves: dict[str, Any], process_index: int, process_count: int) -> Plan:
    """Divides a state among processes.

    Every process computes the same division, without communication.

    Args:
      leaves: the arrays by path. Each process holds the whole of those that
        `is_everywhere`.
      process_index: the index of this process.
      process_count: the number of processes.
    """
    arrays: arrays_lib.ArrayMetas = {}
    candidates = []
    for path, leaf in leaves.items():
        holders = _holders_by_shard(leaf, process_count)
        fewest = min(len(processes) for processes in holders.values())
        meta = leaves_lib.describe(leaf, fewest)
        arrays[path] = meta
        for grid_index in meta.chunks():
            shard = _shard_around(meta.index_of(grid_index), holders)
            candidates.append(
                _Candidate(path, grid_index, meta.chunk_bytes, holders[shard])
            )

    # Each chunk goes to the holder with the least to write so far.
    loads = [0] * process_count
    local = []
    for candidate in sorted(candidates, key=_assignment_order):
        # `min` returns the first of equals, so that every process chooses the same
        # owner.
        owner = min(candidate.holders, key=lambda process: loads[process])
        loads[owner] += candidate.nbytes
        if owner == process_index:
            local.append(candidate)
    chunks = _in_local_shards(local, leaves, arrays)
    return Plan(arrays, chunks, loads, zlib.crc32(repr((arrays, loads)).encode()))


def is_everywhere(leaf: Any) -> bool:
    """Returns whether each process has a copy of an array: it is one of NumPy's, or on
    devices of this process alone.
    """
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def checksums(leaves: dict[str, Any]) -> dict[str, int]:
    """Returns checksums of the arrays of which each process has a copy, by path."""
    found = {}
    for path, leaf in leaves.items():
        if is_everywhere(leaf):
            data, _ = leaves_lib.key_data(leaf)
            value = np.ascontiguousarray(data).reshape(-1)
            found[path] = zlib.crc32(value.view(np.uint8).data)
    return found


def _assignment_order(candidate: _Candidate) -> tuple[Any, ...]:
    # Chunks that only one process holds come first, then the largest ones. The small
    # ones, at the end, even out the loads.
    return (
        len(candidate.holders) > 1,
        -candidate.nbytes,
        candidate.path,
        candidate.grid_index,
    )


def _holders_by_shard(
    leaf: Any, process_count: int
) -> dict[arrays_lib.Index, list[int]]:
    """Returns the processes that hold each distinct shard of an array.

    Args:
      leaf: the array.
      process_count: the number of processes.

    Returns:
      The processes in ascending order, by the shard's bounds in the array.
    """
    data, _ = leaves_lib.key_data(leaf)
    if process_count == 1 or is_everywhere(leaf):
        return {arrays_lib.full_index(data.shape): list(range(process_count))}
    holders: dict[arrays_lib.Index, set[int]] = {}
    for device, index in data.sharding.devices_indices_map(data.shape).items():
        shard = arrays_lib.as_index(index, data.shape)
        holders.setdefault(shard, set()).add(device.process_index)
    return {shard: sorted(processes) for shard, processes in holders.items()}


def _shard_around(
    chunk: arrays_lib.Index, shards: Iterable[arrays_lib.Index]
) -> arrays_lib.Index:
    """Returns the bounds of the shard that contains a chunk of the given bounds.

    No chunk spans two shards, since `leaves.describe` cuts each shard into chunks.
    """
    # All shards of an array have the same size.
    sizes = arrays_lib.index_shape(next(iter(shards)))
    bounds = []
    for (low, _), size in zip(chunk, sizes, strict=True):
        start = low // size * size
        bounds.append((start, start + size))
    return tuple(bounds)


def _in_local_shards(
    candidates: list[_Candidate], leaves: dict[str, Any], arrays: arrays_lib.ArrayMetas
) -> list[Chunk]:
    """Locates the chunks that this process writes in its shards; ordered by array."""
    chunks = []
    shards_by_path: dict[str, dict[arrays_lib.Index, int]] = {}
    for candidate in sorted(candidates):
        path = candidate.path
        if path not in shards_by_path:
            shards_by_path[path] = _local_shards(leaves[path])
        shards = shards_by_path[path]
        bounds = arrays[path].index_of(candidate.grid_index)
        shard = _shard_around(bounds, shards)
        start = []
        for (low, _), (shard_low, _) in zip(bounds, shard, strict=True):
            start.append(low - shard_low)
        chunks.append(
            Chunk(
                path=path,
                grid_index=candidate.grid_index,
                shard=shards[shard],
                start=tuple(start),
                shape=arrays_lib.index_shape(bounds),
            )
        )
    return chunks


def _local_shards(leaf: Any) -> dict[arrays_lib.Index, int]:
    """Returns the index of each distinct shard of this process, by its bounds.

    Of several devices with the same shard, the first counts.
    """
    data, _ = leaves_lib.key_data(leaf)
    if not isinstance(data, jax.Array):
        return {arrays_lib.full_index(np.shape(data)): 0}
    shards: dict[arrays_lib.Index, int] = {}
    for i, shard in enumerate(data.addressable_shards):
        shards.setdefault(arrays_lib.as_index(shard.index, data.shape), i)
    return shards
