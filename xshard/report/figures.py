"""Draws charts with plotly. All text from files is escaped here: plotly takes it as HTML."""

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from xshard.metrics import show
from xshard.report import charts
from xshard.report import runs as runs_lib

WEIGHTS = (0.0, 0.6, 0.9, 0.97, 0.99)
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
    averages: dict[int, list[Any]] = {}
    for number, line in enumerate(chart.lines):
        kept = charts.thin(line.values, parts(chart))
        is_smoothed = chart.is_smoothed and line.mode == "lines" and not line.is_member
        shade = colour(families[line.runs[0]] if len(runs) > 1 else number)
        base = _base(line, runs, shade) | {"x": line.steps[kept].tolist()}
        is_faint = line.is_member or is_smoothed
        traces += _band(line, base)
        traces.append(base | {"y": _listed(line.values[kept]), "opacity": 0.35 if is_faint else 1})
        if is_smoothed:
            traces[-1] |= {"name": f"{base['name']}, unsmoothed", "showlegend": False}
            levels = [_listed(charts.smooth(line.values, weight)[kept]) for weight in WEIGHTS]
            averages[len(traces)] = levels
            traces.append(base | {"y": levels[1], "line": base["line"] | {"width": 2.5}})
        traces += _crosses(line, base)
    layout = _layout(chart, runs) | ({"sliders": [_slider(averages)]} if averages else {})
    return go.Figure(traces, layout)


def parts(chart: charts.Chart) -> int:
    """The number of parts of each curve, of each of which two rows are drawn."""
    return max(_FEWEST_PARTS, _PARTS // len(chart.lines))


def bars(runs: Sequence[runs_lib.Run]) -> go.Figure | None:
    """Shares of the time of each run's processes; None if they were not recorded."""
    known = [(run.name, [start.parts for start in run.starts if start.parts]) for run in runs]
    known = [(name, starts) for name, starts in known if starts]
    traces = []
    for number, part in enumerate(runs_lib.PARTS):
        seconds = [sum(start.get(part, 0.0) for start in starts) for _, starts in known]
        totals = [sum(sum(start.values()) for start in starts) for _, starts in known]
        trace: dict[str, Any] = {"type": "bar", "orientation": "h", "name": part}
        trace["x"] = [s / max(total, 1e-12) for s, total in zip(seconds, totals, strict=True)]
        trace["y"] = [text(name) for name, _ in known]
        trace["text"] = [show.duration(s) for s in seconds]
        trace |= {"hovertemplate": "%{x:.1%}: %{text}", "marker": {"color": colour(number)}}
        traces.append(trace)
    layout = {
        "template": go.layout.Template(),
        "barmode": "stack",
        "height": 160 + 30 * len(known),
        "xaxis": {"tickformat": ".0%"},
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
    }
    return go.Figure(traces, layout) if known else None


def _base(line: charts.Line, runs: Sequence[runs_lib.Run], shade: str) -> dict[str, Any]:
    """Returns all that the traces of one line have in common."""
    names = [runs[index].name for index in line.runs]
    label = names[0] if len(names) == 1 else f"mean of {len(names)} seeds ({names[0]}, …)"
    name = text(f"{label}: {line.what}" if len(runs) > 1 else line.what)
    return {
        "type": "scatter",
        "mode": line.mode,
        "name": name,
        # All that is drawn of a line comes and goes with its name.
        "legendgroup": name,
        "line": {"color": shade, "dash": line.dash, "width": 1.3},
        "marker": {"color": shade, "size": 6},
    }


def _band(line: charts.Line, base: dict[str, Any]) -> list[dict[str, Any]]:
    """The area from the least to the greatest of the runs that a mean is of, with gaps as the mean's."""
    if line.band is None:
        return []
    low, high = line.band
    x: list[Any] = []
    y: list[Any] = []
    for piece in np.ma.clump_unmasked(np.ma.masked_invalid(low)):
        # Of few enough rows, by their extremes.
        lowest, highest = (piece.start + charts.thin(edge[piece], _MARKS) for edge in (low, high))
        x += [*line.steps[lowest].tolist(), *line.steps[highest][::-1].tolist(), None]
        y += [*low[lowest].tolist(), *high[highest][::-1].tolist(), None]
    shape = {"x": x, "y": y, "mode": "lines", "fill": "toself", "opacity": 0.2}
    hidden = {"line": {"width": 0, "color": base["line"]["color"]}, "hoverinfo": "skip"}
    return [base | shape | hidden | {"showlegend": False}]


def _crosses(line: charts.Line, base: dict[str, Any]) -> list[dict[str, Any]]:
    """Marks rows that are not finite, at the height of the last finite row before each."""
    known, lost = np.flatnonzero(np.isfinite(line.values)), np.flatnonzero(np.isnan(line.values))
    if not len(lost):
        return []
    lost = lost[:: math.ceil(len(lost) / _MARKS)]
    before = np.maximum(np.searchsorted(known, lost) - 1, 0)
    heights = line.values[known[before]] if len(known) else np.ones(len(lost))
    cross = {"mode": "markers", "x": line.steps[lost].tolist(), "y": heights.tolist()}
    cross |= {"marker": {"symbol": "x", "size": 9, "color": _RED}, "showlegend": False}
    return [base | cross | {"hovertemplate": "not finite"}]


def _slider(averages: dict[int, list[Any]]) -> dict[str, Any]:
    """Puts averages in the place of one another, by their traces' numbers; the rows stay as they are."""
    steps = []
    for level, weight in enumerate(WEIGHTS):
        values = [levels[level] for levels in averages.values()]
        step = {"method": "restyle", "label": f"{weight:g}", "args": [{"y": values}, [*averages]]}
        steps.append(step)
    shown = {"prefix": "smoothing (weight of what came before): "}
    return {"steps": steps, "active": 1, "currentvalue": shown, "pad": {"t": 35}}


def _layout(chart: charts.Chart, runs: Sequence[runs_lib.Run]) -> dict[str, Any]:
    shown = {index for line in chart.lines for index in line.runs}
    restarts = sorted({start.first for index in shown for start in runs[index].starts[1:]})
    dashes = {"type": "line", "yref": "paper", "y0": 0, "y1": 1}
    dashes["line"] = {"color": "gray", "width": 1, "dash": "dot"}
    kinds = ("linear", "log")
    changes = [{"yaxis.type": kind, "yaxis.autorange": True} for kind in kinds]
    buttons = [
        {"method": "relayout", "label": kind, "args": [change]}
        for kind, change in zip(kinds, changes, strict=True)
    ]
    menu = {"type": "buttons", "buttons": buttons, "active": int(chart.is_log), "direction": "left"}
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
        "updatemenus": [menu | {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}],
        "shapes": [dashes | {"x0": step, "x1": step} for step in restarts[-_MARKS:]],
    }


def _listed(values: np.ndarray) -> list[float | None]:
    """Values as JSON can hold them."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
