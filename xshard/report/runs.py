"""Reads what a work directory says of its run. Nothing is written there, and no device is touched."""

import dataclasses
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Start:
    """One process's part of a run, up to its last row.

    Attributes:
      first: the step of its first row.
      last: that of its last one.
      seconds: how long it had been running then.
      parts: the seconds of each of `PARTS`; empty if they were not recorded.
    """

    first: int
    last: int
    seconds: float
    parts: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run.

    Attributes:
      place: where they are.
      entries: what is there, the oldest step first.
      written_with: versions and devices that the newest was written with.
      problem: why nothing is known of them; empty if something is.
    """

    place: str
    entries: list[checkpoint.Entry]
    written_with: dict[str, Any]
    problem: str


@dataclasses.dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
      name: what it is called in the page: the end of its path that no other run has.
      path: its work directory.
      config: its config, flat.
      training: columns of training rows.
      evaluation: columns of the run's own evaluations.
      separate: columns of the evaluation job's.
      starts: its processes, one after the other; empty if their seconds were not recorded.
      state: 'done', 'running', 'stopped', 'failed', 'silent' or 'unknown'.
      doing: the same in words.
      step: the last step that is known of.
      results: the final evaluation; empty if it has not been made.
      checkpoints: its checkpoints.
      notes: what is to be known of its files.
    """

    name: str
    path: pathlib.Path
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

    @property
    def restarts(self) -> list[int]:
        """The first logged step of each process but the first."""
        return [start.first for start in self.starts[1:]]

    @property
    def seconds(self) -> float | None:
        """The seconds that its processes ran, all together; None if it is not known."""
        return sum(start.seconds for start in self.starts) if self.starts else None


class _Look:
    """A look at checkpoints in a thread of its own, since an object store may not answer for long."""

    def __init__(self, place: str, is_own: bool):
        self._place = place
        self._is_own = is_own
        self._found: list[Checkpoints] = []
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def wait(self, deadline: float) -> Checkpoints:
        """Returns what was found until `deadline`, of the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._found:
            return self._found[0]
        return Checkpoints(self._place, [], {}, "it has not answered in time")

    def _look(self) -> None:
        entries: list[checkpoint.Entry] = []
        written_with: dict[str, Any] = {}
        problem = ""
        try:
            if not self._is_own or pathlib.Path(self._place).is_dir():
                entries, written_with = checkpoint.read_catalog(self._place)
        except Exception as e:
            # Whatever it is, the rest of the page does not depend on it.
            problem = str(e) or type(e).__name__
        self._found.append(Checkpoints(self._place, entries, written_with, problem))


def read(paths: Sequence[str], checkpoint_seconds: float = _CHECKPOINT_SECONDS) -> list[Run]:
    """Reads runs.

    Args:
      paths: their work directories; one that is given twice counts once.
      checkpoint_seconds: how long all places of checkpoints have to answer.

    Raises:
      ValueError: if any of them is no run's directory; all such are named.
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
    looks = []
    for directory, config in zip(directories, configs, strict=True):
        elsewhere = config.get("checkpoint.directory")
        looks.append(_Look(str(elsewhere or directory / "checkpoints"), not elsewhere))
    parts = zip(directories, _names(directories), configs, looks, strict=True)
    return [_run(*part, deadline) for part in parts]


def _run(
    path: pathlib.Path, name: str, config: dict[str, Any], look: _Look, deadline: float
) -> Run:
    rows = rows_lib.read(path / "metrics.jsonl")
    separate = rows_lib.read(path / "eval" / "metrics.jsonl")
    notes = [*rows.notes, *(f"eval/: {note}" for note in separate.notes)]
    starts = _starts(rows.training)
    results = _json(path / "results.json", dict, notes)
    processes = [row for row in _json(path / status.FILE, list, notes) if isinstance(row, dict)]
    final = rows_lib.numbers_of(results.get("eval"))
    steps = [column.steps[-1] for column in (rows.training | rows.evaluation).values()]
    last = max(map(int, steps), default=None)
    state, doing, step = _state(processes, results, last)
    return Run(
        name=name,
        path=path,
        config=config,
        training=rows.training,
        evaluation=_with_results(rows.evaluation, final, _number(results.get("step"))),
        separate=separate.evaluation,
        starts=starts,
        state=state,
        doing=show.printable(doing),
        step=step,
        results=final,
        checkpoints=look.wait(deadline),
        notes=notes,
    )


