"""The tables on the page: runs side by side, checkpoints, configs."""

import itertools
import json
import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from xshard import checkpoint
from xshard.base import formatting
from xshard.pod import attempts
from xshard.report import charts, figures
from xshard.report import rows as rows_lib
from xshard.report import runs as runs_lib

# The text of an empty cell.
NOTHING = "\N{EN DASH}"
# The longest value of a config, in characters.
_LONGEST = 300
# The number of newest checkpoints to show; the best and the pinned ones are shown in
# any case.
_CHECKPOINTS = 60
_RATES = ("steps_per_second", "examples_per_second", "flops_per_second", "utilisation")


class Cell(NamedTuple):
    """A cell.

    Attributes:
      content: its text, which is escaped when it is converted to HTML.
      kind: its CSS class.
      color: the color of its run.
    """

    content: str
    kind: str = ""
    color: str = ""


def table(names: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Returns a table that scrolls sideways in a narrow window."""
    head = "".join(f"<th>{figures.text(name)}</th>" for name in names)
    lines = [f"<tr>{head}</tr>"]
    for row in rows:
        cells = ""
        for cell in row:
            style = ""
            if cell.color:
                style = f' style="border-left-color: {cell.color}"'
            cells += f'<td class="{cell.kind}"{style}>{figures.text(cell.content)}</td>'
        lines.append(f"<tr>{cells}</tr>")
    body = "\n".join(lines)
    return f'<div class="scroll"><table>{body}</table></div>'


def comparison(runs: Sequence[runs_lib.Run]) -> str:
    """Returns a table with a row for each run.

    It has a column for each key in which their configs differ.
    """
    changed = _differing(runs)
    finals = [_final(run) for run in runs]
    evaluated = _union(final for final, _ in finals)
    trained = [*_of_learners(runs, "loss"), *_of_learners(runs, "skipped")]
    names = ["run", "state", *changed]
    names += [f"eval {name}" for name in evaluated]
    for name in trained:
        is_loss = charts.without_learner(name) == "loss"
        names.append(f"training {name}" if is_loss else name)
    names += ["step", "time", "attempts", "goodput", *_RATES]

    rows = []
    for run, family, (final, note) in zip(
        runs, charts.seeds(runs), finals, strict=True
    ):
        row = [
            Cell(run.name, color=figures.color(family)),
            Cell(run.doing, f"state {run.state}"),
        ]
        row += [_setting(run, key) for key in changed]
        row += [numbers(final.get(name, []), note) for name in evaluated]
        row += [numbers(_last(run.training.get(name))) for name in trained]
        row.append(Cell(f"{_number(run.step)} of {run.config.get('steps', NOTHING)}"))
        row += _time(run)
        row += [_median(run.training.get(f"perf/{name}")) for name in _RATES]
        rows.append(row)
    return table(names, rows)


def _time(run: runs_lib.Run) -> list[Cell]:
    """Returns the cells on a run's time, attempts and goodput."""
    goodput = attempts.goodput(run.attempts)
    if goodput is None:
        return [Cell(NOTHING), Cell(str(len(run.attempts) or NOTHING)), Cell(NOTHING)]
    return [
        Cell(formatting.duration(goodput.seconds)),
        Cell(str(len(run.attempts))),
        Cell(f"{goodput.share:.1%}"),
    ]


def _of_learners(runs: Sequence[runs_lib.Run], quantity: str) -> list[str]:
    """Returns a quantity's names in the rows of all learners, such as `actor/loss`.

    Or the quantity itself if no row has it.
    """
    names = []
    for name in _union(run.training for run in runs):
        if charts.without_learner(name) == quantity:
            names.append(name)
    return names or [quantity]


def checkpoints(runs: Sequence[runs_lib.Run]) -> str:
    """Returns the checkpoints of all runs, and the reasons why some are unknown."""
    entries = itertools.chain.from_iterable(run.checkpoints.entries for run in runs)
    evaluated = _union(entry.metrics for entry in entries)
    parts = []
    rows = []
    for run in runs:
        saved = run.checkpoints
        newest = saved.entries[-_CHECKPOINTS:]
        num_shown = 0
        for entry in saved.entries:
            if entry in newest or entry.best or entry.pinned:
                rows.append([Cell(run.name), *_saved(entry, evaluated)])
                num_shown += 1
        note = f"{len(saved.entries)}, of which {num_shown} are shown"
        if saved.problem:
            note = f"cannot be read: {saved.problem}"
        if saved.written_with:
            versions = [f"{name} {v}" for name, v in saved.written_with.items()]
            note += f"; written with {', '.join(versions)}"
        parts.append(f"<p>{figures.text(f'{run.name}: {saved.place}: {note}')}</p>")
    if rows:
        names = ["run", "step", "committed", "size", "state", "kept", *evaluated]
        parts.append(table(names, rows))
    return "\n".join(parts)


def config(runs: Sequence[runs_lib.Run]) -> str:
    """Returns a table of the configs, with the keys in which they differ first."""
    changed = _differing(runs)
    keys = _union([changed, *(run.config for run in runs)])
    rows = []
    for key in keys:
        name = Cell(key, "best" if key in changed else "")
        rows.append([name, *(_setting(run, key) for run in runs)])
    summary = "All keys"
    if changed:
        summary = f"They differ in {', '.join(changed)}."
    elif len(runs) > 1:
        summary = "All are equal."
    values = table(["key", *(run.name for run in runs)], rows)
    return f"<details><summary>{figures.text(summary)}</summary>{values}</details>"


def numbers(values: Sequence[float], after: str = "") -> Cell:
    """Returns a cell with the numbers of all groups.

    Of many groups, it shows the range.

    Args:
      values: the numbers.
      after: a text that follows them.
    """
    if not values:
        return Cell(NOTHING)
    finite = [value for value in values if math.isfinite(value)]
    num_not_finite = len(values) - len(finite)
    shown = " · ".join(map(_number, values))
    if len(values) > 3:
        shown = NOTHING
        if finite:
            shown = f"{_number(min(finite))} to {_number(max(finite))}"
        shown += f" ({len(values)} groups, {num_not_finite} not finite)"
    return Cell(shown + after, "failed" if num_not_finite else "")


def _union(names: Iterable[Iterable[str]]) -> list[str]:
    """Returns each name once, in the order in which they first occur."""
    return list(dict.fromkeys(itertools.chain.from_iterable(names)))


def _number(value: float | None) -> str:
    """Formats a number: integers in full, others with four digits."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _saved(entry: checkpoint.Entry, evaluated: Sequence[str]) -> list[Cell]:
    when = NOTHING
    size = NOTHING
    if entry.time is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(entry.time))
    if entry.nbytes is not None:
        size = formatting.scaled(entry.nbytes, "B")
    reasons = []
    if entry.best:
        reasons.append(f"best {entry.best} by {entry.best_metric}")
    if entry.pinned:
        reasons.append("pinned")
    return [
        Cell(_number(entry.step)),
        Cell(when),
        Cell(size),
        Cell(entry.state, "" if entry.state == "complete" else "failed"),
        Cell(", ".join(reasons)),
        *(Cell(_number(entry.metrics.get(name))) for name in evaluated),
    ]


def _final(run: runs_lib.Run) -> tuple[dict[str, list[float]], str]:
    """Returns the results of a run, and a note.

    Until there are any, they are its last evaluation, and the note says its step.
    """
    if run.results and run.state in ("done", "unknown"):
        return run.results, ""
    columns = {}
    for name, column in run.evaluation.items():
        if not name.startswith("perf/"):
            columns[name] = column
    last_step = max([int(c.steps[-1]) for c in columns.values()], default=None)
    # Metrics that the last evaluation lacks are left out.
    final = {}
    for name, column in columns.items():
        if column.steps[-1] == last_step:
            final[name] = _last(column)
    return final, f" at step {_number(last_step)}"


def _last(column: rows_lib.Column | None) -> list[float]:
    return [] if column is None else column.values[-1].tolist()


def _median(column: rows_lib.Column | None) -> Cell:
    """Returns a cell with the median of a rate's finite rows."""
    if column is None or np.isnan(column.values).all():
        return Cell(NOTHING)
    median = float(np.nanmedian(column.values))
    if median < 1e4:
        return Cell(_number(median))
    return Cell(formatting.scaled(median, ""))


def _differing(runs: Sequence[runs_lib.Run]) -> list[str]:
    """Returns the keys whose values are not the same in all configs."""
    differing = []
    for key in _union(run.config for run in runs):
        if len({json.dumps(run.config.get(key)) for run in runs}) > 1:
            differing.append(key)
    return differing


def _setting(run: runs_lib.Run, key: str) -> Cell:
    """Returns a cell with a config's value as JSON.

    In JSON the text '1' differs from the number 1.
    """
    if key not in run.config:
        return Cell(NOTHING)
    shown = json.dumps(run.config[key], ensure_ascii=False)
    if len(shown) > _LONGEST:
        shown = f"{shown[:_LONGEST]}… ({len(shown)} characters)"
    return Cell(shown)
