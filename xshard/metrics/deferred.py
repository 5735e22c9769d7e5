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
    """What the host has yet to read of each dispatched step, in their order."""

    def __init__(self) -> None:
        self._steps: collections.deque[T] = collections.deque()

    def push(self, step: T) -> list[T]:
        """Adds a step that has just been dispatched.

        Returns:
          The steps that are no longer to stay in flight, which the caller reads.
        """
        self._steps.append(step)
        due = []
        while len(self._steps) > IN_FLIGHT:
            due.append(self._steps.popleft())
        return due

    def flush(self) -> list[T]:
        """Removes all steps, and returns them for the caller to read."""
        due = list(self._steps)
        self._steps.clear()
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