def _with_results(
    columns: rows_lib.Columns, results: dict[str, list[float]], step: int | None
) -> rows_lib.Columns:
    """Evaluations and the final one, of which there need not be a row."""
    if step is None:
        return columns
    extended = dict(columns)
    for name, numbers in results.items():
        one = rows_lib.Column(np.array([step]), np.array([numbers]))
        column = columns.get(name, one)
        if column.steps[-1] < step and column.values.shape[1] == len(numbers):
            steps = np.append(column.steps, one.steps)
            column = rows_lib.Column(steps, np.append(column.values, one.values, axis=0))
        extended[name] = column
    return extended


def _config(path: pathlib.Path) -> dict[str, Any]:
    """A run's config, flat; ValueError if there is no run."""
    if not path.exists():
        raise errors.UserError(f"{path}: there is no such directory.")
    if not path.is_dir():
        raise errors.UserError(
            f"{path} is a file; give the work directories of runs, as in runs/sweep/*/."
        )
    file = path / "config.json"
    if not file.exists():
        below = [p.parent.name for p in sorted(path.glob("*/config.json"))]
        hint = (
            f" Those below it are: give {path}/*/, or some of {', '.join(below)}." if below else ""
        )
        raise errors.UserError(f"{path} is no run's work directory: it has no {file.name}.{hint}")
    try:
        config = jsonfile.read(file)
    except errors.UserError as e:
        raise errors.UserError(f"{e} Leave this run out.") from e
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
    step = _number(results.get("step"))
    not_finite = ""
    if results.get("finite") is False:
        not_finite = f"not finite: {results.get('why')}"
    if not processes:
        if not_finite:
            return "failed", not_finite, step
        if results:
            return "done", "done", step
        return "unknown", "not known: there is no status.json", last
    failed = [row for row in processes if str(row.get("doing")).startswith("failed")]
    said = (failed or processes)[0]
    doing = str(said.get("doing"))
    # Rows may be older than what the process said last, or a result than a run that goes on.
    steps = [s for s in (_number(processes[0].get("step")), last) if s is not None]
    reached = max(steps, default=step)
    for state in status.ENDS:
        if doing.startswith(state):
            if not_finite and state != "stopped":
                return "failed", not_finite, reached
            words = f"stopped at step {reached}" if state == "stopped" else doing
            return state, words, reached
    age = time.time() - (_number(said.get("time")) or 0)
    if age > status.SILENT_SECONDS:
        return "silent", f"gone, or silent for {show.age(age)}; was {doing}", reached
    return "running", doing if doing == "training" else f"running: {doing}", reached


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
    if not len(steps):
        return []
    other = np.diff(values) < 0
    if clock is not None and np.array_equal(clock.steps, seconds.steps):
        # No comparison is true of a time that is not known.
        times = clock.values[known, 0]
        other |= times[1:] - values[1:] > times[:-1]
    begins = [0, *(np.flatnonzero(other) + 1)]
    ends = [*(begin - 1 for begin in begins[1:]), len(steps) - 1]
    return [
        Start(int(steps[begin]), int(steps[end]), float(values[end]), _parts(training, steps[end]))
        for begin, end in zip(begins, ends, strict=True)
    ]


def _parts(training: rows_lib.Columns, step: int) -> dict[str, float]:
    """The seconds of a process's parts, up to the row of a step."""

    def at(name: str) -> float:
        column = training.get(f"perf/{name}")
        found = column.values[column.steps == step, 0] if column is not None else []
        return float(found[0]) if len(found) and np.isfinite(found[0]) else np.nan

    total, goodput = at("seconds"), at("goodput")
    if np.isnan(goodput):
        return {}
    parts = {"training": goodput * total}
    parts |= {name: at(f"{name}_seconds") for name in PARTS[1:-1]}
    parts = {name: max(0.0, value) for name, value in parts.items() if np.isfinite(value)}
    return {**parts, "other": max(0.0, total - sum(parts.values()))}


def _names(paths: Sequence[pathlib.Path]) -> list[str]:
    """The end of each path, as long as it takes to tell it from the others."""
    longest = max((len(path.parts) for path in paths), default=0)
    for length in range(1, longest + 1):
        names = [str(pathlib.PurePath(*path.parts[-length:])) for path in paths]
        if len(set(names)) == len(names):
            break
    return [show.printable(name) for name in names]
