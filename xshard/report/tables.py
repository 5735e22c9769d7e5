"""The page's tables: runs side by side, checkpoints, configs."""

import json
import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from xshard import checkpoint
from xshard.metrics import show
from xshard.report import charts, figures
from xshard.report import rows as rows_lib
from xshard.report import runs as runs_lib

# In the place of what there is not.
NOTHING = "\N{EN DASH}"
_LONGEST = 300
_CHECKPOINTS = 60
_RATES = ("steps_per_second", "examples_per_second", "flops_per_second", "utilisation", "goodput")


class Cell(NamedTuple):
    """A cell: its text, which is escaped only when it becomes HTML, its CSS class, and a run's colour."""

    content: str
    kind: str = ""
    colour: str = ""


def table(names: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table that scrolls sideways where the window is narrow."""
    head = "".join(f"<th>{figures.text(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(map(_html, row))}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>'


def comparison(runs: Sequence[runs_lib.Run]) -> str:
    """One row for each run, and a column for each key in which their configs differ."""
    ends = [_final(run) for run in runs]
    evaluated = list(dict.fromkeys(name for values, _ in ends for name in values))
    changed = _differing(runs)
    names = ["run", "state", *changed, *(f"eval {name}" for name in evaluated)]
    names += ["training loss", "skipped", "step", "time", "processes", *_RATES]
    families = charts.seeds(runs)
    rows = []
    for run, family, (values, when) in zip(runs, families, ends, strict=True):
        row = [Cell(run.name, "", figures.colour(family)), Cell(run.doing, f"state {run.state}")]
        row += [_setting(run, key) for key in changed]
        row += [numbers(values.get(name, []), when) for name in evaluated]
        row += [numbers(_last(run.training.get(name))) for name in ("loss", "skipped")]
        seconds = sum(start.seconds for start in run.starts)
        row += [Cell(f"{_number(run.step)} of {run.config.get('steps', NOTHING)}")]
        row += [Cell(show.duration(seconds) if run.starts else NOTHING)]
        row += [Cell(str(len(run.starts) or NOTHING))]
        row += [_median(run.training.get(f"perf/{name}")) for name in _RATES]
        rows.append(row)
    return table(names, rows)


def checkpoints(runs: Sequence[runs_lib.Run]) -> str:
    """The checkpoints of all runs, and what is not known of them."""
    entries = [entry for run in runs for entry in run.checkpoints.entries]
    evaluated = list(dict.fromkeys(name for entry in entries for name in entry.metrics))
    notes, rows = [], []
    for run in runs:
        place, own, written_with, problem = run.checkpoints
        shown = [e for e in own if e in own[-_CHECKPOINTS:] or e.best or e.pinned]
        note = f"{len(own)}, of which {len(shown)} are shown"
        note = f"cannot be read: {problem}" if problem else note
        versions = ", ".join(f"{name} {version}" for name, version in written_with.items())
        note += f"; written with {versions}" if versions else ""
        notes.append(f"<p>{figures.text(f'{run.name}: {place}: {note}')}</p>")
        rows += [[Cell(run.name), *_saved(entry, evaluated)] for entry in shown]
    names = ["run", "step", "committed", "size", "state", "kept", *evaluated]
    return "\n".join([*notes, table(names, rows) if rows else ""])


def config(runs: Sequence[runs_lib.Run]) -> str:
    """The configs of runs: the keys in which they differ first."""
    changed = _differing(runs)
    keys = dict.fromkeys([*changed, *(key for run in runs for key in run.config)])
    rows = [
        [Cell(key, "best" if key in changed else ""), *(_setting(run, key) for run in runs)]
        for key in keys
    ]
    named = table(["key", *(run.name for run in runs)], rows)
    differ = f"They differ in {', '.join(changed)}." if changed else "All are equal."
    words = figures.text(differ if len(runs) > 1 else "All keys")
    return f"<details><summary>{words}</summary>{named}</details>"


def numbers(values: Sequence[float], after: str = "") -> Cell:
    """The numbers of several groups; of many their range."""
    known = [value for value in values if math.isfinite(value)]
    lost = len(values) - len(known)
    shown = " · ".join(map(_number, values)) or NOTHING
    if len(values) > 3:
        ends = [_number(value) for value in (min(known), max(known))] if known else [NOTHING]
        shown = f"{' to '.join(ends)} ({len(values)} groups, {lost} not finite)"
    return Cell(shown + (after if values else ""), "failed" if lost else "")


def _html(cell: Cell) -> str:
    style = f' style="border-left-color: {cell.colour}"' if cell.colour else ""
    return f'<td class="{cell.kind}"{style}>{figures.text(cell.content)}</td>'


def _number(value: float | None) -> str:
    """A number with the digits that matter."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "not finite"
    is_whole = value == int(value) and abs(value) < 1e15
    return f"{int(value):,}" if is_whole else f"{value:.4g}"


def _saved(entry: checkpoint.Entry, evaluated: Sequence[str]) -> list[Cell]:
    when = NOTHING
    if entry.time is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(entry.time))
    kept = [f"best {entry.best} by {entry.best_metric}"] if entry.best else []
    kept += ["pinned"] if entry.pinned else []
    size = NOTHING if entry.nbytes is None else show.scaled(entry.nbytes, "B")
    state = Cell(entry.state, "" if entry.state == "complete" else "failed")
    cells = [Cell(_number(entry.step)), Cell(when), Cell(size), state, Cell(", ".join(kept))]
    return cells + [Cell(_number(entry.metrics.get(name))) for name in evaluated]


def _final(run: runs_lib.Run) -> tuple[dict[str, list[float]], str]:
    """The results of a run; until there are any its last evaluation, and at which step that was."""
    if run.results and run.state in ("done", "unknown"):
        return run.results, ""
    columns = {k: c for k, c in run.evaluation.items() if not k.startswith("perf/")}
    last = max((int(column.steps[-1]) for column in columns.values()), default=None)
    newest = {name: _last(c) for name, c in columns.items() if c.steps[-1] == last}
    return newest, f" at step {_number(last)}"


def _last(column: rows_lib.Column | None) -> list[float]:
    return [] if column is None else column.values[-1].tolist()


def _median(column: rows_lib.Column | None) -> Cell:
    """The median of a rate's finite rows."""
    known = np.array([]) if column is None else column.values[np.isfinite(column.values)]
    median = float(np.median(known)) if len(known) else None
    is_large = median is not None and median >= 1e4
    return Cell(show.scaled(median, "") if median and is_large else _number(median))


def _differing(runs: Sequence[runs_lib.Run]) -> list[str]:
    """The keys whose values are not the same in all configs."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [key for key in keys if len({json.dumps(run.config.get(key)) for run in runs}) > 1]


def _setting(run: runs_lib.Run, key: str) -> Cell:
    """A config's value as JSON, so that the text '1' is none of a number."""
    shown = json.dumps(run.config[key], ensure_ascii=False) if key in run.config else NOTHING
    is_long = len(shown) > _LONGEST
    return Cell(f"{shown[:_LONGEST]}… ({len(shown)} characters)" if is_long else shown)
