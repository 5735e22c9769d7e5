"""Detection of losses that jump far above the losses of the steps before."""

import collections
from collections.abc import Sequence

import numpy as np


class JumpDetector:
    """Compares the losses of each step with the medians of the steps before.

    Each learner in each group has a median of its own. Only positive losses are
    compared: while a median is 0 or negative, no jump is detected.

    Attributes:
      factor: a loss above this many times the median is a jump.
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
        self._window: collections.deque[np.ndarray] = collections.deque(maxlen=steps)

    def add(self, losses: np.ndarray) -> np.ndarray:
        """Compares a step's losses with the medians, and adds them to the window.

        A step with a loss that is not finite is left out of the medians, for example
        one that a dynamic loss scale skips.

        Args:
          losses: float64[learners, groups].

        Returns:
          float64[learners, groups]: the median where the loss jumped above it, NaN
          elsewhere.
        """
        exceeded = np.full_like(losses, np.nan)
        if len(self._window) == self._window.maxlen:
            medians = np.median(self._window, axis=0)
            has_jumped = losses > self.factor * medians
            has_jumped &= (medians > 0) & np.isfinite(losses)
            exceeded = np.where(has_jumped, medians, np.nan)
        # A single NaN would make every median NaN for as long as it stays in the
        # window.
        if np.isfinite(losses).all():
            self._window.append(losses)
        return exceeded

    def get_state(self) -> list[list[list[float]]]:
        """Returns the losses of the window, as JSON values that keep every bit."""
        return [losses.tolist() for losses in self._window]

    def set_state(self, state: Sequence[Sequence[Sequence[float]]]) -> None:
        """Continues from the losses that `get_state` returned."""
        self._window.clear()
        for losses in state:
            self._window.append(np.asarray(losses, np.float64))
