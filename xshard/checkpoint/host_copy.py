"""The copy of a state to the host: the caller of a save copies, and the thread of the
save writes.

The two overlap only if this process's part of the state exceeds the budget of host
memory.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from xshard.checkpoint import leaves as leaves_lib
from xshard.checkpoint import progress
from xshard.checkpoint import store as store_lib

# Waits until a copy is on the host, and returns it.
_WaitForCopy = Callable[[], np.ndarray]
# After this long without a chunk, the thread writes what it has collected: the copy may
# be waiting for that memory.
_IDLE_SECONDS = 0.05


class Budget:
    """A number of bytes that one thread takes and another gives back."""

    def __init__(self, limit: int):
        """Creates a budget of `limit` bytes, none of which are taken."""
        self._limit = limit
        self._in_use = 0
        self._closed = False
        self._changed = threading.Condition()

    def fits(self, nbytes: int) -> bool:
        """Returns whether `nbytes` can be taken now.

        More than the limit fits if nothing else is taken, so that an array that is
        larger than the budget is copied alone.
        """
        return self._closed or not self._in_use or self._in_use + nbytes <= self._limit

    def take(self, nbytes: int) -> None:
        """Takes bytes, after waiting until they fit."""
        with self._changed:
            self._changed.wait_for(lambda: self.fits(nbytes))
            self._in_use += nbytes

    def give(self, nbytes: int) -> None:
        """Gives bytes back."""
        with self._changed:
            self._in_use -= nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Releases every waiting thread, because no more bytes will be given back."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class HostCopy:
    """A queue of chunks to write.

    The caller of a save fills it with `make`, and the thread of the save empties it
    with `chunks`.
    """

    def __init__(
        self,
        plan: leaves_lib.Plan,
        budget_bytes: int,
        reporter: progress.ProgressReporter,
    ):
        """Creates an empty queue.

        Args:
          plan: the chunks that this process writes.
          budget_bytes: the most bytes that may be copied but not yet written.
          reporter: receives the number of bytes written.
        """
        self._plan = plan
        self._reporter = reporter
        self._budget = Budget(budget_bytes)
        self._may_write = threading.Event()
        # Chunks with their values; then None, or the error that ended the copy.
        self._queue: queue.SimpleQueue[
            tuple[leaves_lib.Chunk, np.ndarray] | BaseException | None
        ] = queue.SimpleQueue()

    def make(self, leaves: dict[str, leaves_lib.Leaf]) -> None:
        """Copies arrays, which may be donated afterwards.

        Waits while the budget is used up.

        Args:
          leaves: the arrays by path.
        """
        try:
            self._copy(leaves)
            self._queue.put(None)
        except BaseException as e:
            # The thread must stop waiting for chunks, and report the failure to the
            # other processes.
            self._queue.put(e)
            raise
        finally:
            self._may_write.set()

    def chunks(self) -> Iterator[tuple[leaves_lib.Chunk, np.ndarray] | None]:
        """Yields the chunks with their values, for the thread.

        Yields None when no chunk has arrived for a while.

        Raises:
          CheckpointError: if the copy failed.
        """
        # Writing at the same time would slow down the copy, for which the caller waits.
        self._may_write.wait()
        while True:
            try:
                item = self._queue.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                yield None
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise store_lib.CheckpointError(f"copying to the host failed: {item}")
            yield item

    def written(self, nbytes: int) -> None:
        """Gives the memory of bytes that have been written back to the budget."""
        self._budget.give(nbytes)
        self._reporter.add(nbytes)

    def close(self) -> None:
        """Releases a caller that waits for the budget.

        Nothing more will be written.
        """
        self._budget.close()

    def _copy(self, leaves: dict[str, leaves_lib.Leaf]) -> None:
        shards: dict[str, list[Any]] = {}
        # Copies are begun before the first of them is waited for, so that the transfers
        # from the devices overlap.
        copying: list[tuple[leaves_lib.Chunk, _WaitForCopy]] = []
        for chunk in self._plan.chunks:
            nbytes = self._plan.arrays[chunk.path].chunk_bytes
            if copying and not self._budget.fits(nbytes):
                # Writing begins early, since only written chunks return memory to the
                # budget. Without this the copy would wait forever.
                self._enqueue(copying)
                copying.clear()
                self._may_write.set()
            self._budget.take(nbytes)
            if chunk.path not in shards:
                shards[chunk.path] = leaves[chunk.path].local_shards()
            _, shard = shards[chunk.path][chunk.shard]
            copying.append((chunk, start_copy(shard, chunk)))
        self._enqueue(copying)

    def _enqueue(self, copying: list[tuple[leaves_lib.Chunk, _WaitForCopy]]) -> None:
        for chunk, wait_for_copy in copying:
            self._queue.put((chunk, wait_for_copy()))


def start_copy(shard: Any, chunk: leaves_lib.Chunk) -> _WaitForCopy:
    """Begins to copy a chunk of a shard.

    Returns:
      A function that waits for the copy and returns it.
    """
    index = tuple(
        slice(start, start + size)
        for start, size in zip(chunk.start, chunk.shape, strict=True)
    )
    if isinstance(shard, np.ndarray):
        # The caller may change the array while it is written.
        return lambda: np.array(shard[index])
    if shard.device.platform == "cpu":
        # This is a view of the array's memory. JAX does not donate a buffer while NumPy
        # refers to it.
        return lambda: np.asarray(shard)[index]
    return start_device_copy(shard, chunk)


def start_device_copy(shard: jax.Array, chunk: leaves_lib.Chunk) -> _WaitForCopy:
    """Begins to copy a chunk of a shard from a device with its own memory."""
    if chunk.shape != shard.shape:
        # The slice is taken on the device, so that only this process's chunk is
        # transferred. It is dynamic, so that all chunks of a shape share a program.
        shard = jax.lax.dynamic_slice(shard, chunk.start, chunk.shape)
    shard.copy_to_host_async()
    return lambda: np.asarray(shard)
