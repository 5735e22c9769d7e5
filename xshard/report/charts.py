"""The charts of a report, and the lines in each: no drawing yet."""

import collections
import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xshard.report import runs as runs_lib

LEARNING, UPDATES, SPEED = "Training and evaluation", "Updates", "Speed"
_UPDATES = ("loss_scale", "skipped", "gradient_norm", "parameter_norm", "learning_rate")
_NO_CHART = {"global_step", "epoch", "perf/time", "perf/seconds"}
_DASHES = {
    "training": "solid",
    "evaluation": "dash",
    "average": "dot",
    "ensemble": "dashdot",
    "average, ensemble": "longdash",
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
      runs: the number of its run; of a mean over seeds, those of all its runs.
      what: what it shows of its run, as 'evaluation, group 1'.
      steps: shape [rows].
      values: shape [rows], nan where there is no finite one.
      dash: of the line, and `mode` how its rows are drawn, as plotly names it.
      band: the least and the greatest of the runs that a mean is of.
      is_member: whether it is one of several that have a mean.
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
    """Curves over steps; on one axis all that there is of one metric."""

    name: str
    lines: list[Line]

    @property
    def section(self) -> str:
        """The part of the page that it is in."""
        if self.name.startswith("perf/"):
            return SPEED
        return UPDATES if _of_learner(self.name) in _UPDATES else LEARNING

    @property
    def is_log(self) -> bool:
        """Tells an axis of factors, as the loss scale's."""
        return _of_learner(self.name) == "loss_scale" or self.name.endswith("_norm")

    @property
    def is_smoothed(self) -> bool:
        """Tells noisy curves from those that go in steps."""
        return _of_learner(self.name) not in ("loss_scale", "skipped", "learning_rate")


def _of_learner(name: str) -> str:
    """The name of a metric without that of its learner, where there are several."""
    return name.rpartition("/")[2]


def charts(runs: Sequence[runs_lib.Run]) -> list[Chart]:
    """All charts of runs, in the order of the page."""
    lines = collections.defaultdict(list)
    for number, run in enumerate(runs):
        for metric, line in _lines(number, run):
            lines[metric].append(line)
    families = seeds(runs)
    drawn = [Chart(metric, _with_means(own, families)) for metric, own in lines.items()]
    sections = (LEARNING, UPDATES, SPEED)
    return sorted(drawn, key=lambda chart: (sections.index(chart.section), chart.name != "loss"))


def seeds(runs: Sequence[runs_lib.Run]) -> list[int]:
    """The number of each run's family: runs of one family differ in no key of the config but the seed."""
    numbers: dict[str, int] = {}
    families = []
    for run in runs:
        rest = {key: value for key, value in run.config.items() if key != "seed"}
        families.append(numbers.setdefault(json.dumps(rest, sort_keys=True), len(numbers)))
    return families


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """The exponential moving average without its bias to 0; nan stays nan, and counts in no mean.

    Args:
      values: shape [rows].
      weight: of what came before, from 0 to less than 1.
    """
    averages = []
    total = total_weight = 0.0
    for value in values.tolist():
        if not math.isfinite(value):
            averages.append(math.nan)
            continue
        total = weight * total + (1 - weight) * value
        # Less than 1 at first, when there is little that came before.
        total_weight = weight * total_weight + (1 - weight)
        averages.append(total / total_weight)
    return np.array(averages)


def thin(values: np.ndarray, parts: int) -> np.ndarray:
    """Numbers of the rows to draw: the least and the greatest of each part, so that no peak is lost.

    Args:
      values: shape [rows].
      parts: the number of parts.
    """
    rows = len(values)
    if rows <= 2 * parts:
        return np.arange(rows)
    kept = {0, rows - 1}
    for part in np.array_split(np.arange(rows), parts):
        known = part[np.isfinite(values[part])]
        if len(known):
            kept |= {known[values[known].argmin()], known[values[known].argmax()]}
        else:
            # So that the part stays a gap.
            kept.add(part[0])
    return np.array(sorted(kept))


def _lines(number: int, run: runs_lib.Run) -> Iterator[tuple[str, Line]]:
    """The curve of each group under each name, with the metric that it is of."""
    for columns, judge, mode in (
        (run.training, "training", "lines"),
        (run.evaluation, "evaluation", "lines+markers"),
        (run.separate, "evaluation job", "markers"),
    ):
        # In an order that all charts have in common, since a line's place in a chart gives it its colour.
        for name in sorted(columns, key=lambda name: _variants(name)[0]):
            steps, values = columns[name]
            variants, metric = _variants(name)
            is_drawn = _NO_CHART.isdisjoint((metric, _of_learner(metric)))
            if not is_drawn or re.fullmatch("perf/.*_seconds", metric):
                continue
            dash = _DASHES.get(variants or judge, "dash")
            what = f"{judge}, {variants}" if variants else judge
            groups = values.shape[1]
            for group in range(groups):
                of_group = f"{what}, group {group}" if groups > 1 else what
                yield metric, Line((number,), of_group, steps, values[:, group], dash, mode)


def _with_means(lines: list[Line], families: list[int]) -> list[Line]:
    """The lines, and before those of runs that differ in their seeds their mean."""
    alike = collections.defaultdict(list)
    for line in lines:
        alike[families[line.runs[0]], line.what].append(line)
    drawn = []
    for members in alike.values():
        mean = _mean(members)
        if mean is None:
            drawn += members
        else:
            drawn.append(mean)
            drawn += [dataclasses.replace(line, is_member=True) for line in members]
    return drawn


def _mean(lines: list[Line]) -> Line | None:
    """The mean of several lines at the steps that all of them have; None if there is no such step."""
    steps = functools.reduce(np.intersect1d, [line.steps for line in lines])
    if len(lines) == 1 or not len(steps):
        return None
    values = np.stack([line.values[np.isin(line.steps, steps)] for line in lines])
    return dataclasses.replace(
        lines[0],
        runs=tuple(line.runs[0] for line in lines),
        steps=steps,
        # Not finite where any of them is not: a mean of the others would hide it. Divided before it is summed,
        # since a sum of the largest numbers is not finite.
        values=(values / len(lines)).sum(axis=0),
        band=(values.min(axis=0), values.max(axis=0)),
    )


def _variants(name: str) -> tuple[str, str]:
    """Returns what a metric is of, as in 'ensemble/average/loss', in alphabetic order; and the metric."""
    variants: set[str] = set()
    while name.startswith(("average/", "ensemble/")):
        variant, _, name = name.partition("/")
        variants.add(variant)
    return ", ".join(sorted(variants)), name
