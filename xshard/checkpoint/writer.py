"""Writes one attempt: each process its pieces, process 0 the rest, and COMMIT as the very last thing."""

import dataclasses
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import budget as budget_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import ownership
from xshard.checkpoint import store as store_lib

Copy = Callable[[], np.ndarray]

# What is written in one transaction, which holds it until it is committed, and how many are under way.
_BATCH_BYTES = 128 << 20
_BATCHES = 4
# As many files are written at a time as a transaction fills.
_FILE_BYTES = 32 << 20
_PACKAGES = ("jax", "jaxlib", "dm-haiku", "optax", "tensorstore", "numpy")


def copy_to_host(
    plan: ownership.Plan,
    leaves: dict[str, Any],
    budget: budget_lib.Budget,
    put: Callable[[ownership.Chunk], None],
    full: Callable[[], None],
) -> None:
    """Copies what this process writes, so that the arrays may be donated afterwards.

    Args:
      plan: what this process writes.
      leaves: the arrays by path.
      budget: the bytes that may be held; given back when they are written.
      put: takes each chunk.
      full: called before this waits for bytes.
    """
    shards: dict[str, list[Any]] = {}
    copying: list[tuple[ownership.Piece, Copy]] = []
    for piece in plan.pieces:
        nbytes = plan.arrays[piece.path].chunk_bytes
        if copying and not budget.fits(nbytes):
            _finish_copies(copying, put)
            full()
        budget.take(nbytes)
        if piece.path not in shards:
            shards[piece.path] = _local_shards(leaves[piece.path])
        copying.append((piece, start_copy(shards[piece.path][piece.shard], piece)))
    _finish_copies(copying, put)


def start_copy(shard: Any, piece: ownership.Piece) -> Copy:
    """Begins to copy a piece of a shard, and returns what ends it."""
    box = tuple(slice(i, i + n) for i, n in zip(piece.start, piece.shape, strict=True))
    if isinstance(shard, np.ndarray):
        return lambda: np.array(shard[box])
    if shard.device.platform == "cpu":
        # The array's own memory: as long as NumPy looks at it, JAX donates it to nobody.
        return lambda: np.asarray(shard)[box]
    return start_device_copy(shard, piece)


def start_device_copy(shard: jax.Array, piece: ownership.Piece) -> Copy:
    """Begins to copy a piece of a shard from a device that has memory of its own."""
    if piece.shape != shard.shape:
        # On the device, so that only what this process writes goes over the bus.
        shard = jax.lax.dynamic_slice(shard, piece.start, piece.shape)
    shard.copy_to_host_async()
    return lambda: np.asarray(shard)


def write_part(
    attempt: format_lib.Attempt,
    process: int,
    arrays: dict[str, arrays_lib.ArrayMeta],
    chunks: Iterator[ownership.Chunk | None],
    written: Callable[[int], None],
) -> int:
    """Writes what a process owns into its own database; process 0 the descriptions of arrays too.

    Args:
      attempt: the attempt.
      process: the process.
      arrays: how each array is stored.
      chunks: what it owns; None where the next one may wait for bytes to be written.
      written: called with the number of bytes that need not be held any more.

    Returns:
      The number of keys.
    """
    batches, keys = _Batches(attempt, process, arrays, written), 0
    for path, meta in arrays.items() if process == 0 else ():
        batches.write(f"{path}/zarr.json", json.dumps(meta.zarr()).encode())
        keys += 1
    for chunk in chunks:
        if chunk is None:
            batches.flush()
        else:
            batches.write_chunk(*chunk)
            keys += 1
    batches.flush()
    if keys:
        sums = format_lib.to_json(batches.sums())
        attempt.store.create(attempt.part(process) + format_lib.SUMS, sums)
    attempt.store.sync(attempt.part(process))
    return keys


