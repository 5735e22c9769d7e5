"""Draws charts with plotly. All text from files is escaped here: plotly takes it as HTML."""

import collections
import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from xshard.metrics import show
from xshard.pod import attempts
from xshard.report import charts
from xshard.report import runs as runs_lib

WEIGHTS = (0.0, 0.6, 0.9, 0.97, 0.99)
# The number of the weight that is shown first.
_LEVEL = 1
# The opacity of what stands behind an average or a mean.
_FAINT = 0.35
# Parts of all curves of a chart together, of each of which two rows are drawn, and of any curve at least.
_PARTS, _FEWEST_PARTS = 2000, 100
# Marks in a chart of what may be in every row.
_MARKS = 300
_RED = "#d62728"


def text(value: object) -> str:
    """A text as HTML."""
    return html.escape(show.printable(str(value)))


def colour(number: int) -> str:
    """A colour far from its neighbours', by the golden angle; the first is blue."""
    return f"hsl({(215 + 137.508 * number) % 360:.0f}, 65%, {42 + 12 * (number % 2)}%)"


def figure(chart: charts.Chart, runs: Sequence[runs_lib.Run]) -> go.Figure:
    """Draws a chart, with a slider for its smoothing."""
    families = charts.seeds(runs)
    traces: list[dict[str, Any]] = []
    # By the numbers of their traces: the averages of a line, with each weight.
    averages: dict[int, list[Any]] = {}
    for number, line in enumerate(chart.lines):
        shade = colour(families[line.runs[0]] if len(runs) > 1 else number)
        kept = charts.thin(line.values, parts(chart))
        base = _base(line, runs, shade) | {"x": line.steps[kept].tolist()}
        rows = base | {"y": _listed(line.values[kept])}
        if line.band is not None:
            traces.append(_band(line, line.band, base))
        if line.is_member:
            traces.append(rows | {"opacity": _FAINT})
        elif chart.is_smoothed and line.mode == "lines":
            name = f"{base['name']}, unsmoothed"
            traces.append(rows | {"opacity": _FAINT, "name": name, "showlegend": False})
            levels = [_listed(charts.smooth(line.values, weight)[kept]) for weight in WEIGHTS]
            averages[len(traces)] = levels
            traces.append(base | {"y": levels[_LEVEL], "line": base["line"] | {"width": 2.5}})
        else:
            traces.append(rows)
        if np.isnan(line.values).any():
            traces.append(_crosses(line, base))
    layout = _layout(chart, runs)
    if averages:
        layout["sliders"] = [_slider(averages)]
    return go.Figure(traces, layout)


