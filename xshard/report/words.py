"""Numbers, times and charts in words."""

import json
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from xshard.metrics import show
from xshard.report import figures

# In the place of a number that there is not.
NOTHING = "\N{EN DASH}"
_LONGEST = 300
_LINES = 8


def number(value: float | None) -> str:
    """A number with the digits that matter."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def numbers(values: Sequence[float]) -> str:
    """The numbers of several groups; of many their range."""
    if len(values) <= 3:
        return " · ".join(map(number, values))
    known = [value for value in values if math.isfinite(value)]
    lost = f", {len(values) - len(known)} not finite" if len(known) < len(values) else ""
    if not known:
        return f"{NOTHING} ({len(values)} groups{lost})"
    low, high = min(known), max(known)
    if low == high:
        return f"{number(low)} (all {len(values)} groups{lost})"
    return f"{number(low)} to {number(high)} ({len(values)} groups{lost})"


def rate(value: float | None) -> str:
    """Formats how many a second; of a million on with a unit's prefix, as in 310 T."""
    if value is None or not math.isfinite(value):
        return NOTHING
    for prefix, unit in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {prefix}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(nbytes: int | None) -> str:
    """A size in bytes, in powers of ten."""
    for prefix, unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes is not None and nbytes >= unit:
            return f"{nbytes / unit:.3g} {prefix}"
    return "" if nbytes is None else f"{nbytes} B"


def moment(seconds: float | None) -> str:
    """A time of the epoch, in UTC."""
    if seconds is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def value(config_value: Any) -> str:
    """A config's value."""
    text = config_value if isinstance(config_value, str) else json.dumps(config_value)
    if isinstance(config_value, float) and len(text) > 12:
        # What is left of a computation in binary.
        text = f"{config_value:.10g}"
    text = text or "(empty)"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


def describe(chart: figures.Chart | figures.Bars) -> str:
    """A chart for who does not see it."""
    if isinstance(chart, figures.Bars):
        said = []
        for name, seconds, parts in chart.bars[:_LINES]:
            total = max(sum(parts.values()), 1e-12)
            shares = ", ".join(f"{part} {s / total:.0%}" for part, s in parts.items())
            said.append(f"{name}, {show.duration(seconds)}: {shares}.")
        return " ".join([f"{chart.title}.", *said, *_more(len(chart.bars))])
    said = []
    for line in chart.lines[:_LINES]:
        known = np.flatnonzero(np.isfinite(line.values))
        name = line.label or chart.title
        if not len(known):
            said.append(f"{name}: no finite values.")
            continue
        shown, steps = line.values[known], line.steps[known]
        low, high = np.argmin(shown), np.argmax(shown)
        said.append(
            f"{name}: {number(shown[0])} at step {steps[0]}, {number(shown[-1])} at step {steps[-1]}, "
            f"lowest {number(shown[low])} at {steps[low]}, highest {number(shown[high])} at {steps[high]}."
        )
    return " ".join([f"{chart.title} over steps.", *said, *_more(len(chart.lines))])


def _more(count: int) -> list[str]:
    return [f"And {count - _LINES} more."] if count > _LINES else []
