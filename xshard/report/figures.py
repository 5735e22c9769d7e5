"""Charts as the data and layouts that plotly draws.

Texts from files are escaped here, since plotly interprets text as HTML.
"""

import collections
import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xshard.base import formatting
from xshard.pod import attempts
from xshard.report import charts
from xshard.report import norms as norms_lib
from xshard.report import runs as runs_lib

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
# The opacity of curves behind an average or a mean.
_FAINT = 0.35
# The height of a chart above its horizontal axis, and of a line of the legend, in
# pixels.
_HEIGHT = 300
_LEGEND_LINE = 20
# The height of a row of a map, in pixels.
_ROW = 18
_RED = "#d62728"
_TRANSPARENT = "rgba(0, 0, 0, 0)"


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


def figure(chart: charts.Chart, runs: Sequence[runs_lib.Run]) -> dict[str, Any]:
    """Draws a chart.

    Returns:
      `data`, the traces; `layout`; and `averages`, which for the number of each
      smoothed trace has its values with each of `WEIGHTS`.
    """
    families = charts.seeds(runs)
    traces: list[Trace] = []
    averages: dict[int, list[Any]] = {}
    legend = ""
    for number, line in enumerate(chart.lines):
        name = text(_label(line, runs))
        if not line.is_member:
            legend = name
        line_color = color(families[line.runs[0]] if len(runs) > 1 else number)
        kept = charts.thin(line.values, num_parts(chart))
        base: Trace = {
            "type": "scatter",
            "mode": _mode(line),
            "name": name,
            # A click on a name in the legend shows or hides all traces of the line, and
            # of the runs that a mean is of, which come after it.
            "legendgroup": legend,
            "line": {"color": line_color, "dash": line.dash, "width": 1.3},
            "marker": {"color": line_color, "size": 6},
            "x": line.steps[kept].tolist(),
        }
        behind = {"opacity": _FAINT, "showlegend": False}
        rows = base | {"y": _json_values(line.values[kept])}
        if line.band is not None:
            traces.append(_band(line, line.band, base))
        if line.is_member:
            traces.append(rows | behind)
        elif chart.is_smoothed and line.mode == "lines":
            traces.append(rows | behind | {"name": f"{name}, unsmoothed"})
            levels = []
            for weight in WEIGHTS:
                average = charts.smooth(line.values, weight)
                levels.append(_json_values(average[kept]))
            averages[len(traces)] = levels
            thick = base["line"] | {"width": 2.5}
            traces.append(base | {"y": levels[FIRST_WEIGHT], "line": thick})
        else:
            traces.append(rows)
        if np.isnan(line.values).any():
            traces.append(_crosses(line, base))
    layout = _layout(chart, runs)
    # On a narrow screen each name in the legend, below the chart, has a line.
    names = [trace for trace in traces if trace.get("showlegend", True)]
    margin = 65 + _LEGEND_LINE * len(names)
    layout["height"] = _HEIGHT + margin
    layout["margin"] = {"t": 40, "r": 10, "b": margin}
    return {"data": traces, "layout": layout, "averages": averages}


def bars(runs: Sequence[runs_lib.Run]) -> dict[str, Any] | None:
    """Draws how the time of each run's attempts, and the time between them, was spent.

    Returns:
      As `figure`; None if none was spent.
    """
    seconds_of_runs: dict[str, collections.Counter[str]] = {}
    for run in runs:
        for attempt in run.attempts:
            seconds = seconds_of_runs.setdefault(text(run.name), collections.Counter())
            seconds.update(attempt.seconds | {attempts.DOWN: attempt.down})
    if not any(seconds.total() for seconds in seconds_of_runs.values()):
        return None
    traces = []
    for number, part in enumerate((*attempts.TIME_CATEGORIES, attempts.DOWN)):
        shares = []
        durations = []
        for seconds in seconds_of_runs.values():
            shares.append(seconds[part] / max(seconds.total(), 1e-12))
            durations.append(formatting.duration(seconds[part]))
        trace = {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "x": shares,
            "y": list(seconds_of_runs),
            "text": durations,
            "hovertemplate": "%{x:.1%}: %{text}",
            "marker": {"color": color(number)},
        }
        traces.append(trace)
    layout = {
        "barmode": "stack",
        "height": 160 + 30 * len(seconds_of_runs),
        "paper_bgcolor": _TRANSPARENT,
        "plot_bgcolor": _TRANSPARENT,
        "xaxis": {"tickformat": ".0%"},
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
    }
    return {"data": traces, "layout": layout, "averages": {}}


