"""The copy of a state to the host, which the caller of a save makes while the save's thread writes it."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import budget as budget_lib
from xshard.checkpoint import ownership
from xshard.checkpoint import store as store_lib

# What waits until a copy is on the host.
_Finish = Callable[[], np.ndarray]
# After so long without a chunk, what has been gathered is written: the copy may wait for its bytes.
_IDLE_SECONDS = 0.05


class HostCopy:
    """Copies of what this process writes, on their way from the caller of a save to its thread."""

    def __init__(self, plan: ownership.Plan, budget_bytes: int, progress: budget_lib.Progress):
        """Begins with nothing copied.

        Args:
          plan: what this process writes.
          budget_bytes: how many bytes may be held at a time: those that are copied and not yet written.
          progress: is told of what is written.
        """
        self._plan = plan
        self._progress = progress
        self._budget = budget_lib.Budget(budget_bytes)
        self._may_write = threading.Event()
        self._queue: queue.SimpleQueue[ownership.Chunk | BaseException | None] = queue.SimpleQueue()

    def make(self, leaves: dict[str, Any]) -> None:
        """Copies arrays, so that they may be donated afterwards; waits where the budget is used up.

        Args:
          leaves: the arrays by path.
        """
        try:
            self._copy(leaves)
            self._queue.put(None)
        except BaseException as e:
            # The thread, and with it all other processes, must hear that no more chunks come.
            self._queue.put(e)
            raise
        finally:
            self._may_write.set()

    def chunks(self) -> Iterator[ownership.Chunk | None]:
        """The chunks, for the thread; None where none has come for a while.

        Raises:
          CheckpointError: if the copy has failed.
        """
        # To write beside the copy would slow down what the caller waits for.
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
        """Gives bytes that are on the disk back to the budget."""
        self._budget.give(nbytes)
        self._progress.add(nbytes)

    def close(self) -> None:
        """Lets the caller pass, since nothing more will be written."""
        self._budget.close()

    def _copy(self, leaves: dict[str, Any]) -> None:
        shards: dict[str, list[Any]] = {}
        copying: list[tuple[ownership.Piece, _Finish]] = []
        for piece in self._plan.pieces:
            nbytes = self._plan.arrays[piece.path].chunk_bytes
            if copying and not self._budget.fits(nbytes):
                # Only what is written gives bytes back, and only what has been copied can be written.
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
    """Begins to copy a piece of a shard, and returns what ends it."""
    box = tuple(slice(i, i + n) for i, n in zip(piece.start, piece.shape, strict=True))
    if isinstance(shard, np.ndarray):
        return lambda: np.array(shard[box])
    if shard.device.platform == "cpu":
        # The array's own memory: as long as NumPy looks at it, JAX donates it to nobody.
        return lambda: np.asarray(shard)[box]
    return start_device_copy(shard, piece)


def start_device_copy(shard: jax.Array, piece: ownership.Piece) -> _Finish:
    """Begins to copy a piece of a shard from a device that has memory of its own."""
    if piece.shape != shard.shape:
        # On the device, so that only what this process writes goes over the bus.
        shard = jax.lax.dynamic_slice(shard, piece.start, piece.shape)
    shard.copy_to_host_async()
    return lambda: np.asarray(shard)


def _local_shards(leaf: Any) -> list[Any]:
    data, _ = arrays_lib.key_data(leaf)
    if not isinstance(data, jax.Array):
        return [np.asarray(data)]
    return [data.addressable_data(i) for i in range(len(data.addressable_shards))]
