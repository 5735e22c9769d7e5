"""Decides which run resumes in a work directory, and whether it may. It only reads, and
changes nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections

from xshard import checkpoint, errors
from xshard import state as state_lib
from xshard.files import identity as identity_lib
from xshard.files import workdir
from xshard.metrics import formatting
from xshard.pod import processes
from xshard.stored import replica_state


class ResumePlan(NamedTuple):
    """The run that starts or resumes; equal on all processes.

    Attributes:
      identity: the identity that tells this run from all others.
      changes: one text for each change since the run was started.
      sets_aside: the ID of the run in the work directory, if it must be moved away
        first; else empty.
    """

    identity: identity_lib.Identity
    changes: Sequence[str] = ()
    sets_aside: str = ""


class StartState(NamedTuple):
    """The state that a new run begins with, or that a resumed run continues from.

    Attributes:
      state: the state.
      evaluated: whether the evaluation that was due at the state's step has been made.
      rows: the number of rows that the run had logged when the state was saved; None if
        that is not known.
      folder: the checkpoint's folder; empty for a new run.
      watched: the saved value of `nonfinite.NonfiniteCheck.get_state`; None if there is none.
      fingerprints: the fingerprints of the state when it was saved, by kind; None if
        they are not known.
    """

    state: state_lib.TrainState
    evaluated: bool = True
    rows: int | None = None
    folder: str = ""
    watched: Any = None
    fingerprints: dict[str, Any] | None = None


def identify(
    config: ml_collections.ConfigDict, directory: workdir.Workdir, set_aside: str
) -> ResumePlan:
    """Identifies the run to start or resume. All processes call it, and process 0's
    view of the files decides.

    Args:
      config: the run's config.
      directory: the run's work directory.
      set_aside: the ID of a run that is moved away if it is the run in the directory.

    Raises:
      UserError: if the directory or the checkpoints belong to another run, or if a
        changed value would make this another run.
    """
    # The result arrives as JSON, which turns the named tuple into a list.
    identity, *others = processes.from_first(
        "which run it is", lambda: _identify(config, directory, set_aside)
    )
    return ResumePlan(identity_lib.Identity(*identity), *others)


def _identify(
    config: ml_collections.ConfigDict, directory: workdir.Workdir, set_aside: str
) -> ResumePlan:
    store = checkpoint.Store(config.checkpoint.directory or str(directory.checkpoints))
    new = identity_lib.new(config)
    if set_aside and set_aside == directory.run_id():
        if store.path is None:
            raise errors.UserError(
                f"--restart_from_scratch cannot move the checkpoints in {store}: give another checkpoint.directory too."
            )
        return ResumePlan(new, sets_aside=set_aside)
    changes = directory.check(config)
    # The checkpoints may be elsewhere, so the work directory and the checkpoints each
    # name their run.
    own = directory.identity()
    owner = checkpoint.read_owner(store)
    if owner is None:
        older = checkpoint.newest_metadata(store).get("config")
        if older is not None:
            identity_lib.compare(
                older, identity_lib.plain(config), f"{store} holds the checkpoints of"
            )
        return ResumePlan(own or new, changes)
    if own is not None and own.id != owner.id:
        raise errors.UserError(
            f"{store} holds the checkpoints of run {owner.id} ({owner.workdir}), and --workdir={directory.path} "
            f"holds run {own.id}: give another checkpoint.directory; --init_from starts a run with their parameters."
        )
    if own is not None:
        return ResumePlan(own, changes)
    whose = f"{store} holds the checkpoints of run {owner.id} ({owner.workdir}),"
    identity_lib.compare(owner.config, identity_lib.plain(config), whose)
    changes.append(f"the work directory of run {owner.id} was {owner.workdir}")
    return ResumePlan(identity_lib.Identity(owner.id, new.fingerprint), changes)


def check_newest(
    manager: checkpoint.Manager, directory: workdir.Workdir, latest: int | None
) -> int | None:
    """Returns the newest step that the run has saved, if the work directory records it;
    called on process 0.

    Args:
      manager: the run's checkpoints.
      directory: the run's work directory.
      latest: the step of the newest checkpoint; None if there is none.

    Raises:
      UserError: if the newest checkpoint that the run saved is missing.
    """
    reached = directory.reached()
    if reached is None:
        if latest is None:
            _check_is_new(manager, directory)
        return None
    # An earlier checkpoint is acceptable only if the newest one is known to be damaged,
    # deleted by hand, or given up by a roll-back. If it is missing for no known reason,
    # perhaps a disk is not mounted; resuming would lose steps.
    if latest is not None and (
        latest >= reached.step or manager.is_given_up(reached.folder)
    ):
        return reached.step
    store = manager.store
    newest = "no checkpoint is" if latest is None else f"step {latest} is the newest"
    place = reached.checkpoints
    moved = "" if place == str(store) else f" The checkpoint was in {place}."
    raise errors.UserError(
        f"This run has reached step {reached.step}, but {newest} in {store}.{moved} Nothing was changed. Make "
        f"{reached.folder} available again, for example by mounting its disk; {_or_begin_again(directory)}"
    )


def _check_is_new(manager: checkpoint.Manager, directory: workdir.Workdir) -> None:
    """Raises UserError if a run without checkpoints shows signs of earlier progress."""
    damaged = manager.damaged_steps()
    if damaged:
        raise errors.UserError(
            f"All checkpoints in {manager.store} are damaged (steps {', '.join(map(str, damaged))}): "
            f"'python -m xshard.checkpoint heal' removes a mark that is wrong; {_or_begin_again(directory)}"
        )


def check_replicas(
    manager: checkpoint.Manager, target: state_lib.TrainState, step: int
) -> None:
    """Raises UserError, on process 0, if a checkpoint holds per-replica state of
    another number of replicas.
    """
    try:
        stored = manager.shapes(step)
    except checkpoint.CheckpointError:
        # The restore reports a damaged checkpoint, and takes an older one.
        return
    replica_state.check_count(target, target.step.sharding.mesh, stored)


def _or_begin_again(directory: workdir.Workdir) -> str:
    run = directory.run_id()
    return (
        f"or give --restart_from_scratch={run}, which moves all of this run to "
        f"{directory.path}/{workdir.SET_ASIDE}/{run} and begins a new one."
    )


def check_finite(manager: checkpoint.Manager, step: int) -> None:
    """Raises UserError, on all processes, if a checkpoint is not finite, because the
    run could only fail again.
    """
    bad = manager.on_process_0(lambda: manager.nonfinite(step))
    if not bad:
        return
    store = manager.store
    newest = manager.on_process_0(manager.newest_finite_step)
    way = "No checkpoint there is finite: give a new --workdir."
    if newest is not None:
        steps = manager.on_process_0(manager.all_steps)
        commands = [
            f"python -m xshard.checkpoint rm {store} {n}" for n in steps if n > newest
        ]
        way = (
            f"The newest finite checkpoint is step {newest}; to resume from it, delete those after it: "
            f"{'; '.join(commands)}."
        )
    raise errors.UserError(
        f"The checkpoint of step {step} in {store} is not finite ({formatting.listed(bad)}), so the run would only "
        f"fail again. {way} --config.on_nonfinite=warn resumes from step {step} all the same."
    )
