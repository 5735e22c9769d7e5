"""Which run resumes in a work directory, and whether it may.

Nothing here changes a file.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections

from xshard import checkpoint, errors
from xshard import experiment as experiment_lib
from xshard.base import formatting
from xshard.files import identity as identity_lib
from xshard.files import provenance as provenance_lib
from xshard.files import workdir
from xshard.pod import host_collectives
from xshard.run import slices
from xshard.training import replica_state
from xshard.training import state as state_lib

# The names of a point's values in the metadata of a checkpoint.
_NOTED = ("evaluated", "watched", "fingerprint", identity_lib.STEP_PROGRAM, "rows")


class ResumePlan(NamedTuple):
    """The run that starts or resumes; equal on all processes.

    Attributes:
      identity: the identity that tells this run from all others.
      changes: one text for each change since the run was started.
      sets_aside: the ID of the run in the work directory, if it must be moved away
        first; else empty.
      step_program: the program that makes the run's steps, as the work directory has
        it; None if it has no run.
    """

    identity: provenance_lib.Identity
    changes: Sequence[str] = ()
    sets_aside: str = ""
    step_program: str | None = None


class Point(NamedTuple):
    """A point of a run, which it saves, and from which it resumes.

    Attributes:
      state: the state.
      data: the position in the data, `TrainBatches.position`; where it was saved, those
        of all processes; None for a new run.
      evaluated: whether the evaluation that is due at the state's step has been made.
      watched: `NonfiniteCheck.get_state`; None for a new run.
      fingerprint: the fingerprints of the state, by kind; None for a new run, or if
        they are of other arrays.
      step_program: the program that makes the run's steps.
      rows: the number of rows that the run has logged; None for a new run.
      folder: the checkpoint's folder; empty for a new run, and while it is saved.
    """

    state: state_lib.TrainState
    data: Any = None
    evaluated: bool = True
    watched: Any = None
    fingerprint: dict[str, Any] | None = None
    step_program: str = identity_lib.STEP
    rows: int | None = None
    folder: str = ""

    @classmethod
    def restored(cls, saved: checkpoint.Restored) -> "Point":
        """Returns the point in a checkpoint."""
        noted = dict(saved.metadata)
        noted[identity_lib.STEP_PROGRAM] = identity_lib.step_program(noted)
        values = {name: noted[name] for name in _NOTED}
        return cls(saved.state, saved.data, folder=saved.folder, **values)

    def metadata(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of it as metadata, JSON values by name."""
        return {name: getattr(self, name) for name in _NOTED}


def identify(
    config: ml_collections.ConfigDict,
    directory: workdir.Workdir,
    set_aside: str,
    channel: host_collectives.Channel,
) -> ResumePlan:
    """Identifies the run to start or resume.

    All processes call it, and process 0's view of the files decides.

    Args:
      config: the run's config.
      directory: the run's work directory.
      set_aside: the ID of a run that is moved away if it is the run in the directory.
      channel: connects the processes.

    Raises:
      UserError: if the directory or the checkpoints belong to another run, or if a
        changed value would make this another run.
    """
    plan = channel.on_process_0(lambda: _identify(config, directory, set_aside))
    # It arrives as JSON, which turns named tuples into lists.
    identity, *others = plan
    return ResumePlan(provenance_lib.Identity(*identity), *others)


def _identify(
    config: ml_collections.ConfigDict, directory: workdir.Workdir, set_aside: str
) -> ResumePlan:
    store = checkpoint.Store(config.checkpoint.directory or str(directory.checkpoints))
    new = identity_lib.new(config)
    if set_aside and set_aside == directory.run_id():
        if store.path is None:
            raise errors.UserError(
                f"--restart_from_scratch cannot move the checkpoints in {store}: give "
                "another checkpoint.directory too."
            )
        return ResumePlan(new, sets_aside=set_aside)
    changes = directory.check(config)
    # The checkpoints may be elsewhere, so the work directory and the checkpoints each
    # name their run.
    identity = directory.identity()
    step_program = directory.step_program()
    owner = checkpoint.read_owner(store)
    if owner is None:
        return ResumePlan(identity or new, changes, step_program=step_program)
    if identity is None:
        # The work directory was lost, for example with the disk of a host, and the
        # checkpoints of its run were not. They must be of this config.
        whose = f"{store} holds the checkpoints of run {owner.id} ({owner.workdir}),"
        identity_lib.compare(owner.config, identity_lib.plain(config), whose)
        changes.append(f"the work directory of run {owner.id} was {owner.workdir}")
        return ResumePlan(provenance_lib.Identity(owner.id, new.fingerprint), changes)
    if identity.id != owner.id:
        raise errors.UserError(
            f"{store} holds the checkpoints of run {owner.id} ({owner.workdir}), and "
            f"--workdir={directory.path} holds run {identity.id}: give another "
            "checkpoint.directory; --init_from starts a run with their parameters."
        )
    return ResumePlan(identity, changes, step_program=step_program)