def norm_map(norms: norms_lib.NormMap) -> dict[str, Any]:
    """Draws the norms of parameters over the steps, with a button for each quantity.

    Returns:
      As `figure`. The page's script colors a cell by the logarithm of its norm.
    """
    traces = []
    buttons = []
    for number, quantity in enumerate(norms_lib.QUANTITIES):
        values = norms.values[quantity]
        logarithms = np.log10(values[np.isfinite(values) & (values > 0)])
        low = -1.0
        high = 0.0
        if len(logarithms):
            # Outliers, such as the first updates of a bias that begins at 0, must not
            # take all colors.
            low, high = np.percentile(logarithms, [1, 99]).tolist()
        ticks = list(range(math.floor(low), math.ceil(high) + 1))
        ticks = ticks[:: math.ceil(len(ticks) / 12)]
        is_first = number == 0
        trace = {
            "type": "heatmap",
            "x": norms.steps,
            "y": [text(path) for path in norms.paths],
            "customdata": [_short_values(of_path) for of_path in values],
            "zmin": low,
            "zmax": high,
            "colorscale": "Viridis",
            "colorbar": {
                "tickvals": ticks,
                "ticktext": [f"1e{tick}" for tick in ticks],
            },
            "hovertemplate": f"%{{y}}<br>step %{{x}}: {quantity} %{{customdata}}"
            "<extra></extra>",
            "visible": is_first,
        }
        traces.append(trace)
        shown = [other == quantity for other in norms_lib.QUANTITIES]
        button = {"method": "restyle", "label": quantity, "args": [{"visible": shown}]}
        buttons.append(button)
    layout = {
        "height": 150 + _ROW * len(norms.paths),
        "margin": {"t": 40, "r": 10, "b": 50},
        "paper_bgcolor": _TRANSPARENT,
        "plot_bgcolor": _TRANSPARENT,
        "modebar": {"bgcolor": _TRANSPARENT},
        "xaxis": {"title": {"text": "step", "standoff": 5}, "showgrid": False},
        "yaxis": {
            "type": "category",
            "autorange": "reversed",
            "automargin": True,
            "dtick": 1,
            "showgrid": False,
        },
        "updatemenus": [_menu(buttons, 0)],
    }
    return {"data": traces, "layout": layout, "averages": {}}


def _short_values(values: np.ndarray) -> list[float | None]:
    """Returns values with three digits, which keep a page with many of them small."""
    short = []
    for value in _json_values(values):
        if value is not None:
            value = float(f"{value:.3g}")
        short.append(value)
    return short


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


def _band(line: charts.Line, band: tuple[np.ndarray, np.ndarray], base: Trace) -> Trace:
    """Draws the area between the smallest and the largest values of a mean's runs.

    It has the same gaps as the mean.
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


def _crosses(line: charts.Line, base: Trace) -> Trace:
    """Marks rows that are not finite, at the height of the last finite row before."""
    missing = np.flatnonzero(np.isnan(line.values))
    missing = missing[:: math.ceil(len(missing) / _MARKS)]
    finite = np.flatnonzero(np.isfinite(line.values))
    heights = np.ones(len(missing))
    if len(finite):
        # Rows before the first finite row are drawn at its height.
        before = np.maximum(np.searchsorted(finite, missing) - 1, 0)
        heights = line.values[finite[before]]
    return base | {
        "mode": "markers",
        "x": line.steps[missing].tolist(),
        "y": heights.tolist(),
        "marker": {"symbol": "x", "size": 9, "color": _RED},
        "showlegend": False,
        "hovertemplate": "not finite",
    }


def _layout(chart: charts.Chart, runs: Sequence[runs_lib.Run]) -> dict[str, Any]:
    buttons = []
    for kind in ("linear", "log"):
        change = {"yaxis.type": kind, "yaxis.autorange": True}
        buttons.append({"method": "relayout", "label": kind, "args": [change]})
    return {
        "paper_bgcolor": _TRANSPARENT,
        "plot_bgcolor": _TRANSPARENT,
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
        "modebar": {"bgcolor": _TRANSPARENT},
        "xaxis": {"title": {"text": "step", "standoff": 5}},
        "yaxis": {
            "type": "log" if chart.is_log else "linear",
            "rangemode": "tozero" if chart.section == charts.SPEED else "normal",
            "hoverformat": ".6~g",
            "automargin": True,
        },
        "updatemenus": [_menu(buttons, int(chart.is_log))],
        "shapes": _restarts(chart, runs),
    }


def _menu(buttons: list[dict[str, Any]], active: int) -> dict[str, Any]:
    """Returns a row of buttons above a chart, of which one is selected."""
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


def _restarts(
    chart: charts.Chart, runs: Sequence[runs_lib.Run]
) -> list[dict[str, Any]]:
    """Returns dotted lines at the first step of each attempt except the first."""
    steps = set()
    for line in chart.lines:
        for number in line.runs:
            for attempt in runs[number].attempts[1:]:
                # An attempt that ended before its first step has none.
                if attempt.first is not None:
                    steps.add(attempt.first)
    shapes = []
    for step in sorted(steps)[-_MARKS:]:
        shape = {
            "type": "line",
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "x0": step,
            "x1": step,
            "line": {"color": "gray", "width": 1, "dash": "dot"},
        }
        shapes.append(shape)
    return shapes


def _json_values(values: np.ndarray) -> list[float | None]:
    """Returns values as JSON numbers; None for those that are not finite."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
