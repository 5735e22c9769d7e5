"""Roll-backs: what a run does about steps that went wrong, where its config says 'roll_back'.

Where replicas have parted the data was not at fault: it goes back to the newest checkpoint, in which they had not, and makes
the same steps again. What follows is of the others, at which numbers are not finite or jump.

It goes back to the newest checkpoint of its schedule, and past the data: the batches from there up to that of the
step in trouble are drawn and not used, and the steps after the checkpoint are made of those that follow. What comes of
it is a function of the schedule and of the step in trouble alone, so that a run that was stopped or killed before, and
has other checkpoints too, goes back to the same one.

Each roll-back is in a file of the work directory before anything of it is done. All that is done follows from the
file, so that a run that was killed meanwhile does the same when it is started again.
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
from xshard.run import history, nonfinite, replication

T = TypeVar("T")


class RollBacks:
    """Those of one run. All processes make one, and call it alike; process 0 reads and writes the file."""

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
        """Checks the config; nothing is read or written.

        Args:
          config: the run's config.
          directory: the run's.
          manager: its checkpoints.
          batches: the run's, which are told what to pass.
          target: the shapes of the run's state.
          say: takes a line on each roll-back.
          doing: takes what the run is doing.

        Raises:
          UserError: if the run cannot do what its config says.
        """
        _check(config, batches, target)
        self._limit = config.roll_back.limit
        self._factor = config.roll_back.learning_rate_factor
        policies = {
            nonfinite.NonfiniteError: config.on_nonfinite,
            replication.PartedError: config.on_parted,
        }
        self._reasons = [x for x, policy in policies.items() if policy == config_lib.ROLL_BACK]
        self._every = config.checkpoint.every_steps
        self._last = config.steps
        self._path = directory.roll_backs
        self._manager = manager
        self._batches = batches
        self._say = say
        self._doing = doing
        self._all: list[history.RollBack] = []
        # By the step that each goes back to: those behind which the run has not gone back since.
        self._standing: dict[int, history.RollBack] = {}

    @property
    def is_ready(self) -> bool:
        """Returns whether the run goes back for any reason, so that it is to have a checkpoint from its first step on."""
        return bool(self._reasons)

    def begin(self) -> None:
        """Reads them, and does what they say, or ends what a kill has cut short of it; before a checkpoint is read.

        Raises:
          UserError: on all processes, if the file is not what a run has written.
        """
        values = self._manager.agree(lambda: [list(entry) for entry in history.read(self._path)])
        self._all = [history.RollBack(*value) for value in values]
        self._standing = history.standing(self._all)
        given_up = [folder for entry in self._all for folder in entry.given_up]
        self._manager.agree(lambda: self._manager.give_up(given_up))
        self._batches.pass_over(history.passes(self._all))

    def repeated(self, attempt: Callable[[], T]) -> T:
        """Attempts to make a run's steps; once more for each roll-back.

        Args:
          attempt: begins with `begin`, and goes on from the newest checkpoint.

        Returns:
          What the last attempt has returned.

        Raises:
          NonfiniteError: with the story of all, if the run is to go back no more.
          PartedError: the same.
        """
        while True:
            trouble: tuple[Any, ...]
            try:
                return attempt()
            except nonfinite.NonfiniteError as e:
                trouble = e.step, str(e)
            except checkpoint.NonfiniteError as e:
                trouble = self._looked_at(e.step), str(e)
            except replication.PartedError as e:
                trouble = e.step, e.what, replication.PartedError
            # Not while the exception holds the arrays of the attempt.
            self.add(*trouble)

    @contextlib.contextmanager
    def left_undecided(self, *, is_stopped: bool) -> Iterator[None]:
        """Has a run that is stopped not go back for a state that is not finite, which it saves for the stop alone.

        Whoever goes on makes its steps again, and decides as a run that was not stopped.
        """
        try:
            yield
        except checkpoint.NonfiniteError as e:
            if not (is_stopped and nonfinite.NonfiniteError in self._reasons):
                raise
            self._say(f"not saved: {e}; to go on is from the checkpoint before")

    def add(self, step: int, why: str, reason: type[Any] = nonfinite.NonfiniteError) -> None:
        """Decides on a roll-back, durably; it is done by the next attempt.

        Args:
          step: the step in trouble, whose batch is the last that is passed.
          why: what was wrong with it, for people.
          reason: NonfiniteError; or PartedError, for which no data is passed.

        Raises:
          NonfiniteError: or what `reason` is, if the config allows no more of them, or there is nothing to go back to.
        """
        if reason not in self._reasons:
            raise reason(why, step)
        if len(self._all) >= self._limit:
            raise reason(f"{why}{self._story()}", step)
        self._doing("saving")
        try:
            self._manager.wait()
        except checkpoint.CheckpointError as e:
            self._say(f"not saved: {e}")
        is_past = reason is nonfinite.NonfiniteError
        choose = self._choose if is_past else self._choose_equal
        restored = self._manager.agree(lambda: choose(step))
        if restored is None:
            raise reason(f"{why}; there is no checkpoint to go back to", step)
        given_up = self._manager.agree(lambda: self._manager.folders_after(restored))
        last = self._used(step if is_past else restored)
        scale = self._all[-1].update_scale if self._all else 1.0
        scale *= self._factor if is_past else 1.0
        new = history.RollBack(step, why, restored, self._used(restored) + 1, last, given_up, scale)
        values = [entry._asdict() for entry in (*self._all, new)]
        self._manager.agree(lambda: jsonfile.write(self._path, values))
        self._say(f"{new} (roll-back {len(values)} of at most {self._limit})")

    def backed_off(self, step: int, state: state_lib.TrainState) -> state_lib.TrainState:
        """The state that a step is given; as `backed_off`."""
        return history.backed_off(self._standing, step, state)

    def row(self, step: int) -> rows_lib.Row | None:
        """The row that says, ahead of that of a step, which batches were passed before it; None if none were."""
        entry = self._standing.get(step - 1)
        if entry is None:
            return None
        values = {
            "number": self._all.index(entry) + 1,
            "trouble_step": entry.step,
            "first_batch": entry.first_batch,
            "last_batch": entry.last_batch,
        }
        return {"step": step, **{f"roll_back/{name}": value for name, value in values.items()}}

    def _used(self, step: int) -> int:
        """The number of batches behind the run after a step: used, or passed before."""
        return step + sum(entry.passed for at, entry in self._standing.items() if at < step)

    def _story(self) -> str:
        times = f"{len(self._all)} time{'s' if len(self._all) > 1 else ''}"
        before = "; ".join(f"({number}) {entry}" for number, entry in enumerate(self._all, 1))
        return f". The run has gone back {times}, as often as roll_back.limit says: {before}"

    def _looked_at(self, step: int) -> int:
        """The step of the schedule at which any run sees that a state is not finite, though its loss is.

        One that was told to save in between sees it earlier, and is to do the same.
        """
        return min(-(-step // self._every) * self._every, self._last)

    def _choose(self, step: int) -> int | None:
        # A run that was begun with another policy may have none of the schedule.
        finite = [number for number in self._manager.finite_steps() if number < step]
        scheduled = [number for number in finite if number % self._every == 0]
        return max(scheduled or finite, default=None)

    def _choose_equal(self, step: int) -> int | None:
        # Each was compared before it was saved, and from each the steps are the same.
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
                    f"roll_back.{name}={options[name]} is for on_nonfinite='roll_back', and that is "
                    f"{config.on_nonfinite!r}: set the one or leave out the other."
                )
    elif batches.rehearsal() is not None:
        raise errors.UserError(
            "on_nonfinite='roll_back' goes past batches without making steps of them, and those of train_batches come "
            "of acting on the model (acts_every_steps): set on_nonfinite to 'stop', 'skip' or 'warn'."
        )
    elif options.learning_rate_factor < 1 and not history.has_scale(target):
        raise errors.UserError(
            f"roll_back.learning_rate_factor={options.learning_rate_factor} lowers the updates of rules made by "
            "OptaxOptimizer(..., backs_off=True), and this experiment has none: make one so, or set the factor to 1."
        )
