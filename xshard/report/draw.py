"""Draws charts with matplotlib, each once: as SVG for the page and as PNG for elsewhere."""

import html
import io
import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib import figure, ticker, transforms

from xshard.metrics import show
from xshard.report import curves, figures, style
from xshard.report import runs as runs_lib

KEY_ENTRIES = 12
_KEY_IN_PNG = 60
_SIZE = (5.6, 2.9)
_DPI = 200
# Points of all curves of a chart together, and of one at most.
_BUCKETS, _BUCKETS_EACH, _BUCKETS_LEAST = 2400, 500, 50
# Parts of the horizontal axis of which one is hardly to be seen.
_STRIPS = 600
_DASHES: dict[str, Any] = {
    figures.SOLID: "-",
    figures.DASHED: (0, (5, 2)),
    figures.DOTTED: (0, (1.2, 1.6)),
    figures.DASHDOT: (0, (5, 1.8, 1.2, 1.8)),
}
_MARKERS = {figures.SOLID: "o", figures.DASHED: "s", figures.DOTTED: "^", figures.DASHDOT: "D"}
_RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "figure.constrained_layout.w_pad": 0.09,
    "figure.constrained_layout.h_pad": 0.09,
    "axes.edgecolor": style.INK["mark"].light,
    "axes.labelcolor": style.INK["muted"].light,
    "axes.titlecolor": style.INK["ink"].light,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": style.INK["grid"].light,
    "grid.linewidth": 0.7,
    "text.color": style.INK["ink"].light,
    "text.parse_math": False,
    "xtick.color": style.INK["muted"].light,
    "ytick.color": style.INK["muted"].light,
    "legend.frameon": False,
    "path.simplify_threshold": 0.3,
    # Text stays text: sharp, selectable, and in the page's own font.
    "svg.fonttype": "none",
}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Drawn(NamedTuple):
    """A chart.

    Attributes:
      svg: to be put into a page; without a title and a key, in the page's CSS colours.
      png: a file, on white, with both.
      thinned: whether there are more rows than are drawn.
    """

    svg: str
    png: bytes
    thinned: bool


