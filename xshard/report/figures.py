"""The charts of a report, and what is in each: no drawing yet."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

import numpy as np

from xshard.report import curves
from xshard.report import rows as rows_lib
from xshard.report import runs as runs_lib

LINEAR, LOG, LOG2 = "linear", "log", "log2"
SOLID, DASHED, DOTTED, DASHDOT = "solid", "dashed", "dotted", "dashdot"
LEARNING, UPDATES, SPEED, TIME = (
    "Training and evaluation",
    "Updates",
    "Speed",
    "Where the time went",
)
# Training rows' own, each with its chart or shown otherwise; what else they hold are the experiment's.
_UPDATES = {
    "loss_scale": ("Loss scale", "loss scale (powers of two)", LOG2),
    "gradient_norm": ("Gradient norm", "norm of the gradients (log)", LOG),
    "parameter_norm": ("Parameter norm", "norm of the parameters (log)", LOG),
}
_SPEED = {
    "perf/steps_per_second": ("Steps", "steps/s", ""),
    "perf/examples_per_second": ("Examples", "examples/s", ""),
    "perf/flops_per_second": ("Model FLOPs, all devices together", "FLOP/s", ""),
    "perf/utilisation": ("Utilisation of the devices", "share of their peak", "%"),
}
_NO_CHART = {"global_step", "skipped", "perf/time", "perf/seconds", "perf/goodput"}
_VARIANTS = {"average": "moving average", "ensemble": "ensemble"}
_STYLES = {
    (): SOLID,
    ("average",): DASHED,
    ("ensemble",): DOTTED,
    ("average", "ensemble"): DASHDOT,
}
# What has no other name beside its variants.
_PLAIN = "in the run"
_MANY_BARS = 24


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
      label: what it is called in the key; empty if the key has its colour already.
      colour: the number of its colour.
      style: SOLID, DASHED, DOTTED or DASHDOT.
      steps: shape [rows].
      values: shape [rows], nan where there is no finite one.
      points: whether it is drawn as points that nothing joins.
      thin: whether it is drawn as one of many.
      skips: the intervals of steps in which updates were skipped.
      restarts: the first steps of its later processes.
    """

    label: str
    colour: int
    style: str
    steps: np.ndarray
    values: np.ndarray
    points: bool = False
    thin: bool = False
    skips: Sequence[tuple[int, int]] = ()
    restarts: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Chart:
    """Curves over steps.

    Attributes:
      name: of its file, without an ending.
      section: where it is in the page.
      title: what it shows.
      label: the vertical axis, with its unit.
      lines: its curves.
      scale: of the vertical axis: LINEAR, LOG or LOG2.
      unit: '%' for shares, else empty.
      smoothed: whether the mean of the rows around is drawn over the rows.
      from_zero: whether the vertical axis begins at 0.
    """

    name: str
    section: str
    title: str
    label: str
    lines: list[Line]
    scale: str = LINEAR
    unit: str = ""
    smoothed: bool = False
    from_zero: bool = False

    @property
    def window(self) -> int:
        """The number of rows that a smoothed value is the mean of, in the longest curve."""
        longest = max(len(line.steps) for line in self.lines)
        return curves.window(longest) if self.smoothed else 1


@dataclasses.dataclass(frozen=True)
class Bars:
    """Shares of time, a bar for each process or run.

    Attributes:
      name: of its file, without an ending.
      section: where it is in the page.
      title: what it shows.
      bars: the name of each, its seconds and the seconds of its parts.
      merged: whether each bar is all processes of a run.
    """

    name: str
    section: str
    title: str
    bars: list[tuple[str, float, dict[str, float]]]
    merged: bool


def charts(runs: Sequence[runs_lib.Run]) -> list[Chart | Bars]:
    """All charts of runs, in the order of the page."""
    names = _in_order(name for run in runs for name in run.training)
    own = [n for n in names if n not in {"loss", *_UPDATES, *_NO_CHART} and n[:5] != "perf/"]
    found: list[Chart | Bars | None] = [
        _training(runs, "loss", LEARNING, "Training loss", "loss", smoothed=True)
    ]
    found += [_training(runs, n, LEARNING, f"Training: {n}", n, smoothed=True) for n in own]
    found += [_evaluation(runs, name) for name in _evaluated(runs)]
    for name, (title, label, scale) in _UPDATES.items():
        smoothed = name == "gradient_norm"
        found.append(_training(runs, name, UPDATES, title, label, scale=scale, smoothed=smoothed))
    others = {
        name: (name[5:], name[5:], "")
        for name in names
        if name[:5] == "perf/" and name not in {*_SPEED, *_NO_CHART} and name[-8:] != "_seconds"
    }
    for name, (title, label, unit) in (_SPEED | others).items():
        found.append(
            _training(runs, name, SPEED, title, label, unit=unit, from_zero=True, smoothed=True)
        )
    title, label = "Goodput since the process began", "share of the time in steps"
    found.append(_bars(runs))
    found.append(_training(runs, "perf/goodput", TIME, title, label, unit="%", from_zero=True))
    return _with_own_names([chart for chart in found if chart is not None])


def skipped(run: runs_lib.Run, group: int) -> list[tuple[int, int]]:
    """The intervals of steps in which a group skipped updates, as far as the rows tell.

    Returns:
      Steps after which and up to which there were skips; neighbours as one.
    """
    column = run.training.get("skipped")
    if column is None or group >= column.values.shape[1]:
        return []
    totals = column.values[:, group]
    known = np.isfinite(totals)
    steps = [0, *map(int, column.steps[known])]
    rises = np.diff(totals[known], prepend=0.0) > 0
    found: list[tuple[int, int]] = []
    for index in np.flatnonzero(rises):
        begin, end = steps[index], steps[index + 1]
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found