def merge(
    attempt: format_lib.Attempt, processes: list[int], arrays: dict[str, arrays_lib.ArrayMeta]
) -> dict[str, arrays_lib.ArrayMeta]:
    """Makes one database of those of some processes; their data stays where it is.

    Returns:
      How each array is stored, with the checksums of what is stored.

    Raises:
      CheckpointError: if they do not hold each key of the arrays.
    """
    # Entries are copied within one context only.
    context = store_lib.make_context()
    merged = attempt.store.database(attempt.prefix, context)
    transaction = ts.Transaction(atomic=True)
    for process in processes:
        part = attempt.store.database(attempt.part(process), context)
        part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_async().result()
    expected = {key.encode() for path, meta in arrays.items() for key in meta.keys(path)}
    found = set(merged.list().result())
    if found != expected:
        raise format_lib.CheckpointError(
            f"{len(expected - found)} keys are missing and {len(found - expected)} are too many, "
            f"such as {sorted(found ^ expected)[0].decode()}"
        )
    sums: dict[str, int] = {}
    for process in processes:
        content = attempt.store.read(attempt.part(process) + format_lib.SUMS)
        if content is None:
            raise format_lib.CheckpointError(f"{attempt.part(process)}{format_lib.SUMS} is gone")
        sums |= json.loads(content)
    of_chunks = lambda path, meta: tuple(sums[key] for key in meta.keys(path)[1:])
    return {p: dataclasses.replace(m, sums=of_chunks(p, m)) for p, m in arrays.items()}


