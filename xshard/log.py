"""What a run logs: training metrics and evaluations, to the file and to the terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import ml_collections
import numpy as np

from xshard import mesh as mesh_lib
from xshard import metrics


class Log:
    """Training metrics and evaluations of a run."""

    def __init__(
        self,
        rows: metrics.JsonLines | None,
        start: int,
        config: ml_collections.ConfigDict,
        mesh: jax.sharding.Mesh,
    ):
        """Begins.

        Args:
          rows: the file; None where it is another process's.
          start: the step that the run goes on from.
          config: the run's config.
          mesh: the run's mesh.
        """
        self._rows = rows
        self._every = config.log_every_steps
        self._last = config.steps
        self._first = start + 1
        self._mesh = mesh
        self._terminal = metrics.Terminal(config.steps)
        self._deferred = metrics.Deferred()

    def push(self, made: int, values: Mapping[str, jax.Array]) -> None:
        """Takes the metrics of a step, and writes those of earlier ones that have come to the host."""
        if made == self._first:
            # The first call has compiled, which says nothing of the steps to come.
            self._terminal.start(made - 1)
        keep = made % self._every == 0 or made == self._last
        if keep:
            values = mesh_lib.replicate(self._mesh, values)
        self._write(self._deferred.push(made, values, keep))

    def flush(self) -> None:
        """Writes what has been taken; waits for it."""
        self._write(self._deferred.flush())

    def write_evaluation(self, made: int, values: Mapping[str, Any]) -> None:
        """Writes an evaluation of the state after a step."""
        row = {"step": made, **{f"eval/{name}": value for name, value in values.items()}}
        if self._rows is not None:
            self._rows.write(row)
        numbers = "  ".join(f"{name} {metrics.show(value)}" for name, value in values.items())
        print(f"step {made}  evaluation: {numbers}", flush=True)

    def _write(self, rows: Iterable[metrics.Row]) -> None:
        for row in rows:
            # A total, since a skip between two rows would not show.
            steps, applied = row["step"], np.asarray(row.pop("global_step"))
            row |= {"global_step": applied.tolist(), "skipped": (steps - applied).tolist()}
            if self._rows is not None:
                self._rows.write(row)
            self._terminal.write(row)
