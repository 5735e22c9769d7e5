"""Reads what a work directory says of its run. Nothing is written there, and no device is touched."""

import itertools
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from xshard import checkpoint, errors
from xshard import config as config_lib
from xshard.files import jsonfile, workdir
from xshard.metrics import show
from xshard.pod import status
from xshard.report import rows as rows_lib

# Parts of a process's seconds, in the order in which they are shown; what is in none of them comes last.
PARTS = ("training", "data", "checkpoint", "evaluation", "start", "other")
_CHECKPOINT_SECONDS = 30.0
_LARGEST = 1 << 62


class Start(NamedTuple):
    """One process's part of a run: its first step, its seconds until its last row, and their parts.

    The parts are empty if they were not recorded.
    """

    first: int
    seconds: float
    parts: dict[str, float]


class Checkpoints(NamedTuple):
    """The checkpoints of a run, what the newest was written with, and why nothing is known of them, if so."""

    place: str
    entries: list[checkpoint.Entry]
    written_with: dict[str, Any]
    problem: str


class Run(NamedTuple):
    """One run.

    Attributes:
      path: its work directory.
      name: the end of that path which no other run has.
      separate: columns of the evaluation job; those of the run's own evaluations are `evaluation`.
      starts: its processes, one after the other; empty if their seconds were not recorded.
      state: 'done', 'running', 'stopped', 'failed', 'silent' or 'unknown'; `doing` is the same in words.
      results: the final evaluation; empty if it has not been made.
    """

    path: pathlib.Path
    name: str
    config: dict[str, Any]
    training: rows_lib.Columns
    evaluation: rows_lib.Columns
    separate: rows_lib.Columns
    starts: list[Start]
    state: str
    doing: str
    step: int | None
    results: dict[str, list[float]]
    checkpoints: Checkpoints
    notes: list[str]


# Waits for what is known of checkpoints, until a time of the monotonic clock.
_Answer = Callable[[float], Checkpoints]


def read(paths: Sequence[str], checkpoint_seconds: float = _CHECKPOINT_SECONDS) -> list[Run]:
    """Reads runs.

    Args:
      paths: their work directories; one that is given twice counts once.
      checkpoint_seconds: how long all places of checkpoints have to answer.

    Raises:
      UserError: if any of them is no run's directory; all such are named.
    """
    unique: dict[pathlib.Path, pathlib.Path] = {}
    for path in paths:
        unique.setdefault(pathlib.Path(path).resolve(), pathlib.Path(path).absolute())
    directories = list(unique.values())
    configs, problems = [], []
    for directory in directories:
        try:
            configs.append(_config(directory))
        except (errors.UserError, OSError) as e:
            problems.append(str(e))
    if problems:
        raise errors.UserError("\n".join(problems))
    deadline = time.monotonic() + checkpoint_seconds
    answers = [_ask(*pair) for pair in zip(directories, configs, strict=True)]
    parts = zip(directories, _names(directories), configs, answers, strict=True)
    return [_run(*part, deadline) for part in parts]


def _ask(directory: pathlib.Path, config: dict[str, Any]) -> _Answer:
    """Looks at checkpoints in a thread of its own, since an object store may not answer for long."""
    elsewhere = config.get("checkpoint.directory")
    place = str(elsewhere or directory / "checkpoints")
    answers: list[Checkpoints] = []

    def look() -> None:
        try:
            is_there = elsewhere or pathlib.Path(place).is_dir()
            catalog = checkpoint.read_catalog(place) if is_there else ([], {})
            answers.append(Checkpoints(place, *catalog, ""))
        except Exception as e:
            # Whatever it is, the rest of the page does not depend on it.
            answers.append(Checkpoints(place, [], {}, str(e) or type(e).__name__))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()

    def wait(deadline: float) -> Checkpoints:
        thread.join(max(0.0, deadline - time.monotonic()))
        return answers[0] if answers else Checkpoints(place, [], {}, "it has not answered in time")

    return wait


def _run(
    path: pathlib.Path, name: str, config: dict[str, Any], answer: _Answer, deadline: float
) -> Run:
    rows = rows_lib.read(path / "metrics.jsonl")
    separate = rows_lib.read(path / "eval" / "metrics.jsonl")
    notes = [*rows.notes, *(f"eval/: {note}" for note in separate.notes)]
    results = _json(path / workdir.RESULTS, dict, notes)
    processes = [row for row in _json(path / status.FILE, list, notes) if isinstance(row, dict)]
    columns = [*rows.training.values(), *rows.evaluation.values()]
    last = max((int(column.steps[-1]) for column in columns), default=None)
    if not columns:
        notes.append("no metrics yet.")
    return Run(
        path,
        name,
        config,
        rows.training,
        rows.evaluation,
        separate.evaluation,
        _starts(rows.training),
        *_state(processes, results, last),
        rows_lib.numbers_of(results.get("eval")),
        answer(deadline),
        notes,
    )


