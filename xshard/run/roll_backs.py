"""Roll-backs: the recovery of a run from a bad step, if its config says 'roll_back'.

If replicas diverged, the data was not at fault. The run goes back to the newest
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
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import jax
import ml_collections
import numpy as np

from xshard import checkpoint, errors, hooks
from xshard import config as config_lib
from xshard import state as state_lib
from xshard.data import batch_sizes
from xshard.data import batches as batches_lib
from xshard.files import jsonfile, workdir
from xshard.learners.state import LearnerState
from xshard.metrics import rows as rows_lib
from xshard.optimizers import back_off
from xshard.pod import host_collectives
from xshard.run import nonfinite, replication

T = TypeVar("T")

_Scale = Annotated[
    float, jsonfile.Rule("a number above 0 and up to 1", lambda x: 0 < x <= 1)
]


class RollBack(NamedTuple):
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
    sizes: batch_sizes.BatchSizes,
    step: int,
    state: state_lib.TrainState,
) -> state_lib.TrainState:
    """Returns the state for a step, with the factor on the updates from there on.

    A roll-back lowers it, and it grows with the batch.

    Args:
      entries: the roll-backs that `in_effect` returns.
      sizes: the sizes of the run's batches.
      step: the number of the step that is about to be made.
      state: the state after the previous step.
    """
    if step - 1 not in entries and not sizes.changes_at(step):
        return state
    scale = sizes.factor(step)
    before = [restored for restored in entries if restored < step]
    if before:
        # The newest one's factor contains those of all earlier roll-backs.
        scale *= entries[max(before)].update_scale

    def scaled(path: Any, x: jax.Array) -> jax.Array:
        if not back_off.is_scale(path[-1].key):
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


class RollBacks(hooks.Hook):
    """The roll-backs of one run.

    All processes make the same calls. Process 0 reads and writes the file.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: workdir.Workdir,
        manager: checkpoint.Manager,
        batches: batches_lib.TrainBatches,
        target: state_lib.TrainState,
        log: Callable[[str], None],
        set_phase: Callable[[str], None],
        exchange: host_collectives.Exchange,
        announce: Callable[[rows_lib.Row, state_lib.TrainState], None],
    ):
        """Checks the config; reads and writes nothing.

        Args:
          config: the run's config.
          directory: the run's work directory.
          manager: the run's checkpoints.
          batches: the run's training batches, which are told what to skip.
          target: the shapes of the run's state.
          log: called with a line about each roll-back.
          set_phase: called with the phase that the run enters, for its status.
          exchange: the series of exchanges of the main thread.
          announce: called with a row that comes before that of the next step, and with
            the state.

        Raises:
          UserError: if the run cannot roll back as its config says.
        """
        _check(config, batches, target)
        self._limit = config.roll_back.limit
        self._update_factor = config.roll_back.learning_rate_factor
        # The errors that the run rolls back for.
        self._reasons: list[type[Exception]] = []
        if config.on_nonfinite == config_lib.ROLL_BACK:
            self._reasons.append(nonfinite.NonfiniteError)
        if config.on_divergence == config_lib.ROLL_BACK:
            self._reasons.append(replication.ReplicaDivergenceError)
        self._save_every = config.checkpoint.every_steps
        self._last_step = config.steps
        self._directory = directory
        self._path = directory.roll_backs
        self._manager = manager
        self._batches = batches
        self._log = log
        self._set_phase = set_phase
        self._exchange = exchange
        self._announce = announce
        self._entries: list[RollBack] = []
        # As the function `in_effect` returns them.
        self._in_effect: dict[int, RollBack] = {}

    @property
    def may_roll_back(self) -> bool:
        """Whether the run may roll back, and so needs a checkpoint of its start."""
        return bool(self._reasons)

    def begin(self) -> None:
        """Reads the recorded roll-backs and applies them.

        This completes a roll-back that a kill interrupted. It must be called before a
        checkpoint is read, because it gives up the checkpoints after the restored ones.

        Raises:
          UserError: on all processes, if a run cannot have written the file.
        """
        values = self._exchange.on_process_0(lambda: read(self._path))
        # They arrive as JSON, which turns named tuples into lists.
        self._entries = [RollBack(*value) for value in values]
        self._in_effect = in_effect(self._entries)
        given_up = []
        for entry in self._entries:
            given_up += entry.given_up
        self._manager.on_process_0(lambda: self._manager.give_up(given_up))
        self._batches.set_skips(batches_to_skip(self._entries))

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
            reason: type[Any] = nonfinite.NonfiniteError
            try:
                return attempt()
            except nonfinite.NonfiniteError as e:
                step = e.step
                why = str(e)
            except checkpoint.NonfiniteError as e:
                step = self._scheduled_check(e.step)
                why = str(e)
            except replication.ReplicaDivergenceError as e:
                reason = replication.ReplicaDivergenceError
                step = e.step
                why = e.what
            # Outside the `except` clauses, because the exception's traceback keeps the
            # arrays of the attempt alive.
            self.decide(step, why, reason)

    @contextlib.contextmanager
    def tolerate_nonfinite_save(self, *, is_stopped: bool) -> Iterator[None]:
        """Tolerates a state that is not finite in the extra save of a stopped run.

        The resumed run makes these steps again, and then decides as a run that was
        never stopped.
        """
        try:
            yield
        except checkpoint.NonfiniteError as e:
            if not (is_stopped and nonfinite.NonfiniteError in self._reasons):
                raise
            self._log(f"not saved: {e}; the run resumes from the checkpoint before")

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
            another roll-back for this reason, or if there is no checkpoint to go back
            to.
        """
        if reason not in self._reasons:
            raise reason(why, step)
        if len(self._entries) >= self._limit:
            raise reason(f"{why}{self._history_text()}", step)
        self._set_phase("saving")
        # The checkpoint that is being written may be the one to go back to, or one to
        # give up.
        try:
            self._manager.wait()
        except checkpoint.CheckpointError as e:
            self._log(f"not saved: {e}")
        # Replicas that differ are a sign neither of bad data nor of too large updates.
        skips_data = reason is nonfinite.NonfiniteError
        choose = self._choose_before if skips_data else self._choose_newest
        restored = self._manager.on_process_0(lambda: choose(step))
        if restored is None:
            raise reason(f"{why}; there is no checkpoint to roll back to", step)
        given_up = self._manager.on_process_0(
            lambda: self._manager.folders_after(restored)
        )
        last_batch = self._batches_drawn(restored)
        update_scale = 1.0
        if self._entries:
            # The factor accumulates over roll-backs.
            update_scale = self._entries[-1].update_scale
        if skips_data:
            last_batch = self._batches_drawn(step)
            update_scale *= self._update_factor
        entry = RollBack(
            step=step,
            why=why,
            restored=restored,
            first_batch=self._batches_drawn(restored) + 1,
            last_batch=last_batch,
            given_up=given_up,
            update_scale=update_scale,
        )
        # Nothing has been changed yet: a kill before this write leaves no trace, and
        # one after it is completed.
        values = [x._asdict() for x in (*self._entries, entry)]
        self._exchange.on_process_0(lambda: self._directory.write(self._path, values))
        self._log(f"{entry} (roll-back {len(values)} of at most {self._limit})")

    def prepare(self, step: int, state: state_lib.TrainState) -> state_lib.TrainState:
        """Returns the state for a step, and announces one after a roll-back."""
        if step - 1 in self._in_effect:
            self._announce(self.row(step), state)
        return self.with_update_scale(step, state)

    def next_due(self, step: int) -> int:
        """Returns the first step after a given one, before whose successor the state is
        edited.
        """
        due = self._batches.sizes.last_of_size(step + 1)
        for restored in self._in_effect:
            if restored > step:
                due = min(due, restored)
        return due

    def with_update_scale(
        self, step: int, state: state_lib.TrainState
    ) -> state_lib.TrainState:
        """Returns the state for a step, as the function `with_update_scale` does."""
        return with_update_scale(self._in_effect, self._batches.sizes, step, state)

    def row(self, step: int) -> rows_lib.Row:
        """Returns the row that names the batches skipped before a step.

        It is logged before the step's own.
        """
        entry = self._in_effect[step - 1]
        return {
            "step": step,
            rows_lib.KIND: rows_lib.ROLL_BACK,
            "roll_back/number": self._entries.index(entry) + 1,
            "roll_back/trouble_step": entry.step,
            "roll_back/first_batch": entry.first_batch,
            "roll_back/last_batch": entry.last_batch,
        }

    def _batches_drawn(self, step: int) -> int:
        """Returns the number of batches drawn up to a step, used or skipped."""
        count = self._batches.sizes.drawn(step)
        for restored, entry in self._in_effect.items():
            if restored < step:
                count += entry.num_skipped
        return count

    def _history_text(self) -> str:
        count = len(self._entries)
        times = f"{count} time{'s' if count > 1 else ''}"
        texts = [f"({i}) {entry}" for i, entry in enumerate(self._entries, 1)]
        return (
            f". The run has rolled back {times}, the most that roll_back.limit allows: "
            f"{'; '.join(texts)}"
        )

    def _scheduled_check(self, step: int) -> int:
        """Returns the step of the scheduled save that finds a state not finite.

        Its loss is finite, so only saves detect it. An extra save in between detects it
        earlier. Rounding up to the schedule gives the same roll-back in both cases.
        """
        scheduled = -(-step // self._save_every) * self._save_every
        return min(scheduled, self._last_step)

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


def _check(
    config: ml_collections.ConfigDict,
    batches: batches_lib.TrainBatches,
    target: state_lib.TrainState,
) -> None:
    """Raises UserError if the options of roll-backs do not fit the run."""
    options = config.roll_back
    if config.on_nonfinite != config_lib.ROLL_BACK:
        # These options are about roll-backs that skip data.
        for name, default in (("loss_factor", 0), ("learning_rate_factor", 1)):
            if options[name] != default:
                raise errors.UserError(
                    f"roll_back.{name}={options[name]} requires "
                    "on_nonfinite='roll_back', but on_nonfinite is "
                    f"{config.on_nonfinite!r}: set on_nonfinite, or leave out "
                    f"roll_back.{name}."
                )
    elif batches.rehearsal() is not None:
        raise errors.UserError(
            "on_nonfinite='roll_back' skips batches without training on them, but the "
            "batches of train_batches come from acting on the model "
            "(acts_every_steps): set on_nonfinite to 'stop', 'skip' or 'warn'."
        )
    elif options.learning_rate_factor < 1 and not _has_scale(target):
        raise errors.UserError(
            f"roll_back.learning_rate_factor={options.learning_rate_factor} lowers the "
            "updates of rules made by OptaxOptimizer(..., backs_off=True), but this "
            "experiment has none: pass backs_off=True, or set the factor to 1."
        )
    follows = config.get("batch_learning_rate", config_lib.NONE) != config_lib.NONE
    if follows and not _has_scale(target):
        raise errors.UserError(
            f"batch_learning_rate={config.batch_learning_rate!r} raises the updates of "
            "rules made by OptaxOptimizer(..., backs_off=True), but this experiment "
            "has none: pass backs_off=True, or set it to 'none'."
        )


def _has_scale(target: state_lib.TrainState) -> bool:
    """Returns whether any learner has an update factor that a roll-back can lower."""
    for learner in state_lib.learners(target).values():
        for arrays in learner.opt_state.values():
            if any(map(back_off.is_scale, arrays)):
                return True
    return False
