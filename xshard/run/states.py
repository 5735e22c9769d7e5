"""The states of a run in its checkpoints: which ones are kept, their shapes, and how
they are restored.
"""

import contextlib
import dataclasses
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
from xshard.files import workdir
from xshard.pod import members as members_lib
from xshard.run import adaptations, earlier_states, slices
from xshard.training import replica_state
from xshard.training import state as state_lib


class States:
    """The states of a run in its checkpoints, kept as the run's config says.

    All processes make the same calls.

    Attributes:
      manager: the checkpoints, as any program sees them.
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
        members: members_lib.Members | None = None,
    ):
        """Opens the checkpoints; writes nothing.

        Args:
          experiment: the experiment, with the run's config.
          mesh: the mesh on which states are placed.
          example: one row of a batch; only its shapes and types matter.
          directory: the run's work directory.
          owner: the run that writes the checkpoints; None for a reader.
          committed: called on process 0, from another thread, when a checkpoint is
            committed.
          members: the members of the run; by default the processes that JAX has joined.

        Raises:
          ValueError: if a value of the config is invalid.
        """
        config = experiment.config
        options = config.checkpoint
        rules = keep(options)
        if config.on_nonfinite == config_lib.ROLL_BACK:
            # A roll-back needs the newest scheduled checkpoint, which extra saves must
            # not push out.
            rules = dataclasses.replace(rules, newest_of=options.every_steps)
        target = state_lib.abstract_state(experiment, mesh, config.seed, example)
        self.manager = checkpoint.Manager(
            options.directory or directory.checkpoints,
            rules,
            budget_bytes=int(options.budget_gb * 1e9),
            finite=_finite_patterns(target, mesh),
            refuse_nonfinite=must_be_finite(config),
            owner=owner,
            log=announce,
            committed=committed,
            members=members,
        )
        self.target = target
        self._experiment = experiment
        self._mesh = mesh
        self._seed = config.seed
        # The number of slices of the checkpoint that was read last.
        self._slices_read = 0
        self._has_said_adaptation = False

    def init_state(self, example: Any) -> state_lib.TrainState:
        """Creates a new state.

        Args:
          example: one row of a batch, equal on all processes.
        """
        return state_lib.init(self._experiment, self._mesh, self._seed, example)

    def restore_state(
        self, step: int | None = None, *, fits: bool = False
    ) -> checkpoint.Restored:
        """Reads a checkpoint.

        Args:
          step: the step to restore; the newest by default.
          fits: whether per-replica state may have the checkpoint's number of replicas
            instead of the mesh's.

        Returns:
          The checkpoint. Its state has no averages of networks' state if an earlier
          version saved it, which kept none.

        Raises:
          CheckpointError: as `Manager.restore` does.
          UserError: if the experiment now adapts the network in another way.
        """
        # Set once the checkpoint is known.
        stored_shapes: dict[str, Any] = {}

        def target(stored: replica_state.Shapes) -> state_lib.TrainState:
            stored_shapes.clear()
            stored_shapes.update(stored)
            shapes = self.target
            if fits:
                shapes = replica_state.fit(shapes, self._mesh, stored)
            return earlier_states.without_unsaved(shapes, stored)

        compare_groups = None
        if config_lib.separates_slices(self._experiment.config):
            compare_groups = slices.compare_groups
        restored = self.manager.restore(target, step, compare_groups=compare_groups)
        where = f"the checkpoint of step {restored.step} in {self.manager.store}"
        note = adaptations.check(restored.metadata, self.target, where)
        if note and not self._has_said_adaptation:
            # A reader of many checkpoints says it once.
            self._has_said_adaptation = True
            announce(note)
        if earlier_states.lacks_statistics(restored.state, self.target):
            announce(
                f"step {restored.step} was saved without averages of the network's "
                "state, by an earlier version: its averages of the parameters are "
                "evaluated with the state of those that train"
            )
        if not slices.differ(self._experiment, self.target, stored_shapes):
            return restored
        before = checkpoint.num_groups(stored_shapes) or 1
        now = mesh_lib.num_groups(self._mesh)
        options = self._experiment.config.outer
        if not fits:
            announce(slices.describe(before, now, restored.step, options))
        elif before != self._slices_read:
            # A reader of many checkpoints says it once.
            announce(slices.describe_read(before, now))
            self._slices_read = before
        # What was noted of the saved state does not hold of this one.
        metadata = {**restored.metadata, "watched": None, "fingerprint": None}
        return restored._replace(
            state=slices.continued(restored.state), metadata=metadata
        )


def _finite_patterns(
    target: state_lib.TrainState, mesh: jax.sharding.Mesh
) -> tuple[str, str]:
    """Returns patterns of the paths of all arrays that a run requires to be finite.

    These are the parameters, the state of the networks, and the slots, but for slots
    that are a single number. Such a slot may be infinite by design: the least loss so
    far is, before the first. An experiment's own state may hold anything. Slots are
    named last: they follow from what else is not finite, and are many.
    """
    scalar_ndim = len(mesh_lib.group_axes(mesh))
    exempt = []
    for path, leaf in checkpoint.flatten(target).items():
        if leaf.ndim == scalar_ndim and re.search("(^|/)opt_state/", path):
            exempt.append(re.escape(path))
    either = "|".join(exempt)
    # What the first one matches is no slot.
    return checkpoint.BY_DEFAULT, f"^(?!({either})$)(.*/)?(net_state|opt_state)/"


def must_be_finite(config: ml_collections.ConfigDict) -> bool:
    """Returns whether a run refuses checkpoints of a state that is not finite."""
    return config.on_nonfinite != config_lib.WARN


def keep(options: ml_collections.ConfigDict) -> checkpoint.Keep:
    """Returns the retention rules of `config.checkpoint`."""
    return checkpoint.Keep(
        last=options.keep_last,
        every_steps=options.keep_every_steps,
        best=options.keep_best,
        metric=options.best_metric,
        mode=options.best_mode,
        hours=options.get("keep_hours", 0.0),
    )


def announce(message: str) -> None:
    """Prints a line about checkpoints on stderr."""
    # The line comes from another thread at any time, so it must not mix with the run's
    # own output on stdout. An error of printing says nothing about the checkpoint, so
    # it is ignored.
    with contextlib.suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)
