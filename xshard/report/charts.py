"""The charts of a report, as the data and layouts that plotly draws.

Texts from files are escaped here, since plotly interprets text as HTML.
"""

import collections
import html
import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from xshard.base import formatting
from xshard.files import jsonfile
from xshard.pod import attempts
from xshard.report import runs as runs_lib

# The `data`, traces, and the `layout` of a chart; arrays may be those of pandas.
Figure = dict[str, Any]
# A trace of plotly: a curve, an area or marks, by the names of its properties.
Trace = dict[str, Any]
# The sections of the page that have charts, in order.
LEARNING = "Training and evaluation"
UPDATES = "Updates"
SPEED = "Speed"
SECTIONS = (LEARNING, UPDATES, SPEED)
# The weights of the smoothing control, and the index of the one that is selected first.
WEIGHTS = (0.0, 0.6, 0.9, 0.97, 0.99)
FIRST_WEIGHT = 1
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
# The number of parts of all curves of a chart together, and the fewest of any curve.
# Two rows of each part are drawn.
_PARTS = 2000
_FEWEST_PARTS = 100
# The most marks of one kind in a chart.
_MARKS = 300
# What curves behind an average or a mean have.
_BEHIND = {"opacity": 0.35, "showlegend": False}
# The height of a chart above its horizontal axis, of a line of the legend, and of a row
# of a map, in pixels.
_HEIGHT = 300
_LEGEND_LINE = 20
_ROW = 18
_TRANSPARENT = "rgba(0, 0, 0, 0)"
_STEPS = {"title": {"text": "step", "standoff": 5}}
# A row for each name, the first one on top.
_NAMES = {"type": "category", "autorange": "reversed", "automargin": True}


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
    """A chart with all curves of one metric over the steps.

    Attributes:
      name: the metric.
      quantity: its name without its learner's name.
      section: the section of the page that contains it.
      lines: the curves.
    """

    name: str
    quantity: str
    section: str
    lines: list[Line]

    @property
    def is_log(self) -> bool:
        """Whether the axis is logarithmic at first, as for the loss scale and norms."""
        return self.quantity.endswith(("_norm", "loss_scale", _NOISE_SCALE))

    @property
    def is_smoothed(self) -> bool:
        """Whether its curves are smoothed, as noisy ones are."""
        return self.quantity not in _NOT_SMOOTHED

    @property
    def num_parts(self) -> int:
        """The number of parts of each curve, of which two rows each are drawn."""
        return max(_FEWEST_PARTS, _PARTS // len(self.lines))

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


def text(value: object) -> str:
    """Escapes a text for HTML."""
    return html.escape(formatting.printable(str(value)))


def color(number: int) -> str:
    """Returns a color that differs clearly from those of neighboring numbers.

    The hues are apart by the golden angle; the first is blue.
    """
    hue = (215 + 137.508 * number) % 360
    return f"hsl({hue:.0f}, 65%, {45 + 12 * (number % 2)}%)"


def without_learner(name: str) -> str:
    """Returns the name of a metric without its learner's name."""
    return name.rpartition("/")[2]


def seeds(runs: Sequence[runs_lib.Run]) -> list[int]:
    """Returns the number of each run's family.

    The configs of a family differ at most in the seed.
    """
    families = [json.dumps({**run.config, "seed": 0}, sort_keys=True) for run in runs]
    return pd.factorize(pd.Series(families))[0].tolist()


def charts(runs: Sequence[runs_lib.Run]) -> list[Chart]:
    """Returns all charts of runs, in the order of the page."""
    families = seeds(runs)
    lines_of_metrics = collections.defaultdict(list)
    for index, run in enumerate(runs):
        for metric, line in _lines(index, run):
            lines_of_metrics[metric].append(line)
    all_charts = []
    for metric, lines in lines_of_metrics.items():
        quantity = without_learner(metric)
        section = UPDATES if quantity in _UPDATES else LEARNING
        if metric.startswith("perf/"):
            section = SPEED
        drawn = _with_means(lines, families)
        if quantity == _NOISE_SCALE:
            drawn += _batch_sizes(lines, runs)
        all_charts.append(Chart(metric, quantity, section, drawn))
    # In its section the loss comes first; the sort keeps the order of the others.
    all_charts.sort(key=lambda x: (SECTIONS.index(x.section), x.quantity != "loss"))
    return all_charts


def _lines(index: int, run: runs_lib.Run) -> list[tuple[str, Line]]:
    """Returns the curve of each group under each name, with its metric."""
    lines = []
    sources = (run.training, run.evaluation, run.evaluation_job)
    for (source, mode), columns in zip(_MODES.items(), sources, strict=True):
        named = []
        for name, frame in columns.items():
            # 'ensemble/average/loss' is of two variants. Runs of earlier versions have
            # 'average'.
            variants: set[str] = set()
            while name.startswith(("raw/", "average/", "ensemble/")):
                variant, _, name = name.partition("/")
                variants.add(variant)
            named.append((", ".join(sorted(variants)), name, frame))
        # All charts use the same order, since a line's position in a chart determines
        # its color.
        for kind, metric, frame in sorted(named, key=lambda x: x[0]):
            if _NO_CHART.fullmatch(metric):
                continue
            dash = _DASHES.get(kind or source, "dash")
            what = f"{source}, {kind}" if kind else source
            for group in frame:
                label = f"{what}, group {group}" if frame.shape[1] > 1 else what
                lines.append((metric, Line((index,), label, frame[group], dash, mode)))
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
            band=values.T.agg(["min", "max"], skipna=False).T,
        )
        drawn.append(mean)
        drawn += [line._replace(is_member=True) for line in members]
    return drawn


