"""Writes one attempt to save a step: each process writes the chunks that it owns, and
process 0 the rest, with COMMIT last.

What makes an attempt durable and whole, in this order:

1. Each process writes its chunks and syncs them (`write_part`).
2. Process 0 merges the databases (`merge`), and verifies that the result has every key
   of every array and no other (`verify`).
3. It writes meta.json (`describe`), and reads the manifest and meta.json back for their
   checksums.
4. It syncs all folders, and creates COMMIT, if absent (`commit`). Before this the
   attempt does not count, and a kill or a power loss leaves nothing but a folder that
   the next save removes.
"""

import json
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import lock as lock_lib
from xshard.checkpoint import ownership
from xshard.checkpoint import store as store_lib
from xshard.files import provenance as provenance_lib

# A transaction holds its data in memory until it is committed. These limit the size of
# a transaction, and the number of transactions under way.
_BATCH_BYTES = 128 << 20
_BATCHES = 4
# Tensorstore writes the data files of one transaction in parallel; a full transaction
# fills four of this size.
_FILE_BYTES = 32 << 20


def write_part(
    attempt: format_lib.SaveAttempt,
    process: int,
    arrays: arrays_lib.ArrayMetas,
    chunks: Iterator[tuple[ownership.Chunk, np.ndarray] | None],
    written: Callable[[int], None],
) -> int:
    """Writes the chunks that a process owns into its own database. Process 0 also
    writes each array's zarr.json.

    Args:
      attempt: the attempt.
      process: the index of the process.
      arrays: how each array is stored, by path.
      chunks: the chunks that the process owns, with their values. None asks to flush,
        since the next chunk may wait for memory that unwritten chunks hold.
      written: called with the number of bytes that have been written and whose memory
        may be released.

    Returns:
      The number of keys written.
    """
    batches = _Batches(attempt, process, arrays, written)
    num_keys = 0
    if process == 0:
        for path, meta in arrays.items():
            batches.write(f"{path}/zarr.json", json.dumps(meta.zarr()).encode())
            num_keys += 1
    for item in chunks:
        if item is None:
            batches.flush()
        else:
            chunk, value = item
            batches.write_chunk(chunk, value)
            num_keys += 1
    batches.flush()
    # Process 0 commits on the strength of this process's report, so the data must
    # already survive a power loss. Tensorstore has synced the files; the names of new
    # files and folders are not durable before their folders are synced, too.
    attempt.store.sync(attempt.part(process))
    return num_keys


def merge(attempt: format_lib.SaveAttempt, processes: list[int]) -> ts.KvStore:
    """Merges the databases of some processes into one that refers to their data in
    place.
    """
    # Tensorstore copies entries by reference only between databases that share one
    # context and are opened alike.
    context = store_lib.make_context()
    merged = attempt.store.database(attempt.prefix, context, is_written=True)
    transaction = ts.Transaction(atomic=True)
    for process in processes:
        prefix = attempt.part(process)
        part = attempt.store.database(prefix, context, is_written=True)
        part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_async().result()
    return merged


def verify(merged: ts.KvStore, arrays: arrays_lib.ArrayMetas) -> int:
    """Verifies that a merged database holds every key of the arrays and no other.

    Returns:
      The number of keys.

    Raises:
      CheckpointError: if a key is missing, or there is an unexpected one.
    """
    expected: set[bytes] = set()
    for path, meta in arrays.items():
        expected.update(key.encode() for key in meta.keys(path))
    listed = set(merged.list().result())
    if listed != expected:
        raise format_lib.CheckpointError(
            f"{len(expected - listed)} keys are missing and {len(listed - expected)} "
            f"are unexpected, such as {sorted(listed ^ expected)[0].decode()}"
        )
    return len(expected)


def describe(
    attempt: format_lib.SaveAttempt,
    arrays: arrays_lib.ArrayMetas,
    metadata: dict[str, Any],
    data: list[Any],
) -> None:
    """Writes meta.json.

    Args:
      attempt: the attempt.
      arrays: how each array is stored.
      metadata: the run's metadata.
      data: each process's position in the data, in order of the processes.
    """
    meta = format_lib.Meta(
        version=format_lib.VERSION,
        step=attempt.step,
        arrays=arrays,
        metadata=metadata,
        data=data,
        written_with={
            "processes": len(data),
            "devices": jax.device_count(),
            "python": platform.python_version(),
            **provenance_lib.library_versions(),
        },
    )
    content = format_lib.serialize_meta(meta)
    attempt.store.create(attempt.prefix + format_lib.META, content)