def parts(chart: charts.Chart) -> int:
    """The number of parts of each curve, of each of which two rows are drawn."""
    return max(_FEWEST_PARTS, _PARTS // len(chart.lines))


def bars(runs: Sequence[runs_lib.Run]) -> go.Figure | None:
    """Shares of the time of each run's attempts, and between them; None if they were not recorded."""
    # The seconds of each part of each run.
    spent: dict[str, collections.Counter[str]] = {}
    for run in runs:
        for attempt in run.attempts:
            seconds = attempt.seconds | {attempts.DOWN: attempt.down}
            spent.setdefault(run.name, collections.Counter()).update(seconds)
    if not spent:
        return None
    traces = []
    for number, part in enumerate((*attempts.PARTS, attempts.DOWN)):
        shares = [seconds[part] / max(seconds.total(), 1e-12) for seconds in spent.values()]
        trace = {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "x": shares,
            "y": [text(name) for name in spent],
            "text": [show.duration(seconds[part]) for seconds in spent.values()],
            "hovertemplate": "%{x:.1%}: %{text}",
            "marker": {"color": colour(number)},
        }
        traces.append(trace)
    layout = {
        "template": go.layout.Template(),
        "barmode": "stack",
        "height": 160 + 30 * len(spent),
        "xaxis": {"tickformat": ".0%"},
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
    }
    return go.Figure(traces, layout)


def _base(line: charts.Line, runs: Sequence[runs_lib.Run], shade: str) -> dict[str, Any]:
    """Returns all that the traces of one line have in common."""
    label = line.what
    if len(runs) > 1:
        run = runs[line.runs[0]].name
        count = len(line.runs)
        of_runs = f"mean of {count} seeds ({run}, …)" if count > 1 else run
        label = f"{of_runs}: {line.what}"
    name = text(label)
    return {
        "type": "scatter",
        "mode": line.mode,
        "name": name,
        # All that is drawn of a line comes and goes with its name.
        "legendgroup": name,
        "line": {"color": shade, "dash": line.dash, "width": 1.3},
        "marker": {"color": shade, "size": 6},
    }


def _band(
    line: charts.Line, band: tuple[np.ndarray, np.ndarray], base: dict[str, Any]
) -> dict[str, Any]:
    """The area from the least to the greatest of the runs that a mean is of, with gaps as the mean's."""
    low, high = band
    x: list[Any] = []
    y: list[Any] = []
    for piece in np.ma.clump_unmasked(np.ma.masked_invalid(low)):
        # Along the lower edge and back along the upper one; of few enough rows, by their extremes.
        lowest = piece.start + charts.thin(low[piece], _MARKS)
        highest = piece.start + charts.thin(high[piece], _MARKS)[::-1]
        x += [*line.steps[lowest].tolist(), *line.steps[highest].tolist(), None]
        y += [*low[lowest].tolist(), *high[highest].tolist(), None]
    return base | {
        "x": x,
        "y": y,
        "mode": "lines",
        "fill": "toself",
        "opacity": 0.2,
        "line": {"width": 0, "color": base["line"]["color"]},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _crosses(line: charts.Line, base: dict[str, Any]) -> dict[str, Any]:
    """Marks rows that are not finite, at the height of the last finite row before each."""
    lost = np.flatnonzero(np.isnan(line.values))
    lost = lost[:: math.ceil(len(lost) / _MARKS)]
    known = np.flatnonzero(np.isfinite(line.values))
    heights = np.ones(len(lost))
    if len(known):
        # The first finite row for those that have none before them.
        before = np.maximum(np.searchsorted(known, lost) - 1, 0)
        heights = line.values[known[before]]
    return base | {
        "mode": "markers",
        "x": line.steps[lost].tolist(),
        "y": heights.tolist(),
        "marker": {"symbol": "x", "size": 9, "color": _RED},
        "showlegend": False,
        "hovertemplate": "not finite",
    }


def _slider(averages: dict[int, list[Any]]) -> dict[str, Any]:
    """Puts averages in the place of one another, by their traces' numbers; the rows stay as they are."""
    steps = []
    for level, weight in enumerate(WEIGHTS):
        values = [levels[level] for levels in averages.values()]
        arguments = [{"y": values}, list(averages)]
        steps.append({"method": "restyle", "label": f"{weight:g}", "args": arguments})
    return {
        "steps": steps,
        "active": _LEVEL,
        "currentvalue": {"prefix": "smoothing (weight of what came before): "},
        "pad": {"t": 35},
    }


def _layout(chart: charts.Chart, runs: Sequence[runs_lib.Run]) -> dict[str, Any]:
    buttons = []
    for kind in ("linear", "log"):
        change = {"yaxis.type": kind, "yaxis.autorange": True}
        buttons.append({"method": "relayout", "label": kind, "args": [change]})
    menu = {
        "type": "buttons",
        "buttons": buttons,
        "active": int(chart.is_log),
        "direction": "left",
        "x": 0,
        "xanchor": "left",
        "y": 1.02,
        "yanchor": "bottom",
    }
    return {
        # Without plotly's own template, which is as long as many a chart.
        "template": go.layout.Template(),
        "height": 470,
        "margin": {"t": 60, "r": 20},
        "hovermode": "x unified" if len(chart.lines) <= 12 else "closest",
        "showlegend": True,
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {
            "type": "log" if chart.is_log else "linear",
            "rangemode": "tozero" if chart.section == charts.SPEED else "normal",
            "hoverformat": ".6~g",
            "automargin": True,
        },
        "updatemenus": [menu],
        "shapes": _restarts(chart, runs),
    }


def _restarts(chart: charts.Chart, runs: Sequence[runs_lib.Run]) -> list[dict[str, Any]]:
    """Dotted lines at the first step of each attempt but the first."""
    shown = {number for line in chart.lines for number in line.runs}
    firsts = {attempt.first for number in shown for attempt in runs[number].attempts[1:]}
    # One that did not come to its first step has none.
    steps = [first for first in firsts if first is not None]
    dotted = {"color": "gray", "width": 1, "dash": "dot"}
    return [
        {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": step, "x1": step, "line": dotted}
        for step in sorted(steps)[-_MARKS:]
    ]


def _listed(values: np.ndarray) -> list[float | None]:
    """Values as JSON can hold them."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
