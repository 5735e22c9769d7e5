"""Reads parts of arrays from a checkpoint, and distinguishes damage from errors of the
disk.
"""

import collections
import dataclasses
import math
import mmap
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib

# Tensorstore's status codes for content that is not what was written, and for missing
# files. Any other status and every disk error is not damage: the stored bytes may be
# correct.
_DAMAGE = (
    "DATA_LOSS",
    "INVALID_ARGUMENT",
    "OUT_OF_RANGE",
    "FAILED_PRECONDITION",
    "NOT_FOUND",
)
_STATUS = re.compile(r"([A-Z_]{6,}):")
_ERRNO = re.compile(r"os_error_code='(\w+)'")
# The most bytes that are read ahead of the part in use. More was not faster in
# measurements.
AHEAD_BYTES = 256 << 20
# XLA on CPUs uses host memory of this alignment in place, and copies other memory.
_ALIGNMENT = 64
# Allocations of at least this size bypass NumPy; see `_aligned`.
_MAPPED_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class ArraySlice:
    """A part of an array to read, such as the shard of a device.

    Attributes:
      path: the array's path.
      meta: how the array is stored.
      index: the part.
    """

    path: str
    meta: arrays_lib.ArrayMeta
    index: arrays_lib.Index

    @property
    def nbytes(self) -> int:
        """The size of the part in bytes."""
        return math.prod(arrays_lib.index_shape(self.index)) * self.meta.itemsize


class _Read(NamedTuple):
    """A read under way.

    Attributes:
      part: what is read.
      out: the memory that it is read into.
      wait: waits for the end of the read; raises ValueError or OSError if it failed.
    """

    part: ArraySlice
    out: np.ndarray
    wait: Callable[[], Any]


