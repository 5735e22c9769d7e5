"""Reads the states of a run from its checkpoints, for whoever does not train it. Nothing is written."""

import functools
from typing import Any

import jax

from xshard import checkpoint
from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.files import workdir
from xshard.run import saving
from xshard.stored import replicas, storage


class Reader:
    """The states of a run, on whatever devices; what is a replica's own is of as many as the run had.

    Attributes:
      manager: the checkpoints.
      target: shapes, types and shardings of a state, as a checkpoint has it.
    """

    def __init__(
        self,
        experiment: experiment_lib.Experiment,
        mesh: jax.sharding.Mesh,
        example: Any,
        directory: workdir.Workdir,
    ):
        """Finds the shapes.

        Args:
          experiment: the experiment, with the run's config.
          mesh: where states are to be.
          example: one row of a batch.
          directory: the run's.
        """
        args = experiment, mesh, experiment.config.seed, example
        self.manager = saving.manager(experiment.config, str(directory.checkpoints))
        self.target = state_lib.abstract_state(*args, whole=True)
        self._fitted = functools.partial(replicas.fit, self.target, mesh)
        self._older = lambda: state_lib.abstract_state(*args, whole=True, all_slots=True)
        self._storage = storage.Storage(experiment, mesh)

    def restore(self, step: int | None = None) -> checkpoint.Restored:
        """Reads a step, the newest by default, with the state as a step takes it; CheckpointError as `Manager.restore`."""
        restored = self.manager.restore(self._fitted, step, may_hold=self._older)
        return restored._replace(state=self._storage.from_whole(restored.state))
