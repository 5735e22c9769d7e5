"""Which run resumes in a work directory, and whether it may.

Nothing here changes a file.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections
import msgspec

from xshard import checkpoint, errors
from xshard.files import identity as identity_lib
from xshard.files import jsonfile, workdir
from xshard.files import provenance as provenance_lib
from xshard.pod import host_collectives
from xshard.training import state as state_lib

# The names of a point's values in the metadata of a checkpoint.
_NOTED = ("evaluated", "watched", "fingerprint", identity_lib.STEP_PROGRAM, "rows")


class ResumePlan(msgspec.Struct, frozen=True):
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
    plan = channel.on_process_0(
        lambda: msgspec.to_builtins(_identify(config, directory, set_aside))
    )
    return jsonfile.parse(plan, ResumePlan)


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