def _config(path: pathlib.Path) -> dict[str, Any]:
    """A run's config, flat; UserError if there is no run."""
    if not path.exists():
        raise errors.UserError(f"{path}: there is no such directory.")
    if not path.is_dir():
        raise errors.UserError(
            f"{path} is a file; give the work directories of runs, as in runs/sweep/*/."
        )
    file = path / "config.json"
    if not file.exists():
        below = ", ".join(p.parent.name for p in sorted(path.glob("*/config.json")))
        hint = f" Those below it are: give {path}/*/, or some of {below}." if below else ""
        raise errors.UserError(f"{path} is no run's work directory: it has no {file.name}.{hint}")
    config = jsonfile.read(file)
    config.pop(workdir.IDENTITY, None)
    return config_lib.flatten(config)


def _json(path: pathlib.Path, kind: type, notes: list[str]) -> Any:
    """Reads a file, which may not be there yet; nothing if it is damaged, which is noted."""
    try:
        return jsonfile.read_if_exists(path, kind) or kind()
    except errors.UserError as e:
        notes.append(str(e))
        return kind()


def _state(
    processes: list[dict[str, Any]], results: dict[str, Any], last: int | None
) -> tuple[str, str, int | None]:
    """A run's state, the same in words, and its step."""
    failed = [row for row in processes if str(row.get("doing")).startswith("failed")]
    speaker = (failed or processes or [{}])[0]
    doing = show.printable(str(speaker.get("doing")))
    # Rows may be older than what the process said last, or a result than a run that goes on.
    steps = [_number(row.get("step")) for row in processes[:1]] + [last]
    step = max((s for s in steps if s is not None), default=_number(results.get("step")))
    if results.get("finite") is False and not doing.startswith("stopped"):
        is_over = not processes or doing.startswith(status.ENDS)
        if is_over:
            return "failed", show.printable(f"not finite: {results.get('why')}"), step
    if not processes:
        known = ("done", "done") if results else ("unknown", "not known: there is no status.json")
        return *known, step
    for end in status.ENDS:
        if doing.startswith(end):
            return end, f"stopped at step {step}" if end == "stopped" else doing, step
    age = time.time() - (_number(speaker.get("time")) or 0)
    if age > status.SILENT_SECONDS:
        return "silent", f"gone, or silent for {show.age(age)}; was {doing}", step
    return "running", doing if doing == "training" else f"running: {doing}", step


def _number(value: Any) -> int | None:
    """A file's number, whole; None if it is none, as where someone else has written the file."""
    # As a step or a time can be: neither infinite, nor more than an array holds.
    is_number = isinstance(value, int | float) and abs(value) < _LARGEST
    return int(value) if is_number else None


def _starts(training: rows_lib.Columns) -> list[Start]:
    """The processes that made the rows.

    A new one's seconds begin again at 0. Where its first row comes late they may have passed those of
    the row before, but then it began after that row was written.
    """
    seconds, clock = training.get("perf/seconds"), training.get("perf/time")
    if seconds is None:
        return []
    known = ~np.isnan(seconds.values[:, 0])
    steps, values = seconds.steps[known], seconds.values[known, 0]
    other = values[1:] < values[:-1]
    if clock is not None and np.array_equal(clock.steps, seconds.steps):
        # No comparison is true of a time that is not known.
        times = clock.values[known, 0]
        other |= times[1:] > times[:-1] + values[1:]
    starts = []
    for begin, end in itertools.pairwise([0, *(np.flatnonzero(other) + 1), len(steps)]):
        if begin < end:
            parts = _parts(training, steps[end - 1], float(values[end - 1]))
            starts.append(Start(int(steps[begin]), float(values[end - 1]), parts))
    return starts


def _parts(training: rows_lib.Columns, step: int, seconds: float) -> dict[str, float]:
    """The seconds of a process's parts, up to the row of a step."""

    def at(name: str) -> float:
        column = training.get(f"perf/{name}")
        there = [] if column is None else column.values[column.steps == step, 0]
        return float(there[0]) if len(there) else np.nan

    parts = {"training": at("goodput") * seconds}
    parts |= {name: at(f"{name}_seconds") for name in PARTS[1:-1]}
    if np.isnan(parts["training"]):
        return {}
    parts = {name: max(0.0, value) for name, value in parts.items() if np.isfinite(value)}
    return {**parts, "other": max(0.0, seconds - sum(parts.values()))}


def _names(paths: Sequence[pathlib.Path]) -> list[str]:
    """The end of each path, as long as it takes to tell it from the others."""
    longest = max((len(path.parts) for path in paths), default=0)
    for length in range(1, longest + 1):
        names = [str(pathlib.PurePath(*path.parts[-length:])) for path in paths]
        if len(set(names)) == len(names):
            break
    return [show.printable(name) for name in names]
