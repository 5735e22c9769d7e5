"""The samples on the page: texts, images and histograms of the runs, newest first."""

import html
from collections.abc import Sequence
from typing import Any

from xshard import samples
from xshard.report import figures
from xshard.report import runs as runs_lib

# The width of images and histograms on the page, and the height of histograms.
_WIDTH, _HEIGHT = 480, 120


def gallery(runs: Sequence[runs_lib.Run]) -> str:
    """Returns all samples by run and name, with earlier ones behind a click; empty if
    there are none.
    """
    parts = []
    for run in runs:
        by_name: dict[str, list[str]] = {}
        for row in reversed(run.samples):
            for name, item in samples.items(row).items():
                drawing = f"<p>step {row['step']}</p>\n{_drawing(item)}"
                by_name.setdefault(name, []).append(drawing)
        for name, (newest, *before) in by_name.items():
            title = figures.text(f"{run.name}: {name}" if len(runs) > 1 else name)
            parts.append(f"<h3>{title}</h3>\n{newest}")
            if before:
                earlier = "\n".join(before)
                parts.append(
                    f"<details><summary>{len(before)} before</summary>{earlier}</details>"
                )
    return "\n".join(parts)


def _drawing(item: samples.Item) -> str:
    if item["kind"] == "text":
        lines = "\n".join(figures.text(line) for line in item["text"].splitlines())
        return f"<pre>{lines}</pre>"
    if item["kind"] == "image":
        # Small images are enlarged by an integer factor.
        width = item["width"] * max(1, _WIDTH // item["width"])
        source = html.escape(f"data:image/png;base64,{item['png']}")
        style = "image-rendering: pixelated; max-width: 100%"
        return f'<img src="{source}" width="{width}" style="{style}" alt="">'
    return _bars(item["counts"], item["edges"])


def _bars(counts: Sequence[Any], edges: Sequence[Any]) -> str:
    most = max(max(counts), 1)
    bars = []
    for place, count in enumerate(counts):
        height = _HEIGHT * max(count, 0) / most
        left, width = _WIDTH * place / len(counts), _WIDTH / len(counts)
        label = figures.text(f"{edges[place]:.4g} to {edges[place + 1]:.4g}: {count}")
        bars.append(
            f'<rect x="{left:.1f}" y="{_HEIGHT - height:.1f}" width="{width:.1f}" height="{height:.1f}">'
            f"<title>{label}</title></rect>"
        )
    ends = figures.text(f"{edges[0]:.4g} to {edges[-1]:.4g}, {sum(counts)} values")
    svg = f'<svg width="{_WIDTH}" height="{_HEIGHT}" fill="{figures.colour(0)}">{"".join(bars)}</svg>'
    return f"{svg}\n<p>{ends}</p>"