def draw(
    chart: figures.Chart | figures.Bars, colours: Sequence[style.Colour], description: str
) -> Drawn:
    """Draws a chart.

    Args:
      chart: what is drawn.
      colours: of its lines.
      description: the chart in words, for who does not see it.
    """
    # A glyph that the font for files lacks shows as a box there, and in the page as it should.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        matplotlib.rcParams["svg.hashsalt"] = chart.name
        if isinstance(chart, figures.Chart):
            fig, thinned = _curves(chart, colours)
            height = _SIZE[1]
        else:
            fig, thinned = _bars(chart), False
            height = fig.get_figheight() - 0.25
        fig.axes[0].set_title(chart.title)
        png = io.BytesIO()
        fig.savefig(png, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
        fig.axes[0].set_title("")
        for legend in list(fig.legends):
            legend.remove()
        fig.set_figheight(height)
        svg = io.StringIO()
        fig.savefig(svg, format="svg", transparent=True)
    return Drawn(_for_page(svg.getvalue(), colours, description), png.getvalue(), thinned)


def _curves(chart: figures.Chart, colours: Sequence[style.Colour]) -> tuple[figure.Figure, bool]:
    labels = [line.label for line in chart.lines if line.label]
    rows = -(-min(len(labels), _KEY_IN_PNG) // 3) if len(labels) > 1 else 0
    fig = figure.Figure(figsize=(_SIZE[0], _SIZE[1]), layout="constrained")
    ax = fig.subplots()
    share = _BUCKETS // (len(chart.lines) * (2 if chart.smoothed else 1))
    buckets = max(_BUCKETS_LEAST, min(_BUCKETS_EACH, share))
    thinned = False
    handles = []
    for line in chart.lines:
        thinned |= len(line.steps) > 2 * buckets
        handles.append(_curve(ax, chart, line, colours[line.colour].light, buckets))
    _scale(ax, chart)
    _marks(ax, chart, colours)
    ax.set_xlabel("step")
    ax.set_ylabel(chart.label)
    if rows:
        fig.set_figheight(_SIZE[1] + 0.16 * rows)
        named = [
            (handle, f" {short(line.label)}")
            for handle, line in zip(handles, chart.lines, strict=True)
            if line.label
        ]
        shown = list(zip(*named[:_KEY_IN_PNG], strict=True))
        fig.legend(*shown, loc="outside lower left", ncols=3, fontsize=7.5)
    return fig, thinned


def short(text: str) -> str:
    """A name short enough for a key."""
    return text if len(text) <= 40 else f"{text[:19]}…{text[-20:]}"


def _curve(ax: Any, chart: figures.Chart, line: figures.Line, colour: str, buckets: int) -> Any:
    """Draws a line; returns what stands for it in the key."""
    values = (
        np.where(line.values > 0, line.values, np.nan) if chart.scale != "linear" else line.values
    )
    width = 0.8 if line.thin else 1.5
    if line.points:
        steps, shown = curves.thin(line.steps, values, buckets)
        return ax.plot(
            steps, shown, _MARKERS[line.style], color=colour, markersize=4, markerfacecolor="none"
        )[0]
    window = curves.window(len(values)) if chart.smoothed else 1
    if window > 1 and len(chart.lines) <= KEY_ENTRIES:
        ax.plot(*curves.thin(line.steps, values, buckets), color=colour, alpha=0.3, linewidth=0.7)
    steps, shown = curves.thin(line.steps, curves.smooth(values, window), buckets)
    known = np.isfinite(shown)
    # What has no neighbour to be joined to would not be seen.
    alone = known & ~np.append(known[1:], False) & ~np.append(False, known[:-1])
    few = len(steps) <= 30
    marked = np.flatnonzero(known if few else alone)
    return ax.plot(
        steps, shown, color=colour, linewidth=width, linestyle=_DASHES[line.style],
        marker="o", markersize=2.6, markevery=marked.tolist(),
    )[0]  # fmt: skip


def _scale(ax: Any, chart: figures.Chart) -> None:
    ax.xaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    ax.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    values = np.concatenate([line.values for line in chart.lines])
    values = values[np.isfinite(values) & ((values > 0) | (chart.scale == figures.LINEAR))]
    if not len(values):
        ax.set_yticks([])
        ax.text(0.5, 0.5, "no finite values", transform=ax.transAxes, ha="center")
        return
    if chart.scale == figures.LOG2:
        ax.set_yscale("log", base=2)
        ax.set_ylim(values.min() / 4, values.max() * 2)
        ax.yaxis.set_major_locator(ticker.LogLocator(base=2, numticks=8))
        ax.yaxis.set_major_formatter(ticker.FuncFormatter(_power_of_two))
        ax.yaxis.set_minor_locator(ticker.NullLocator())
    elif chart.scale == figures.LOG:
        ax.set_yscale("log")
        if values.max() < 20 * values.min():
            # Less than two powers of ten: their names alone would say little.
            ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5), numticks=8))
            ax.yaxis.set_minor_formatter(ticker.NullFormatter())
        ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.6g}"))
    elif chart.unit == "%":
        ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))
    elif np.abs(values).max() >= 1e4:
        ax.yaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    if chart.from_zero:
        ax.set_ylim(0, max(values.max() * 1.08, 1e-12))


def _power_of_two(value: float, position: Any) -> str:
    del position
    power = np.log2(value)
    return (
        f"2{str(round(power)).translate(_SUPERSCRIPTS)}" if power == round(power) else f"{value:g}"
    )