def check_newest(
    manager: checkpoint.Manager, directory: workdir.Workdir, latest: int | None
) -> int | None:
    """Checks that a run resumes from the newest checkpoint that it has saved.

    Process 0 calls it.

    Args:
      manager: the run's checkpoints.
      directory: the run's work directory.
      latest: the step of the newest checkpoint; None if there is none.

    Returns:
      The newest step that the run has saved; None if it has saved none.

    Raises:
      UserError: if that checkpoint is missing.
    """
    reached = directory.reached()
    store = manager.store
    if reached is None:
        if latest is not None:
            return None
        damaged = manager.damaged_steps()
        if not damaged:
            return None
        steps = ", ".join(map(str, damaged))
        raise errors.UserError(
            f"All checkpoints in {store} are damaged (steps {steps}): 'python -m "
            "xshard.checkpoint heal' removes a mark that is wrong; "
            f"{_or_begin_again(directory)}"
        )
    # An earlier checkpoint is acceptable only if the newest one is known to be damaged,
    # deleted by hand, or given up by a roll-back. If it is missing for no known reason,
    # perhaps a disk is not mounted; resuming would lose steps.
    if latest is not None and (
        latest >= reached.step or manager.is_given_up(reached.folder)
    ):
        return reached.step
    newest = "no checkpoint is"
    if latest is not None:
        newest = f"step {latest} is the newest"
    moved = ""
    if reached.checkpoints != str(store):
        moved = f" The checkpoint was in {reached.checkpoints}."
    raise errors.UserError(
        f"This run has reached step {reached.step}, but {newest} in {store}.{moved} "
        f"Nothing was changed. Make {reached.folder} available again, for example by "
        f"mounting its disk; {_or_begin_again(directory)}"
    )


def _or_begin_again(directory: workdir.Workdir) -> str:
    run = directory.run_id()
    return (
        f"or give --restart_from_scratch={run}, which moves all of this run to "
        f"{directory.path}/{workdir.SET_ASIDE}/{run} and begins a new one."
    )


def check_replicas(
    experiment: experiment_lib.Experiment,
    manager: checkpoint.Manager,
    target: state_lib.TrainState,
    step: int,
) -> None:
    """Checks that a checkpoint's per-replica state is of as many replicas as there are.

    Process 0 calls it.

    Args:
      experiment: the run's experiment.
      manager: the run's checkpoints.
      target: the shapes of the run's state.
      step: the step of the checkpoint.

    Raises:
      UserError: if it is of another number of replicas.
    """
    try:
        stored = manager.shapes(step)
    except checkpoint.CheckpointError:
        # The restore reports a damaged checkpoint, and takes an older one.
        return
    if slices.differ(experiment, target, stored):
        slices.check(target)
        return
    replica_state.check_count(target, target.step.sharding.mesh, stored)


def check_finite(manager: checkpoint.Manager, step: int) -> None:
    """Checks that a checkpoint is finite, since the run could only fail again.

    All processes call it.

    Raises:
      UserError: on all processes, if it is not.
    """
    bad = manager.on_process_0(lambda: manager.nonfinite(step))
    if not bad:
        return
    store = manager.store
    newest = manager.on_process_0(manager.newest_finite_step)
    if newest is None:
        way = "No checkpoint there is finite: give a new --workdir."
    else:
        commands = []
        for number in manager.on_process_0(manager.all_steps):
            if number > newest:
                commands.append(f"python -m xshard.checkpoint rm {store} {number}")
        way = (
            f"The newest finite checkpoint is step {newest}; to resume from it, delete "
            f"those after it: {'; '.join(commands)}."
        )
    raise errors.UserError(
        f"The checkpoint of step {step} in {store} is not finite "
        f"({formatting.listed(bad)}), so the run would only fail again. {way} "
        f"--config.on_nonfinite=warn resumes from step {step} all the same."
    )
