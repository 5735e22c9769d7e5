"""Detection of losses that jump far above the losses of the steps before."""

import collections
from collections.abc import Sequence

import numpy as np


class JumpDetector:
    """Compares each step's losses with the median of the steps before, separately for
    each learner and group.

    It works for positive losses only: while a median is 0 or negative, no jump is
    detected.
    """

    def __init__(self, factor: float, steps: int):
        """Starts with no losses.

        Args:
          factor: a loss above this many times the median is a jump; a caller with a
            factor of 0 never calls `add`.
          steps: the number of steps that the median covers; no jump is detected until
            there are that many.
        """
        self.factor = factor
        self._last: collections.deque[np.ndarray] = collections.deque(maxlen=steps)

    def add(self, losses: np.ndarray) -> np.ndarray:
        """Adds a step's losses, and compares them with the medians of the steps before.

        A step with a loss that is not finite is left out of the medians, for example
        one that a dynamic loss scale skips.

        Args:
          losses: float64[learners, groups].

        Returns:
          float64[learners, groups]: the median where the loss jumped above it, NaN
          elsewhere.
        """
        limits = np.full_like(losses, np.nan)
        if len(self._last) == self._last.maxlen:
            medians = np.median(self._last, axis=0)
            jumped = (
                (medians > 0) & (losses > self.factor * medians) & np.isfinite(losses)
            )
            limits = np.where(jumped, medians, np.nan)
        # A single NaN would make every median NaN for as long as it stays in the
        # window.
        if np.isfinite(losses).all():
            self._last.append(losses)
        return limits

    def get_state(self) -> list[list[list[float]]]:
        """Returns the losses of the last steps, as JSON values that keep every bit."""
        return [losses.tolist() for losses in self._last]

    def set_state(self, state: Sequence[Sequence[Sequence[float]]]) -> None:
        """Continues from the losses that `get_state` returned."""
        self._last.clear()
        self._last.extend(np.asarray(losses, np.float64) for losses in state)
