"""Lays out the page, as one self-contained HTML file."""

import shlex
import string
import time
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import plotly.io
import plotly.offline

from xshard.files import workdir
from xshard.report import charts, figures, gallery, tables
from xshard.report import runs as runs_lib

# The policy forbids all connections, since plotly has a button that would upload a
# chart.
_PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="connect-src 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px; width: max-content }
td { border-left: 5px solid transparent; max-width: 40em; overflow-wrap: anywhere }
th, td { border-bottom: 1px solid #ddd; padding: .25em .7em; text-align: left; vertical-align: top }
.best { font-weight: bold }
.done, .running { color: #177a2d }
.failed, .alarm { color: #c1121f; font-weight: bold }
.stopped, .silent, .unknown, .notes { color: #8a5a00 }
h1, h3 { overflow-wrap: anywhere }
pre { overflow-x: auto }
.alarm { border: 2px solid; padding: .5em 1em }
</style>
<script>$plotly</script>
</head>
<body>
<h1>$title</h1>
<p>$subtitle</p>
$alarms
$summary
$notes
$sections
<p>Click a name in a legend to hide its curves; double-click it to show only these. Drag to zoom; double-click to reset.</p>
</body>
</html>
""")
_REPEAT = f"""# repeat.py
import json
import ml_collections

def get_config(path):
    with open(path) as file:
        config = json.load(file)
    config.pop("{workdir.IDENTITY}", None)  # A run of its own.
    return ml_collections.ConfigDict(config)
"""
_REPEAT_EXPLANATION = (
    "The command of a run is not recorded. This file loads a run's config from its work directory. With it, "
    "the command below begins the same run in another directory. Add the flags that are not part "
    "of the config, such as --cpu_devices and --init_from."
)
# A limit for forged files, which may have any number of names.
_CHARTS = 200
_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "showSendToCloud": False,
    "toImageButtonOptions": {"scale": 2},
}


def build(runs: Sequence[runs_lib.Run]) -> str:
    """Returns the page on one or more runs."""
    all_charts = charts.charts(runs)
    sections: dict[str, str] = {}
    for number, chart in enumerate(all_charts[:_CHARTS]):
        drawing = _figure(
            chart.name, figures.figure(chart, runs), number, _captions(chart)
        )
        sections[chart.section] = sections.get(chart.section, "") + drawing
    bars = figures.bars(runs)
    if bars is not None:
        captions = ["All attempts of a run, and the time between them."]
        sections["Where the time went"] = _figure(
            "Shares", bars, len(all_charts), captions
        )
    shown = gallery.gallery(runs)
    if shown:
        sections["Samples"] = shown
    sections["Checkpoints"] = tables.checkpoints(runs)
    sections["Config"] = tables.config(runs)
    sections["To run it again"] = _repeat(runs[0])
    title = f"{len(runs)} runs" if len(runs) > 1 else runs[0].name
    experiments = dict.fromkeys(str(run.config.get("experiment", "")) for run in runs)
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    alarms, notes = [], []
    for run in runs:
        if run.state == "failed":
            alarms.append(f"{run.name}: {run.doing}")
        notes += [f"{run.name}: {note}" for note in run.notes]
    left_out = len(all_charts) - _CHARTS
    if left_out > 0:
        notes.append(f"{left_out} charts are left out: the rows have too many names.")
    return _PAGE.substitute(
        title=figures.text(title),
        plotly=plotly.offline.get_plotlyjs(),
        subtitle=figures.text(f"{', '.join(experiments)} · as of {now}"),
        alarms=_paragraphs("alarm", alarms),
        summary=tables.comparison(runs),
        notes=_paragraphs("notes", notes),
        sections="\n".join(
            f"<h2>{name}</h2>\n{content}" for name, content in sections.items()
        ),
    )


def _repeat(run: runs_lib.Run) -> str:
    """Describes how to repeat a run."""
    config = f"--config=repeat.py:{run.path / 'config.json'}"
    command = shlex.join(
        ["python", "-m", "xshard.main", config, "--workdir=runs/again"]
    )
    explanation = _paragraphs("", [_REPEAT_EXPLANATION])
    return f"{explanation}\n<pre>{_REPEAT}</pre>\n<pre>{figures.text(command)}</pre>"


def _paragraphs(kind: str, texts: Sequence[str]) -> str:
    return "\n".join(
        f'<p class="{kind}">{figures.text(content)}</p>' for content in texts
    )


def _figure(title: str, figure: go.Figure, number: int, captions: Sequence[str]) -> str:
    drawing = plotly.io.to_html(
        figure,
        config=_CONFIG,
        # The head of the page contains plotly once.
        include_plotlyjs=False,
        full_html=False,
        div_id=f"chart-{number}",
        default_height=f"{figure.layout.height}px",
    )
    return f"<h3>{figures.text(title)}</h3>\n{drawing}\n{_paragraphs('', captions)}\n"


def _captions(chart: charts.Chart) -> list[str]:
    """Returns notes on how a chart is drawn, and on values that it cannot show."""
    captions = []
    # A mean is not finite only where its members are not, so means are not counted.
    rows = [line for line in chart.lines if line.band is None]
    values = np.concatenate([line.values for line in rows])
    lost = np.count_nonzero(np.isnan(values))
    low = np.count_nonzero(values <= 0)
    if len(rows) < len(chart.lines):
        captions.append(
            "A band spans the smallest to the largest value of runs whose configs differ at most in the seed, around "
            "their mean, at the steps that all of them have."
        )
    if lost:
        captions.append(
            f"{lost} values are not finite: red crosses at the height of the row before."
        )
    if low and chart.is_log:
        captions.append(
            f"{low} values are not above 0; a log scale shows them as gaps."
        )
    if max(len(line.steps) for line in rows) > 2 * figures.parts(chart):
        captions.append(
            "Long curves show only the smallest and the largest row of each part."
        )
    return captions
