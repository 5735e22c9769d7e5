"""The tables on the page: runs side by side, checkpoints, configs."""

import json
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from xshard import checkpoint
from xshard.base import formatting
from xshard.pod import attempts
from xshard.report import charts, figures
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


def table(*parts: Sequence[dict[str, Cell]]) -> str:
    """Returns a table that scrolls sideways in a narrow window.

    Args:
      parts: from left to right, the cells of each row by the names of their columns; a
        row may lack some.
    """
    frame = pd.concat([pd.DataFrame(part, dtype=object) for part in parts], axis=1)
    head = "".join(f"<th>{figures.text(name)}</th>" for name in frame)
    lines = [f"<tr>{head}</tr>"]
    for row in frame.itertuples(index=False, name=None):
        cells = ""
        for cell in row:
            content, kind, color = cell if isinstance(cell, Cell) else Cell(NOTHING)
            style = f' style="border-left-color: {color}"' if color else ""
            cells += f'<td class="{kind}"{style}>{figures.text(content)}</td>'
        lines.append(f"<tr>{cells}</tr>")
    body = "\n".join(lines)
    return f'<div class="scroll"><table>{body}</table></div>'


def comparison(runs: Sequence[runs_lib.Run]) -> str:
    """Returns a table with a row for each run.

    It has a column for each key in which their configs differ.
    """
    changed = _differing(runs)
    heads = []
    for run, family in zip(runs, charts.seeds(runs), strict=True):
        head = {"run": Cell(run.name, color=figures.color(family))}
        head["state"] = Cell(run.doing, f"state {run.state}")
        heads.append(head | {key: _setting(run, key) for key in changed})
    losses = [_trained(run, "loss", "training ") for run in runs]
    skipped = [_trained(run, "skipped", "") for run in runs]
    return table(heads, [_final(run) for run in runs], losses, skipped, _progress(runs))


def _trained(run: runs_lib.Run, quantity: str, before: str) -> dict[str, Cell]:
    """Returns the last values of a quantity of all learners, such as `actor/loss`."""
    cells = {}
    for name, column in run.training.items():
        if charts.without_learner(name) == quantity:
            cells[f"{before}{name}"] = numbers(_last(column))
    return cells


def _progress(runs: Sequence[runs_lib.Run]) -> list[dict[str, Cell]]:
    """Returns how far each run is, its time and its rates."""
    rows = []
    for run in runs:
        row = {
            "step": Cell(f"{_number(run.step)} of {run.config.get('steps', NOTHING)}"),
            "time": Cell(NOTHING),
            "attempts": Cell(str(len(run.attempts) or NOTHING)),
            "goodput": Cell(NOTHING),
        }
        goodput = attempts.goodput(run.attempts)
        if goodput is not None:
            row["time"] = Cell(formatting.duration(goodput.seconds))
            row["goodput"] = Cell(f"{goodput.share:.1%}")
        for name in _RATES:
            column = run.training.get(f"perf/{name}", pd.DataFrame())
            median = float(column.stack().median())
            shown = NOTHING
            if not math.isnan(median):
                is_small = median < 1e4
                shown = _number(median) if is_small else formatting.scaled(median, "")
            row[name] = Cell(shown)
        rows.append(row)
    return rows


def checkpoints(runs: Sequence[runs_lib.Run]) -> str:
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
        rows += [{"run": Cell(run.name), **_saved(entry)} for entry in shown]
        for entry in shown:
            of_entry = entry.metrics.items()
            metrics.append({name: Cell(_number(value)) for name, value in of_entry})
        note = f"{len(catalog.entries)}, of which {len(shown)} are shown"
        if problem:
            note = f"cannot be read: {problem}"
        if catalog.written_with:
            versions = [f"{name} {v}" for name, v in catalog.written_with.items()]
            note += f"; written with {', '.join(versions)}"
        lines.append(f"<p>{figures.text(f'{run.name}: {place}: {note}')}</p>")
    if rows:
        lines.append(table(rows, metrics))
    return "\n".join(lines)


def _saved(entry: checkpoint.Entry) -> dict[str, Cell]:
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
    return {
        "step": Cell(_number(entry.step)),
        "committed": Cell(when),
        "size": Cell(size),
        "state": Cell(entry.state, "" if entry.state == "complete" else "failed"),
        "kept": Cell(", ".join(reasons)),
    }


def config(runs: Sequence[runs_lib.Run]) -> str:
    """Returns a table of the configs, with the keys in which they differ first."""
    changed = _differing(runs)
    rows = []
    for key in dict.fromkeys([*changed, *_keys(runs)]):
        row = {"key": Cell(key, "best" if key in changed else "")}
        rows.append(row | {run.name: _setting(run, key) for run in runs})
    summary = "All keys"
    if changed:
        summary = f"They differ in {', '.join(changed)}."
    elif len(runs) > 1:
        summary = "All are equal."
    shown = figures.text(summary)
    return f"<details><summary>{shown}</summary>{table(rows)}</details>"


def numbers(values: Sequence[float], after: str = "") -> Cell:
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
    return Cell(shown + after, "failed" if num_not_finite else "")


def _number(value: float | None) -> str:
    """Formats a number: integers in full, others with four digits."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _final(run: runs_lib.Run) -> dict[str, Cell]:
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


def _keys(runs: Sequence[runs_lib.Run]) -> list[str]:
    """Returns each key of the configs once."""
    keys: dict[str, Any] = {}
    for run in runs:
        keys |= run.config
    return list(keys)


def _differing(runs: Sequence[runs_lib.Run]) -> list[str]:
    """Returns the keys whose values are not the same in all configs."""
    differing = []
    for key in _keys(runs):
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
