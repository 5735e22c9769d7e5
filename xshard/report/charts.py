"""The charts of a report and their lines; `xshard.report.figures` draws them."""

import collections
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from xshard.files import jsonfile
from xshard.report import runs as runs_lib

# The sections of the page that have charts, in order.
LEARNING = "Training and evaluation"
UPDATES = "Updates"
SPEED = "Speed"
SECTIONS = (LEARNING, UPDATES, SPEED)
# What the line of the batch size in the chart of a noise scale is called.
BATCH_SIZE = "batch size"
_NOISE_SCALE = "noise_scale"
# The quantities of the updates, those that change in steps or are averages already, and
# those without a chart. The bars show how the time was spent.
_UPDATES = (
    "loss_scale",
    "skipped",
    "gradient_norm",
    "parameter_norm",
    "learning_rate",
    _NOISE_SCALE,
)
_NOT_SMOOTHED = ("loss_scale", "skipped", "learning_rate", _NOISE_SCALE)
_NO_CHART = re.compile(
    r"(.*/)?(global_step|updates_per_step|epoch)|perf/(time|seconds|.*_seconds)"
)
# How the curves of each source are drawn, and the dash style of each kind of curve, in
# plotly's terms.
_MODES = {
    "training": "lines",
    "evaluation": "lines+markers",
    "evaluation job": "markers",
}
_DASHES = {
    "training": "solid",
    "evaluation": "dash",
    "average": "dot",
    "ensemble": "dashdot",
    "average, ensemble": "longdash",
    "raw": "dot",
}


class Line(NamedTuple):
    """One curve.

    Attributes:
      runs: the index of its run; for a mean over seeds, the indices of all its runs.
      what: the part of the run that it shows, such as 'evaluation, group 1'.
      values: the values by step; nan for those that are not finite.
      dash: the dash style of the line, in plotly's terms.
      mode: how its rows are drawn, in plotly's terms.
      band: for a mean, the smallest and the largest values of its runs by step, 'min'
        and 'max'.
      is_member: whether it is one of several curves that have a mean.
    """

    runs: tuple[int, ...]
    what: str
    values: pd.Series
    dash: str
    mode: str
    band: pd.DataFrame | None = None
    is_member: bool = False


class Chart(NamedTuple):
    """A chart with all curves of one metric over the steps."""

    name: str
    lines: list[Line]

    @property
    def quantity(self) -> str:
        """The name of the metric without its learner's name."""
        return without_learner(self.name)

    @property
    def section(self) -> str:
        """The section of the page that contains it."""
        if self.name.startswith("perf/"):
            return SPEED
        return UPDATES if self.quantity in _UPDATES else LEARNING

    @property
    def is_log(self) -> bool:
        """Whether the axis is logarithmic at first, as for the loss scale and norms."""
        return self.quantity.endswith(("_norm", "loss_scale", _NOISE_SCALE))

    @property
    def is_smoothed(self) -> bool:
        """Whether its curves are smoothed, as noisy ones are."""
        return self.quantity not in _NOT_SMOOTHED

    @property
    def useful_batch(self) -> float | None:
        """The largest of the newest noise scales; None if none is known, or if the
        chart is of something else.
        """
        newest = []
        for line in self.lines:
            known = line.values.dropna()
            is_measured = line.band is None and not line.what.startswith(BATCH_SIZE)
            if self.quantity == _NOISE_SCALE and is_measured and len(known):
                newest.append(float(known.iloc[-1]))
        return max(newest, default=None)


def without_learner(name: str) -> str:
    """Returns the name of a metric without its learner's name."""
    return name.rpartition("/")[2]


def charts(runs: Sequence[runs_lib.Run]) -> list[Chart]:
    """Returns all charts of runs, in the order of the page."""
    families = seeds(runs)
    lines_of_metrics = collections.defaultdict(list)
    for index, run in enumerate(runs):
        for metric, line in _lines(index, run):
            lines_of_metrics[metric].append(line)
    all_charts = []
    for metric, lines in lines_of_metrics.items():
        drawn = _with_means(lines, families)
        if without_learner(metric) == _NOISE_SCALE:
            drawn += _batch_sizes(lines, runs)
        all_charts.append(Chart(metric, drawn))
    # In its section the loss comes first; the sort keeps the order of the others.
    all_charts.sort(key=lambda x: (SECTIONS.index(x.section), x.quantity != "loss"))
    return all_charts


def seeds(runs: Sequence[runs_lib.Run]) -> list[int]:
    """Returns the number of each run's family.

    The configs of a family differ at most in the seed.
    """
    families = []
    for run in runs:
        rest = {key: value for key, value in run.config.items() if key != "seed"}
        families.append(json.dumps(rest, sort_keys=True))
    return pd.factorize(pd.Series(families))[0].tolist()


