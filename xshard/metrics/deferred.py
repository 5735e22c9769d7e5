"""Numbers from the device to the host, without stopping the device."""

import collections
from collections.abc import Iterator, Mapping

import jax

from xshard.metrics import rows

# Steps that may have been dispatched and not yet looked at.
IN_FLIGHT = 2


class Deferred:
    """Metrics on their way to the host, and a bound on the steps in flight.

    The host asks for the metrics of a step only when some later steps have been dispatched, so that the
    device always has work. The bound is small: host memory holds a batch for each step in flight, and
    XLA's CPU collectives deadlock when many steps compete for few threads.
    """

    def __init__(self) -> None:
        self._pending: collections.deque[tuple[int, Mapping[str, jax.Array], bool]] = (
            collections.deque()
        )

    def push(self, step: int, metrics: Mapping[str, jax.Array], keep: bool) -> Iterator[rows.Row]:
        """Takes a step's metrics; returns the rows that are due, of those that were to be kept."""
        if keep:
            for value in metrics.values():
                value.copy_to_host_async()
        self._pending.append((step, metrics, keep))
        return self._pop(IN_FLIGHT)

    def flush(self) -> Iterator[rows.Row]:
        """Waits for all steps in flight; returns their rows."""
        return self._pop(0)

    def _pop(self, remain: int) -> Iterator[rows.Row]:
        while len(self._pending) > remain:
            step, metrics, keep = self._pending.popleft()
            # All metrics come together, from one computation.
            next(iter(metrics.values())).block_until_ready()
            if keep:
                row: rows.Row = {"step": step}
                for name, value in metrics.items():
                    row[name] = rows.to_number(value)
                yield row
