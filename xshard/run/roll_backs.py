"""Roll-backs: the recovery of a run from a bad step, if its config says 'roll_back'.

If replicas parted, the data was not at fault. The run goes back to the newest
checkpoint up to the step in trouble, and makes the same steps again with the same data.
In every checkpoint the replicas were equal when it was saved.

If numbers were not finite or jumped, the run goes back to the newest scheduled
checkpoint and skips data: it draws the batches from the checkpoint up to the step in
trouble without using them. The steps after the checkpoint use the batches that follow.
The outcome depends only on the schedule and on the step in trouble. A run that was
stopped or killed before, and therefore has additional checkpoints, goes back to the
same one.

Each roll-back is written to a file of the work directory before any of it is carried
out. Everything that the run does follows from this file, so a run that is killed in
between carries out the same roll-back when it is started again.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import ml_collections

from xshard import checkpoint, errors
from xshard import config as config_lib
from xshard import state as state_lib
from xshard.data import batches as batches_lib
from xshard.files import jsonfile, workdir
from xshard.metrics import rows as rows_lib
from xshard.run import nonfinite, replication, roll_back_history

T = TypeVar("T")


class RollBacks:
    """The roll-backs of one run. All processes make the same calls; process 0 reads and
    writes the file.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: workdir.Workdir,
        manager: checkpoint.Manager,
        batches: batches_lib.TrainBatches,
        target: state_lib.TrainState,
        say: Callable[[str], None],
        doing: Callable[[str], None],
    ):
        """Checks the config; reads and writes nothing.

        Args:
          config: the run's config.
          directory: the run's work directory.
          manager: the run's checkpoints.
          batches: the run's training batches, which are told what to skip.
          target: the shapes of the run's state.
          say: called with a line about each roll-back.
          doing: called with the phase that the run enters, for its status.

        Raises:
          UserError: if the run cannot roll back as its config says.
        """
        _check(config, batches, target)
        self._limit = config.roll_back.limit
        self._factor = config.roll_back.learning_rate_factor
        policies = {
            nonfinite.NonfiniteError: config.on_nonfinite,
            replication.ReplicaDivergenceError: config.on_divergence,
        }
        self._reasons = [
            x for x, policy in policies.items() if policy == config_lib.ROLL_BACK
        ]
        self._every = config.checkpoint.every_steps
        self._last = config.steps
        self._path = directory.roll_backs
        self._manager = manager
        self._batches = batches
        self._say = say
        self._doing = doing
        self._all: list[roll_back_history.RollBack] = []
        # As `roll_back_history.in_effect` returns them.
        self._in_effect: dict[int, roll_back_history.RollBack] = {}

    @property
    def is_ready(self) -> bool:
        """Returns whether the run may roll back for any reason, and so needs a
        checkpoint before its first step.
        """
        return bool(self._reasons)

    def begin(self) -> None:
        """Reads the recorded roll-backs and applies them, which completes any that a
        kill interrupted.

        It must be called before a checkpoint is read, because it gives up the
        checkpoints after the restored ones.

        Raises:
          UserError: on all processes, if a run cannot have written the file.
        """
        values = self._manager.agree(
            lambda: [list(entry) for entry in roll_back_history.read(self._path)]
        )
        self._all = [roll_back_history.RollBack(*value) for value in values]
        self._in_effect = roll_back_history.in_effect(self._all)
        given_up = [folder for entry in self._all for folder in entry.given_up]
        self._manager.agree(lambda: self._manager.give_up(given_up))
        self._batches.set_skips(roll_back_history.batches_to_skip(self._all))

    def retry(self, attempt: Callable[[], T]) -> T:
        """Attempts to make a run's steps, and attempts again after each roll-back.

        Args:
          attempt: calls `begin`, restores the newest checkpoint, and makes the run's
            steps.

        Returns:
          The result of the attempt that succeeded.

        Raises:
          NonfiniteError: with all roll-backs in its message, if the run may not roll
            back again.
          ReplicaDivergenceError: likewise.
        """
        while True:
            trouble: tuple[Any, ...]
            try:
                return attempt()
            except nonfinite.NonfiniteError as e:
                trouble = e.step, str(e)
            except checkpoint.NonfiniteError as e:
                trouble = self._scheduled_check(e.step), str(e)
            except replication.ReplicaDivergenceError as e:
                trouble = e.step, e.what, replication.ReplicaDivergenceError
            # Outside the `except` clauses, because the exception's traceback keeps the
            # arrays of the attempt alive.
            self.add(*trouble)

    @contextlib.contextmanager
    def tolerate_nonfinite_save(self, *, is_stopped: bool) -> Iterator[None]:
        """Tolerates a state that is not finite in the extra save of a run that is being
        stopped.

        The resumed run makes these steps again, and then decides as a run that was
        never stopped.
        """
        try:
            yield
        except checkpoint.NonfiniteError as e:
            if not (is_stopped and nonfinite.NonfiniteError in self._reasons):
                raise
            self._say(f"not saved: {e}; the run resumes from the checkpoint before")

    def add(
        self, step: int, why: str, reason: type[Any] = nonfinite.NonfiniteError
    ) -> None:
        """Decides on a roll-back and records it on the disk; the next attempt carries
        it out.

        Args:
          step: the step in trouble; its batch is the last that is skipped.
          why: what was wrong with the step, for the user.
          reason: NonfiniteError, or ReplicaDivergenceError, for which no data is
            skipped.

        Raises:
          NonfiniteError: or the type that `reason` names, if the config does not allow
            another roll-back for this reason, or if there is no checkpoint to go back
            to.
        """
        if reason not in self._reasons:
            raise reason(why, step)
        if len(self._all) >= self._limit:
            raise reason(f"{why}{self._history_text()}", step)
        self._doing("saving")
        # The checkpoint that is being written may be the one to go back to, or one to
        # give up.
        try:
            self._manager.wait()
        except checkpoint.CheckpointError as e:
            self._say(f"not saved: {e}")
        skips_data = reason is nonfinite.NonfiniteError
        choose = self._choose if skips_data else self._choose_equal
        restored = self._manager.agree(lambda: choose(step))
        if restored is None:
            raise reason(f"{why}; there is no checkpoint to roll back to", step)
        given_up = self._manager.agree(lambda: self._manager.folders_after(restored))
        # The factor accumulates over roll-backs.
        last, scale = self._batches_drawn(restored), 1.0
        if self._all:
            scale = self._all[-1].update_scale
        # Replicas that differ are a sign neither of bad data nor of too large updates.
        if skips_data:
            last, scale = self._batches_drawn(step), scale * self._factor
        new = roll_back_history.RollBack(
            step,
            why,
            restored,
            self._batches_drawn(restored) + 1,
            last,
            given_up,
            scale,
        )
        # Nothing has been changed yet: a kill before this write leaves no trace, and
        # one after it is completed.
        values = [entry._asdict() for entry in (*self._all, new)]
        self._manager.agree(lambda: jsonfile.write(self._path, values))
        self._say(f"{new} (roll-back {len(values)} of at most {self._limit})")

    def is_before(self, step: int) -> bool:
        """Returns whether the run has rolled back to the step before this one."""
        return step - 1 in self._in_effect

    def with_back_off(
        self, step: int, state: state_lib.TrainState
    ) -> state_lib.TrainState:
        """Returns the state for a step, as `roll_back_history.with_back_off` does."""
        return roll_back_history.with_back_off(self._in_effect, step, state)

    def row(self, step: int) -> rows_lib.Row:
        """Returns the row, logged before the step's own, that names the batches skipped
        before it.
        """
        entry = self._in_effect[step - 1]
        return {
            "step": step,
            "roll_back/number": self._all.index(entry) + 1,
            "roll_back/trouble_step": entry.step,
            "roll_back/first_batch": entry.first_batch,
            "roll_back/last_batch": entry.last_batch,
        }

    def _batches_drawn(self, step: int) -> int:
        """Returns the number of batches that the run has drawn after a step, used or
        skipped.
        """
        return step + sum(
            entry.num_skipped for at, entry in self._in_effect.items() if at < step
        )

    def _history_text(self) -> str:
        times = f"{len(self._all)} time{'s' if len(self._all) > 1 else ''}"
        before = "; ".join(
            f"({number}) {entry}" for number, entry in enumerate(self._all, 1)
        )
        return f". The run has rolled back {times}, the most that roll_back.limit allows: {before}"

    def _scheduled_check(self, step: int) -> int:
        """Returns the scheduled save at which every run detects a state that is not
        finite, though its loss is.

        An extra save in between detects it earlier. Rounding up to the schedule gives
        the same roll-back in both cases.
        """
        return min(-(-step // self._every) * self._every, self._last)

    def _choose(self, step: int) -> int | None:
        # A run that was begun with another policy may have no scheduled checkpoint.
        finite = [number for number in self._manager.finite_steps() if number < step]
        scheduled = [number for number in finite if number % self._every == 0]
        return max(scheduled or finite, default=None)

    def _choose_equal(self, step: int) -> int | None:
        # The replicas were compared before each save, and the steps are the same from
        # every checkpoint, so the newest one costs the least.
        return max((x for x in self._manager.all_steps() if x <= step), default=None)


def _check(
    config: ml_collections.ConfigDict,
    batches: batches_lib.TrainBatches,
    target: state_lib.TrainState,
) -> None:
    options = config.roll_back
    if config.on_nonfinite != config_lib.ROLL_BACK:
        for name, default in (("loss_factor", 0), ("learning_rate_factor", 1)):
            if options[name] != default:
                raise errors.UserError(
                    f"roll_back.{name}={options[name]} requires on_nonfinite='roll_back', but on_nonfinite is "
                    f"{config.on_nonfinite!r}: set on_nonfinite, or leave out roll_back.{name}."
                )
    elif batches.rehearsal() is not None:
        raise errors.UserError(
            "on_nonfinite='roll_back' skips batches without training on them, but the batches of train_batches come "
            "from acting on the model (acts_every_steps): set on_nonfinite to 'stop', 'skip' or 'warn'."
        )
    elif options.learning_rate_factor < 1 and not roll_back_history.has_scale(target):
        raise errors.UserError(
            f"roll_back.learning_rate_factor={options.learning_rate_factor} lowers the updates of rules made by "
            "OptaxOptimizer(..., backs_off=True), but this experiment has none: pass backs_off=True, or set the factor to 1."
        )
