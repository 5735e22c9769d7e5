"""The rules by which checkpoints are kept."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from xshard.checkpoint import store as store_lib


class Saved(NamedTuple):
    """A checkpoint, as far as keeping it goes.

    Attributes:
      step: its step.
      metric: what the best is chosen by; None if it was saved without.
      pinned: whether someone has said that it stays.
      finite: whether all in it is finite that is to be, as far as it was looked at.
    """

    step: int
    metric: float | None = None
    pinned: bool = False
    finite: bool = True


@dataclasses.dataclass(frozen=True)
class Keep:
    """The rules: what any of them keeps is kept. The newest, the newest that is finite, and pinned ones always are.

    Attributes:
      last: how many of the newest.
      every_steps: those of steps that this divides; 0: none.
      best: how many of the best by `metric`; 0: none.
      metric: the name of the metric, as it is in `Manager.save`.
      mode: 'max' or 'min', whichever is better.
      newest_of: the newest of steps that this divides, to which a run may go back; 0: none.
    """

    last: int
    every_steps: int = 0
    best: int = 0
    metric: str = ""
    mode: str = "max"
    newest_of: int = 0

    def __post_init__(self) -> None:
        """Checks the values."""
        for name, least in (("last", 1), ("every_steps", 0), ("best", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise store_lib.CheckpointError(
                    f"checkpoint.keep_{name}={value!r} must be an integer of at least {least}."
                )
        if self.best and (not self.metric or self.mode not in ("max", "min")):
            raise store_lib.CheckpointError(
                f"checkpoint.keep_best={self.best} needs best_metric, the name of a metric, and best_mode, "
                f"'max' or 'min'; received {self.metric!r} and {self.mode!r}."
            )

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        """The steps that are kept."""
        steps = sorted(checkpoint.step for checkpoint in saved)
        kept = {*steps[-self.last :], *self.best_steps(saved)}
        finite = [checkpoint.step for checkpoint in saved if checkpoint.finite]
        # What a run may go on from must not give way to newer ones from which it could only fail again.
        kept.update(sorted(finite)[-1:])
        if self.newest_of:
            kept.update([step for step in steps if step % self.newest_of == 0][-1:])
        for checkpoint in saved:
            is_due = self.every_steps and checkpoint.step % self.every_steps == 0
            if checkpoint.pinned or is_due:
                kept.add(checkpoint.step)
        return kept

    def best_steps(self, saved: Sequence[Saved]) -> list[int]:
        """The steps that are kept as the best ones, the best first; of equals the earlier."""
        # In ascending order the best come first, and of equals the earlier step.
        sign = -1 if self.mode == "max" else 1
        ranked = []
        for checkpoint in saved:
            if checkpoint.metric is not None and not math.isnan(checkpoint.metric):
                ranked.append((sign * checkpoint.metric, checkpoint.step))
        return [step for _, step in sorted(ranked)[: self.best]]
