"""The roll-backs of a run, as recorded in a file of its work directory, and the batches
that they skip.
"""

import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from xshard import errors
from xshard import state as state_lib
from xshard.files import jsonfile
from xshard.learners.state import LearnerState
from xshard.optimizers import back_off

_Count = Annotated[int, jsonfile.Rule("an integer of at least 0", lambda n: n >= 0)]
_Scale = Annotated[
    float, jsonfile.Rule("a number above 0 and up to 1", lambda x: 0 < x <= 1)
]


class RollBack(NamedTuple):
    """A roll-back that the run has decided on.

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

    step: _Count
    why: str
    restored: _Count
    first_batch: _Count
    last_batch: _Count
    given_up: list[str]
    update_scale: _Scale = 1.0

    @property
    def num_skipped(self) -> int:
        """The number of batches that are skipped."""
        return self.last_batch - self.first_batch + 1

    def __str__(self) -> str:
        then = "repeating the steps with the same data"
        if self.num_skipped:
            then = (
                f"skipping batches {self.first_batch} to {self.last_batch} of the data"
            )
        lowered = (
            f", with updates times {self.update_scale:g}"
            if self.update_scale < 1
            else ""
        )
        return f"{self.why}; rolled back to step {self.restored}, {then}{lowered}"


def read(path: pathlib.Path) -> list[RollBack]:
    """Returns the recorded roll-backs of a run; raises UserError if a run cannot have
    written the file.
    """
    values = jsonfile.read_if_exists(path, list) or []
    try:
        return jsonfile.parse(values, list[RollBack])
    except ValueError as e:
        raise errors.UserError(
            f"{path} was not written by a run ({e}): it must hold the run's roll-backs, "
            "which determine the batches that the run skips. Restore the file, or give "
            "a new --workdir."
        ) from e


def batches_to_skip(entries: list[RollBack]) -> dict[int, int]:
    """Returns the number of batches to skip, by the step before which they are skipped."""
    return {step + 1: entry.num_skipped for step, entry in in_effect(entries).items()}


def in_effect(entries: list[RollBack]) -> dict[int, RollBack]:
    """Returns the roll-backs with skipped batches that are still in effect, by the step
    that each goes back to.

    A later roll-back that skips batches replaces those to its own or a later step,
    because it makes these steps again. A later roll-back that skips none leaves them in
    effect: it repeats the same steps with the same data.
    """
    by_step: dict[int, RollBack] = {}
    for new in entries:
        if new.num_skipped:
            # The steps after `new.restored` are made again, without the earlier skips.
            by_step = {
                step: entry for step, entry in by_step.items() if step < new.restored
            }
            by_step[new.restored] = new
    return by_step


def with_back_off(
    entries: Mapping[int, RollBack], step: int, state: state_lib.TrainState
) -> state_lib.TrainState:
    """Returns the state for a step, with the update factor lowered if the run rolled
    back to the step before.

    Args:
      entries: the roll-backs that `in_effect` returns.
      step: the number of the step that is about to be made.
      state: the state after the previous step.
    """
    entry = entries.get(step - 1)
    if entry is None:
        return state

    def lowered(path: Any, x: jax.Array) -> jax.Array:
        if not back_off.is_scale(path[-1].key):
            return x
        # Each process creates its own shards, because the array may extend over devices
        # of other processes.
        whole = np.full(x.shape, entry.update_scale, x.dtype)
        return jax.make_array_from_callback(
            x.shape, x.sharding, lambda index: whole[index]
        )

    def of_learner(_: str, learner: LearnerState) -> LearnerState:
        opt_state = jax.tree_util.tree_map_with_path(lowered, learner.opt_state)
        return learner.replace(opt_state=opt_state)

    return state_lib.map_learners(of_learner, state)


def has_scale(target: state_lib.TrainState) -> bool:
    """Returns whether the optimizer state of any learner has an update factor that a
    roll-back can lower.
    """
    for learner in state_lib.learners(target).values():
        for arrays in learner.opt_state.values():
            if any(map(back_off.is_scale, arrays)):
                return True
    return False
