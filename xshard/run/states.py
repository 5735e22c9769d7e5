"""The states of a run in its checkpoints: which ones are kept, their shapes, and how
they are restored.
"""

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from xshard import checkpoint
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.files import workdir
from xshard.stored import replica_state


class States:
    """The states of a run. All processes make the same calls.

    Attributes:
      manager: the checkpoints.
      target: the shapes, types and shardings of a state in a checkpoint.
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
        """Opens the checkpoints; writes nothing.

        Args:
          experiment: the experiment, with the run's config.
          mesh: the mesh on which states are placed.
          example: one row of a batch.
          directory: the run's work directory.
          owner: the run that writes the checkpoints; None for a reader.
          committed: called on process 0, from another thread, when a checkpoint is
            committed.

        Raises:
          ValueError: if a value of the config is invalid.
        """
        self._args = experiment, mesh, experiment.config.seed, example
        config = experiment.config
        options, rules = config.checkpoint, keep(config.checkpoint)
        target = state_lib.abstract_state(*self._args)
        # A roll-back needs the newest scheduled checkpoint, which extra saves must not
        # push out.
        if config.on_nonfinite == config_lib.ROLL_BACK:
            rules = dataclasses.replace(rules, newest_of=options.every_steps)
        self.manager = checkpoint.Manager(
            options.directory or directory.checkpoints,
            rules,
            budget_bytes=int(options.budget_gb * 1e9),
            finite=_must_be_finite(target, mesh),
            refuse_nonfinite=must_be_finite(config),
            owner=owner,
            log=say,
            committed=committed,
        )
        self.target = target
        self._mesh = mesh

    def init(self) -> state_lib.TrainState:
        """Creates a new state."""
        return state_lib.init(*self._args)

    def restore(
        self, step: int | None = None, *, fits: bool = False
    ) -> checkpoint.Restored:
        """Reads a checkpoint.

        Args:
          step: the step to restore; the newest by default.
          fits: whether per-replica state may have the checkpoint's number of replicas
            instead of the mesh's.

        Raises:
          CheckpointError: as `Manager.restore` does.
        """
        target = (
            functools.partial(replica_state.fit, self.target, self._mesh)
            if fits
            else self.target
        )
        older = lambda: state_lib.abstract_state(*self._args, all_slots=True)
        return self.manager.restore(target, step, may_hold=older)


def _must_be_finite(target: state_lib.TrainState, mesh: jax.sharding.Mesh) -> str:
    """Returns a regular expression of the paths of all arrays that a run requires to be
    finite.

    These are the parameters, the state of the networks, and the slots, but for slots
    that are a single number. Such a slot may be infinite by design: the least loss so
    far is, before the first. An experiment's own state may hold anything.
    """
    numbers = []
    for path, leaf in checkpoint.flatten(target).items():
        is_number = leaf.ndim == len(mesh_lib.group_axes(mesh))
        if is_number and re.search("(^|/)opt_state/", path):
            numbers.append(re.escape(path))
    either = "|".join(numbers)
    return f"{checkpoint.PARAMS}|^(?!({either})$)(.*/)?(net_state|opt_state)/"


def must_be_finite(config: ml_collections.ConfigDict) -> bool:
    """Returns whether a run refuses checkpoints of a state that is not finite."""
    return config.on_nonfinite != config_lib.WARN


def keep(options: ml_collections.ConfigDict) -> checkpoint.Keep:
    """Returns the rules of `config.checkpoint` that decide which checkpoints are kept."""
    return checkpoint.Keep(
        options.keep_last,
        options.keep_every_steps,
        options.keep_best,
        options.best_metric,
        options.best_mode,
    )


def say(message: str) -> None:
    """Prints a line about checkpoints on stderr."""
    # The line comes from another thread at any time, so it must not mix with the run's
    # own output on stdout. An error of printing says nothing about the checkpoint, so
    # it is ignored.
    with contextlib.suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)