def _batch_sizes(lines: Sequence[Line], runs: Sequence[runs_lib.Run]) -> list[Line]:
    """Returns the batch size beside the noise scale of each run."""
    drawn = []
    of_training = [line for line in lines if line.mode == _MODES["training"]]
    for index, run in enumerate(runs):
        of_run = [line for line in of_training if line.runs == (index,)]
        size = run.config.get("batch_size")
        if not of_run or size is None or not jsonfile.is_number(size):
            continue
        what = BATCH_SIZE
        if run.config.get("outer.every_steps"):
            # Each slice steps along the gradient of its own part.
            size /= len(of_run)
            what = f"{BATCH_SIZE} of a slice"
        values = pd.Series(float(size), index=of_run[0].values.index)
        drawn.append(Line((index,), what, values, "dot", "lines"))
    return drawn


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
    part = np.arange(rows) // -(-rows // parts)
    # A part without a finite row keeps its first one, so that it is drawn as a gap.
    lowest = values.fillna(np.inf).groupby(part).idxmin()
    highest = values.fillna(-np.inf).groupby(part).idxmax()
    return values[sorted({*lowest, *highest, values.index[0], values.index[-1]})]


def figure(chart: Chart, runs: Sequence[runs_lib.Run]) -> Figure:
    """Draws a chart. The `meta` of each smoothed trace has its values with each of
    `WEIGHTS`.
    """
    families = seeds(runs)
    traces: list[Trace] = []
    restarts: set[int] = set()
    legend = ""
    # On a narrow screen each name in the legend, below the chart, has a line.
    margin = 65
    for number, line in enumerate(chart.lines):
        name = line.what
        if len(runs) > 1:
            of_runs = runs[line.runs[0]].name
            if line.band is not None:
                of_runs = f"mean of {len(line.runs)} runs ({of_runs}, …)"
            name = f"{of_runs}: {name}"
        name = text(name)
        if not line.is_member:
            legend = name
            margin += _LEGEND_LINE
        line_color = color(families[line.runs[0]] if len(runs) > 1 else number)
        kept = thin(line.values, chart.num_parts)
        rows = {
            "type": "scatter",
            "x": kept.index,
            "y": kept,
            "mode": _mode(line),
            "name": name,
            # A click on a name in the legend shows or hides all traces of the line, and
            # of the runs that a mean is of, which come after it.
            "legendgroup": legend,
            "line": {"color": line_color, "dash": line.dash, "width": 1.3},
            "marker": {"color": line_color, "size": 6},
        }
        if line.band is not None:
            traces.append(rows | _band(line.band, line_color))
        if line.is_member:
            traces.append(rows | _BEHIND)
        elif chart.is_smoothed and line.mode == "lines":
            traces.append(rows | _BEHIND | {"name": f"{name}, unsmoothed"})
            levels = []
            for weight in WEIGHTS:
                # The moving average is corrected for its bias to 0. nan stays nan, and
                # enters no average.
                average = line.values.ewm(alpha=1 - weight, ignore_na=True).mean()
                levels.append(average.where(line.values.notna())[kept.index])
            smoothed = {"y": levels[FIRST_WEIGHT], "meta": levels}
            traces.append(rows | smoothed | {"line": {**rows["line"], "width": 2.5}})
        else:
            traces.append(rows)
        if line.values.hasnans:
            traces.append(rows | _crosses(line.values))
        for index in line.runs:
            # An attempt that ended before its first step has none.
            firsts = [attempt.first for attempt in runs[index].attempts[1:]]
            restarts.update(first for first in firsts if first is not None)
    mark = {"type": "line", "yref": "paper", "y0": 0, "y1": 1}
    mark["line"] = {"color": "gray", "width": 1, "dash": "dot"}
    changes = {}
    for kind in ("linear", "log"):
        changes[kind] = {"yaxis.type": kind, "yaxis.autorange": True}
    layout = {
        "margin": {"t": 40, "r": 10, "b": margin},
        "hovermode": "x unified" if len(chart.lines) <= 12 else "closest",
        "hoverlabel": {"namelength": -1},
        "showlegend": True,
        "legend": {
            "orientation": "h",
            "x": 0,
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
        },
        "xaxis": _STEPS,
        "yaxis": {
            "type": "log" if chart.is_log else "linear",
            "rangemode": "tozero" if chart.section == SPEED else "normal",
            "hoverformat": ".6~g",
            "automargin": True,
        },
        "updatemenus": [_menu("relayout", changes, int(chart.is_log))],
        "shapes": [{**mark, "x0": x, "x1": x} for x in sorted(restarts)[-_MARKS:]],
    }
    return _figure(traces, _HEIGHT + margin, layout)


