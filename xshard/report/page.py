"""Lays out the page, in HTML that needs nothing but itself."""

import collections
import shlex
import string
import time
import urllib.parse
from collections.abc import Sequence
from typing import NamedTuple

from xshard.report import draw, figures, style, tables, words
from xshard.report import runs as runs_lib

_PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="xshard.report">
<title>$title</title>
<style>
$css
</style>
</head>
<body>
<h1>$title</h1>
<p class="sub">$subtitle</p>
$summary
$notes
<main>
$sections
</main>
<footer>$footer</footer>
</body>
</html>
""")
_REPEAT = """# repeat.py
import json
import ml_collections

def get_config(path):
    with open(path) as file:
        return ml_collections.ConfigDict(json.load(file))
"""
_DASHES = {
    figures.SOLID: "",
    figures.DASHED: "6 2.5",
    figures.DOTTED: "1.5 2.5",
    figures.DASHDOT: "6 2 1.5 2",
}
_POINTS = {
    figures.SOLID: "M9.5 6a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0",
    figures.DASHED: "M9.5 2.5h7v7h-7z",
    figures.DOTTED: "M13 2l4 7.5h-8z",
    figures.DASHDOT: "M13 1.5l4.5 4.5l-4.5 4.5l-4.5-4.5z",
}


class Report(NamedTuple):
    """A page and the files beside it.

    Attributes:
      html: the page.
      pngs: the charts as PNG files, by name.
    """

    html: str
    pngs: dict[str, bytes]


def build(runs: Sequence[runs_lib.Run], folder: str) -> Report:
    """Makes the report on runs.

    Args:
      runs: one or more.
      folder: the name of the folder beside the page in which the PNG files will be.
    """
    found = figures.charts(runs)
    curves = [chart for chart in found if isinstance(chart, figures.Chart)]
    numbers = [line.colour for chart in curves for line in chart.lines]
    colours = style.series(max([len(runs) - 1, *numbers]) + 1)
    sections: dict[str, list[str]] = collections.defaultdict(list)
    pngs: dict[str, bytes] = {}
    thinned = False
    for chart in found:
        drawn = draw.draw(chart, colours, words.describe(chart))
        pngs[f"{chart.name}.png"] = drawn.png
        thinned |= drawn.thinned
        link = urllib.parse.quote(f"{folder}/{chart.name}.png")
        sections[chart.section].append(_figure(chart, drawn.svg, link))
    parts = [
        _section(name, f'<div class="charts">{"".join(charts)}</div>')
        for name, charts in sections.items()
    ]
    parts.append(_section("Checkpoints", tables.checkpoints(runs)))
    parts.append(_section("Config", tables.config(runs)))
    parts.append(_section("To run it again", _repeat(runs)))
    several = len(runs) > 1
    html = _PAGE.substitute(
        title=tables.text(f"{len(runs)} runs" if several else runs[0].name),
        css=style.css(colours),
        subtitle=_subtitle(runs),
        summary=tables.comparison(runs) if several else _facts(runs[0]),
        notes=_notes(runs),
        sections="\n".join(parts),
        footer=_footer(folder, len(pngs), thinned),
    )
    return Report(html, pngs)


def _section(name: str, inner: str) -> str:
    return f"<section>\n<h2>{tables.text(name)}</h2>\n{inner}\n</section>"


def _subtitle(runs: Sequence[runs_lib.Run]) -> str:
    experiments = dict.fromkeys(str(run.config.get("experiment", "")) for run in runs)
    where = f" · {runs[0].path}" if len(runs) == 1 else ""
    return tables.text(f"{', '.join(experiments)}{where} · as of {words.moment(time.time())}")


def _facts(run: runs_lib.Run) -> str:
    """Lists what is to be known of a single run first."""
    end = tables.final(run)
    facts: list[tuple[str, str, str]] = [
        ("state", tables.state(run), ""),
        ("step", tables.step(run), ""),
    ]
    if run.seconds is not None:
        count = len(run.starts)
        facts.append(("time", tables.duration(run), "" if count == 1 else f"in {count} processes"))
    for name, values in end.values.items():
        note = "the result" if end.is_result else f"at step {words.number(end.step)}"
        facts.append((f"evaluation: {name}", words.numbers(values), note))
    for label, name in (("training loss", "loss"), ("skipped updates", "skipped")):
        if tables.last(run, name):
            facts.append((label, words.numbers(tables.last(run, name)), "at the last row"))
    for unit, name in (("steps/s", "steps"), ("examples/s", "examples"), ("model FLOP/s", "flops")):
        speed = tables.typical(run, f"perf/{name}_per_second")
        if speed is not None:
            facts.append((unit, words.rate(speed), "median of the rows"))
    share = tables.typical(run, "perf/utilisation")
    if share is not None:
        facts.append(("utilisation", f"{share:.1%}", "median of the rows"))
    inner = "".join(
        f"<div><dt>{tables.text(name)}</dt><dd>{value}{f'<small>{tables.text(note)}</small>' if note else ''}</dd></div>"
        for name, value, note in facts
    )
    return f'<dl class="facts">{inner}</dl>'


def _notes(runs: Sequence[runs_lib.Run]) -> str:
    """Notes what a reader has to know before looking at charts."""
    said = []
    for run in runs:
        label = f"{run.name}: " if len(runs) > 1 else ""
        if not run.training and not run.evaluation:
            said.append(f"{label}no metrics yet.")
        said += [f"{label}{note}" for note in run.notes]
    if not said:
        return ""
    return f'<ul class="notes">{"".join(f"<li>{tables.text(note)}</li>" for note in said)}</ul>'


def _figure(chart: figures.Chart | figures.Bars, svg: str, png: str) -> str:
    key, notes = _key(chart), " ".join(_captions(chart))
    return (
        f'<figure id="chart-{chart.name}"><header><h3>{tables.text(chart.title)}</h3>'
        f'<a href="{png}" aria-label="{tables.text(chart.title)} as PNG">PNG</a></header>\n{svg}\n'
        f"<figcaption>{key}{tables.text(notes)}</figcaption></figure>\n"
    )


def _key(chart: figures.Chart | figures.Bars) -> str:
    """Explains the colours and dashes of a chart; folded up where they are many."""
    if isinstance(chart, figures.Bars):
        names = {part for _, _, parts in chart.bars for part in parts}
        entries = [
            (name, f'<rect width="12" height="12" rx="3" fill="var(--p{index})"/>', 12)
            for index, name in enumerate(runs_lib.PARTS)
            if name in names
        ]
    else:
        entries = [(line.label, _sample(line), 26) for line in chart.lines if line.label]
    if not entries:
        return ""
    items = "".join(
        f'<li><svg width="{width}" height="12" aria-hidden="true">{inner}</svg>{tables.text(name)}</li>'
        for name, inner, width in entries
    )
    key = f'<ul class="key">{items}</ul>'
    if len(entries) <= draw.KEY_ENTRIES:
        return key
    return f"<details><summary>{len(entries)} lines: the key</summary>{key}</details>"


def _sample(line: figures.Line) -> str:
    colour = f"var(--c{line.colour})"
    if line.points:
        return f'<path d="{_POINTS[line.style]}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    return (
        f'<path d="M1 6H25" stroke="{colour}" stroke-width="2.2" '
        f'stroke-dasharray="{_DASHES[line.style]}"/>'
    )


def _captions(chart: figures.Chart | figures.Bars) -> list[str]:
    """Captions of how a chart is drawn."""
    if isinstance(chart, figures.Bars):
        return ["Up to the last row of each process."]
    said = []
    if chart.window > 1:
        faint = "Faint: the rows. " if len(chart.lines) <= draw.KEY_ENTRIES else ""
        said.append(f"{faint}Strong: the mean of {chart.window} rows around each.")
    if any(line.thin for line in chart.lines):
        said.append("Thin: the groups of a run.")
    if any(line.skips for line in chart.lines):
        said.append("Along the bottom: between which rows updates were skipped.")
    if any(line.restarts for line in chart.lines):
        said.append("Dashes down from the top: another process went on.")
    lost = sum(int((line.values != line.values).sum()) for line in chart.lines)
    if lost:
        said.append(f"{lost} values are not finite: gaps.")
    if chart.scale != figures.LINEAR:
        low = sum(int((line.values <= 0).sum()) for line in chart.lines)
        said += [f"{low} values are not above 0, which the scale cannot show: gaps."] if low else []
    return said


def _repeat(runs: Sequence[runs_lib.Run]) -> str:
    """Says how to make a run again, and on what it was made."""
    path = runs[0].path / "config.json"
    command = shlex.join(
        ["python", "-m", "xshard.main", f"--config=repeat.py:{path}", "--workdir=runs/again"]
    )
    said = [
        "<p>The command of a run is not recorded. With this file, which takes a run's config as it is "
        "in its work directory, the command below begins the same run in another directory"
        f"{', of the first one; with the path of another for another' if len(runs) > 1 else ''}. "
        "Flags that are no part of the config, such as --cpu_devices and --init_from, are to be added.</p>",
        f"<pre>{_REPEAT}</pre>\n<pre>{tables.text(command)}</pre>",
    ]
    known: dict[str, list[str]] = {}
    for run in runs:
        written_with = ", ".join(f"{k} {v}" for k, v in run.checkpoints.written_with.items())
        if written_with:
            known.setdefault(written_with, []).append(run.name)
    for versions, names in known.items():
        of = f" ({', '.join(names)})" if len(runs) > 1 else ""
        said.append(f"<p>Written with{tables.text(of)}: {tables.text(versions)}.</p>")
    if not known:
        said.append("<p>Versions are recorded with a checkpoint, of which none could be read.</p>")
    return "\n".join(said)


def _footer(folder: str, count: int, thinned: bool) -> str:
    said = (
        [f"The {count} charts are also PNG files in {folder}/, beside this page."] if count else []
    )
    if thinned:
        said.append(
            "Long curves are drawn by the least and the greatest row of each of some hundred parts: no "
            "peak is lost."
        )
    return tables.text(" ".join([*said, "Made by python -m xshard.report."]))