def read_arrays(
    attempt: format_lib.SaveAttempt, arrays: arrays_lib.ArrayMetas
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads arrays into host memory and yields each with its path; typed PRNG keys as
    their data.

    Raises:
      DamagedError: at the first array that is not what was written.
      UnreadableError: at the first array that cannot be read.
    """
    parts = []
    for path, meta in arrays.items():
        parts.append(ArraySlice(path, meta, arrays_lib.full_index(meta.shape)))
    yield from zip(arrays, read_slices(attempt, parts), strict=True)


def read_slices(
    attempt: format_lib.SaveAttempt,
    parts: Iterable[ArraySlice],
    budget_bytes: int = AHEAD_BYTES,
) -> Iterator[np.ndarray]:
    """Reads parts of arrays, several at a time, and yields them in the order of
    `parts`.

    Args:
      attempt: a checkpoint.
      parts: the parts to read.
      budget_bytes: the most bytes that are read at a time; a larger part is read alone.

    Raises:
      DamagedError: at the first part that is not what was written.
      UnreadableError: at the first part that cannot be read.
    """
    database = store_lib.Database(attempt.store, attempt.prefix)
    limit = min(budget_bytes, AHEAD_BYTES)
    reads: collections.deque[_Read] = collections.deque()
    nbytes = 0
    for part in parts:
        while reads and nbytes + part.nbytes > limit:
            nbytes -= reads[0].part.nbytes
            yield _finish(attempt, reads.popleft())
        reads.append(_begin(attempt, database, part))
        nbytes += part.nbytes
    while reads:
        yield _finish(attempt, reads.popleft())


def _begin(
    attempt: format_lib.SaveAttempt, database: store_lib.Database, part: ArraySlice
) -> _Read:
    """Allocates memory for a part, and begins to read it.

    Raises:
      CheckpointError: if there is not enough memory.
    """
    shape = arrays_lib.index_shape(part.index)
    try:
        out = _aligned(shape, jnp.dtype(part.meta.dtype))
    except (MemoryError, OSError) as e:
        raise format_lib.CheckpointError(
            f"'{part.path}' in {attempt} is {part.meta}: not enough memory for "
            f"{part.nbytes} bytes."
        ) from e
    if arrays_lib.is_large(part.path, part.meta):
        return _Read(part, out, _read_large(database, part, out))
    return _Read(part, out, _read_small(database, part, out))


def _finish(attempt: format_lib.SaveAttempt, read: _Read) -> np.ndarray:
    """Waits until a part has been read; raises DamagedError or UnreadableError with the
    array's path.
    """
    try:
        read.wait()
    except (ValueError, OSError) as e:
        what = f"'{read.part.path}' in {attempt}"
        if _is_damage(e):
            raise format_lib.DamagedError(
                f"{what} is not what was written: {store_lib.reason(e)}."
            ) from e
        raise format_lib.UnreadableError(
            f"{what} cannot be read: {store_lib.reason(e)}."
        ) from e
    return read.out


def _read_large(
    database: store_lib.Database, part: ArraySlice, out: np.ndarray
) -> Callable[[], Any]:
    """Begins to read a part with tensorstore's zarr3 driver, which assembles the chunks
    and verifies the checksum of each. Returns a function that waits for the end.
    """
    array = database.array(part.path, part.meta.zarr())
    source = array[arrays_lib.as_slices(part.index)]
    # Tensorstore reads directly into this memory, without an intermediate copy.
    target = ts.array(out, context=database.context)
    return target.write(source[ts.d[:].translate_to[0]]).result


def _read_small(
    database: store_lib.Database, part: ArraySlice, out: np.ndarray
) -> Callable[[], Any]:
    """Begins to read each chunk as bytes, which takes less time than opening the array.
    Returns a function that waits for the end.
    """
    futures = {}
    for chunk in part.meta.chunks(part.index):
        futures[chunk] = database.keys.read(arrays_lib.chunk_key(part.path, chunk))

    def wait() -> None:
        for chunk, future in futures.items():
            stored = future.result()
            if stored.state != "value":
                raise ValueError("a chunk is missing")
            value = arrays_lib.decode(stored.value, part.meta)
            _copy_overlap(value, part.meta.index_of(chunk), out, part.index)

    return wait


def _copy_overlap(
    chunk: np.ndarray,
    chunk_index: arrays_lib.Index,
    out: np.ndarray,
    out_index: arrays_lib.Index,
) -> None:
    """Copies what a chunk and a part of the array have in common, which may be nothing.

    Args:
      chunk: the chunk, with its padding.
      chunk_index: the place of the chunk in the array.
      out: the part.
      out_index: the place of the part in the array.
    """
    from_chunk = []
    to_out = []
    for bounds, out_bounds in zip(chunk_index, out_index, strict=True):
        start = max(bounds[0], out_bounds[0])
        stop = min(bounds[1], out_bounds[1])
        if start >= stop:
            return
        from_chunk.append(slice(start - bounds[0], stop - bounds[0]))
        to_out.append(slice(start - out_bounds[0], stop - out_bounds[0]))
    out[tuple(to_out)] = chunk[tuple(from_chunk)]


def _is_damage(e: Exception) -> bool:
    """Returns whether a failed read shows wrong or missing content, and no error of the
    disk.
    """
    if isinstance(e, OSError):
        return False
    # Tensorstore's errors are ValueErrors that begin with a status. One of the disk
    # also has the code of the operating system, and a status that fits no better than
    # any other.
    errno = _ERRNO.search(str(e))
    if errno is not None:
        return errno[1] == "ENOENT"
    status = _STATUS.match(str(e))
    # An error without a status comes from this package's checks of bytes that were
    # read.
    return status is None or status[1] in _DAMAGE


def _aligned(shape: arrays_lib.Shape, dtype: Any) -> np.ndarray:
    """Allocates an array that XLA on CPUs can use in place."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= _MAPPED_BYTES:
        # NumPy requests huge pages for arrays of this size, and their allocation took
        # three times as long.
        memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        return memory.view(dtype).reshape(shape)
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
