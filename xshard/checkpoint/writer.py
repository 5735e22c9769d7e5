"""Writes the chunks that a process owns of one attempt to save a step."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorstore as ts

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import leaves as leaves_lib
from xshard.checkpoint import store as store_lib

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
    chunks: Iterator[tuple[leaves_lib.Chunk, np.ndarray] | None],
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

    def write_chunk(self, chunk: leaves_lib.Chunk, value: np.ndarray) -> None:
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
