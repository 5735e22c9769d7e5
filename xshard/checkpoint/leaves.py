"""The leaves of a state: their names in a checkpoint, the chunks that each is cut into,
and which process writes which chunk.

Each chunk is written once, and processes write about equally many bytes.
"""

import math
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xshard.base import array_types
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import store as store_lib

# An array that several processes hold is cut into this many chunks for each of them.
_CHUNKS_EACH = 4
# The largest factor by which a dimension is divided at a time, if it may also be
# divided otherwise.
_LARGEST_FACTOR = 7

CheckpointError = store_lib.CheckpointError
Shape = arrays_lib.Shape


class Leaf(NamedTuple):
    """An array of a state, or a jax.ShapeDtypeStruct, and what is stored of it.

    Attributes:
      value: the array.
      data: the data of a typed PRNG key; any other array itself.
      key_impl: the name of the key's implementation; None for any other array.
    """

    value: Any
    data: Any
    key_impl: str | None

    @property
    def is_everywhere(self) -> bool:
        """Whether each process has a copy: it is one of NumPy's, or on devices of this
        process alone.
        """
        return not isinstance(self.value, jax.Array) or self.value.is_fully_addressable

    def local_shards(self) -> list[tuple[arrays_lib.Index, Any]]:
        """Returns the bounds and the data of each shard on this process's devices; one
        of NumPy's is one shard.
        """
        if not isinstance(self.data, jax.Array):
            value = np.asarray(self.data)
            return [(arrays_lib.full_index(value.shape), value)]
        shards = []
        for shard in self.data.addressable_shards:
            bounds = arrays_lib.as_index(shard.index, self.data.shape)
            shards.append((bounds, shard.data))
        return shards

    def describe(self, holders: int = 1) -> arrays_lib.ArrayMeta:
        """Describes how it is stored.

        Args:
          holders: the number of processes that hold each of its shards, and share in
            writing it.
        """
        shape = tuple(self.data.shape)
        dtype = jnp.dtype(self.data.dtype)
        sharding = getattr(self.data, "sharding", None)
        shard_shape = sharding.shard_shape(shape) if sharding else shape
        limit = arrays_lib.CHUNK_BYTES
        if holders > 1:
            # Several chunks for each holder divide the work evenly: one more or less
            # makes little difference.
            shard_bytes = math.prod(shard_shape) * dtype.itemsize
            share = shard_bytes // (_CHUNKS_EACH * holders)
            least = max(share, arrays_lib.SHARED_CHUNK_BYTES)
            limit = min(least, arrays_lib.CHUNK_BYTES)
        return arrays_lib.ArrayMeta(
            shape=shape,
            dtype=dtype.name,
            chunk_shape=_chunk_shape(shape, shard_shape, limit // dtype.itemsize),
            key_impl=self.key_impl,
            sharding=str(getattr(sharding, "spec", "")),
        )


def of(tree: Any) -> dict[str, Leaf]:
    """Returns the leaves of a tree by path; raises the errors of `flatten`."""
    return {path: Leaf(x, *key_data(x)) for path, x in flatten(tree).items()}


def flatten(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, which is their name in a checkpoint.

    Raises:
      CheckpointError: if two leaves have the same path, if a leaf is not an array, or
        its type or path cannot be stored, or if there are no leaves.
    """
    leaves: dict[str, Any] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if path in leaves:
            raise CheckpointError(
                f"Two leaves of the state have the path '{path}'; rename one."
            )
        leaves[path] = _checked(path, leaf)
    if not leaves:
        raise CheckpointError("The state holds no arrays.")
    return leaves


def key_data(leaf: Any) -> tuple[Any, str | None]:
    """Returns the data of a typed PRNG key, and the name of its implementation.

    Returns any other array as it is, and None.
    """
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf, None
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf), str(jax.random.key_impl(leaf))

    # `jax.random.key_impl` takes arrays and tracers, not a `jax.ShapeDtypeStruct`, so
    # the implementation is noted while the function is traced.
    impls: list[str] = []

    def traced(key: Any) -> Any:
        impls.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    data = jax.eval_shape(traced, leaf)
    return data, impls[0]


def _checked(path: str, leaf: Any) -> Any:
    """Returns a leaf in the byte order of this machine, in which bytes are stored.

    Raises:
      CheckpointError: if it is no array, or of a type or path that cannot be stored.
    """
    try:
        path.encode()
    except UnicodeEncodeError as e:
        raise CheckpointError(f"The path {path!r} is no text ({e}); rename it.") from e
    # A target may have shapes in place of arrays.
    is_taken = isinstance(leaf, np.generic | jax.ShapeDtypeStruct)
    if not is_taken and not array_types.is_array(leaf):
        raise CheckpointError(
            f"'{path}' is {leaf!r}, of type {type(leaf).__name__}; make it an array of "
            "NumPy's own or of JAX's, such as jnp.int32(3), np.asarray(...), or "
            ".filled(value) where a mask hides elements."
        )
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return leaf
    if np.dtype(dtype).name not in arrays_lib.TYPES:
        raise CheckpointError(
            f"'{path}' is of type {dtype}, which zarr cannot hold; convert it."
        )
    if isinstance(leaf, np.ndarray):
        return leaf.astype(dtype.newbyteorder("="), copy=False)
    return leaf


def _chunk_shape(shape: Shape, shard_shape: Shape, limit: int) -> Shape:
    """Cuts a shard into equal chunks, so that no chunk spans two shards.

    Args:
      shape: the shape of the array.
      shard_shape: the shape of its shards.
      limit: the most elements of a chunk.
    """
    chunk = [max(size, 1) for size in shard_shape]
    while math.prod(chunk) > limit:
        # The longest dimension that can still be cut. None can if the chunk has size 1
        # in every dimension.
        longest = None
        smaller = 0
        for i, size in enumerate(chunk):
            cut = _smaller(size, is_whole=shard_shape[i] == shape[i])
            if cut < size and (longest is None or size > chunk[longest]):
                longest = i
                smaller = cut
        if longest is None:
            break
        chunk[longest] = smaller
    return tuple(chunk)


def _smaller(size: int, *, is_whole: bool) -> int:
    """Returns the next smaller chunk size for a dimension.

    Args:
      size: the current size of the chunk.
      is_whole: whether a shard spans the whole dimension. Only then may the size be one
        that does not divide it.
    """
    # A chunk that does not fill its shape is padded, which costs a copy, so small
    # divisors are tried first.
    largest_factor = min(size, _LARGEST_FACTOR) if is_whole else size
    for factor in range(2, largest_factor + 1):
        if size % factor == 0:
            return size // factor
    return -(-size // 2) if is_whole else size


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


def plan(leaves: dict[str, Leaf], process_index: int, process_count: int) -> Plan:
    """Divides a state among processes.

    Every process computes the same division, without communication.

    Args:
      leaves: the arrays by path. Each process holds the whole of those that are
        everywhere.
      process_index: the index of this process.
      process_count: the number of processes.
    """
    arrays: arrays_lib.ArrayMetas = {}
    candidates = []
    for path, leaf in leaves.items():
        holders = _holders_by_shard(leaf, process_count)
        fewest = min(len(processes) for processes in holders.values())
        meta = leaf.describe(fewest)
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


def checksums(leaves: dict[str, Leaf]) -> dict[str, int]:
    """Returns checksums of the arrays of which each process has a copy, by path."""
    found = {}
    for path, leaf in leaves.items():
        if leaf.is_everywhere:
            value = np.ascontiguousarray(leaf.data).reshape(-1)
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
    leaf: Leaf, process_count: int
) -> dict[arrays_lib.Index, list[int]]:
    """Returns the processes that hold each distinct shard of an array.

    Args:
      leaf: the array.
      process_count: the number of processes.

    Returns:
      The processes in ascending order, by the shard's bounds in the array.
    """
    data = leaf.data
    if process_count == 1 or leaf.is_everywhere:
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

    No chunk spans two shards, since `Leaf.describe` cuts each shard into chunks.
    """
    # All shards of an array have the same size.
    sizes = arrays_lib.index_shape(next(iter(shards)))
    bounds = []
    for (low, _), size in zip(chunk, sizes, strict=True):
        start = low // size * size
        bounds.append((start, start + size))
    return tuple(bounds)


def _in_local_shards(
    candidates: list[_Candidate],
    leaves: dict[str, Leaf],
    arrays: arrays_lib.ArrayMetas,
) -> list[Chunk]:
    """Locates the chunks that this process writes in its shards; ordered by array."""
    chunks = []
    shards_by_path: dict[str, dict[arrays_lib.Index, int]] = {}
    for candidate in sorted(candidates):
        path = candidate.path
        if path not in shards_by_path:
            indices: dict[arrays_lib.Index, int] = {}
            for i, (bounds, _) in enumerate(leaves[path].local_shards()):
                # Of several devices with the same shard, the first counts.
                indices.setdefault(bounds, i)
            shards_by_path[path] = indices
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
