"""Evaluation of a state: the means over all evaluation examples."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_collections
import numpy as np

from xshard import batches, data, errors, step
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.metrics import rows
from xshard.pod import processes


class Evaluation:
    """Judges states of an experiment."""

    def __init__(
        self, experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, batch_size: int
    ):
        """Checks the batch, and that there are examples.

        Args:
          experiment: the experiment.
          mesh: the run's mesh.
          batch_size: the examples that are judged at a time.

        Raises:
          ValueError: if there are none, or the batch does not divide into replicas.
        """
        self._examples = experiment_lib.checked_eval_data(experiment)
        self._mesh = mesh
        self._batch_size = batch_size
        self._batches()
        # Replicated, so that each process has those of all groups.
        self._jitted = jax.jit(
            step.make_eval_step(experiment, mesh), out_shardings=mesh_lib.sharding(mesh)
        )
        self._step = processes.compiled_by_all(self._jitted, "the evaluation")

    def summary(self) -> str:
        """Returns a summary of the data, to be compared between processes."""
        return data.summary(self._examples)

    def check(self, state: state_lib.TrainState, options: ml_collections.ConfigDict) -> None:
        """Traces the evaluation.

        Args:
          state: the shapes of a state.
          options: `config.checkpoint`, which may name a metric that the best checkpoint is told by.

        Raises:
          UserError: if the experiment's methods do not fit, or nothing is called so.
        """
        shapes = batches.eval_shapes(self._examples, self._mesh, self._batch_size)
        names = self._jitted.trace(state, shapes).out_info.keys() - {"count"}
        if options.keep_best and options.best_metric not in names:
            raise errors.UserError(
                f"checkpoint.best_metric={options.best_metric!r} must be a metric of the evaluation: "
                f"{', '.join(sorted(names))}."
            )

    def __call__(
        self, state: state_lib.TrainState, go_on: Callable[[], bool] = lambda: True
    ) -> dict[str, Any] | None:
        """The means over all examples; lists where there are several groups.

        Args:
          state: the state.
          go_on: asked after each batch, on all processes alike.

        Returns:
          The values by name; None if `go_on` said no.
        """
        totals: dict[str, np.ndarray] = {}
        for batch in self._batches():
            for name, value in jax.device_get(self._step(state, batch)).items():
                totals[name] = totals.get(name, np.float64(0)) + value.astype(np.float64)
            if not go_on():
                return None
        count = totals.pop("count").max()
        return {name: rows.to_number(value / count) for name, value in totals.items()}

    def _batches(self) -> Any:
        return batches.eval_batches(self._examples, self._mesh, self._batch_size)


def predictor(
    jitted: Any, mesh: jax.sharding.Mesh, state: state_lib.TrainState
) -> Callable[[Mapping[str, Any]], Any]:
    """The function that takes a batch on the host to a network's outputs there.

    Args:
      jitted: `xshard.step.make_predict`'s, its outputs replicated, so that each process has all of them.
      mesh: the run's mesh.
      state: a state.
    """
    outputs = processes.compiled_by_all(jitted, "the prediction")
    return lambda batch: jax.device_get(outputs(state, mesh_lib.put_whole(mesh, batch)))
