"""Lays out the page, as one self-contained HTML file."""

import itertools
import json
import pathlib
import shlex
import string
import time
from collections.abc import Sequence

import pandas as pd
import plotly.io.json
import plotly.offline

from xshard.base import formatting
from xshard.files import workdir
from xshard.report import charts, figures, gallery, tables
from xshard.report import runs as runs_lib

_PAGE = pathlib.Path(__file__).with_name("page.html")
_REPEAT = f"""# repeat.py
import json
import ml_collections
from xshard import config_values

def get_config(path):
    with open(path) as file:
        config = json.load(file)
    config.pop("{workdir.IDENTITY}", None)  # A run of its own.
    return ml_collections.ConfigDict(config_values.from_json(config))
"""
_REPEAT_EXPLANATION = (
    "The command of a run is not recorded. This file loads a run's config from its "
    "work directory. With it, the command below begins the same run in another "
    "directory. Add the flags that are not part of the config, such as --cpu_devices "
    "and --init_from."
)
_BAND_HINT = (
    "A band spans the smallest to the largest value of runs whose configs differ at "
    "most in the seed, around their mean, at the steps that all of them have."
)
# A limit for forged files, which may have any number of names.
_MAX_CHARTS = 200
# More maps would make the page large.
_MAX_MAPS = 12
_MAP_CAPTION = (
    "L2 norms after each step: of the gradient, as the rule receives it; of the "
    "parameter; of the update; and the ratio of the update to the parameter. Gaps are "
    "0 or not finite."
)


def build(runs: Sequence[runs_lib.Run]) -> str:
    """Returns the page on one or more runs."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    experiments = dict.fromkeys(str(run.config.get("experiment", "")) for run in runs)
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    alarms = []
    notes = []
    for run in runs:
        if run.state == "failed":
            alarms.append(f"{run.name}: {run.doing}")
        notes += [f"{run.name}: {note}" for note in run.notes]
    all_charts = charts.charts(runs)
    left_out = len(all_charts) - _MAX_CHARTS
    if left_out > 0:
        notes.append(f"{left_out} charts are left out: the rows have too many names.")
    lines = itertools.chain.from_iterable(chart.lines for chart in all_charts)
    has_bands = any(line.band is not None for line in lines)
    sections = _sections(runs, all_charts[:_MAX_CHARTS])
    page = string.Template(_PAGE.read_text(encoding="utf-8"))
    return page.substitute(
        title=figures.text(title),
        plotly=plotly.offline.get_plotlyjs(),
        subtitle=figures.text(f"{', '.join(experiments)} · as of {now}"),
        alarms=_paragraphs(alarms, "alarm"),
        summary=tables.comparison(runs),
        notes=_paragraphs(notes, "notes"),
        weights=json.dumps(figures.WEIGHTS),
        weight=figures.FIRST_WEIGHT,
        last_weight=len(figures.WEIGHTS) - 1,
        sections="\n".join(sections),
        hint=_BAND_HINT if has_bands else "",
    )


def _sections(
    runs: Sequence[runs_lib.Run], all_charts: Sequence[charts.Chart]
) -> list[str]:
    """Returns the parts of the page below its head, each with a heading."""
    contents: dict[str, str] = {}
    for name in charts.SECTIONS:
        drawings = ""
        for chart in all_charts:
            if chart.section == name:
                figure = figures.figure(chart, runs)
                drawings += _drawing(chart.name, figure, _captions(chart))
        if drawings:
            contents[name] = f'<div class="charts">\n{drawings}</div>'
        maps = _norm_maps(runs)
        if name == charts.UPDATES and maps:
            contents["Norms of parameters"] = maps
    bars = figures.bars(runs)
    if bars is not None:
        captions = ["All attempts of a run, and the time between them."]
        contents["Where the time went"] = _drawing("Shares", bars, captions)
    samples = gallery.gallery(runs)
    if samples:
        contents["Samples"] = samples
    contents["Checkpoints"] = tables.checkpoints(runs)
    contents["Config"] = tables.config(runs)
    contents["To run it again"] = _repeat(runs[0])
    return [f"<h2>{name}</h2>\n{content}" for name, content in contents.items()]


def _norm_maps(runs: Sequence[runs_lib.Run]) -> str:
    """Returns the norms of the parameters of each run; empty if there are none."""
    drawings = []
    for run in runs:
        for norms in run.norms:
            words = [norms.name] if norms.name else []
            if len(runs) > 1:
                words.insert(0, run.name)
            figure = figures.norm_map(norms)
            title = ": ".join(words) or "All parameters"
            drawings.append(_drawing(title, figure, [_MAP_CAPTION]))
    left_out = len(drawings) - _MAX_MAPS
    if left_out > 0:
        drawings = drawings[:_MAX_MAPS]
        drawings.append(_paragraphs([f"{left_out} more are left out."], "notes"))
    return "".join(drawings)


def _drawing(title: str, figure: figures.Figure, captions: Sequence[str]) -> str:
    """Returns a chart: its place, and its data, which the page's script draws there."""
    # Plotly escapes the characters by which a text could end the script element.
    data = plotly.io.json.to_json_plotly(figure)
    return (
        f"<div><h3>{figures.text(title)}</h3>\n"
        f'<div style="height: {figure["layout"]["height"]}px"></div>'
        f'<script type="application/json">{data}</script>\n'
        f"{_paragraphs(captions)}</div>\n"
    )


def _captions(chart: charts.Chart) -> list[str]:
    """Returns notes on how a chart is drawn, and on values that it cannot show."""
    captions = []
    useful = chart.useful_batch
    if useful is not None:
        size = formatting.number(float(f"{max(useful, 1):.2g}"))
        captions.append(
            f"Batches above {size} examples bring little: in one of that many, half of "
            "the gradient's squared norm is noise. The noise scale grows as the loss "
            "falls."
        )
    # A mean is not finite only where its members are not, so means are not counted.
    curves = [line.values for line in chart.lines if line.band is None]
    values = pd.concat(curves)
    num_not_finite = values.isna().sum()
    num_not_positive = (values <= 0).sum()
    if num_not_finite and useful is not None:
        captions.append(
            f"{num_not_finite} values are unknown, as the mean gradient is too small "
            "to be told from the noise: red crosses. A larger noise_scale_steps "
            "averages over more steps."
        )
    elif num_not_finite:
        captions.append(
            f"{num_not_finite} values are not finite: red crosses at the height of "
            "the row before."
        )
    if num_not_positive and chart.is_log:
        captions.append(
            f"{num_not_positive} values are not above 0; a log scale shows them as "
            "gaps."
        )
    if max(map(len, curves)) > 2 * figures.num_parts(chart):
        captions.append(
            "Long curves show only the smallest and the largest row of each part."
        )
    return captions


def _repeat(run: runs_lib.Run) -> str:
    """Describes how to repeat a run."""
    config = f"--config=repeat.py:{run.path / 'config.json'}"
    command = ["python", "-m", "xshard.main", config, "--workdir=runs/again"]
    return (
        f"{_paragraphs([_REPEAT_EXPLANATION])}\n<pre>{_REPEAT}</pre>\n"
        f"<pre>{figures.text(shlex.join(command))}</pre>"
    )


def _paragraphs(texts: Sequence[str], kind: str = "") -> str:
    return "\n".join(f'<p class="{kind}">{figures.text(text)}</p>' for text in texts)
