"""The samples on the page: texts, images and histograms of the runs, newest first."""

import html
from collections.abc import Sequence
from typing import Any

from xshard import samples
from xshard.report import figures
from xshard.report import runs as runs_lib

# The width of images and histograms on the page, and the height of histograms, in
# pixels.
_WIDTH = 480
_HEIGHT = 120


def gallery(runs: Sequence[runs_lib.Run]) -> str:
    """Returns all samples by run and name, with earlier ones behind a click.

    It is empty if there are none.
    """
    parts = []
    for run in runs:
        by_name: dict[str, list[str]] = {}
        for row in reversed(run.samples):
            for name, item in samples.items(row).items():
                drawing = f"<p>step {row['step']}</p>\n{_drawing(item)}"
                by_name.setdefault(name, []).append(drawing)
        for name, (newest, *before) in by_name.items():
            title = name
            if len(runs) > 1:
                title = f"{run.name}: {name}"
            parts.append(f"<h3>{figures.text(title)}</h3>\n{newest}")
            if before:
                earlier = "\n".join(before)
                parts.append(
                    f"<details><summary>{len(before)} "
                    f"before</summary>{earlier}</details>"
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
    """Returns a histogram: a bar for each count, with its edges as a tooltip."""
    largest = max(max(counts), 1)
    width = _WIDTH / len(counts)
    bars = ""
    for i, count in enumerate(counts):
        height = _HEIGHT * max(count, 0) / largest
        label = figures.text(f"{edges[i]:.4g} to {edges[i + 1]:.4g}: {count}")
        bars += (
            f'<rect x="{width * i:.1f}" y="{_HEIGHT - height:.1f}" '
            f'width="{width:.1f}" height="{height:.1f}">'
            f"<title>{label}</title></rect>"
        )
    caption = figures.text(f"{edges[0]:.4g} to {edges[-1]:.4g}, {sum(counts)} values")
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" fill="{figures.color(0)}">'
        f"{bars}</svg>\n<p>{caption}</p>"
    )
