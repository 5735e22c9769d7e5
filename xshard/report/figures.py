"""Charts as the data and layouts that plotly draws.

Texts from files are escaped here, since plotly interprets text as HTML.
"""

import html
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from xshard.base import formatting
from xshard.pod import attempts
from xshard.report import charts
from xshard.report import norms as norms_lib
from xshard.report import runs as runs_lib

# The `data`, traces, and the `layout` of a chart; arrays may be those of pandas.
Figure = dict[str, Any]
# A trace of plotly: a curve, an area or marks, by the names of its properties.
Trace = dict[str, Any]
# The weights of the smoothing control, and the index of the one that is selected first.
WEIGHTS = (0.0, 0.6, 0.9, 0.97, 0.99)
FIRST_WEIGHT = 1
# The number of parts of all curves of a chart together, and the fewest of any curve.
# Two rows of each part are drawn.
_PARTS = 2000
_FEWEST_PARTS = 100
# The most marks of one kind in a chart.
_MARKS = 300
# What curves behind an average or a mean have.
_BEHIND = {"opacity": 0.35, "showlegend": False}
# The height of a chart above its horizontal axis, and of a line of the legend, in
# pixels.
_HEIGHT = 300
_LEGEND_LINE = 20
# The height of a row of a map, in pixels.
_ROW = 18
_TRANSPARENT = "rgba(0, 0, 0, 0)"
_ON_THE_PAGE = {
    "paper_bgcolor": _TRANSPARENT,
    "plot_bgcolor": _TRANSPARENT,
    "modebar": {"bgcolor": _TRANSPARENT},
}
_STEPS = {"title": {"text": "step", "standoff": 5}}
# A row for each name, the first one on top.
_NAMES = {"type": "category", "autorange": "reversed", "automargin": True}


def text(value: object) -> str:
    """Escapes a text for HTML."""
    return html.escape(formatting.printable(str(value)))


def color(number: int) -> str:
    """Returns a color that differs clearly from those of neighboring numbers.

    The hues are apart by the golden angle; the first is blue.
    """
    hue = (215 + 137.508 * number) % 360
    return f"hsl({hue:.0f}, 65%, {45 + 12 * (number % 2)}%)"


def num_parts(chart: charts.Chart) -> int:
    """Returns the number of parts of each curve, of which two rows each are drawn."""
    return max(_FEWEST_PARTS, _PARTS // len(chart.lines))


def figure(chart: charts.Chart, runs: Sequence[runs_lib.Run]) -> Figure:
    """Draws a chart. The `meta` of each smoothed trace has its values with each of
    `WEIGHTS`.
    """
    families = charts.seeds(runs)
    traces: list[Trace] = []
    legend = ""
    # On a narrow screen each name in the legend, below the chart, has a line.
    margin = 65
    for number, line in enumerate(chart.lines):
        name = text(_label(line, runs))
        if not line.is_member:
            legend = name
            margin += _LEGEND_LINE
        line_color = color(families[line.runs[0]] if len(runs) > 1 else number)
        kept = charts.thin(line.values, num_parts(chart))
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
                levels.append(charts.smooth(line.values, weight)[kept.index])
            smooth = {"y": levels[FIRST_WEIGHT], "meta": levels}
            traces.append(rows | smooth | {"line": {**rows["line"], "width": 2.5}})
        else:
            traces.append(rows)
        if line.values.hasnans:
            traces.append(rows | _crosses(line.values))
    changes = {}
    for kind in ("linear", "log"):
        changes[kind] = {"yaxis.type": kind, "yaxis.autorange": True}
    layout = {
        **_ON_THE_PAGE,
        "height": _HEIGHT + margin,
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
            "rangemode": "tozero" if chart.section == charts.SPEED else "normal",
            "hoverformat": ".6~g",
            "automargin": True,
        },
        "updatemenus": [_menu("relayout", changes, int(chart.is_log))],
        "shapes": _restarts(chart, runs),
    }
    return {"data": traces, "layout": layout}


