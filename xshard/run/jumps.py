"""Losses that jump: far above those of the steps before."""

import collections
from collections.abc import Sequence

import numpy as np


class Jumps:
    """Compares each step's losses with the median of the steps before, for each learner and group by itself.

    It is for losses above 0: at a median of 0 or below none is seen.
    """

    def __init__(self, factor: float, steps: int):
        """Begins.

        Args:
          factor: a loss above so many times the median has jumped; 0: none has.
          steps: the median is of so many; before there are as many none is seen.
        """
        self.factor = factor
        self._last: collections.deque[np.ndarray] = collections.deque(maxlen=steps)

    def add(self, losses: np.ndarray) -> np.ndarray:
        """Takes a step's losses, float64[learners, groups]; returns the medians above which they have jumped, else NaN.

        Steps with a loss that is not finite, as one that a dynamic loss scale skips, are left out of the medians.
        """
        limits = np.full_like(losses, np.nan)
        if len(self._last) == self._last.maxlen:
            medians = np.median(self._last, axis=0)
            jumped = (medians > 0) & (losses > self.factor * medians) & np.isfinite(losses)
            limits = np.where(jumped, medians, np.nan)
        if np.isfinite(losses).all():
            self._last.append(losses)
        return limits

    def get_state(self) -> list[list[list[float]]]:
        """The losses that it goes by, as JSON can hold them, to the bit."""
        return [losses.tolist() for losses in self._last]

    def set_state(self, state: Sequence[Sequence[Sequence[float]]]) -> None:
        """Goes on with what `get_state` has returned."""
        self._last.clear()
        self._last.extend(np.asarray(losses, np.float64) for losses in state)
