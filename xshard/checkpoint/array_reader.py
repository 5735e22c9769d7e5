"""Reads parts of arrays from a checkpoint, and distinguishes damage from errors of the
disk.
"""

import collections
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
from xshard.checkpoint import metadata_files
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
# The chunks of an array with more chunks than this are counted before the array is
# read.
_MANY_CHUNKS = 4096
# The database stores values smaller than this, with their checksum, in its nodes next
# to their keys.
_INLINE_BYTES = 1024


class ArrayRegion(NamedTuple):
    """A part of an array to read.

    Attributes:
      path: the array's path.
      meta: how the array is stored.
      box: the bounds of the part.
    """

    path: str
    meta: arrays_lib.ArrayMeta
    box: arrays_lib.Box

    @property
    def nbytes(self) -> int:
        """The size of the part in bytes."""
        return math.prod(arrays_lib.box_shape(self.box)) * self.meta.itemsize


def read_arrays(
    attempt: format_lib.SaveAttempt, arrays: arrays_lib.ArrayMetas
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads arrays into host memory and yields each with its path; typed PRNG keys as
    their data.

    Raises:
      DamagedError: at the first array that is not what was written.
    """
    parts = [
        ArrayRegion(path, meta, arrays_lib.whole_box(meta.shape))
        for path, meta in arrays.items()
    ]
    yield from zip(arrays, read_regions(attempt, parts), strict=True)


def read_regions(
    attempt: format_lib.SaveAttempt,
    parts: Iterable[ArrayRegion],
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
    """
    database = store_lib.Database(attempt.store, attempt.prefix)
    stored_bytes = _stored_bytes(attempt)
    limit = min(budget_bytes, AHEAD_BYTES)
    # The reads under way: each part, its memory, and a function that waits for the
    # read.
    reading: collections.deque[tuple[ArrayRegion, np.ndarray, Callable[[], None]]] = (
        collections.deque()
    )
    held = 0
    for part in parts:
        _check_size(attempt, part, stored_bytes)
        while reading and held + part.nbytes > limit:
            held -= reading[0][0].nbytes
            yield _finish(attempt, *reading.popleft())
        out = _allocate(attempt, part)
        reading.append((part, out, _start(database, part, out)))
        held += part.nbytes
    while reading:
        yield _finish(attempt, *reading.popleft())


def _finish(
    attempt: format_lib.SaveAttempt,
    part: ArrayRegion,
    out: np.ndarray,
    wait: Callable[[], None],
) -> np.ndarray:
    """Waits until a part has been read; raises DamagedError or UnreadableError with the
    array's path.
    """
    try:
        wait()
    except (ValueError, OSError) as e:
        raise _error(f"'{part.path}' in {attempt}", e) from e
    return out


def _check_size(
    attempt: format_lib.SaveAttempt, part: ArrayRegion, stored_bytes: int
) -> None:
    """Raises DamagedError if an array seems too large for its checkpoint and its chunks
    do not match its description.

    The check runs before memory is allocated, because a forged description may claim
    any size.
    """
    meta = part.meta
    # Smaller chunks are stored in the nodes of the database. The nodes are compressed,
    # so that their size proves nothing.
    is_outside = meta.chunk_bytes >= _INLINE_BYTES
    seems_large = is_outside and meta.nbytes > stored_bytes
    if not seems_large and meta.chunk_count <= _MANY_CHUNKS:
        return
    try:
        _check_chunks(attempt, part.path, meta)
    except (ValueError, OSError) as e:
        raise _error(f"'{part.path}', {meta}, in {attempt}", e) from e


def _check_chunks(
    attempt: format_lib.SaveAttempt, path: str, meta: arrays_lib.ArrayMeta
) -> None:
    """Counts an array's chunks and reads the first; raises ValueError if they do not
    match the description.
    """
    database = attempt.store.database(attempt.prefix)
    dimensions = len(meta.shape)
    if dimensions:
        prefix = arrays_lib.chunk_key(path, ()).encode()
        # The range of keys that begin with the prefix and a slash: "0" is the character
        # after "/".
        keys = database.list(ts.KvStore.KeyRange(prefix + b"/", prefix + b"0")).result()
        # The range also contains the keys of an array whose path begins with the
        # prefix.
        chunk = re.compile(re.escape(prefix) + rb"(/\d+){%d}" % dimensions)
        count = sum(1 for key in keys if chunk.fullmatch(key))
        if count != meta.chunk_count:
            raise ValueError(f"{count} of its {meta.chunk_count} chunks are there")
    first = (0,) * dimensions
    content = database.read(arrays_lib.chunk_key(path, first)).result().value
    arrays_lib.decode(content, meta)


def _start(
    database: store_lib.Database, part: ArrayRegion, out: np.ndarray
) -> Callable[[], None]:
    """Begins to read a part into memory; returns a function that waits for the end."""
    if arrays_lib.is_large(part.path, part.meta):
        return _start_large(database, part, out)
    return _start_small(database, part, out)


def _start_large(
    database: store_lib.Database, part: ArrayRegion, out: np.ndarray
) -> Callable[[], None]:
    """Begins to read a part with tensorstore's zarr3 driver, which assembles the
    chunks.
    """
    path, meta, box = part
    stored = database.array(path, meta.zarr())[arrays_lib.box_index(box)]
    # Tensorstore reads directly into this memory, without an intermediate copy.
    target = ts.array(out, context=database.context)
    return target.write(stored[ts.d[:].translate_to[0]]).result


def _start_small(
    database: store_lib.Database, part: ArrayRegion, out: np.ndarray
) -> Callable[[], None]:
    """Begins to read each chunk as bytes, which takes less time than opening the array."""
    path, meta, box = part
    reading = []
    for chunk in meta.chunks(box):
        reading.append((chunk, database.keys.read(arrays_lib.chunk_key(path, chunk))))

    def wait() -> None:
        for chunk, future in reading:
            stored = future.result()
            if stored.state != "value":
                raise ValueError("a chunk is missing")
            _copy(meta.box(chunk), arrays_lib.decode(stored.value, meta), box, out)

    return wait


def _error(
    what: str, e: Exception
) -> metadata_files.DamagedError | metadata_files.UnreadableError:
    """Classifies a read error as damage (wrong or missing content) or as unreadable (an
    error of the disk).
    """
    text = str(e)
    errno, status = _ERRNO.search(text), _STATUS.match(text)
    if isinstance(e, OSError):
        is_damage = False
    elif errno is not None:
        is_damage = errno[1] == "ENOENT"
    else:
        # An error without a status comes from this package's checks of bytes that were
        # read.
        is_damage = status is None or status[1] in _DAMAGE
    if is_damage:
        return metadata_files.DamagedError(
            f"{what} is not what was written: {store_lib.reason(e)}."
        )
    return metadata_files.UnreadableError(
        f"{what} cannot be read: {store_lib.reason(e)}."
    )


def _stored_bytes(attempt: format_lib.SaveAttempt) -> int:
    """Returns the size of an attempt's files in bytes; in an object store, the size
    recorded in COMMIT.
    """
    try:
        size = attempt.store.size(attempt.prefix)
    except format_lib.CheckpointError as e:
        raise metadata_files.UnreadableError(f"{attempt} cannot be read: {e}.") from e
    return metadata_files.read_commit(attempt)["bytes"] if size is None else size


def _allocate(attempt: format_lib.SaveAttempt, part: ArrayRegion) -> np.ndarray:
    try:
        return _aligned(arrays_lib.box_shape(part.box), jnp.dtype(part.meta.dtype))
    except (MemoryError, OSError) as e:
        raise format_lib.CheckpointError(
            f"'{part.path}' in {attempt} is {part.meta}: not enough memory for {part.nbytes} bytes."
        ) from e


def _aligned(shape: arrays_lib.Shape, dtype: Any) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= _MAPPED_BYTES:
        # NumPy requests huge pages for arrays of this size, and their allocation took
        # three times as long.
        memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        return memory.view(dtype).reshape(shape)
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def _copy(
    source: arrays_lib.Box, value: np.ndarray, target: arrays_lib.Box, out: np.ndarray
) -> None:
    """Copies the intersection of two boxes of an array, if they intersect."""
    out_index, value_index = [], []
    for (s_low, s_high), (t_low, t_high) in zip(source, target, strict=True):
        low, high = max(s_low, t_low), min(s_high, t_high)
        if low >= high:
            return
        out_index.append(slice(low - t_low, high - t_low))
        value_index.append(slice(low - s_low, high - s_low))
    out[tuple(out_index)] = value[tuple(value_index)]
