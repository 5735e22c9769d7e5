"""Reads parts of arrays from a checkpoint, and names what is damaged."""

import collections
import contextlib
import math
import mmap
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import schema
from xshard.checkpoint import store as store_lib

# What tensorstore says of bytes that are not what was written, or of a file that is not there. All else, and every
# error of the disk, is an error: the bytes may be there and right.
_DAMAGE = ("DATA_LOSS", "INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION", "NOT_FOUND")
_STATUS = re.compile(r"([A-Z_]{6,}):")
_ERRNO = re.compile(r"os_error_code='(\w+)'")
# As much is read ahead of what is placed; more was not faster.
_AHEAD_BYTES = 256 << 20
# XLA's CPU takes memory of this alignment as it is; what is not, it copies.
_ALIGNMENT = 64
_MAPPED_BYTES = 4 << 20
# Chunks that are counted before they are read.
_MANY_CHUNKS = 4096
# Values smaller than this, checksum and all, are kept with their keys.
_INLINE_BYTES = 1024


class DamagedError(format_lib.CheckpointError):
    """A checkpoint that counts but does not hold what was written."""


class UnreadableError(format_lib.CheckpointError):
    """A checkpoint that the disk or the service does not give; it may be whole."""


def read_meta(attempt: format_lib.Attempt) -> dict[str, Any]:
    """The description of a checkpoint, after its checksums have been verified.

    Raises:
      DamagedError: if a file is missing or not what was written.
      CheckpointError: if it is of a version that this code does not know.
    """
    return read_both(attempt)[1]


def read_both(attempt: format_lib.Attempt) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads COMMIT and meta.json, as `read_commit` and `read_meta`, each once."""
    commit = read_commit(attempt)
    contents = {}
    for name in (format_lib.META, format_lib.MANIFEST):
        contents[name] = _read_file(attempt, name)
        if format_lib.checksum(contents[name]) != commit["sha256"].get(name):
            raise DamagedError(f"{attempt}/{name} is not what was written (its checksum differs).")
    return commit, _parse(attempt, format_lib.META, contents[format_lib.META], schema.meta)


def read_commit(attempt: format_lib.Attempt) -> dict[str, Any]:
    """The content of COMMIT, with the metrics of METRICS; DamagedError if it is not this attempt's."""
    content = _read_file(attempt, format_lib.COMMIT)
    commit = _parse(attempt, format_lib.COMMIT, content, schema.commit)
    if (commit["step"], commit["attempt"]) != (attempt.step, attempt.nonce):
        raise DamagedError(f"{attempt}/{format_lib.COMMIT} is another checkpoint's.")
    # Damage there is none of the state.
    with contextlib.suppress(DamagedError):
        commit["metrics"] |= added_metrics(attempt)
    return commit


def added_metrics(attempt: format_lib.Attempt) -> dict[str, float]:
    """The content of METRICS, which need not be there; DamagedError if it is not what was written."""
    if format_lib.METRICS not in attempt.marks:
        return {}
    content = _read_file(attempt, format_lib.METRICS)
    return _parse(attempt, format_lib.METRICS, content, schema.metrics)


def array_metas(meta: dict[str, Any]) -> dict[str, arrays_lib.ArrayMeta]:
    """The arrays of a description, by path."""
    return {path: _array_meta(entry) for path, entry in meta["arrays"].items()}


def _array_meta(entry: dict[str, Any]) -> arrays_lib.ArrayMeta:
    sums = entry.get("sums")
    return arrays_lib.ArrayMeta(
        shape=tuple(entry["shape"]),
        dtype=entry["dtype"],
        chunk_shape=tuple(entry["chunk_shape"]),
        key_impl=entry.get("key_impl"),
        sharding=entry.get("sharding", ""),
        sums=None if sums is None else tuple(sums),
    )


