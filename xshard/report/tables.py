"""The page's tables: runs side by side, checkpoints, configs. All text is escaped here."""

import html
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from xshard import checkpoint
from xshard.metrics import show
from xshard.report import runs as runs_lib
from xshard.report import words

_CONFIG_COLUMNS = 6
_CHECKPOINTS = 60


class Cell(NamedTuple):
    """A cell: HTML, and its CSS class, 'n' for numbers."""

    html: str
    kind: str = ""


class Final(NamedTuple):
    """The last evaluation of a run.

    Attributes:
      values: the numbers of all groups under each name.
      step: its step.
      is_result: whether it is the run's result, and not one on the way.
    """

    values: dict[str, list[float]]
    step: int | None
    is_result: bool


def text(value: object) -> str:
    """A text as HTML."""
    return html.escape(show.printable(str(value)), quote=True)


def table(names: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    """A table that scrolls sideways where the window is narrow."""
    head = "".join(f'<th scope="col" class="{cell.kind}">{cell.html}</th>' for cell in names)
    lines = ["".join(f'<td class="{cell.kind}">{cell.html}</td>' for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def swatch(colour: int) -> str:
    """A run's colour beside its name."""
    return (
        f'<svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" rx="3" '
        f'fill="var(--c{colour})"/></svg>'
    )


def state(run: runs_lib.Run) -> str:
    """Says what a run is doing."""
    return f'<span class="state {run.state}">{text(run.doing)}</span>'


def step(run: runs_lib.Run) -> str:
    """Says at which step a run is, of how many."""
    steps = run.config.get("steps")
    of = f" of {words.number(steps)}" if isinstance(steps, int) else ""
    return f"{words.number(run.step)}{of}"


def duration(run: runs_lib.Run) -> str:
    """Says how long its processes ran."""
    return words.NOTHING if run.seconds is None else show.duration(run.seconds)


def final(run: runs_lib.Run) -> Final:
    """The results of a run; until there are any, its last evaluation."""
    if run.results and run.state in ("done", "unknown"):
        return Final(run.results, run.step, True)
    columns = {k: c for k, c in run.evaluation.items() if not k.startswith("perf/")}
    last = max((int(column.steps[-1]) for column in columns.values()), default=None)
    values = {
        name: column.values[-1].tolist()
        for name, column in columns.items()
        if column.steps[-1] == last
    }
    return Final(values, last, False)


def last(run: runs_lib.Run, name: str) -> list[float]:
    """The last numbers in a column of training rows; none if there is no such column."""
    column = run.training.get(name)
    return [] if column is None else column.values[-1].tolist()


def typical(run: runs_lib.Run, name: str) -> float | None:
    """The median of a column of training rows."""
    column = run.training.get(name)
    if column is None or not np.isfinite(column.values).any():
        return None
    return float(statistics.median(column.values[np.isfinite(column.values)].tolist()))


def differing(runs: Sequence[runs_lib.Run]) -> list[str]:
    """The keys whose values are not the same in all configs."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [key for key in keys if len({_same(run, key) for run in runs}) > 1]


def comparison(runs: Sequence[runs_lib.Run]) -> str:
    """One row for each run, and a column for each key in which their configs differ."""
    ends = [final(run) for run in runs]
    evaluated = list(dict.fromkeys(name for end in ends for name in end.values))
    best = {name: _best(runs, ends, name) for name in evaluated}
    keys = differing(runs)
    timed = any(run.seconds is not None for run in runs)
    fast = any("perf/steps_per_second" in run.training for run in runs)
    names = [Cell("run"), Cell("state"), *(_head(key) for key in keys)]
    names += [_head(f"eval {name}") for name in evaluated]
    names += [_head(name) for name in ("training loss", "skipped", "step")]
    names += [_head("time")] if timed else []
    names += [_head("steps/s")] if fast else []
    rows = []
    for index, (run, end) in enumerate(zip(runs, ends, strict=True)):
        row = [Cell(swatch(index) + text(run.name), "name"), Cell(state(run), "state-of")]
        row += [_config_cell(run, key, "n changed") for key in keys]
        row += [Cell(_value(end, name, index in best[name]), "n") for name in evaluated]
        loss, skips = (words.numbers(last(run, name)) for name in ("loss", "skipped"))
        row += [Cell(shown or words.NOTHING, "n") for shown in (loss, skips, step(run))]
        row += [Cell(duration(run), "n")] if timed else []
        row += [Cell(words.rate(typical(run, "perf/steps_per_second")), "n")] if fast else []
        rows.append(row)
    return table(names, rows)


def checkpoints(runs: Sequence[runs_lib.Run]) -> str:
    """The checkpoints of all runs, and what is not known of them."""
    several = len(runs) > 1
    measured = [e.metrics for run in runs for e in run.checkpoints.entries]
    evaluated = list(dict.fromkeys(name for values in measured for name in values))
    names = [Cell("run")] if several else []
    names += [Cell("step", "n"), Cell("committed"), Cell("size", "n"), Cell("state"), Cell("kept")]
    names += [_head(name) for name in evaluated]
    said, rows = [], []
    for index, run in enumerate(runs):
        there = run.checkpoints
        shown = _shown(there.entries)
        note = there.problem and f"cannot be read: {there.problem}"
        if not note and not shown:
            note = "none"
        elif not note and len(shown) < len(there.entries):
            note = f"{len(there.entries)}, of which the table shows {len(shown)}: the newest, the best and the pinned"
        label = f"{run.name}: " if several else ""
        said.append(
            f"<p class='note'>{text(label + there.place)}{text(f': {note}' if note else '')}</p>"
        )
        for entry in shown:
            own = [Cell(swatch(index) + text(run.name), "name")] if several else []
            rows.append([*own, *_entry(entry, evaluated)])
    return "\n".join([*said, table(names, rows) if rows else ""])


def config(runs: Sequence[runs_lib.Run]) -> str:
    """The config of a run; of several, where they differ and what they have in common."""
    keys, changed = dict.fromkeys(key for run in runs for key in run.config), differing(runs)
    common = [[Cell(text(key)), _config_cell(runs[0], key)] for key in keys if key not in changed]
    shared = f'<div class="config"><table><tbody>{_rows(common)}</tbody></table></div>'
    if len(runs) == 1:
        return shared
    said = ""
    if not changed:
        said = "<p>The configs are equal.</p>"
    elif len(runs) > _CONFIG_COLUMNS:
        said = f"<p>They differ in {text(', '.join(changed))}: see the table of runs.</p>"
    else:
        names = [Cell("key"), *(Cell(swatch(i) + text(run.name)) for i, run in enumerate(runs))]
        rows = [
            [Cell(text(k)), *(_config_cell(run, k, "changed") for run in runs)] for k in changed
        ]
        said = table(names, rows)
    return f"{said}\n<h3 class='common'>The same in all runs</h3>\n{shared}"


def _head(name: str) -> Cell:
    """The head of a column of numbers, which may be broken where its name has parts."""
    return Cell(re.sub(r"([./_])", r"\1<wbr>", text(name)), "n")


def _rows(rows: Iterable[Sequence[Cell]]) -> str:
    return "".join(
        f'<tr><th scope="row">{key.html}</th><td class="text">{value.html}</td></tr>\n'
        for key, value in rows
    )


def _value(end: Final, name: str, is_best: bool) -> str:
    if name not in end.values:
        return words.NOTHING
    shown = words.numbers(end.values[name])
    shown = f"<b>{shown}</b>" if is_best else shown
    return shown if end.is_result else f"{shown} <small>at {words.number(end.step)}</small>"


def _best(runs: Sequence[runs_lib.Run], ends: Sequence[Final], name: str) -> list[int]:
    """The runs with the best result, where all configs say by which metric, and what is better."""
    rules = {
        (run.config.get("checkpoint.best_metric"), run.config.get("checkpoint.best_mode"))
        for run in runs
    }
    if len(rules) != 1 or not rules <= {(name, "max"), (name, "min")}:
        return []
    sign = -1 if rules == {(name, "max")} else 1
    ranked = [
        (sign * float(np.mean(end.values[name])), index)
        for index, end in enumerate(ends)
        if end.is_result and name in end.values and np.isfinite(end.values[name]).all()
    ]
    least = min(ranked, default=(0.0, 0))[0]
    return [index for value, index in ranked if value == least] if len(ranked) > 1 else []


def _entry(entry: checkpoint.Entry, evaluated: Sequence[str]) -> list[Cell]:
    kept = [f"best {entry.best} by {entry.best_metric}"] if entry.best else []
    kept += ["pinned"] if entry.pinned else []
    state_text = entry.state
    if entry.state == "incomplete":
        state_text = "being written, or cut off"
    cells = [
        Cell(words.number(entry.step), "n"),
        Cell(words.moment(entry.time), "name"),
        Cell(words.size(entry.nbytes), "n"),
        Cell(text(state_text)),
        Cell(text(", ".join(kept))),
    ]
    return cells + [Cell(words.number(entry.metrics.get(name)), "n") for name in evaluated]


def _shown(entries: Sequence[checkpoint.Entry]) -> list[checkpoint.Entry]:
    newest = entries[-_CHECKPOINTS:]
    return [entry for entry in entries if entry in newest or entry.best or entry.pinned]


def _config_cell(run: runs_lib.Run, key: str, kind: str = "text") -> Cell:
    return Cell(text(words.value(run.config[key])) if key in run.config else words.NOTHING, kind)


def _same(run: runs_lib.Run, key: str) -> str:
    """A text that is the same for the same value; of a key that is missing no value has it."""
    return json.dumps(run.config[key], sort_keys=True) if key in run.config else ""