def bars(runs: Sequence[runs_lib.Run]) -> Figure | None:
    """Draws how the time of each run's attempts, and the time between them, was spent;
    None if none was.
    """
    rows = []
    for run in runs:
        for attempt in run.attempts:
            seconds = {**attempt.seconds, attempts.DOWN: attempt.down}
            rows.append({"run": text(run.name), **seconds})
    parts = [*attempts.TIME_CATEGORIES, attempts.DOWN]
    frame = pd.DataFrame(rows, columns=["run", *parts])
    spent = frame.groupby("run", sort=False).sum()
    if not spent.to_numpy().any():
        return None
    traces = []
    for number, part in enumerate(parts):
        trace = {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "x": spent[part] / spent.sum(axis=1).clip(1e-12),
            "y": spent.index,
            "text": spent[part].map(formatting.duration),
            "hovertemplate": "%{x:.1%}: %{text}",
            "marker": {"color": color(number)},
        }
        traces.append(trace)
    layout = {
        **_ON_THE_PAGE,
        "barmode": "stack",
        "height": 160 + 30 * len(spent),
        "xaxis": {"tickformat": ".0%"},
        "yaxis": _NAMES,
    }
    return {"data": traces, "layout": layout}


def norm_map(norms: norms_lib.NormMap) -> Figure:
    """Draws the norms of parameters over the steps, with a button for each quantity.

    The page's script colors a cell by the logarithm of its norm.
    """
    traces: list[Trace] = []
    changes = {}
    for quantity, values in norms.values.items():
        logarithms = np.log10(values.where(values > 0)).stack()
        low = -1.0
        high = 0.0
        if len(logarithms):
            # Outliers, such as the first updates of a bias that begins at 0, must not
            # take all colors.
            low, high = logarithms.quantile([0.01, 0.99])
        ticks = list(range(math.floor(low), math.ceil(high) + 1))
        ticks = ticks[:: math.ceil(len(ticks) / 12)]
        trace = {
            "type": "heatmap",
            "x": values.columns,
            "y": [text(path) for path in values.index],
            # Three digits keep a page with many of them small.
            "customdata": values.map(lambda x: float(f"{x:.3g}")).to_numpy(),
            "zmin": low,
            "zmax": high,
            "colorscale": "Viridis",
            "colorbar": {
                "tickvals": ticks,
                "ticktext": [f"1e{tick}" for tick in ticks],
            },
            "hovertemplate": f"%{{y}}<br>step %{{x}}: {quantity} %{{customdata}}"
            "<extra></extra>",
            "visible": not traces,
        }
        traces.append(trace)
        shown = [other == quantity for other in norms.values]
        changes[quantity] = {"visible": shown}
    layout = {
        **_ON_THE_PAGE,
        "height": 150 + _ROW * len(values),
        "margin": {"t": 40, "r": 10, "b": 50},
        "xaxis": {**_STEPS, "showgrid": False},
        "yaxis": {**_NAMES, "dtick": 1, "showgrid": False},
        "updatemenus": [_menu("restyle", changes, 0)],
    }
    return {"data": traces, "layout": layout}


def _label(line: charts.Line, runs: Sequence[runs_lib.Run]) -> str:
    if len(runs) == 1:
        return line.what
    run = runs[line.runs[0]].name
    if len(line.runs) > 1:
        run = f"mean of {len(line.runs)} runs ({run}, …)"
    return f"{run}: {line.what}"


def _mode(line: charts.Line) -> str:
    """Returns how a line is drawn: with markers if a row would be invisible.

    A row is if no finite row is next to it.
    """
    is_finite = np.isfinite(np.pad(line.values, 1, constant_values=np.nan))
    is_alone = is_finite[1:-1] & ~is_finite[:-2] & ~is_finite[2:]
    if line.mode == "lines" and is_alone.any():
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
        low = charts.thin(piece["min"], _MARKS)
        high = charts.thin(piece["max"], _MARKS)[::-1]
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


def _restarts(chart: charts.Chart, runs: Sequence[runs_lib.Run]) -> list[Trace]:
    """Returns dotted lines at the first step of each attempt except the first."""
    steps = set()
    for number in itertools.chain.from_iterable(line.runs for line in chart.lines):
        for attempt in runs[number].attempts[1:]:
            # An attempt that ended before its first step has none.
            if attempt.first is not None:
                steps.add(attempt.first)
    style = {"type": "line", "yref": "paper", "y0": 0, "y1": 1}
    style["line"] = {"color": "gray", "width": 1, "dash": "dot"}
    return [style | {"x0": step, "x1": step} for step in sorted(steps)[-_MARKS:]]
