"""Results of dispatched programs, which the host reads without stalling the devices.

The host dispatches some steps before an earlier one has ended, so that the devices
always have work, and reads a step's results only when they are ready.
"""

import collections
import functools
from collections.abc import Iterable
from typing import Generic, TypeVar

import jax

T = TypeVar("T")

# The number of dispatched steps whose results the host has not read. It is small
# because host memory holds a batch for each of them, and because XLA's CPU collectives
# deadlock when many steps compete for few threads.
IN_FLIGHT = 2


class Queue(Generic[T]):
    """What the host has yet to read of each dispatch, in their order."""

    def __init__(self) -> None:
        # With the number of steps of each.
        self._dispatches: collections.deque[tuple[T, int]] = collections.deque()
        self._num_steps = 0

    def push(self, dispatch: T, num_steps: int = 1) -> list[T]:
        """Adds what has just been dispatched.

        Args:
          dispatch: what the host will read.
          num_steps: the number of steps that it is of.

        Returns:
          What is no longer to stay in flight, since at least `IN_FLIGHT` steps have
          been dispatched after it; the caller reads it.
        """
        self._dispatches.append((dispatch, num_steps))
        self._num_steps += num_steps
        due = []
        while self._num_steps - self._dispatches[0][1] >= IN_FLIGHT:
            first, count = self._dispatches.popleft()
            self._num_steps -= count
            due.append(first)
        return due

    def flush(self) -> list[T]:
        """Removes everything, and returns it for the caller to read."""
        due = [dispatch for dispatch, _ in self._dispatches]
        self._dispatches.clear()
        self._num_steps = 0
        return due


def to_host(arrays: Iterable[jax.Array]) -> None:
    """Starts to copy replicated arrays to the host, beside later steps.

    Once they are ready, reading them does not wait for a transfer.
    """
    if _is_on_host():
        return
    for array in arrays:
        array.copy_to_host_async()


@functools.cache
def _is_on_host() -> bool:
    # On CPUs the host reads the device's memory, and the call would cost more than the
    # read.
    return jax.default_backend() == "cpu"
