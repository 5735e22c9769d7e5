"""Transfers metrics from the device to the host without stalling the device."""

import collections
import functools
from collections.abc import Iterable, Iterator, Mapping

import jax

from xshard.metrics import rows

# The number of dispatched steps whose metrics the host has not read yet.
IN_FLIGHT = 2


@functools.cache
def _is_on_host() -> bool:
    # On CPUs the host reads the device's memory, and the call would cost more than the
    # read.
    return jax.default_backend() == "cpu"


def to_host(arrays: Iterable[jax.Array]) -> None:
    """Starts to copy replicated arrays to the host, beside later steps, so that reading
    them does not wait.
    """
    if _is_on_host():
        return
    for array in arrays:
        array.copy_to_host_async()


class InFlight:
    """A bound on the steps in flight.

    The host dispatches some steps before an earlier one has ended, so the devices
    always have work. The bound is small because host memory holds a batch for each step
    in flight, and because XLA's CPU collectives deadlock when many steps compete for
    few threads.
    """

    def __init__(self) -> None:
        self._arrays: collections.deque[jax.Array] = collections.deque()

    def push(self, array: jax.Array) -> None:
        """Adds a step by one of its results; waits for the step that was dispatched
        `IN_FLIGHT` steps before.
        """
        self._arrays.append(array)
        if len(self._arrays) > IN_FLIGHT:
            # One program computes all results of a step, so waiting for one of them is
            # enough.
            self._arrays.popleft().block_until_ready()


class Deferred:
    """Metrics on their way to the host, which reads those of a step only after some
    later steps have been dispatched.
    """

    def __init__(self) -> None:
        self._pending: collections.deque[tuple[int, Mapping[str, jax.Array]]] = (
            collections.deque()
        )

    def push(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Adds the metrics of a step."""
        to_host(metrics.values())
        self._pending.append((step, metrics))

    def due(self, step: int) -> Iterator[rows.Row]:
        """Yields the rows of steps that are no longer in flight after a step was
        dispatched.
        """
        while self._pending and self._pending[0][0] + IN_FLIGHT <= step:
            yield self._pop()

    def flush(self) -> Iterator[rows.Row]:
        """Waits for all steps that were added, and yields their rows."""
        while self._pending:
            yield self._pop()

    def _pop(self) -> rows.Row:
        step, metrics = self._pending.popleft()
        row: rows.Row = {"step": step}
        for name, value in metrics.items():
            row[name] = rows.to_number(value)
        return row