def commit(
    attempt: format_lib.SaveAttempt,
    keys: int,
    nbytes: int,
    metrics: dict[str, float],
    nonfinite: list[str] | None,
    owner: format_lib.Owner | None,
    changes: format_lib.Changes,
) -> None:
    """Creates COMMIT, which makes an attempt count.

    Args:
      attempt: the attempt.
      keys: the number of keys in its database.
      nbytes: the size of its arrays, in bytes.
      metrics: the metrics by which the best checkpoint is chosen.
      nonfinite: paths of checked arrays that are not finite, possibly incomplete; None:
        no arrays were checked.
      owner: the run that saves the attempt; None: it is not recorded.
      changes: the lock of the run, which creates COMMIT while it is held.
    """
    # The checksums are those of what the store returns, not of what was sent to it.
    checksums = {}
    for name in (format_lib.META, format_lib.MANIFEST):
        content = attempt.store.read(attempt.prefix + name)
        if content is None:
            raise format_lib.CheckpointError(f"{attempt}/{name} is missing")
        checksums[name] = format_lib.checksum(content)
    # Every folder must be durable before COMMIT exists: a power loss must not leave
    # COMMIT without its data.
    attempt.store.sync(attempt.prefix)
    run = None
    if owner is not None:
        run = provenance_lib.Identity(owner.id, owner.fingerprint)
    content = format_lib.serialize_commit(
        format_lib.Commit(
            step=attempt.step,
            attempt=attempt.nonce,
            keys=keys,
            bytes=nbytes,
            time=time.time(),
            sha256=checksums,
            metrics=metrics,
            nonfinite=nonfinite,
            run=run,
        )
    )
    # `create` is atomic and does not overwrite, so that COMMIT exists as a whole or not
    # at all.
    changes.create(attempt.prefix + format_lib.COMMIT, content)


def remove(
    attempt: format_lib.SaveAttempt,
    *,
    changes: format_lib.Changes | None = None,
    by_hand: bool = False,
) -> None:
    """Deletes an attempt. It stops counting first, so that an interrupted deletion
    leaves nothing to restore.

    Args:
      attempt: the attempt.
      changes: the lock of the run that deletes, without which nothing is deleted;
        None: a person does.
      by_hand: whether to record the deletion in the store, which permits the run to
        resume from an earlier step.

    Raises:
      CheckpointError: if the attempt's folder is a link, or cannot be deleted.
    """
    if attempt.is_link:
        raise format_lib.CheckpointError(
            f"{attempt} is a symbolic link, which a run never creates: delete it and "
            "its target by hand."
        )
    if changes is None:
        changes = attempt.store
    if by_hand:
        try:
            format_lib.note_removed(attempt, changes)
        except format_lib.CheckpointError as e:
            # A run needs the note of its newest checkpoint only. A full disk, which has
            # no room for a note, must let older ones be deleted.
            there = format_lib.committed(attempt.store)
            if all(other.step <= attempt.step for other in there):
                raise format_lib.CheckpointError(
                    f"{e}. The deletion of the newest checkpoint must be recorded: "
                    "make room first, as by deleting an older one."
                ) from e
    # Without COMMIT the attempt does not count, however far the rest of the deletion
    # gets. The sync keeps this order through a power loss.
    changes.delete(attempt.prefix + format_lib.COMMIT)
    attempt.store.sync_folder(attempt.prefix)
    if format_lib.ABANDONED in attempt.marks and isinstance(
        attempt.store, store_lib.Bucket
    ):
        # The mark stays: the run that was writing the attempt may wake up and create
        # its COMMIT.
        for name in attempt.store.names(attempt.prefix):
            if name != attempt.prefix + format_lib.ABANDONED:
                attempt.store.delete(name)
    else:
        attempt.store.delete_folder(attempt.prefix)