def read_arrays(
    attempt: format_lib.Attempt, arrays: dict[str, arrays_lib.ArrayMeta], budget_bytes: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads arrays into host memory, each with its path; PRNG keys as their data.

    Raises:
      DamagedError: at the first that is not what was written.
    """
    requests = (
        (path, meta, tuple((0, size) for size in meta.shape)) for path, meta in arrays.items()
    )
    yield from zip(arrays, read_parts(attempt, requests, budget_bytes), strict=True)


def read_parts(
    attempt: format_lib.Attempt,
    requests: Iterable[tuple[str, arrays_lib.ArrayMeta, arrays_lib.Box]],
    budget_bytes: int,
) -> Iterator[np.ndarray]:
    """Reads parts of arrays in the order they are asked for, many at a time.

    Args:
      attempt: a checkpoint.
      requests: the path of each array, how it is stored, and which part of it is wanted.
      budget_bytes: how much is read at a time; what is larger is read alone.

    Raises:
      DamagedError: at the first that is not what was written.
    """
    source = _Source(attempt)
    sizes = _Sizes(attempt)
    reading: collections.deque[tuple[int, np.ndarray, Callable[[], None]]] = collections.deque()
    limit, held = min(budget_bytes, _AHEAD_BYTES), 0

    def finish() -> np.ndarray:
        nonlocal held
        nbytes, out, wait = reading.popleft()
        held -= nbytes
        wait()
        return out

    for path, meta, box in requests:
        sizes.check(path, meta)
        nbytes = box_bytes(meta, box)
        while reading and held + nbytes > limit:
            yield finish()
        out = _allocate(attempt, path, meta, box)
        reading.append((nbytes, out, source.start(path, meta, box, out)))
        held += nbytes
    while reading:
        yield finish()


class _Sizes:
    """Sees whether an array can be there as it is described, before memory is taken for it."""

    def __init__(self, attempt: format_lib.Attempt):
        self._attempt = attempt
        self._stored = _stored_bytes(attempt)

    def check(self, path: str, meta: arrays_lib.ArrayMeta) -> None:
        """Raises DamagedError if a chunk is missing, or not of its size, of an array that seems too large."""
        # Smaller chunks are in the nodes of the database, which are compressed.
        is_outside = meta.chunk_bytes >= _INLINE_BYTES
        seems_large = is_outside and meta.nbytes > self._stored
        if not seems_large and meta.chunk_count <= _MANY_CHUNKS:
            return
        try:
            self._read_some(path, meta)
        except (ValueError, OSError) as e:
            _raise_unreadable(f"'{path}', {meta}, in {self._attempt}", e)

    def _read_some(self, path: str, meta: arrays_lib.ArrayMeta) -> None:
        database = self._attempt.store.database(self._attempt.prefix)
        prefix = arrays_lib.chunk_key(path, ()).encode()
        # From the slash that follows the prefix to the character after it.
        found = database.list(ts.KvStore.KeyRange(prefix + b"/", prefix + b"0")).result()
        # Another array may have a name that begins with the prefix.
        chunk = re.compile(re.escape(prefix) + rb"(/\d+){%d}" % len(meta.shape))
        there = sum(1 for key in found if chunk.fullmatch(key)) if meta.shape else 1
        if there != meta.chunk_count:
            raise ValueError(f"{there} of its {meta.chunk_count} chunks are there")
        first = database.read(arrays_lib.chunk_key(path, (0,) * len(meta.shape))).result()
        arrays_lib.decode(first.value, meta, (0,) * len(meta.shape))


class _Source:
    """The database of an attempt."""

    def __init__(self, attempt: format_lib.Attempt):
        self._attempt = attempt
        self._context = store_lib.make_context()
        self._database = attempt.store.database(attempt.prefix, self._context)
        self._array: tuple[str, Any] = ("", None)

    def start(
        self, path: str, meta: arrays_lib.ArrayMeta, box: arrays_lib.Box, out: np.ndarray
    ) -> Callable[[], None]:
        """Begins to read a part of an array, and returns what waits for the end."""
        if meta.chunk_bytes >= arrays_lib.LARGE_BYTES:
            ends = self._start_ends(path, meta, box)
            part = self._open(path, meta)[tuple(slice(*bounds) for bounds in box)]
            # Into this memory, without a copy between.
            future = ts.array(out, context=self._context).write(part[ts.d[:].translate_to[0]])
            return lambda: self._check(path, lambda: _check_ends(meta, ends, future))
        chunks = [(c, self._database.read(arrays_lib.chunk_key(path, c))) for c in meta.chunks(box)]
        return lambda: self._check(path, lambda: _decode_all(meta, chunks, box, out))

    def _start_ends(
        self, path: str, meta: arrays_lib.ArrayMeta, box: arrays_lib.Box
    ) -> list[tuple[tuple[int, ...], Any]]:
        """Begins to read the checksums of the chunks of a part, where it is known what they are to be."""
        if meta.sums is None:
            return []
        place = meta.sum_place
        return [
            (chunk, self._database.read(arrays_lib.chunk_key(path, chunk), byte_range=place))
            for chunk in meta.chunks(box)
        ]

    def _open(self, path: str, meta: arrays_lib.ArrayMeta) -> Any:
        if self._array[0] != path:
            opened = store_lib.open_array(self._database, path, meta.zarr(), self._context)
            self._array = path, opened
        return self._array[1]

    def _check(self, path: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except (ValueError, OSError) as e:
            _raise_unreadable(f"'{path}' in {self._attempt}", e)


def _decode_all(
    meta: arrays_lib.ArrayMeta,
    chunks: list[tuple[tuple[int, ...], Any]],
    box: arrays_lib.Box,
    out: np.ndarray,
) -> None:
    for chunk, future in chunks:
        found = future.result()
        if found.state != "value":
            raise ValueError("a chunk is missing")
        _copy(meta.box(chunk), arrays_lib.decode(found.value, meta, chunk), box, out)


def _check_ends(
    meta: arrays_lib.ArrayMeta, ends: list[tuple[tuple[int, ...], Any]], reading: Any
) -> None:
    reading.result()
    for chunk, future in ends:
        arrays_lib.check_sum(future.result().value, meta, chunk)


def box_bytes(meta: arrays_lib.ArrayMeta, box: arrays_lib.Box) -> int:
    """The size of a part of an array."""
    return math.prod(high - low for low, high in box) * meta.itemsize


def _read_file(attempt: format_lib.Attempt, name: str) -> bytes:
    try:
        content = attempt.store.read(attempt.prefix + name)
    except format_lib.CheckpointError as e:
        raise UnreadableError(f"{attempt}/{name} cannot be read: {e}.") from e
    if content is None:
        raise DamagedError(f"{attempt}/{name} is missing.")
    return content


def _parse(
    attempt: format_lib.Attempt, name: str, content: bytes, parse: Callable[[bytes], Any]
) -> Any:
    try:
        return parse(content)
    except format_lib.CheckpointError as e:
        raise format_lib.CheckpointError(f"{attempt}/{name} {e}") from e
    except ValueError as e:
        raise DamagedError(f"{attempt}/{name} is not what was written: {e}.") from e


def _raise_unreadable(what: str, e: Exception) -> Any:
    reason, status, errno = store_lib.reason(e), _STATUS.match(str(e)), _ERRNO.search(str(e))
    is_missing = errno is not None and errno[1] == "ENOENT"
    of_the_disk = isinstance(e, OSError) or (errno is not None and not is_missing)
    if of_the_disk or (status and status[1] not in _DAMAGE and not is_missing):
        raise UnreadableError(f"{what} cannot be read: {reason}.") from e
    raise DamagedError(f"{what} is not what was written: {reason}.") from e


def _stored_bytes(attempt: format_lib.Attempt) -> int:
    """The size of an attempt's files; of objects elsewhere, of which each would take a request, what COMMIT says."""
    try:
        size = attempt.store.size(attempt.prefix)
    except format_lib.CheckpointError as e:
        raise UnreadableError(f"{attempt} cannot be read: {e}.") from e
    return read_commit(attempt)["bytes"] if size is None else size


def _allocate(
    attempt: format_lib.Attempt, path: str, meta: arrays_lib.ArrayMeta, box: arrays_lib.Box
) -> np.ndarray:
    try:
        return _aligned(tuple(high - low for low, high in box), jnp.dtype(meta.dtype))
    except (MemoryError, OSError) as e:
        raise format_lib.CheckpointError(
            f"'{path}' in {attempt} is {meta}: there is no memory for {box_bytes(meta, box)} bytes."
        ) from e


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= _MAPPED_BYTES:
        # NumPy asks for huge pages for arrays of this size: they took three times as long to get.
        memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        return memory.view(dtype).reshape(shape)
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def _copy(
    source: arrays_lib.Box, value: np.ndarray, target: arrays_lib.Box, out: np.ndarray
) -> None:
    """Copies what two boxes of an array have in common."""
    common = [(max(s[0], t[0]), min(s[1], t[1])) for s, t in zip(source, target, strict=True)]
    if any(low >= high for low, high in common):
        return
    inner = [
        tuple(slice(low - b[0], high - b[0]) for (low, high), b in zip(common, box, strict=True))
        for box in (target, source)
    ]
    out[inner[0]] = value[inner[1]]
