"""The charts of a report and their lines; `xshard.report.figures` draws them."""

import collections
import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

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
# The rows that are smoothed at a time.
_BLOCK = 128
# The quantities of the updates, those that change in steps, and those without a chart.
_UPDATES = (
    "loss_scale",
    "skipped",
    "gradient_norm",
    "parameter_norm",
    "learning_rate",
    _NOISE_SCALE,
)
_STEPWISE = ("loss_scale", "skipped", "learning_rate")
_NO_CHART = ("global_step", "updates_per_step", "epoch", "perf/time", "perf/seconds")
# The dash style of each kind of curve, in plotly's terms.
_DASHES = {
    "training": "solid",
    "evaluation": "dash",
    "average": "dot",
    "ensemble": "dashdot",
    "average, ensemble": "longdash",
    "raw": "dot",
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
      runs: the index of its run; for a mean over seeds, the indices of all its runs.
      what: the part of the run that it shows, such as 'evaluation, group 1'.
      steps: shape [rows].
      values: shape [rows]; nan for values that are not finite.
      dash: the dash style of the line, in plotly's terms.
      mode: how its rows are drawn, in plotly's terms.
      band: for a mean, the smallest and the largest values of its runs.
      is_member: whether it is one of several curves that have a mean.
    """

    runs: tuple[int, ...]
    what: str
    steps: np.ndarray
    values: np.ndarray
    dash: str
    mode: str
    band: tuple[np.ndarray, np.ndarray] | None = None
    is_member: bool = False


class Chart(NamedTuple):
    """A chart with all curves of one metric over the steps."""

    name: str
    lines: list[Line]

    @property
    def section(self) -> str:
        """The section of the page that contains it."""
        if self.name.startswith("perf/"):
            return SPEED
        if without_learner(self.name) in _UPDATES:
            return UPDATES
        return LEARNING

    @property
    def has_bands(self) -> bool:
        """Whether any of its lines is a mean of several runs."""
        return any(line.band is not None for line in self.lines)

    @property
    def is_log(self) -> bool:
        """Whether the axis is logarithmic at first, as for the loss scale and norms."""
        is_scale = without_learner(self.name) in ("loss_scale", _NOISE_SCALE)
        return is_scale or self.name.endswith("_norm")

    @property
    def is_smoothed(self) -> bool:
        """Whether its curves are smoothed, as noisy ones are."""
        # A noise scale is an average already.
        return without_learner(self.name) not in (*_STEPWISE, _NOISE_SCALE)


def without_learner(name: str) -> str:
    """Returns the name of a metric without its learner's name."""
    return name.rpartition("/")[2]


def charts(runs: Sequence[runs_lib.Run]) -> list[Chart]:
    """Returns all charts of runs, in the order of the page."""
    lines_of_metrics = collections.defaultdict(list)
    for index, run in enumerate(runs):
        for metric, line in _lines(index, run):
            lines_of_metrics[metric].append(line)
    families = seeds(runs)
    all_charts = []
    for metric, lines in lines_of_metrics.items():
        drawn = _with_means(lines, families)
        if without_learner(metric) == _NOISE_SCALE:
            drawn += _batch_sizes(lines, runs)
        all_charts.append(Chart(metric, drawn))

    def position(chart: Chart) -> tuple[int, bool]:
        # In its section the loss comes first; the sort keeps the order of the others.
        is_other = without_learner(chart.name) != "loss"
        return SECTIONS.index(chart.section), is_other

    return sorted(all_charts, key=position)


def seeds(runs: Sequence[runs_lib.Run]) -> list[int]:
    """Returns the number of each run's family.

    The configs of a family differ at most in the seed.
    """
    numbers: dict[str, int] = {}
    families = []
    for run in runs:
        rest = {key: value for key, value in run.config.items() if key != "seed"}
        family = json.dumps(rest, sort_keys=True)
        families.append(numbers.setdefault(family, len(numbers)))
    return families


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Returns the exponential moving average, corrected for its bias to 0.

    nan stays nan, and enters no average.

    Args:
      values: shape [rows].
      weight: the weight of the earlier rows, from 0 to less than 1.
    """
    is_finite = np.isfinite(values)
    finite = values[is_finite]
    rows = len(finite)
    # A block's averages begin with 0, and are those of all its rows at once.
    blocks = np.pad(finite, (0, -rows % _BLOCK)).reshape(-1, _BLOCK)
    distance = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    weights = np.where(distance >= 0, weight ** np.maximum(distance, 0.0), 0.0)
    totals = blocks @ ((1 - weight) * weights).T
    # What the blocks before contribute, at the last row of the one before.
    earlier = []
    total = 0.0
    for last in totals[:, -1].tolist():
        earlier.append(total)
        total = weight**_BLOCK * total + last
    totals += np.outer(earlier, weight ** np.arange(1.0, _BLOCK + 1))
    # The sum of all weights so far, which is less than 1 at first, corrects the bias.
    averages = np.full(len(values), np.nan)
    averages[is_finite] = totals.ravel()[:rows] / _total_weights(rows, weight)
    return averages


def _total_weights(rows: int, weight: float) -> np.ndarray:
    """Returns the sums of the weights of the first row, the first two, and so on."""
    total_weights = np.ones(rows)
    # The first row whose weight is lost in the last bit of the sum, and those after it,
    # need no power, which takes long.
    count = 1
    if weight:
        count = math.ceil(math.log(np.finfo(np.float64).eps / 4) / math.log(weight))
    first = np.arange(1.0, min(rows, count) + 1)
    total_weights[: len(first)] = 1 - weight**first
    return total_weights


def thin(values: np.ndarray, parts: int) -> np.ndarray:
    """Returns the indices of the rows to draw.

    They are the smallest and the largest of each part, so that no peak is lost.

    Args:
      values: shape [rows].
      parts: the number of parts.
    """
    rows = len(values)
    if rows <= 2 * parts:
        return np.arange(rows)
    kept = [np.array([0, rows - 1])]
    # The first parts have one more row than the others.
    size, more = divmod(rows, parts)
    middle = more * (size + 1)
    for begin, end, length in ((0, middle, size + 1), (middle, rows, size)):
        of_parts = values[begin:end].reshape(-1, length)
        first = np.arange(begin, end, length)
        is_finite = np.isfinite(of_parts)
        # Without a finite row, the first one is kept both times, so that the part is
        # drawn as a gap.
        kept.append(first + np.where(is_finite, of_parts, np.inf).argmin(axis=1))
        kept.append(first + np.where(is_finite, of_parts, -np.inf).argmax(axis=1))
    return np.unique(np.concatenate(kept))


def _lines(index: int, run: runs_lib.Run) -> Iterator[tuple[str, Line]]:
    """Yields the curve of each group under each name, with its metric.

    Args:
      index: the index of the run.
      run: the run.
    """
    for columns, source, mode in (
        (run.training, "training", "lines"),
        (run.evaluation, "evaluation", "lines+markers"),
        (run.evaluation_job, "evaluation job", "markers"),
    ):
        # All charts use the same order, since a line's position in a chart determines
        # its color.
        for name in sorted(columns, key=lambda name: _variants(name)[0]):
            variants, metric = _variants(name)
            if not _has_chart(metric):
                continue
            what = f"{source}, {variants}" if variants else source
            steps, values = columns[name]
            groups = values.shape[1]
            for group in range(groups):
                line = Line(
                    runs=(index,),
                    what=f"{what}, group {group}" if groups > 1 else what,
                    steps=steps,
                    values=values[:, group],
                    dash=_DASHES.get(variants or source, "dash"),
                    mode=mode,
                )
                yield metric, line


def _has_chart(metric: str) -> bool:
    if metric in _NO_CHART or without_learner(metric) in _NO_CHART:
        return False
    # The bars show how the time was spent.
    return not re.fullmatch("perf/.*_seconds", metric)


def _with_means(lines: list[Line], families: list[int]) -> list[Line]:
    """Returns the lines; lines of a family of runs come after their mean."""
    members_of_means = collections.defaultdict(list)
    for line in lines:
        members_of_means[families[line.runs[0]], line.what].append(line)
    drawn = []
    for members in members_of_means.values():
        mean = _mean(members)
        if mean is None:
            drawn += members
        else:
            drawn.append(mean)
            drawn += [dataclasses.replace(line, is_member=True) for line in members]
    return drawn


def _mean(lines: list[Line]) -> Line | None:
    """Returns the mean of several lines at the steps that all of them have.

    None for one line, or without a common step.
    """
    steps = functools.reduce(np.intersect1d, [line.steps for line in lines])
    if len(lines) == 1 or not len(steps):
        return None
    values = np.stack([line.values[np.isin(line.steps, steps)] for line in lines])
    return dataclasses.replace(
        lines[0],
        runs=tuple(line.runs[0] for line in lines),
        steps=steps,
        # The mean is not finite where any line is not, since a mean of the others would
        # hide that. Values are divided before they are summed, since a sum of very
        # large numbers would overflow.
        values=(values / len(lines)).sum(axis=0),
        band=(values.min(axis=0), values.max(axis=0)),
    )


def _batch_sizes(lines: Sequence[Line], runs: Sequence[runs_lib.Run]) -> list[Line]:
    """Returns the batch size beside the noise scale of each run."""
    of_runs = {}
    for line in lines:
        (index,) = line.runs
        size = runs[index].config.get("batch_size")
        # The first line of a run is that of its training.
        if index in of_runs:
            continue
        if size is not None and jsonfile.is_number(size):
            # A batch may grow; rows then say so.
            grown = runs[index].config.get("batch_schedule") or ()
            values = np.full(len(line.steps), float(size))
            for steps, larger in grown:
                values[line.steps > steps] = float(larger)
            what = BATCH_SIZE
            if runs[index].config.get("outer.every_steps"):
                # Each slice steps along the gradient of its own part.
                of_training = (line.runs, line.mode)
                values /= sum((x.runs, x.mode) == of_training for x in lines)
                what = f"{BATCH_SIZE} of a slice"
            of_runs[index] = dataclasses.replace(
                line,
                what=what,
                values=values,
                dash="dot",
                mode="lines",
            )
    return list(of_runs.values())


def useful_batch(chart: Chart) -> float | None:
    """Returns the largest of the newest noise scales of a chart.

    None if none is known, or if the chart is of something else.
    """
    newest = []
    if without_learner(chart.name) == _NOISE_SCALE:
        for line in chart.lines:
            known = line.values[np.isfinite(line.values)]
            if (
                not line.what.startswith(BATCH_SIZE)
                and line.band is None
                and len(known)
            ):
                newest.append(float(known[-1]))
    return max(newest, default=None)


def _variants(name: str) -> tuple[str, str]:
    """Splits a name such as 'ensemble/average/loss' into its variants and its metric.

    The variants are in alphabetic order.
    """
    variants: set[str] = set()
    # Runs of earlier versions have 'average'.
    while name.startswith(("raw/", "average/", "ensemble/")):
        variant, _, name = name.partition("/")
        variants.add(variant)
    return ", ".join(sorted(variants)), name
