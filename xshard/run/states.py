"""The states of a run in its checkpoints: which are kept, what they look like, and how they are read."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from xshard import checkpoint
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.files import workdir
from xshard.stored import replicas
from xshard.stored import storage as storage_lib


class States:
    """The states of a run; each process calls them alike.

    Attributes:
      manager: the checkpoints.
      target: shapes, types and shardings of a state, as a checkpoint has it.
      storage: what takes a state to the shapes of a checkpoint, and back.
    """

    def __init__(
        self,
        experiment: experiment_lib.Experiment,
        mesh: jax.sharding.Mesh,
        example: Any,
        directory: workdir.Workdir,
        owner: checkpoint.Owner | None = None,
        committed: Callable[[checkpoint.Committed], None] = lambda committed: None,
    ):
        """Opens the checkpoints; nothing is written.

        Args:
          experiment: the experiment, with the run's config.
          mesh: where states are to be.
          example: one row of a batch.
          directory: the run's.
          owner: the run that writes them; None for one who reads.
          committed: called on process 0, from another thread, when a checkpoint counts.

        Raises:
          ValueError: if a value of the config does not make sense.
        """
        self._args = experiment, mesh, experiment.config.seed, example
        self.manager = manager(experiment.config, str(directory.checkpoints), owner, committed)
        self.target = state_lib.abstract_state(*self._args, whole=True)
        self.storage = storage_lib.Storage(experiment, mesh)
        self._mesh = mesh

    def init(self) -> state_lib.TrainState:
        """Makes a new state."""
        return state_lib.init(*self._args)

    def restore(self, step: int | None = None, *, fits: bool = False) -> checkpoint.Restored:
        """Reads a checkpoint, with the state as a step takes it.

        Args:
          step: the step; the newest by default.
          fits: whether what is a replica's own may be of another number of replicas, as many as the checkpoint has.

        Raises:
          CheckpointError: as of `Manager.restore`.
        """
        target = functools.partial(replicas.fit, self.target, self._mesh) if fits else self.target
        older = lambda: state_lib.abstract_state(*self._args, whole=True, all_slots=True)
        restored = self.manager.restore(target, step, may_hold=older)
        return restored._replace(state=self.storage.from_whole(restored.state))


def manager(
    config: ml_collections.ConfigDict,
    default: str,
    owner: checkpoint.Owner | None = None,
    committed: Callable[[checkpoint.Committed], None] = lambda committed: None,
) -> checkpoint.Manager:
    """Opens the checkpoints of a run; nothing is written.

    Args:
      config: the run's config.
      default: where they are if `checkpoint.directory` is empty.
      owner: the run that writes them; None for one who reads.
      committed: called on process 0, from another thread, when a checkpoint counts.

    Raises:
      ValueError: if a value of the config does not make sense.
    """
    options, rules = config.checkpoint, keep(config.checkpoint)
    if config.on_nonfinite == config_lib.ROLL_BACK:
        rules = dataclasses.replace(rules, newest_of=options.every_steps)
    return checkpoint.Manager(
        options.directory or default,
        rules,
        budget_bytes=int(options.budget_gb * 1e9),
        finite=checkpoint.PARAMS,
        refuse_nonfinite=must_be_finite(config),
        owner=owner,
        say=say,
        committed=committed,
    )


def must_be_finite(config: ml_collections.ConfigDict) -> bool:
    """Returns whether a checkpoint of parameters that are not finite does not count."""
    return config.on_nonfinite != config_lib.WARN


def keep(options: ml_collections.ConfigDict) -> checkpoint.Keep:
    """Returns the rules by which checkpoints are kept, as `config.checkpoint` says."""
    return checkpoint.Keep(
        options.keep_last,
        options.keep_every_steps,
        options.keep_best,
        options.best_metric,
        options.best_mode,
    )


def say(message: str) -> None:
    """Says something of checkpoints on stderr."""
    # Not among what the run prints of itself: it comes from another thread, at any time. That it cannot be
    # printed says nothing of what is saved.
    with contextlib.suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)
