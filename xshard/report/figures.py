"""Draws charts with plotly. Text from files is escaped here, since plotly interprets
text as HTML.
"""

import collections
import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from xshard.metrics import formatting
from xshard.pod import attempts
from xshard.report import charts
from xshard.report import runs as runs_lib

WEIGHTS = (0.0, 0.6, 0.9, 0.97, 0.99)
# The index of the weight that is selected at first.
_LEVEL = 1
# The opacity of curves behind an average or a mean.
_FAINT = 0.35
# The number of parts of all curves of a chart together, and the fewest of any curve.
# Two rows of each part are drawn.
_PARTS, _FEWEST_PARTS = 2000, 100
# The most marks of one kind in a chart.
_MARKS = 300
_RED = "#d62728"


def text(value: object) -> str:
    """Escapes a text for HTML."""
    return html.escape(formatting.printable(str(value)))


def colour(number: int) -> str:
    """Returns a color that differs clearly from the colors of neighboring numbers, by
    the golden angle; the first is blue.
    """
    return f"hsl({(215 + 137.508 * number) % 360:.0f}, 65%, {42 + 12 * (number % 2)}%)"


def figure(chart: charts.Chart, runs: Sequence[runs_lib.Run]) -> go.Figure:
    """Draws a chart, with a slider for its smoothing."""
    families = charts.seeds(runs)
    traces: list[dict[str, Any]] = []
    # For the number of each smoothed trace, its averages with each weight.
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
            levels = [
                _listed(charts.smooth(line.values, weight)[kept]) for weight in WEIGHTS
            ]
            averages[len(traces)] = levels
            traces.append(
                base | {"y": levels[_LEVEL], "line": base["line"] | {"width": 2.5}}
            )
        else:
            traces.append(rows)
        if np.isnan(line.values).any():
            traces.append(_crosses(line, base))
    layout = _layout(chart, runs)
    if averages:
        layout["sliders"] = [_slider(averages)]
    return go.Figure(traces, layout)


def parts(chart: charts.Chart) -> int:
    """Returns the number of parts of each curve of a chart; two rows of each part are
    drawn.
    """
    return max(_FEWEST_PARTS, _PARTS // len(chart.lines))


def bars(runs: Sequence[runs_lib.Run]) -> go.Figure | None:
    """Draws how the time of each run's attempts, and the time between them, was spent;
    None if it was not recorded.
    """
    # For each run, the seconds of each part.
    spent: dict[str, collections.Counter[str]] = {}
    for run in runs:
        for attempt in run.attempts:
            seconds = attempt.seconds | {attempts.DOWN: attempt.down}
            spent.setdefault(run.name, collections.Counter()).update(seconds)
    if not spent:
        return None
    traces = []
    for number, part in enumerate((*attempts.TIME_CATEGORIES, attempts.DOWN)):
        shares = [
            seconds[part] / max(seconds.total(), 1e-12) for seconds in spent.values()
        ]
        trace = {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "x": shares,
            "y": [text(name) for name in spent],
            "text": [formatting.duration(seconds[part]) for seconds in spent.values()],
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


def _base(
    line: charts.Line, runs: Sequence[runs_lib.Run], shade: str
) -> dict[str, Any]:
    """Returns the properties that all traces of one line share."""
    label = line.what
    if len(runs) > 1:
        run = runs[line.runs[0]].name
        count = len(line.runs)
        of_runs = f"mean of {count} runs ({run}, …)" if count > 1 else run
        label = f"{of_runs}: {line.what}"
    name = text(label)
    return {
        "type": "scatter",
        "mode": _mode(line),
        "name": name,
        # A click on the name in the legend shows or hides all traces of the line.
        "legendgroup": name,
        "line": {"color": shade, "dash": line.dash, "width": 1.3},
        "marker": {"color": shade, "size": 6},
    }


def _mode(line: charts.Line) -> str:
    """Returns the mode of a line; with markers if a row would be invisible, since no
    finite row is next to it.
    """
    known = np.isfinite(np.pad(line.values, 1, constant_values=np.nan))
    is_alone = known[1:-1] & ~known[:-2] & ~known[2:]
    return "lines+markers" if line.mode == "lines" and is_alone.any() else line.mode


def _band(
    line: charts.Line, band: tuple[np.ndarray, np.ndarray], base: dict[str, Any]
) -> dict[str, Any]:
    """Draws the area between the smallest and the largest values of a mean's runs, with
    the same gaps as the mean.
    """
    low, high = band
    x: list[Any] = []
    y: list[Any] = []
    for piece in np.ma.clump_unmasked(np.ma.masked_invalid(low)):
        # The outline runs along the lower edge and back along the upper one, each
        # thinned to its extremes.
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
        # Rows before the first finite row are drawn at its height.
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
    """Returns a slider that replaces the averages of the smoothed traces, by their
    numbers.
    """
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
        # An empty template: plotly's own would be as large as many charts.
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


def _restarts(
    chart: charts.Chart, runs: Sequence[runs_lib.Run]
) -> list[dict[str, Any]]:
    """Returns dotted lines at the first step of each attempt except the first."""
    steps: set[int] = set()
    for line in chart.lines:
        for number in line.runs:
            firsts = (attempt.first for attempt in runs[number].attempts[1:])
            # An attempt that ended before its first step has no first step.
            steps.update(first for first in firsts if first is not None)
    dotted = {"color": "gray", "width": 1, "dash": "dot"}
    return [
        {
            "type": "line",
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "x0": step,
            "x1": step,
            "line": dotted,
        }
        for step in sorted(steps)[-_MARKS:]
    ]


def _listed(values: np.ndarray) -> list[float | None]:
    """Returns values as JSON numbers; None for those that are not finite."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
