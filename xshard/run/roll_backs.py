"""The roll-backs that a run has made, which determine the batches that it skips.

If replicas diverged, the data was not at fault. The run goes back to the newest
checkpoint up to the step in trouble, and makes the same steps again with the same data.

If numbers were not finite or jumped, the run goes back to the newest scheduled
checkpoint and skips data: it draws the batches from the checkpoint up to the step in
trouble without using them. The steps after the checkpoint use the batches that follow.

Each roll-back is written to a file of the work directory before any of it is carried
out. Everything that the run does follows from this file, so a run that is killed in
between carries out the same roll-back when it is started again. The wing
`xshard.wings.roll_backs` decides on them.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import msgspec
import numpy as np

from xshard import checkpoint, errors, hooks
from xshard.data import batches as batches_lib
from xshard.files import jsonfile, workdir
from xshard.learners.state import LearnerState
from xshard.metrics import rows as rows_lib
from xshard.optimizers import optax as optax_optimizer
from xshard.pod import host_collectives
from xshard.training import state as state_lib

_Scale = Annotated[float, msgspec.Meta(gt=0, le=1)]


class RollBack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A roll-back that the run has decided on, as its file records it.

    Attributes:
      step: the step in trouble.
      why: what was wrong with that step.
      restored: the step of the checkpoint that the run goes back to.
      first_batch: the number of the first skipped batch, in the order of the run's
        data, counted from 1.
      last_batch: the number of the last skipped batch, which is the batch of the step
        in trouble; `first_batch - 1` if no batch is skipped.
      given_up: the folders of the checkpoints after the restored one, which no longer
        count.
      update_scale: the factor that multiplies updates from there on, in rules that have
        such a factor.
    """

    step: jsonfile.Count
    why: str
    restored: jsonfile.Count
    first_batch: jsonfile.Count
    last_batch: jsonfile.Count
    given_up: list[str]
    update_scale: _Scale

    @property
    def num_skipped(self) -> int:
        """The number of batches that are skipped."""
        return self.last_batch - self.first_batch + 1

    def __str__(self) -> str:
        text = f"{self.why}; rolled back to step {self.restored}, "
        if self.num_skipped:
            batches = f"{self.first_batch} to {self.last_batch}"
            text += f"skipping batches {batches} of the data"
        else:
            text += "repeating the steps with the same data"
        if self.update_scale < 1:
            text += f", with updates times {self.update_scale:g}"
        return text


def read(path: pathlib.Path) -> list[RollBack]:
    """Reads the recorded roll-backs of a run; there are none if there is no file.

    Raises:
      UserError: if a run cannot have written the file.
    """
    values = jsonfile.read_if_exists(path, list) or []
    try:
        return jsonfile.parse(values, list[RollBack])
    except ValueError as e:
        raise errors.UserError(
            f"{path} was not written by a run ({e}): it must hold the run's "
            "roll-backs, which determine the batches that the run skips. Restore the "
            "file, or give a new --workdir."
        ) from e


def in_effect(entries: Sequence[RollBack]) -> dict[int, RollBack]:
    """Selects the roll-backs whose skipped batches the run still skips.

    A later roll-back that skips batches replaces those to its own or a later step,
    because it makes these steps again. A later roll-back that skips none leaves them in
    effect: it repeats the same steps with the same data.

    Args:
      entries: all roll-backs of a run, in their order.

    Returns:
      The roll-backs by the step that each goes back to.
    """
    by_step: dict[int, RollBack] = {}
    for entry in entries:
        if not entry.num_skipped:
            continue
        # The steps after `entry.restored` are made again, without the earlier skips.
        for step in list(by_step):
            if step >= entry.restored:
                del by_step[step]
        by_step[entry.restored] = entry
    return by_step


def batches_to_skip(entries: Sequence[RollBack]) -> dict[int, int]:
    """Returns the numbers of batches to skip, by the step before which they come."""
    return {step + 1: entry.num_skipped for step, entry in in_effect(entries).items()}


