"""The steps after which a run evaluates and saves."""

from typing import NamedTuple

import ml_collections

from xshard import hooks


class Schedule(NamedTuple):
    """The steps after which a run evaluates and saves.

    Attributes:
      last: the last step, after which the run both evaluates and saves.
      evaluation_every: the number of steps from one evaluation to the next; 0 for one
        after the last step only.
      save_every: the number of steps from one save to the next.
      saves_evaluated: whether each evaluated state is also saved, because any of them
        may be the best.
    """

    last: int
    evaluation_every: int
    save_every: int
    saves_evaluated: bool

    @classmethod
    def of(cls, config: ml_collections.ConfigDict) -> "Schedule":
        """Returns the schedule that a run's config describes."""
        return cls(
            last=config.steps,
            evaluation_every=config.eval_every_steps,
            save_every=config.checkpoint.every_steps,
            saves_evaluated=config.checkpoint.keep_best > 0,
        )

    def next_evaluation(self, step: int) -> int:
        """Returns the first step after this one, after which an evaluation is due."""
        return min(self.last, hooks.every(self.evaluation_every, step))

    def next_save(self, step: int) -> int:
        """Returns the first step after this one, after which a save is due."""
        due = min(self.last, hooks.every(self.save_every, step))
        if self.saves_evaluated:
            due = min(due, self.next_evaluation(step))
        return due

    def evaluation(self, step: int) -> bool:
        """Returns whether an evaluation is due after a step."""
        return self.next_evaluation(step - 1) == step

    def save(self, step: int) -> bool:
        """Returns whether a save is due after a step."""
        return self.next_save(step - 1) == step

    def scheduled_save(self, step: int) -> int:
        """Returns the first step from a given one on that is saved by the schedule."""
        return min(self.last, hooks.every(self.save_every, step - 1))