def smooth(values: pd.Series, weight: float) -> pd.Series:
    """Returns the exponential moving average, corrected for its bias to 0.

    nan stays nan, and enters no average.

    Args:
      values: the values by step.
      weight: the weight of the earlier rows, from 0 to less than 1.
    """
    averages = values.ewm(alpha=1 - weight, ignore_na=True).mean()
    return averages.where(values.notna())


def thin(values: pd.Series, parts: int) -> pd.Series:
    """Returns the rows to draw, which are the first, the last, and the smallest and the
    largest of each part, so that no peak is lost.

    Args:
      values: the values by step.
      parts: the most parts of equal length.
    """
    rows = len(values)
    if rows <= 2 * parts:
        return values
    length = -(-rows // parts)
    # A part without a finite row keeps its first one, so that it is drawn as a gap.
    padded = np.pad(values, (0, -rows % length), constant_values=np.nan)
    of_parts = padded.reshape(-1, length)
    lowest = np.where(np.isnan(of_parts), np.inf, of_parts).argmin(axis=1)
    highest = np.where(np.isnan(of_parts), -np.inf, of_parts).argmax(axis=1)
    first = np.arange(0, rows, length)
    return values.iloc[np.unique([*(first + lowest), *(first + highest), 0, rows - 1])]


def _lines(index: int, run: runs_lib.Run) -> list[tuple[str, Line]]:
    """Returns the curve of each group under each name, with its metric."""
    lines = []
    sources = (run.training, run.evaluation, run.evaluation_job)
    for (source, mode), columns in zip(_MODES.items(), sources, strict=True):
        # All charts use the same order, since a line's position in a chart determines
        # its color.
        for name in sorted(columns, key=lambda name: _variants(name)[0]):
            variants, metric = _variants(name)
            if _NO_CHART.fullmatch(metric):
                continue
            frame = columns[name]
            for group in frame:
                words = [source]
                if variants:
                    words.append(variants)
                if frame.shape[1] > 1:
                    words.append(f"group {group}")
                dash = _DASHES.get(variants or source, "dash")
                line = Line((index,), ", ".join(words), frame[group], dash, mode)
                lines.append((metric, line))
    return lines


def _with_means(lines: list[Line], families: list[int]) -> list[Line]:
    """Returns the lines; lines of a family of runs come after their mean, at the steps
    that all of them have.
    """
    members_of_means = collections.defaultdict(list)
    for line in lines:
        members_of_means[families[line.runs[0]], line.what].append(line)
    drawn = []
    for members in members_of_means.values():
        values = pd.concat([line.values for line in members], axis=1, join="inner")
        if len(members) == 1 or values.empty:
            drawn += members
            continue
        mean = members[0]._replace(
            runs=tuple(line.runs[0] for line in members),
            # The mean is not finite where any line is not, since a mean of the others
            # would hide that. Values are divided before they are summed, since a sum of
            # very large numbers would overflow.
            values=(values / len(members)).sum(axis=1, skipna=False),
            band=pd.DataFrame(
                {
                    "min": values.min(axis=1, skipna=False),
                    "max": values.max(axis=1, skipna=False),
                }
            ),
        )
        drawn.append(mean)
        drawn += [line._replace(is_member=True) for line in members]
    return drawn


def _batch_sizes(lines: Sequence[Line], runs: Sequence[runs_lib.Run]) -> list[Line]:
    """Returns the batch size beside the noise scale of each run."""
    drawn = []
    for index, run in enumerate(runs):
        of_run = []
        for line in lines:
            if line.runs == (index,) and line.mode == _MODES["training"]:
                of_run.append(line)
        size = run.config.get("batch_size")
        if not of_run or size is None or not jsonfile.is_number(size):
            continue
        values = pd.Series(float(size), index=of_run[0].values.index)
        what = BATCH_SIZE
        if run.config.get("outer.every_steps"):
            # Each slice steps along the gradient of its own part.
            values /= len(of_run)
            what = f"{BATCH_SIZE} of a slice"
        drawn.append(Line((index,), what, values, "dot", "lines"))
    return drawn


def _variants(name: str) -> tuple[str, str]:
    """Splits a name such as 'ensemble/average/loss' into its variants, in alphabetic
    order, and its metric.
    """
    variants: set[str] = set()
    # Runs of earlier versions have 'average'.
    while name.startswith(("raw/", "average/", "ensemble/")):
        variant, _, name = name.partition("/")
        variants.add(variant)
    return ", ".join(sorted(variants)), name
