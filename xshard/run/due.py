"""The steps at which a run evaluates, saves and shows samples."""

from typing import NamedTuple

import ml_collections


class Due(NamedTuple):
    """The steps at which a run evaluates and saves.

    Attributes:
      last: the last step, at which it does both.
      evaluation_every: so many steps lie between evaluations.
      save_every: the same of saves.
      saves_evaluated: whether each state that is evaluated is saved, too, since one of them may be the best.
      samples_every: so many steps lie between samples; 0: there are some after the last step alone.
    """

    last: int
    evaluation_every: int
    save_every: int
    saves_evaluated: bool
    samples_every: int = 0

    @classmethod
    def of(cls, config: ml_collections.ConfigDict) -> "Due":
        """Those of a run's config."""
        options = config.checkpoint
        every = config.eval_every_steps, options.every_steps
        return cls(config.steps, *every, options.keep_best > 0, config.samples_every_steps)

    def evaluation(self, step: int) -> bool:
        """Returns whether the state after a step is to be evaluated."""
        return step == self.last or step % self.evaluation_every == 0

    def save(self, step: int) -> bool:
        """Returns whether it is to be saved."""
        if self.saves_evaluated and self.evaluation(step):
            return True
        return step == self.last or step % self.save_every == 0

    def samples(self, step: int) -> bool:
        """Returns whether the state after a step, which is not the last, is to show samples."""
        return step < self.last and self.samples_every > 0 and step % self.samples_every == 0
