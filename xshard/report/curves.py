"""Long curves made short enough to draw, and noisy ones readable."""

import itertools

import numpy as np

SMOOTHED_FROM = 60
_WINDOWS = 40


def window(rows: int) -> int:
    """Returns the number of rows that a smoothed value is the mean of; odd; 1 where there are too few to smooth."""
    return 1 if rows < SMOOTHED_FROM else rows // _WINDOWS | 1


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the rows around each one, fewer at the ends; nan stays nan, and counts in no mean.

    Args:
      values: shape [rows].
      window: how many rows, an odd number.
    """
    known = np.isfinite(values)
    ones = np.ones(min(window, 2 * len(values) - 1))
    # Sums of each window by itself: in a running sum one huge value would leave its rounding behind.
    around = (len(ones) - 1) // 2
    totals, counts = (
        np.convolve(column, ones)[around : around + len(values)]
        for column in (np.where(known, values, 0.0), known.astype(np.float64))
    )
    return np.where(known, totals / np.maximum(counts, 1.0), np.nan)


def thin(steps: np.ndarray, values: np.ndarray, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Keeps of each of `buckets` parts of a curve the least and the greatest row; a short one as it is.

    No peak is lost, and the ends stay. A part without a finite value stays a gap.

    Args:
      steps: shape [rows].
      values: shape [rows].
      buckets: the number of parts.

    Returns:
      The steps and the values that are left, in their order.
    """
    rows = len(steps)
    if rows <= 2 * buckets:
        return steps, values
    edges = np.linspace(0, rows, buckets + 1).astype(int)
    kept = {0, rows - 1}
    for begin, end in itertools.pairwise(edges):
        part = values[begin:end]
        if np.all(np.isnan(part)):
            kept.add(begin)
        else:
            kept |= {begin + int(np.nanargmin(part)), begin + int(np.nanargmax(part))}
    index = sorted(kept)
    return steps[index], values[index]