def bars(runs: Sequence[runs_lib.Run]) -> Figure | None:
    """Draws how the time of each run's attempts, and the time between them, was spent;
    None if none was.
    """
    rows = []
    for run in runs:
        for attempt in run.attempts:
            seconds = {**attempt.seconds, attempts.DOWN: attempt.down}
            rows.append({"run": text(run.name), **seconds})
    names = ["run", *attempts.TIME_CATEGORIES, attempts.DOWN]
    spent = pd.DataFrame(rows, columns=names).groupby("run", sort=False).sum()
    if not spent.to_numpy().any():
        return None
    shares = spent.div(spent.sum(axis=1).clip(1e-12), axis="index")
    traces = []
    for number, part in enumerate(spent):
        trace = {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "x": shares[part],
            "y": spent.index,
            "text": spent[part].map(formatting.duration),
            "hovertemplate": "%{x:.1%}: %{text}",
            "marker": {"color": color(number)},
        }
        traces.append(trace)
    layout = {"barmode": "stack", "xaxis": {"tickformat": ".0%"}, "yaxis": _NAMES}
    return _figure(traces, 160 + 30 * len(spent), layout)


def norm_map(norms: runs_lib.NormMap) -> Figure:
    """Draws the norms of parameters over the steps, with a button for each quantity.

    The page's script colors a cell by the logarithm of its norm.
    """
    traces: list[Trace] = []
    changes = {}
    for quantity, values in norms.values.items():
        logarithms = np.log10(values.where(values > 0)).stack()
        # Outliers, such as the first updates of a bias that begins at 0, must not take
        # all colors.
        low, high = logarithms.quantile([0.01, 0.99]).fillna(0.0)
        trace = {
            "type": "heatmap",
            "x": values.columns,
            "y": [text(path) for path in values.index],
            # Three digits keep a page with many of them small.
            "customdata": values.map(lambda x: float(f"{x:.3g}")).to_numpy(),
            "zmin": low,
            "zmax": high,
            "colorscale": "Viridis",
            "colorbar": {"tickprefix": "1e", "dtick": max(1, round((high - low) / 12))},
            "hovertemplate": f"%{{y}}<br>step %{{x}}: {quantity} %{{customdata}}"
            "<extra></extra>",
            "visible": not traces,
        }
        traces.append(trace)
        shown = [other == quantity for other in norms.values]
        changes[quantity] = {"visible": shown}
    layout = {
        "margin": {"t": 40, "r": 10, "b": 50},
        "xaxis": {**_STEPS, "showgrid": False},
        "yaxis": {**_NAMES, "dtick": 1, "showgrid": False},
        "updatemenus": [_menu("restyle", changes, 0)],
    }
    return _figure(traces, 150 + _ROW * len(values), layout)