def describe(
    attempt: format_lib.Attempt,
    arrays: dict[str, arrays_lib.ArrayMeta],
    metadata: dict[str, Any],
    data: list[Any],
) -> None:
    """Writes meta.json.

    Args:
      attempt: the attempt.
      arrays: how each array is stored.
      metadata: the run's own.
      data: the position in the data of each process.
    """
    meta = {
        "version": format_lib.VERSION,
        "step": attempt.step,
        "arrays": {path: dataclasses.asdict(meta) for path, meta in arrays.items()},
        "metadata": metadata,
        "data": data,
        "written_with": {
            "processes": len(data),
            "devices": jax.device_count(),
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
    }
    attempt.store.create(attempt.prefix + format_lib.META, format_lib.to_json(meta))


def commit(
    attempt: format_lib.Attempt,
    keys: int,
    nbytes: int,
    metrics: dict[str, float],
    nonfinite: list[str] | None = None,
    owner: format_lib.Owner | None = None,
) -> None:
    """Makes an attempt count.

    Args:
      attempt: the attempt.
      keys: the number of keys in its database.
      nbytes: the size of its arrays.
      metrics: what the best checkpoint is chosen by.
      nonfinite: paths of arrays that are to be finite and are not, not necessarily all; None: nobody has looked.
      owner: the run that it is of.
    """
    checksums = {}
    for name in (format_lib.META, format_lib.MANIFEST):
        content = attempt.store.read(attempt.prefix + name)
        if content is None:
            raise format_lib.CheckpointError(f"{attempt}/{name} is gone")
        checksums[name] = format_lib.checksum(content)
    # All folders must be on the disk before the file that says so.
    attempt.store.sync(attempt.prefix)
    said: dict[str, Any] = {
        "step": attempt.step,
        "attempt": attempt.nonce,
        "keys": keys,
        "bytes": nbytes,
        "time": time.time(),
        "sha256": checksums,
        "metrics": metrics,
    }
    if nonfinite is not None:
        said[format_lib.NONFINITE] = nonfinite
    if owner is not None:
        said[format_lib.OWNER] = {"id": owner.id, "fingerprint": owner.fingerprint}
    content = format_lib.seal(said)
    attempt.store.create(attempt.prefix + format_lib.COMMIT, content)


def remove(attempt: format_lib.Attempt, *, by_hand: bool = False) -> None:
    """Deletes an attempt; from the first instant on it does not count. If a person does, that is noted.

    Raises:
      CheckpointError: if it is a link, or cannot be deleted.
    """
    if attempt.is_link:
        raise format_lib.CheckpointError(
            f"{attempt} is a link that no run has made: delete it, and what it leads to, by hand."
        )
    if by_hand:
        format_lib.note_removed(attempt)
    # Without COMMIT it does not count, however far the rest of the deletion comes.
    attempt.store.delete(attempt.prefix + format_lib.COMMIT)
    attempt.store.sync_folder(attempt.prefix)
    attempt.store.delete_folder(attempt.prefix)


class _Batches:
    """Writes into a process's database in transactions of about `_BATCH_BYTES`."""

    def __init__(
        self,
        attempt: format_lib.Attempt,
        process: int,
        arrays: dict[str, arrays_lib.ArrayMeta],
        written: Callable[[int], None],
    ):
        context = store_lib.make_context()
        self._database = attempt.store.database(
            attempt.part(process), context, target_data_file_size=_FILE_BYTES
        )
        self._context = context
        self._arrays = arrays
        self._written = written
        self._open: tuple[str, Any] = ("", None)
        self._under_way: list[tuple[Any, int]] = []
        self._sums: dict[str, int] = {}
        self._large: list[tuple[str, tuple[int, ...]]] = []
        self._begin()

    def write(self, key: str, content: bytes) -> None:
        self._target.write(key, content)
        self._keys += 1

    def write_chunk(self, piece: ownership.Piece, value: np.ndarray) -> None:
        meta = self._arrays[piece.path]
        if meta.chunk_bytes < arrays_lib.LARGE_BYTES:
            content = arrays_lib.encode(value, meta.chunk_shape)
            key = arrays_lib.chunk_key(piece.path, piece.chunk)
            self._sums[key] = arrays_lib.stored_sum(content)
            self.write(key, content)
        else:
            box = tuple(slice(*bounds) for bounds in meta.box(piece.chunk))
            target = self._array(piece.path)[box].with_transaction(self._transaction)
            # Tensorstore refers to the memory instead of copying it.
            writing = target.write(value, can_reference_source_data_indefinitely=True)
            self._copies.append(writing.copy)
            self._large.append((piece.path, piece.chunk))
            self._keys += 1
        self._nbytes += meta.chunk_bytes
        if self._nbytes >= _BATCH_BYTES:
            self._commit()
            self._wait(leave=_BATCHES - 1)

    def sums(self) -> dict[str, int]:
        """The checksum of each chunk that has been written, by its key."""
        ends = {}
        for path, chunk in self._large:
            key = arrays_lib.chunk_key(path, chunk)
            # Tensorstore has made it, and written it after the chunk.
            ends[key] = self._database.read(key, byte_range=self._arrays[path].sum_place)
        read = {key: arrays_lib.stored_sum(end.result().value) for key, end in ends.items()}
        return self._sums | read

    def flush(self) -> None:
        if self._keys:
            self._commit()
        self._wait(leave=0)

    def _array(self, path: str) -> Any:
        if self._open[0] != path:
            zarr = self._arrays[path].zarr()
            opened = store_lib.open_array(self._database, path, zarr, self._context)
            self._open = path, opened
        return self._open[1]

    def _begin(self) -> None:
        self._transaction = ts.Transaction(atomic=True)
        self._target = self._database.with_transaction(self._transaction)
        self._nbytes = self._keys = 0
        self._copies: list[Any] = []

    def _commit(self) -> None:
        for copy in self._copies:
            # What cannot be written shows here, or when the transaction is committed.
            copy.result()
        self._under_way.append((self._transaction.commit_async(), self._nbytes))
        self._begin()

    def _wait(self, leave: int) -> None:
        while len(self._under_way) > leave:
            future, nbytes = self._under_way.pop(0)
            future.result()
            self._written(nbytes)


def _local_shards(leaf: Any) -> list[Any]:
    data, _ = arrays_lib.key_data(leaf)
    if not isinstance(data, jax.Array):
        return [np.asarray(data)]
    return [data.addressable_data(i) for i in range(len(data.addressable_shards))]


def _finish_copies(
    copying: list[tuple[ownership.Piece, Copy]], put: Callable[[ownership.Chunk], None]
) -> None:
    for piece, copy in copying:
        put((piece, copy()))
    copying.clear()