def _marks(ax: Any, chart: figures.Chart, colours: Sequence[style.Colour]) -> None:
    """Restarts as lines down from the top; skips as strips along the bottom, one for each curve."""
    across = transforms.blended_transform_factory(ax.transData, ax.transAxes)
    # Those of one run are for all of its curves.
    many = len({tuple(line.restarts) for line in chart.lines}) > 1
    for line in chart.lines:
        colour = colours[line.colour].light if many else style.INK["mark"].light
        top = 0.93 if many else 0.0
        for step in line.restarts:
            ax.plot([step, step], [top, 1.0], color=colour, linewidth=1.0, linestyle=(0, (2, 2)),
                    transform=across, scalex=False, scaley=False)  # fmt: skip
    skipping = [line for line in chart.lines if line.skips]
    height = min(0.03, 0.25 / max(1, len(skipping)))
    apart = sum(ax.dataLim.intervalx * (-1, 1)) / _STRIPS
    for lane, line in enumerate(skipping):
        spans = [(begin, end - begin) for begin, end in _joined(line.skips, apart)]
        ax.broken_barh(
            spans, (lane * height * 1.25, height), facecolors=colours[line.colour].light,
            transform=across, linewidth=0.6, edgecolors=colours[line.colour].light,
        )  # fmt: skip


def _joined(spans: Sequence[tuple[int, int]], apart: float) -> list[tuple[int, int]]:
    """Intervals, those that are nearer than `apart` as one: nobody would see what is between them."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and begin - joined[-1][1] < apart:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined


def _bars(chart: figures.Bars) -> figure.Figure:
    count = len(chart.bars)
    few = count <= 12
    fig = figure.Figure(
        figsize=(_SIZE[0], 1.0 + (0.34 if few else 0.2) * count), layout="constrained"
    )
    ax = fig.subplots()
    ax.grid(axis="x")
    left = np.zeros(count)
    for index, name in enumerate(runs_lib.PARTS):
        shares = np.array(
            [parts.get(name, 0) / max(sum(parts.values()), 1e-12) for _, _, parts in chart.bars]
        )
        if not shares.any():
            continue
        ax.barh(range(count), shares, 0.62, left, color=style.PARTS[index].light, label=f" {name}")
        for bar in np.flatnonzero(shares > 0.09).tolist():
            ax.text(
                left[bar] + shares[bar] / 2, bar, f"{shares[bar]:.0%}", color="#ffffff",
                ha="center", va="center", fontsize=7.5,
            )  # fmt: skip
        left += shares
    between = "\n" if few else "  "
    names = [f"{short(name)}{between}{show.duration(seconds)}" for name, seconds, _ in chart.bars]
    ax.set_yticks(range(count), names, fontsize=7.5)
    ax.set_ylim(count - 0.5, -0.5)
    ax.set_xlim(0, 1)
    ax.grid(False, axis="y")
    ax.xaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    fig.legend(loc="outside lower left", ncols=6, fontsize=7.5, columnspacing=1.0, handlelength=1.0)
    return fig


def _for_page(svg: str, colours: Sequence[style.Colour], description: str) -> str:
    """An SVG as an element of a page: the page's colours and font, nothing that reaches out of it."""
    names = {colour.light: name for name, colour in style.variables(colours).items()}

    def in_css(match: re.Match[str]) -> str:
        name = names.get(match[2])
        return f"{match[1]}var(--{name})" if name else match[0]

    _, _, body = svg.partition("<svg")
    head, _, body = body.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box
    body = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<!--.*?-->", "", body, flags=re.S)
    # Names such as 'axes_1' would be in each chart; those that are referred to are hashes.
    body = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", body).replace("xlink:href", "href")
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", body)
    body = re.sub(r"((?:fill|stroke): )(#[0-9a-f]{6})", in_css, body)
    body = re.sub(r"\n\s*", "\n", body)
    label = html.escape(description, quote=True)
    return f'<svg class="chart" role="img" aria-label="{label}" {box[0]}>{body}'
