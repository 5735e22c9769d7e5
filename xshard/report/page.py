"""Lays out the page, one self-contained HTML file: its charts, tables and samples."""

import html
import json
import math
import pathlib
import shlex
import string
import time
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.io.json
import plotly.offline

from xshard import checkpoint, samples
from xshard.base import formatting
from xshard.files import workdir
from xshard.pod import attempts
from xshard.report import charts
from xshard.report import runs as runs_lib

# The text of an empty cell.
NOTHING = "\N{EN DASH}"
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
# The longest value of a config, in characters.
_LONGEST = 300
# The number of newest checkpoints to show; the best and the pinned ones are shown in
# any case.
_CHECKPOINTS = 60
_RATES = ("steps_per_second", "examples_per_second", "flops_per_second", "utilisation")
# The width of images and histograms on the page, and the height of histograms, in
# pixels.
_WIDTH = 480
_HEIGHT = 120


class Html(str):
    """A text that is HTML already; any other is escaped."""


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
    hint = ""
    for chart in all_charts:
        if any(line.band is not None for line in chart.lines):
            hint = _BAND_HINT
    page = string.Template(_PAGE.read_text(encoding="utf-8"))
    return page.substitute(
        title=charts.text(title),
        plotly=plotly.offline.get_plotlyjs(),
        subtitle=charts.text(f"{', '.join(experiments)} · as of {now}"),
        alarms=_paragraphs(alarms, "alarm"),
        summary=_comparison(runs),
        notes=_paragraphs(notes, "notes"),
        weights=json.dumps(charts.WEIGHTS),
        weight=charts.FIRST_WEIGHT,
        last_weight=len(charts.WEIGHTS) - 1,
        sections=_sections(runs, all_charts[:_MAX_CHARTS]),
        hint=hint,
    )


def _sections(runs: Sequence[runs_lib.Run], all_charts: Sequence[charts.Chart]) -> str:
    """Returns the parts of the page below its head, each with a heading."""
    contents = dict.fromkeys([charts.LEARNING, charts.UPDATES], "")
    contents |= dict.fromkeys(["Norms of parameters", charts.SPEED], "")
    for chart in all_charts:
        drawing = _drawing(chart.name, charts.figure(chart, runs), _captions(chart))
        contents[chart.section] += drawing
    for name in charts.SECTIONS:
        if contents[name]:
            contents[name] = f'<div class="charts">\n{contents[name]}</div>'
    maps = []
    for run in runs:
        for norms in run.norms:
            words = [run.name] if len(runs) > 1 else []
            words += [norms.name] if norms.name else []
            maps.append((": ".join(words) or "All parameters", norms))
    for title, norms in maps[:_MAX_MAPS]:
        drawing = _drawing(title, charts.norm_map(norms), [_MAP_CAPTION])
        contents["Norms of parameters"] += drawing
    if len(maps) > _MAX_MAPS:
        left_out = f"{len(maps) - _MAX_MAPS} more are left out."
        contents["Norms of parameters"] += _paragraphs([left_out], "notes")
    bars = charts.bars(runs)
    if bars is not None:
        captions = ["All attempts of a run, and the time between them."]
        contents["Where the time went"] = _drawing("Shares", bars, captions)
    contents["Samples"] = gallery(runs)
    contents["Checkpoints"] = _checkpoints(runs)
    contents["Config"] = _config(runs)
    config = f"--config=repeat.py:{runs[0].path / 'config.json'}"
    command = ["python", "-m", "xshard.main", config, "--workdir=runs/again"]
    contents["To run it again"] = (
        f"{_paragraphs([_REPEAT_EXPLANATION])}\n<pre>{_REPEAT}</pre>\n"
        f"<pre>{charts.text(shlex.join(command))}</pre>"
    )
    sections = ""
    for name, content in contents.items():
        if content:
            sections += f"<h2>{name}</h2>\n{content}\n"
    return sections


