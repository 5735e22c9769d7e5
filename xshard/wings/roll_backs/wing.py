"""The wing that recovers a run from a bad step, if its config says 'roll_back'.

`xshard.run.roll_backs` says what a roll-back is, and carries it out. In every
checkpoint the replicas were equal when it was saved, so a run whose replicas diverged
goes back to the newest one.

If numbers were not finite or jumped, the outcome depends only on the schedule and on
the step in trouble. A run that was stopped or killed before, and therefore has
additional checkpoints, goes back to the same one.
"""

from typing import Any

from xshard import checkpoint, errors, hooks, loop
from xshard import config as config_lib
from xshard.run import nonfinite, replication, roll_backs


class RollBacks(hooks.Wing):
    """Decides on the roll-backs of one run. All processes make the same calls."""

    name = "roll_backs"

    def __init__(self, run: loop.Run):
        """Takes the run.

        Raises:
          UserError: if the run cannot roll back as its config says.
        """
        _check(run)
        config = run.config
        self._limit = config.roll_back.limit
        self._update_factor = config.roll_back.learning_rate_factor
        # The errors that the run rolls back for.
        self._reasons: list[type[Exception]] = []
        if config.on_nonfinite == config_lib.ROLL_BACK:
            self._reasons.append(nonfinite.NonfiniteError)
        if config.on_divergence == config_lib.ROLL_BACK:
            self._reasons.append(replication.ReplicaDivergenceError)
        self._save_every = config.checkpoint.every_steps
        self._run = run
        self._past = run.past
        self._manager = run.checkpoints.manager

    def recovers_from(self, error: type[Exception]) -> bool:
        """Returns whether the run rolls back for errors of a type."""
        return error in self._reasons

    def recover(self, error: Any) -> bool:
        """Decides on a roll-back for an error, if the run rolls back for it.

        Raises:
          NonfiniteError: with all roll-backs in its message, if the run may not roll
            back again.
          ReplicaDivergenceError: likewise.
        """
        reason = type(error)
        if reason not in self._reasons:
            return False
        why = str(error)
        if reason is replication.ReplicaDivergenceError:
            why = error.what
        self.decide(error.step, why, reason)
        return True

    def decide(
        self, step: int, why: str, reason: type[Any] = nonfinite.NonfiniteError
    ) -> None:
        """Decides on a roll-back and records it on the disk.

        The next attempt carries it out.

        Args:
          step: the step in trouble; its batch is the last that is skipped.
          why: what was wrong with the step, for the user.
          reason: NonfiniteError, or ReplicaDivergenceError, for which no data is
            skipped.

        Raises:
          NonfiniteError: or the type that `reason` names, if the config does not allow
            another roll-back, or if there is no checkpoint to go back to.
        """
        entries = self._past.entries
        if len(entries) >= self._limit:
            raise reason(f"{why}{self._history_text()}", step)
        self._run.set_phase("saving")
        # The checkpoint that is being written may be the one to go back to, or one to
        # give up.
        try:
            self._manager.wait()
        except checkpoint.CheckpointError as e:
            self._run.terminal.say(f"not saved: {e}")
        # Replicas that differ are a sign neither of bad data nor of too large updates.
        skips_data = reason is nonfinite.NonfiniteError
        choose = self._choose_before if skips_data else self._choose_newest
        restored = self._manager.on_process_0(lambda: choose(step))
        if restored is None:
            raise reason(f"{why}; there is no checkpoint to roll back to", step)
        given_up = self._manager.on_process_0(
            lambda: self._manager.folders_after(restored)
        )
        last_batch = self._past.batches_drawn(restored)
        update_scale = 1.0
        if entries:
            # The factor accumulates over roll-backs.
            update_scale = entries[-1].update_scale
        if skips_data:
            last_batch = self._past.batches_drawn(step)
            update_scale *= self._update_factor
        entry = roll_backs.RollBack(
            step=step,
            why=why,
            restored=restored,
            first_batch=self._past.batches_drawn(restored) + 1,
            last_batch=last_batch,
            given_up=given_up,
            update_scale=update_scale,
        )
        self._past.record(entry)
        number = len(entries) + 1
        self._run.terminal.say(f"{entry} (roll-back {number} of at most {self._limit})")

    def _history_text(self) -> str:
        count = len(self._past.entries)
        times = f"{count} time{'s' if count > 1 else ''}"
        texts = [f"({i}) {entry}" for i, entry in enumerate(self._past.entries, 1)]
        return (
            f". The run has rolled back {times}, the most that roll_back.limit allows: "
            f"{'; '.join(texts)}"
        )

    def _choose_before(self, step: int) -> int | None:
        """Chooses a scheduled checkpoint from before a step that is not finite."""
        finite = [number for number in self._manager.finite_steps() if number < step]
        scheduled = [number for number in finite if number % self._save_every == 0]
        # A run that was begun with another policy may have no scheduled checkpoint.
        return max(scheduled or finite, default=None)

    def _choose_newest(self, step: int) -> int | None:
        """Chooses the newest checkpoint up to a step after which replicas differ."""
        # The replicas were compared before each save, and the steps are the same from
        # every checkpoint, so the newest one costs the least.
        steps = [number for number in self._manager.all_steps() if number <= step]
        return max(steps, default=None)


def _check(run: loop.Run) -> None:
    """Raises UserError if the options of roll-backs do not fit the run."""
    config = run.config
    options = config.roll_back
    if config.on_nonfinite != config_lib.ROLL_BACK:
        # It is about roll-backs that skip data.
        if options.learning_rate_factor != 1:
            raise errors.UserError(
                f"roll_back.learning_rate_factor={options.learning_rate_factor} "
                "requires on_nonfinite='roll_back', but on_nonfinite is "
                f"{config.on_nonfinite!r}: set on_nonfinite, or leave out "
                "roll_back.learning_rate_factor."
            )
    elif run.batches.rehearsal() is not None:
        raise errors.UserError(
            "on_nonfinite='roll_back' skips batches without training on them, but the "
            "batches of train_batches come from acting on the model "
            "(acts_every_steps): set on_nonfinite to 'stop', 'skip' or 'warn'."
        )
    elif options.learning_rate_factor < 1 and not roll_backs.has_update_scale(
        run.target
    ):
        raise errors.UserError(
            f"roll_back.learning_rate_factor={options.learning_rate_factor} lowers the "
            "updates of rules made by OptaxOptimizer(..., backs_off=True), but this "
            "experiment has none: pass backs_off=True, or set the factor to 1."
        )