def _training(
    runs: Sequence[runs_lib.Run],
    name: str,
    section: str,
    title: str,
    label: str,
    *,
    scale: str = LINEAR,
    unit: str = "",
    smoothed: bool = False,
    from_zero: bool = False,
) -> Chart | None:
    """The chart of one column of training rows; None if no run has it."""
    lines = [
        dataclasses.replace(
            line,
            restarts=run.restarts,
            skips=skipped(run, group) if scale == LOG2 else (),
        )
        for index, run in enumerate(runs)
        if name in run.training
        for group, line in enumerate(_lines(runs, index, run.training[name], SOLID, ""))
    ]
    if not lines:
        return None
    if scale == LINEAR and not unit and not from_zero and _spans(lines):
        scale, label = LOG, f"{label} (log)"
    return Chart(name, section, title, label, lines, scale, unit, smoothed, from_zero)


def _evaluation(runs: Sequence[runs_lib.Run], name: str) -> Chart:
    """The chart of a value of the evaluation, with its variants."""
    lines: list[Line] = []
    for index, run in enumerate(runs):
        for columns, job in ((run.evaluation, False), (run.separate, True)):
            for full, column in columns.items():
                variants, base = _variants(full)
                if base != name:
                    continue
                words = [*(_VARIANTS[v] for v in variants), *(["evaluation job"] if job else [])]
                made = list(_lines(runs, index, column, _STYLES[variants], ", ".join(words)))
                made = [dataclasses.replace(line, points=job) for line in made]
                if len(runs) == 1 and "ensemble" in variants:
                    # Of no group, and so in none's colour.
                    groups = max(other.values.shape[1] for other in columns.values())
                    made = [dataclasses.replace(line, colour=groups) for line in made]
                lines += made
    if len(runs) == 1 and len(lines) > 1:
        lines = [dataclasses.replace(line, label=line.label or _PLAIN) for line in lines]
    scale, label = (LOG, f"{name} (log)") if _spans(lines) else (LINEAR, name)
    return Chart(f"eval/{name}", LEARNING, f"Evaluation: {name}", label, lines, scale)


def _lines(
    runs: Sequence[runs_lib.Run], index: int, column: rows_lib.Column, style: str, said: str
) -> Iterator[Line]:
    """The curve of each group."""
    groups = column.values.shape[1]
    for group in range(groups):
        if len(runs) > 1:
            # A run has one colour, whatever there are several of in it.
            label = ", ".join(part for part in (runs[index].name, said) if part)
            colour, label = index, "" if group else label
        else:
            parts = (f"group {group}" if groups > 1 else "", said)
            colour, label = group, ", ".join(part for part in parts if part)
        values = column.values[:, group]
        thin = len(runs) > 1 and groups > 1
        yield Line(label, colour, style, column.steps, values, thin=thin)


def _spans(lines: Sequence[Line]) -> bool:
    """Returns whether values that are above 1 at times spread so far that a linear axis would not show them."""
    values = np.concatenate([line.values for line in lines])
    values = values[np.isfinite(values)]
    return bool(len(values) and values.min() > 0 and values.max() > max(1, 100 * values.min()))


def _bars(runs: Sequence[runs_lib.Run]) -> Bars | None:
    known = [(run, [start for start in run.starts if start.parts]) for run in runs]
    known = [(run, starts) for run, starts in known if starts]
    if not known:
        return None
    merged = sum(len(starts) for _, starts in known) > max(_MANY_BARS, len(known))
    bars = []
    for run, starts in known:
        own = [] if len(runs) == 1 else [run.name]
        for number, start in enumerate(starts, 1):
            steps = f"steps {start.first} to {start.last}"
            name = [f"process {number}: {steps}"] if len(starts) > 1 or not own else []
            if not merged:
                bars.append((", ".join([*own, *name]), start.seconds, start.parts))
        if merged:
            parts = {name: sum(s.parts.get(name, 0.0) for s in starts) for name in runs_lib.PARTS}
            text = ", ".join([*own, *([f"{len(starts)} processes"] if len(starts) > 1 else [])])
            bars.append((text, sum(s.seconds for s in starts), parts))
    return Bars("time", TIME, "Shares of the time since a process began", bars, merged)


def _evaluated(runs: Sequence[runs_lib.Run]) -> list[str]:
    """The names of what was evaluated, without the variants."""
    tables = [columns for run in runs for columns in (run.evaluation, run.separate)]
    names = _in_order(_variants(name)[1] for columns in tables for name in columns)
    return [name for name in names if not name.startswith("perf/")]


def _variants(name: str) -> tuple[tuple[str, ...], str]:
    """Returns what an evaluation is of, as 'average/loss', in alphabetic order; and the name without that."""
    found: set[str] = set()
    while name.partition("/")[0] in _VARIANTS.keys() - found and "/" in name:
        variant, _, name = name.partition("/")
        found.add(variant)
    return tuple(sorted(found)), name


def _in_order(names: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _with_own_names(found: Sequence[Chart | Bars]) -> list[Chart | Bars]:
    """Charts whose names are those of files: of plain letters, and no two alike where case does not count."""
    taken: set[str] = set()
    renamed = []
    for chart in found:
        name = re.sub(r"[^a-z0-9_-]+", "_", chart.name.lower()).strip("_")[:60] or "chart"
        own, number = name, 1
        while own in taken:
            number += 1
            own = f"{name}_{number}"
        taken.add(own)
        renamed.append(dataclasses.replace(chart, name=own))
    return renamed
