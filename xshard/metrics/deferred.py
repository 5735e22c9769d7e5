"""Transfers metrics from the device to the host without stalling the device."""

import collections
from collections.abc import Iterable, Iterator, Mapping

import jax

from xshard.metrics import rows

# The number of dispatched steps whose metrics the host has not read yet.
IN_FLIGHT = 2


def to_host(arrays: Iterable[jax.Array]) -> None:
    """Starts to copy replicated arrays to the host, beside later steps, so that reading them does not wait."""
    # On CPUs the host reads the device's memory, and the call would cost more than the read.
    if jax.default_backend() != "cpu":
        for array in arrays:
            array.copy_to_host_async()


class Deferred:
    """Metrics on their way to the host, and a bound on the steps in flight.

    The host reads the metrics of a step only after some later steps have been dispatched, so the device always has
    work. The bound is small because host memory holds a batch for each step in flight, and because XLA's CPU
    collectives deadlock when many steps compete for few threads.
    """

    def __init__(self) -> None:
        self._pending: collections.deque[tuple[int, Mapping[str, jax.Array], bool]] = (
            collections.deque()
        )

    def push(self, step: int, metrics: Mapping[str, jax.Array], keep: bool) -> Iterator[rows.Row]:
        """Adds a step's metrics; yields the rows of earlier kept steps that are due. `keep` asks for a row of this step."""
        if keep:
            to_host(metrics.values())
        self._pending.append((step, metrics, keep))
        return self._pop(IN_FLIGHT)

    def flush(self) -> Iterator[rows.Row]:
        """Waits for all steps in flight; yields the rows of those kept."""
        return self._pop(0)

    def _pop(self, remain: int) -> Iterator[rows.Row]:
        while len(self._pending) > remain:
            step, metrics, keep = self._pending.popleft()
            # One program computes all metrics of a step, so waiting for one of them is enough.
            next(iter(metrics.values())).block_until_ready()
            if keep:
                row: rows.Row = {"step": step}
                for name, value in metrics.items():
                    row[name] = rows.to_number(value)
                yield row
