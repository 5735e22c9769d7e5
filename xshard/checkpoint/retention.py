"""The rules by which checkpoints are kept."""

import dataclasses
import math
from collections.abc import Sequence

from xshard.checkpoint import store as store_lib


@dataclasses.dataclass(frozen=True)
class Saved:
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
    """

    last: int
    every_steps: int = 0
    best: int = 0
    metric: str = ""
    mode: str = "max"

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
        steps = sorted(one.step for one in saved)
        kept = {*steps[-self.last :], *(one.step for one in saved if one.pinned)}
        finite = [one.step for one in saved if one.finite]
        if finite:
            kept.add(max(finite))
        if self.every_steps:
            kept |= {step for step in steps if step % self.every_steps == 0}
        return kept | set(self.best_steps(saved))

    def best_steps(self, saved: Sequence[Saved]) -> list[int]:
        """The steps that are kept as the best ones, the best first; of equals the earlier."""
        sign = -1 if self.mode == "max" else 1
        ranked = sorted(
            (sign * one.metric, one.step)
            for one in saved
            if one.metric is not None and not math.isnan(one.metric)
        )
        return [step for _, step in ranked[: self.best]]
