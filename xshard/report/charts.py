"""The charts of a report, and the lines in each: no drawing yet."""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence

import numpy as np

from xshard.report import runs as runs_lib

LEARNING, UPDATES, SPEED = "Training and evaluation", "Updates", "Speed"
_UPDATES = ("loss_scale", "skipped", "gradient_norm", "parameter_norm")
_NO_CHART = ("global_step", "perf/time", "perf/seconds")
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


@dataclasses.dataclass(frozen=True)
class Chart:
    """Curves over steps; on one axis all that there is of one metric."""

    name: str
    lines: list[Line]

    @property
    def section(self) -> str:
        """The part of the page that it is in."""
        if self.name.startswith("perf/"):
            return SPEED
        return UPDATES if self.name in _UPDATES else LEARNING

    @property
    def is_log(self) -> bool:
        """Tells an axis of factors, as the loss scale's."""
        return self.name == "loss_scale" or self.name.endswith("_norm")

    @property
    def is_smoothed(self) -> bool:
        """Tells noisy curves from those that go in steps."""
        return self.name not in ("loss_scale", "skipped")


def charts(runs: Sequence[runs_lib.Run]) -> list[Chart]:
    """All charts of runs, in the order of the page."""
    lines: dict[str, list[Line]] = {}
    for number, run in enumerate(runs):
        for metric, line in _lines(number, run):
            lines.setdefault(metric, []).append(line)
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
    known = np.isfinite(values)
    blend = lambda total, value: weight * total + (1 - weight) * value
    totals = list(itertools.accumulate(values[known].tolist(), blend, initial=0.0))[1:]
    averages = np.full(len(values), np.nan)
    averages[known] = np.array(totals) / (1 - weight ** np.arange(1, len(totals) + 1))
    return averages


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
    for index in np.array_split(np.arange(rows), parts):
        known = index[np.isfinite(values[index])]
        ends = (known[values[known].argmin()], known[values[known].argmax()]) if len(known) else ()
        # A part without a finite value stays a gap.
        kept.update(ends or index[:1])
    return np.array(sorted(kept))


def _lines(number: int, run: runs_lib.Run) -> Iterator[tuple[str, Line]]:
    """The curve of each group under each name, with the metric that it is of."""
    for columns, judge, mode in (
        (run.training, "training", "lines"),
        (run.evaluation, "evaluation", "lines+markers"),
        (run.separate, "evaluation job", "markers"),
    ):
        for name, (steps, values) in columns.items():
            variants, metric = _variants(name)
            if metric in _NO_CHART or re.fullmatch("perf/.*_seconds", metric):
                continue
            what = f"{judge}, {variants}" if variants else judge
            dash = _DASHES.get(variants or judge, "dash")
            for group, own in enumerate(values.T):
                of = f", group {group}" if len(values.T) > 1 else ""
                yield metric, Line((number,), f"{what}{of}", steps, own, dash, mode)


def _with_means(lines: list[Line], families: list[int]) -> list[Line]:
    """The lines, and of runs that differ in their seeds the mean at the steps that all of them have."""
    together: dict[tuple[int, str], list[Line]] = {}
    for line in lines:
        together.setdefault((families[line.runs[0]], line.what), []).append(line)
    drawn = []
    for own in together.values():
        steps = functools.reduce(np.intersect1d, [line.steps for line in own])
        if len(own) > 1 and len(steps):
            values = np.stack([line.values[np.isin(line.steps, steps)] for line in own])
            drawn.append(
                dataclasses.replace(
                    own[0],
                    runs=tuple(line.runs[0] for line in own),
                    steps=steps,
                    # Not finite where any of them is not: a mean of the others would hide it.
                    values=(values / len(own)).sum(axis=0),
                    band=(values.min(axis=0), values.max(axis=0)),
                )
            )
            own = [dataclasses.replace(line, is_member=True) for line in own]
        drawn += own
    return drawn


def _variants(name: str) -> tuple[str, str]:
    """Returns what a metric is of, as in 'ensemble/average/loss', in alphabetic order; and the metric."""
    variants: set[str] = set()
    while name.startswith(("average/", "ensemble/")):
        variant, _, name = name.partition("/")
        variants.add(variant)
    return ", ".join(sorted(variants)), name