def _figure(traces: list[Trace], height: int, layout: dict[str, Any]) -> Figure:
    """Returns a figure that has the page's background."""
    shown = {"height": height, "modebar": {"bgcolor": _TRANSPARENT}, **layout}
    for name in ("paper_bgcolor", "plot_bgcolor"):
        shown[name] = _TRANSPARENT
    return {"data": traces, "layout": shown}


def _mode(line: Line) -> str:
    """Returns how a line is drawn: with markers if a row would be invisible.

    A row is if no finite row is next to it.
    """
    is_gap = line.values.isna()
    has_gaps_beside = is_gap.shift(1, fill_value=True) & is_gap.shift(
        -1, fill_value=True
    )
    if line.mode == "lines" and (has_gaps_beside & ~is_gap).any():
        return "lines+markers"
    return line.mode


def _band(band: pd.DataFrame, line_color: str) -> Trace:
    """Returns how the area between the smallest and the largest values of a mean's runs
    differs from the mean, whose gaps it has.
    """
    outline = [pd.Series(dtype=float)]
    for _, piece in band.dropna().groupby(band["min"].isna().cumsum()):
        # It runs along the lower edge and back along the upper one, each thinned to its
        # extremes.
        low = thin(piece["min"], _MARKS)
        high = thin(piece["max"], _MARKS)[::-1]
        outline += [low, high, pd.Series(np.nan, index=[np.nan])]
    edges = pd.concat(outline)
    return {
        "x": edges.index,
        "y": edges,
        "mode": "lines",
        "fill": "toself",
        "opacity": 0.2,
        "line": {"width": 0, "color": line_color},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _crosses(values: pd.Series) -> Trace:
    """Returns how marks of rows that are not finite differ from their line: at the
    height of the last finite row before, and those before the first one, at its height.
    """
    heights = values.ffill().bfill().fillna(1.0)[values.isna()]
    heights = heights[:: math.ceil(len(heights) / _MARKS)]
    return {
        "mode": "markers",
        "x": heights.index,
        "y": heights,
        "marker": {"symbol": "x", "size": 9, "color": "#d62728"},
        "showlegend": False,
        "hovertemplate": "not finite",
    }


def _menu(method: str, changes: dict[str, Any], active: int) -> dict[str, Any]:
    """Returns a row of buttons above a chart, of which one is selected."""
    buttons = []
    for label, change in changes.items():
        buttons.append({"method": method, "label": label, "args": [change]})
    return {
        "type": "buttons",
        "buttons": buttons,
        "active": active,
        "direction": "left",
        "x": 0,
        "xanchor": "left",
        "y": 1,
        "yanchor": "bottom",
        "pad": {"b": 6},
        # Gray can be read on the selected button, which is white, and on the page,
        # which may be dark.
        "bgcolor": _TRANSPARENT,
        "font": {"color": "gray"},
    }