def _drawing(title: str, figure: charts.Figure, captions: Sequence[str]) -> str:
    """Returns a chart: its place, and its data, which the page's script draws there."""
    # Plotly escapes the characters by which a text could end the script element.
    data = plotly.io.json.to_json_plotly(figure)
    return (
        f"<div><h3>{charts.text(title)}</h3>\n"
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
    if max(map(len, curves)) > 2 * chart.num_parts:
        captions.append(
            "Long curves show only the smallest and the largest row of each part."
        )
    return captions


def _paragraphs(texts: Sequence[str], kind: str = "") -> str:
    return "\n".join(f'<p class="{kind}">{charts.text(text)}</p>' for text in texts)


# The tables.


def _table(*parts: Any) -> str:
    """Returns a table that scrolls sideways in a narrow window.

    Args:
      parts: from left to right, frames, or lists of the cells of each row by the names
        of their columns; a row may lack some.
    """
    frame = pd.concat([pd.DataFrame(part, dtype=object) for part in parts], axis=1)
    frame.columns = [charts.text(name) for name in frame]
    escaped = frame.map(
        lambda x: x if isinstance(x, Html) else charts.text(x), na_action="ignore"
    )
    with pd.option_context("display.max_colwidth", None):
        body = escaped.to_html(index=False, escape=False, border=0, na_rep=NOTHING)
    return f'<div class="scroll">{body}</div>'


def _marked(content: str, kind: str, style: str = "") -> Html:
    """Returns a cell's content with a CSS class."""
    shown = charts.text(content)
    return Html(f'<span class="{kind}" style="{style}">{shown}</span>')


def _comparison(runs: Sequence[runs_lib.Run]) -> str:
    """Returns a table with a row for each run.

    It has a column for each key in which their configs differ.
    """
    settings, changed = _settings(runs)
    heads = []
    finals = []
    trained: dict[str, list[dict[str, str]]] = {"loss": [], "skipped": []}
    progress = []
    for run, family in zip(runs, charts.seeds(runs), strict=True):
        style = f"border-color: {charts.color(family)}"
        state = _marked(run.doing, f"state {run.state}")
        heads.append({"run": _marked(run.name, "run", style), "state": state})
        finals.append(_final(run))
        # The last values of all learners, such as `actor/loss`.
        for quantity, rows in trained.items():
            before = "training " if quantity == "loss" else ""
            cells = {}
            for name, column in run.training.items():
                if charts.without_learner(name) == quantity:
                    cells[before + name] = numbers(_last(column))
            rows.append(cells)
        progress.append(_progress(run))
    return _table(heads, settings[changed], finals, *trained.values(), progress)


def _progress(run: runs_lib.Run) -> dict[str, str]:
    """Returns how far a run is, its time and its rates."""
    row = {
        "step": f"{_number(run.step)} of {run.config.get('steps', NOTHING)}",
        "time": NOTHING,
        "attempts": str(len(run.attempts) or NOTHING),
        "goodput": NOTHING,
    }
    goodput = attempts.goodput(run.attempts)
    if goodput is not None:
        row["time"] = formatting.duration(goodput.seconds)
        row["goodput"] = f"{goodput.share:.1%}"
    for name in _RATES:
        column = run.training.get(f"perf/{name}", pd.DataFrame())
        median = float(column.stack().median())
        row[name] = NOTHING
        if not math.isnan(median):
            is_small = median < 1e4
            row[name] = _number(median) if is_small else formatting.scaled(median, "")
    return row


def _checkpoints(runs: Sequence[runs_lib.Run]) -> str:
    """Returns the checkpoints of all runs, and the reasons why some are unknown."""
    lines = []
    rows = []
    metrics = []
    for run in runs:
        place, catalog, problem = run.checkpoints
        shown: list[checkpoint.Entry] = []
        for number, entry in enumerate(reversed(catalog.entries)):
            if number < _CHECKPOINTS or entry.best or entry.pinned:
                shown.insert(0, entry)
        for entry in shown:
            rows.append({"run": run.name, **_saved(entry)})
            of_entry = entry.metrics.items()
            metrics.append({name: _number(value) for name, value in of_entry})
        note = f"{len(catalog.entries)}, of which {len(shown)} are shown"
        if problem:
            note = f"cannot be read: {problem}"
        if catalog.written_with:
            versions = [f"{name} {v}" for name, v in catalog.written_with.items()]
            note += f"; written with {', '.join(versions)}"
        lines.append(f"{run.name}: {place}: {note}")
    return _paragraphs(lines) + (_table(rows, metrics) if rows else "")


def _saved(entry: checkpoint.Entry) -> dict[str, str]:
    when = NOTHING
    if entry.time is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(entry.time))
    reasons = []
    if entry.best:
        reasons.append(f"best {entry.best} by {entry.best_metric}")
    if entry.pinned:
        reasons.append("pinned")
    size = NOTHING if entry.nbytes is None else formatting.scaled(entry.nbytes, "B")
    is_whole = entry.state == "complete"
    return {
        "step": _number(entry.step),
        "committed": when,
        "size": size,
        "state": entry.state if is_whole else _marked(entry.state, "failed"),
        "kept": ", ".join(reasons),
    }


