"""The copy of a state to the host: the caller of a save copies, and the thread of the
save writes.

The two overlap only if this process's share of the state exceeds the budget of host
memory.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from xshard.checkpoint import budget as budget_lib
from xshard.checkpoint import leaves as leaves_lib
from xshard.checkpoint import ownership
from xshard.checkpoint import store as store_lib

# Waits until a copy is on the host, and returns it.
_Finish = Callable[[], np.ndarray]
# After this long without a chunk, the thread writes what it has collected: the copy may
# be waiting for that memory.
_IDLE_SECONDS = 0.05


class HostCopy:
    """A queue of chunks to write, filled by the caller of a save and emptied by the
    thread of the save.
    """

    def __init__(
        self,
        plan: ownership.Plan,
        budget_bytes: int,
        progress: budget_lib.ProgressReporter,
    ):
        """Creates an empty queue.

        Args:
          plan: the chunks that this process writes.
          budget_bytes: the most bytes that may be copied but not yet written.
          progress: receives the number of bytes written.
        """
        self._plan = plan
        self._progress = progress
        self._budget = budget_lib.Budget(budget_bytes)
        self._may_write = threading.Event()
        self._queue: queue.SimpleQueue[ownership.Chunk | BaseException | None] = (
            queue.SimpleQueue()
        )

    def make(self, leaves: dict[str, Any]) -> None:
        """Copies arrays, which may be donated afterwards. Waits while the budget is
        used up.

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

    def chunks(self) -> Iterator[ownership.Chunk | None]:
        """Yields the chunks for the thread, and None when no chunk has arrived for a
        while.

        Raises:
          CheckpointError: if the copy failed.
        """
        # Writing at the same time would slow down the copy, for which the caller waits.
        self._may_write.wait()
        while True:
            try:
                chunk = self._queue.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                yield None
                continue
            if chunk is None:
                return
            if isinstance(chunk, BaseException):
                raise store_lib.CheckpointError(f"copying to the host failed: {chunk}")
            yield chunk

    def written(self, nbytes: int) -> None:
        """Gives the memory of bytes that have been written back to the budget."""
        self._budget.give(nbytes)
        self._progress.add(nbytes)

    def close(self) -> None:
        """Releases a caller that waits for the budget, because nothing more will be
        written.
        """
        self._budget.close()

    def _copy(self, leaves: dict[str, Any]) -> None:
        shards: dict[str, list[Any]] = {}
        copying: list[tuple[ownership.Piece, _Finish]] = []
        for piece in self._plan.pieces:
            nbytes = self._plan.arrays[piece.path].chunk_bytes
            if copying and not self._budget.fits(nbytes):
                # Writing begins early, since only written chunks return memory to the
                # budget. Without this the copy would wait forever.
                self._hand_over(copying)
                self._may_write.set()
            self._budget.take(nbytes)
            if piece.path not in shards:
                shards[piece.path] = _local_shards(leaves[piece.path])
            shard = shards[piece.path][piece.shard]
            copying.append((piece, start_copy(shard, piece)))
        self._hand_over(copying)

    def _hand_over(self, copying: list[tuple[ownership.Piece, _Finish]]) -> None:
        for piece, finish in copying:
            self._queue.put((piece, finish()))
        copying.clear()


def start_copy(shard: Any, piece: ownership.Piece) -> _Finish:
    """Begins to copy a piece of a shard; returns a function that waits for the copy and
    returns it.
    """
    box = tuple(slice(i, i + n) for i, n in zip(piece.start, piece.shape, strict=True))
    if isinstance(shard, np.ndarray):
        return lambda: np.array(shard[box])
    if shard.device.platform == "cpu":
        # This is a view of the array's memory. JAX does not donate a buffer while NumPy
        # refers to it.
        return lambda: np.asarray(shard)[box]
    return start_device_copy(shard, piece)


def start_device_copy(shard: jax.Array, piece: ownership.Piece) -> _Finish:
    """Begins to copy a piece of a shard from a device with its own memory."""
    if piece.shape != shard.shape:
        # The slice is taken on the device, so that only this process's piece is
        # transferred.
        shard = jax.lax.dynamic_slice(shard, piece.start, piece.shape)
    shard.copy_to_host_async()
    return lambda: np.asarray(shard)


def _local_shards(leaf: Any) -> list[Any]:
    data, _ = leaves_lib.key_data(leaf)
    if not isinstance(data, jax.Array):
        return [np.asarray(data)]
    return [shard.data for shard in data.addressable_shards]