def with_update_scale(
    entries: Mapping[int, RollBack],
    step: int,
    state: state_lib.TrainState,
) -> state_lib.TrainState:
    """Returns the state for a step, with the factor on the updates from there on.

    A roll-back that skips data lowers it.

    Args:
      entries: the roll-backs that `in_effect` returns.
      step: the number of the step that is about to be made.
      state: the state after the previous step.
    """
    if step - 1 not in entries:
        return state
    # It contains the factors of all earlier roll-backs.
    scale = entries[step - 1].update_scale

    def scaled(path: Any, x: jax.Array) -> jax.Array:
        if not optax_optimizer.is_back_off(path[-1].key):
            return x
        # Each process creates its own shards, because the array may extend over devices
        # of other processes.
        value = np.full(x.shape, scale, x.dtype)
        return jax.make_array_from_callback(
            x.shape, x.sharding, lambda index: value[index]
        )

    def scaled_learner(_: str, learner: LearnerState) -> LearnerState:
        opt_state = jax.tree_util.tree_map_with_path(scaled, learner.opt_state)
        return learner.replace(opt_state=opt_state)

    return state_lib.map_learners(scaled_learner, state)


class Past(hooks.Hook):
    """The roll-backs of one run so far, to which all of its steps keep.

    All processes make the same calls. Process 0 reads and writes the file.

    Attributes:
      entries: the roll-backs, in their order.
    """

    def __init__(
        self,
        directory: workdir.Workdir,
        manager: checkpoint.Manager,
        batches: batches_lib.TrainBatches,
        channel: host_collectives.Channel,
        announce: Callable[[rows_lib.Row, state_lib.TrainState], None],
    ):
        """Reads and writes nothing.

        Args:
          directory: the run's work directory.
          manager: the run's checkpoints.
          batches: the run's training batches, which are told what to skip.
          channel: the processes' channel of the main thread.
          announce: called with a row that comes before that of the next step, and with
            the state.
        """
        self.entries: list[RollBack] = []
        self._directory = directory
        self._path = directory.roll_backs
        self._manager = manager
        self._batches = batches
        self._channel = channel
        self._announce = announce
        # As the function `in_effect` returns them.
        self._in_effect: dict[int, RollBack] = {}

    def begin(self) -> None:
        """Reads the recorded roll-backs and applies them.

        This completes a roll-back that a kill interrupted. It must be called before a
        checkpoint is read, because it gives up the checkpoints after the restored ones.

        Raises:
          UserError: on all processes, if a run cannot have written the file.
        """
        values = self._channel.on_process_0(
            lambda: msgspec.to_builtins(read(self._path))
        )
        self.entries = jsonfile.parse(values, list[RollBack])
        self._in_effect = in_effect(self.entries)
        given_up = []
        for entry in self.entries:
            given_up += entry.given_up
        self._manager.on_process_0(lambda: self._manager.give_up(given_up))
        self._batches.set_skips(batches_to_skip(self.entries))

    def record(self, entry: RollBack) -> None:
        """Records a roll-back, which the next call of `begin` carries out."""
        # Nothing has been changed yet: a kill before this write leaves no trace, and
        # one after it is completed.
        values = msgspec.to_builtins([*self.entries, entry])
        self._channel.on_process_0(lambda: self._directory.write(self._path, values))

    def prepare(self, step: int, state: state_lib.TrainState) -> state_lib.TrainState:
        """Returns the state for a step, and announces one after a roll-back."""
        if step - 1 in self._in_effect:
            self._announce(self.row(step), state)
        return with_update_scale(self._in_effect, step, state)

    def next_due(self, step: int) -> int:
        """Returns the first step after a given one, before whose successor the state is
        edited.
        """
        due = hooks.NEVER
        for restored in self._in_effect:
            if restored > step:
                due = min(due, restored)
        return due

    def row(self, step: int) -> rows_lib.Row:
        """Returns the row that names the batches skipped before a step.

        It is logged before the step's own.
        """
        entry = self._in_effect[step - 1]
        return {
            "step": step,
            rows_lib.KIND: rows_lib.ROLL_BACK,
            "roll_back/number": self.entries.index(entry) + 1,
            "roll_back/trouble_step": entry.step,
            "roll_back/first_batch": entry.first_batch,
            "roll_back/last_batch": entry.last_batch,
        }

    def batches_drawn(self, step: int) -> int:
        """Returns the number of batches drawn up to a step, used or skipped."""
        count = step
        for restored, entry in self._in_effect.items():
            if restored < step:
                count += entry.num_skipped
        return count


def has_update_scale(target: state_lib.TrainState) -> bool:
    """Returns whether any learner has an update factor that a roll-back can lower."""
    for learner in state_lib.learners(target).values():
        for arrays in learner.opt_state.values():
            if any(map(optax_optimizer.is_back_off, arrays)):
                return True
    return False