def settle(store: store_lib.Store, lock: lock_lib.Lock) -> None:
    """Makes what the last holder of a store's lock does late do no harm.

    This process has taken the lock over from it, and has not looked yet which
    checkpoints count. See `xshard.checkpoint.lock`.

    Args:
      store: the store.
      lock: its lock, which this process holds.
    """
    if lock.inherited is None:
        return
    for attempt in format_lib.attempts(store):
        if attempt.folder in lock.inherited:
            # A person may have pinned it since, and the deletion have failed.
            if format_lib.PINNED not in attempt.marks:
                remove(attempt, changes=lock)
        # COMMIT is read by name, since a listing may lag behind.
        elif store.read(attempt.prefix + format_lib.COMMIT) is None:
            note = {"abandoned": time.strftime("%Y-%m-%d %H:%M:%S")}
            if format_lib.ABANDONED not in attempt.marks:
                store.create(
                    attempt.prefix + format_lib.ABANDONED, format_lib.to_json(note)
                )
    lock.announce([])


class _Transaction:
    """A transaction that is being filled.

    Attributes:
      tensorstore: the transaction.
      keys: the database within it.
      num_keys: the number of keys written into it.
      nbytes: the size of the chunks written into it.
      copies: for each large chunk, a future that is done when tensorstore needs its
        memory no more.
    """

    def __init__(self, database: store_lib.Database):
        self.tensorstore = ts.Transaction(atomic=True)
        self.keys = database.keys.with_transaction(self.tensorstore)
        self.num_keys = 0
        self.nbytes = 0
        self.copies: list[Any] = []


class _Batches:
    """Writes into a process's database in transactions of about `_BATCH_BYTES`."""

    def __init__(
        self,
        attempt: format_lib.SaveAttempt,
        process: int,
        arrays: arrays_lib.ArrayMetas,
        written: Callable[[int], None],
    ):
        """Opens the database, for arguments as those of `write_part`."""
        self._database = store_lib.Database(
            attempt.store,
            attempt.part(process),
            is_written=True,
            target_data_file_size=_FILE_BYTES,
        )
        self._arrays = arrays
        self._written = written
        # The transactions under way: the future of each, and its size in bytes.
        self._under_way: list[tuple[Any, int]] = []
        self._open = _Transaction(self._database)

    def write(self, key: str, content: bytes) -> None:
        """Writes a value."""
        self._open.keys.write(key, content)
        self._open.num_keys += 1

    def write_chunk(self, chunk: ownership.Chunk, value: np.ndarray) -> None:
        """Writes a chunk, whose memory must not change until `written` is called."""
        meta = self._arrays[chunk.path]
        if not arrays_lib.is_large(chunk.path, meta):
            content = arrays_lib.encode(value, meta.chunk_shape)
            self.write(arrays_lib.chunk_key(chunk.path, chunk.grid_index), content)
        else:
            slices = arrays_lib.as_slices(meta.index_of(chunk.grid_index))
            array = self._database.array(chunk.path, meta.zarr())
            target = array[slices].with_transaction(self._open.tensorstore)
            # Nobody modifies this memory before it is written, so tensorstore need not
            # copy it.
            writing = target.write(value, can_reference_source_data_indefinitely=True)
            self._open.copies.append(writing.copy)
            self._open.num_keys += 1
        self._open.nbytes += meta.chunk_bytes
        if self._open.nbytes >= _BATCH_BYTES:
            self._commit()
            self._wait(leave=_BATCHES - 1)

    def flush(self) -> None:
        """Waits until everything is written."""
        if self._open.num_keys:
            self._commit()
        self._wait(leave=0)

    def _commit(self) -> None:
        full = self._open
        for copy in full.copies:
            # Write errors surface here or when the transaction is committed.
            copy.result()
        self._under_way.append((full.tensorstore.commit_async(), full.nbytes))
        self._open = _Transaction(self._database)

    def _wait(self, leave: int) -> None:
        """Waits until at most some transactions are under way."""
        while len(self._under_way) > leave:
            future, nbytes = self._under_way.pop(0)
            future.result()
            self._written(nbytes)
