"""The rules that decide which checkpoints are kept."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from xshard.checkpoint import store as store_lib


class Saved(NamedTuple):
    """The properties of a checkpoint that the rules depend on.

    Attributes:
      step: its step.
      metric: the metric by which the best is chosen; None if it was saved without one.
      pinned: whether a person has pinned it.
      finite: whether no checked array is known to be nonfinite.
      time: when it was saved, in seconds since 1970; None if that is unknown.
    """

    step: int
    metric: float | None = None
    pinned: bool = False
    finite: bool = True
    time: float | None = None


@dataclasses.dataclass(frozen=True)
class Keep:
    """The retention rules. A checkpoint is kept if any rule keeps it.

    The newest checkpoint, the newest finite one and pinned ones are always kept.

    Attributes:
      last: keeps this many of the newest checkpoints.
      every_steps: keeps the checkpoints of all steps that are multiples of this number;
        0: none.
      best: keeps this many of the best checkpoints by `metric`; 0: none.
      metric: the name of the metric, as passed to `Manager.save`.
      mode: 'max' if larger values are better, or 'min'.
      newest_of: keeps the newest checkpoint whose step is a multiple of this number, to
        which a run may roll back; 0: none.
      hours: keeps the first checkpoint, and each first one that is so many hours
        younger than the one kept before; 0: none. Source: `tf.compat.v1.train.Saver`,
        keep_checkpoint_every_n_hours.
    """

    last: int
    every_steps: int = 0
    best: int = 0
    metric: str = ""
    mode: str = "max"
    newest_of: int = 0
    hours: float = 0.0

    def __post_init__(self) -> None:
        """Checks the values."""
        for name, least in (("last", 1), ("every_steps", 0), ("best", 0)):
            value = getattr(self, name)
            # A bool is an int, too.
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise store_lib.CheckpointError(
                    f"checkpoint.keep_{name}={value!r} must be an integer of at least "
                    f"{least}."
                )
        is_number = isinstance(self.hours, int | float)
        if not is_number or isinstance(self.hours, bool) or not 0 <= self.hours < 1e9:
            raise store_lib.CheckpointError(
                f"checkpoint.keep_hours={self.hours!r} must be a number of at least 0; "
                "0 keeps none."
            )
        if self.best and (not self.metric or self.mode not in ("max", "min")):
            raise store_lib.CheckpointError(
                f"checkpoint.keep_best={self.best} needs best_metric, the name of a "
                "metric, and best_mode, 'max' or 'min'; received "
                f"{self.metric!r} and {self.mode!r}."
            )

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        """Returns the steps that are kept."""
        steps = sorted(checkpoint.step for checkpoint in saved)
        kept = set(steps[-self.last :])
        kept.update(self.best_steps(saved))
        kept.update(self._steps_by_time(saved))
        # A run can only fail again from a nonfinite checkpoint, so newer ones must not
        # replace the last finite one.
        finite = sorted(checkpoint.step for checkpoint in saved if checkpoint.finite)
        kept.update(finite[-1:])
        if self.newest_of:
            multiples = [step for step in steps if step % self.newest_of == 0]
            kept.update(multiples[-1:])
        for checkpoint in saved:
            is_due = self.every_steps and checkpoint.step % self.every_steps == 0
            if checkpoint.pinned or is_due:
                kept.add(checkpoint.step)
        return kept

    def _steps_by_time(self, saved: Sequence[Saved]) -> list[int]:
        """Lists the steps that `hours` keeps.

        Each of them stays in the list when later ones are saved, or others deleted.
        """
        if not self.hours:
            return []
        steps = []
        last = -math.inf
        for checkpoint in sorted(saved, key=lambda checkpoint: checkpoint.step):
            if checkpoint.time is None:
                continue
            # A clock that was set back must not end the rule until that time is over.
            if abs(checkpoint.time - last) >= 3600 * self.hours:
                steps.append(checkpoint.step)
                last = checkpoint.time
        return steps

    def best_steps(self, saved: Sequence[Saved]) -> list[int]:
        """Lists the steps that are kept as the best, best first.

        Among equals, the earlier step is better. A checkpoint without the metric, or
        with NaN, is never the best.
        """
        # With this sign, ascending order puts the best first, and the earlier step
        # first among equals.
        sign = -1 if self.mode == "max" else 1
        ranked = []
        for checkpoint in saved:
            if checkpoint.metric is not None and not math.isnan(checkpoint.metric):
                ranked.append((sign * checkpoint.metric, checkpoint.step))
        return [step for _, step in sorted(ranked)[: self.best]]