def _config(runs: Sequence[runs_lib.Run]) -> str:
    """Returns a table of the configs, with the keys in which they differ first."""
    settings, changed = _settings(runs)
    names = dict.fromkeys([*changed, *settings])
    columns = settings[list(names)].T.reset_index(drop=True)
    columns.columns = [run.name for run in runs]
    keys = [_marked(name, "best") if name in changed else name for name in names]
    summary = "All keys"
    if changed:
        summary = f"They differ in {', '.join(changed)}."
    elif len(runs) > 1:
        summary = "All are equal."
    table = _table({"key": keys}, columns)
    return f"<details><summary>{charts.text(summary)}</summary>{table}</details>"


def _settings(runs: Sequence[runs_lib.Run]) -> tuple[pd.DataFrame, list[str]]:
    """Returns the configs as JSON, in which the text '1' differs from the number 1,
    with a row for each run; and the keys whose values are not the same in all.
    """
    rows = []
    for run in runs:
        row = {}
        for key, value in run.config.items():
            row[key] = json.dumps(value, ensure_ascii=False)
        rows.append(row)
    settings = pd.DataFrame(rows, dtype=object)
    is_changed = settings.fillna("null").nunique() > 1
    changed = list(settings.columns[is_changed])

    def shortened(value: str) -> str:
        if len(value) <= _LONGEST:
            return value
        return f"{value[:_LONGEST]}… ({len(value)} characters)"

    return settings.map(shortened, na_action="ignore"), changed


def numbers(values: Sequence[float], after: str = "") -> str:
    """Returns a cell with the numbers of all groups.

    Of many groups, it shows the range.

    Args:
      values: the numbers; at least one.
      after: a text that follows them.
    """
    finite = [value for value in values if math.isfinite(value)]
    num_not_finite = len(values) - len(finite)
    shown = " · ".join(map(_number, values))
    if len(values) > 3:
        shown = NOTHING
        if finite:
            shown = f"{_number(min(finite))} to {_number(max(finite))}"
        shown += f" ({len(values)} groups, {num_not_finite} not finite)"
    shown += after
    return _marked(shown, "failed") if num_not_finite else shown


def _number(value: float | None) -> str:
    """Formats a number: integers in full, others with four digits."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _final(run: runs_lib.Run) -> dict[str, str]:
    """Returns the results of a run.

    Until there are any, they are its last evaluation, and say its step.
    """
    final = run.results
    note = ""
    if not final or run.state not in ("done", "unknown"):
        columns = {}
        for name, column in run.evaluation.items():
            if not name.startswith("perf/"):
                columns[name] = column
        last_step = max([column.index[-1] for column in columns.values()], default=None)
        note = f" at step {_number(last_step)}"
        # Metrics that the last evaluation lacks are left out.
        final = {}
        for name, column in columns.items():
            if column.index[-1] == last_step:
                final[name] = _last(column)
    return {f"eval {name}": numbers(values, note) for name, values in final.items()}


def _last(column: pd.DataFrame) -> list[float]:
    return column.iloc[-1].tolist()


# The samples: texts, images and histograms.


def gallery(runs: Sequence[runs_lib.Run]) -> str:
    """Returns all samples by run and name, with earlier ones behind a click.

    It is empty if there are none.
    """
    parts = []
    for run in runs:
        by_name: dict[str, list[str]] = {}
        for row in reversed(run.samples):
            for name, item in samples.items(row).items():
                drawing = f"<p>step {row['step']}</p>\n{_shown(item)}"
                by_name.setdefault(name, []).append(drawing)
        for name, (newest, *before) in by_name.items():
            title = name
            if len(runs) > 1:
                title = f"{run.name}: {name}"
            parts.append(f"<h3>{charts.text(title)}</h3>\n{newest}")
            if before:
                earlier = "\n".join(before)
                parts.append(
                    f"<details><summary>{len(before)} "
                    f"before</summary>{earlier}</details>"
                )
    return "\n".join(parts)


def _shown(item: samples.Item) -> str:
    if item["kind"] == "text":
        lines = "\n".join(charts.text(line) for line in item["text"].splitlines())
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
        label = charts.text(f"{edges[i]:.4g} to {edges[i + 1]:.4g}: {count}")
        bars += (
            f'<rect x="{width * i:.1f}" y="{_HEIGHT - height:.1f}" '
            f'width="{width:.1f}" height="{height:.1f}">'
            f"<title>{label}</title></rect>"
        )
    caption = charts.text(f"{edges[0]:.4g} to {edges[-1]:.4g}, {sum(counts)} values")
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" fill="{charts.color(0)}">'
        f"{bars}</svg>\n<p>{caption}</p>"
    )
