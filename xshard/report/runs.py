"""Reads the runs of a report from their work directories. Nothing is written there, and
no device is used.
"""

import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xshard import checkpoint, errors
from xshard import config as config_lib
from xshard.base import formatting
from xshard.files import disk, jsonfile, workdir
from xshard.pod import attempts as attempts_lib
from xshard.pod import status
from xshard.report import norms as norms_lib
from xshard.report import rows as rows_lib

_CHECKPOINT_SECONDS = 30.0
# The number of sample rows on a page; more would make it too large.
_SAMPLES = 10


class Checkpoints(NamedTuple):
    """The checkpoints of a run, and the problem if they are unknown."""

    place: str
    catalog: checkpoint.Catalog = checkpoint.Catalog([], {})
    problem: str = ""


class Run(NamedTuple):
    """One run.

    Attributes:
      path: its work directory.
      name: the shortest end of that path that no other run has.
      evaluation_job: the columns of the evaluation job; `evaluation` has the run's own
        evaluations.
      attempts: the attempts in order; empty for a run of a version that did not record
        them.
      state: 'done', 'running', 'stopped', 'failed', 'silent' or 'unknown'; `doing`
        describes it in words.
      results: the final evaluation; empty if there is none yet.
      samples: the newest rows of samples, in the format of `xshard.samples`, by
        ascending steps.
      norms: the norms of its parameters over the steps.
    """

    path: pathlib.Path
    name: str
    config: dict[str, Any]
    training: rows_lib.Columns
    evaluation: rows_lib.Columns
    evaluation_job: rows_lib.Columns
    attempts: list[attempts_lib.Attempt]
    state: str
    doing: str
    step: float | None
    results: dict[str, list[float]]
    checkpoints: Checkpoints
    samples: list[dict[str, Any]]
    norms: list[norms_lib.NormMap]
    notes: list[str]


def read(
    paths: Sequence[str], checkpoint_seconds: float = _CHECKPOINT_SECONDS
) -> list[Run]:
    """Reads runs.

    Args:
      paths: their work directories; duplicates count once.
      checkpoint_seconds: the timeout for reading all checkpoint directories together.

    Raises:
      UserError: if any path holds no run; the message names all such paths.
    """
    unique: dict[pathlib.Path, pathlib.Path] = {}
    for path in map(pathlib.Path, map(disk.expanded, paths)):
        unique.setdefault(path.resolve(), path.absolute())
    directories = list(unique.values())
    configs = []
    problems = []
    for directory in directories:
        try:
            configs.append(_config(directory))
        except (errors.UserError, OSError) as e:
            problems.append(str(e))
    if problems:
        raise errors.UserError("\n".join(problems))
    # An object store may not answer for a long time, so threads ask, all at once. They
    # are daemons, so that the program can exit without waiting for them.
    listed: dict[str, Checkpoints] = {}
    places = []
    threads = []
    for directory, config in zip(directories, configs, strict=True):
        elsewhere = config.get("checkpoint.directory")
        places.append(str(elsewhere or directory / "checkpoints"))
        # A run that has not saved yet has no such directory, which is no error.
        if elsewhere or pathlib.Path(places[-1]).is_dir():
            arguments = (places[-1], listed)
            threads.append(threading.Thread(target=_list, args=arguments, daemon=True))
            threads[-1].start()
        else:
            listed[places[-1]] = Checkpoints(places[-1])
    deadline = time.monotonic() + checkpoint_seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    runs = []
    parts = zip(directories, _names(directories), configs, places, strict=True)
    for directory, name, config, place in parts:
        late = Checkpoints(place, problem="the storage did not answer in time")
        runs.append(_run(directory, name, config, listed.get(place, late)))
    return runs


def _list(place: str, listed: dict[str, Checkpoints]) -> None:
    """Lists the checkpoints at a place."""
    try:
        found = Checkpoints(place, checkpoint.read_catalog(place))
    except Exception as e:
        # No error here may prevent the rest of the page.
        found = Checkpoints(place, problem=str(e) or type(e).__name__)
    listed[place] = found


def _run(
    path: pathlib.Path, name: str, config: dict[str, Any], checkpoints: Checkpoints
) -> Run:
    rows = rows_lib.read(path / "metrics.jsonl")
    evaluation_job = rows_lib.read(path / "eval" / "metrics.jsonl")
    notes = [*rows.notes, *(f"eval/: {note}" for note in evaluation_job.notes)]
    results = _noted(notes, lambda: jsonfile.read_if_exists(path / workdir.RESULTS), {})
    processes = _noted(notes, lambda: status.read_if_exists(path), [])
    columns = [*rows.training.values(), *rows.evaluation.values()]
    if not columns:
        notes.append("no metrics yet.")
    # Rows may be older than the status, and results may be from before the run was
    # resumed.
    steps = [int(column.index[-1]) for column in columns]
    steps += [row["step"] for row in processes[:1] if row["step"] is not None]
    if not steps and jsonfile.is_number(results.get("step")):
        steps = [results["step"]]
    step = max(steps, default=None)
    state, doing = _state(processes, results, step)
    return Run(
        path=path,
        name=name,
        config=config,
        training=rows.training,
        evaluation=rows.evaluation,
        evaluation_job=evaluation_job.evaluation,
        attempts=_noted(notes, lambda: attempts_lib.read(path), []),
        state=state,
        doing=doing,
        step=step,
        results=rows_lib.numbers_of(results.get("eval")),
        checkpoints=checkpoints,
        samples=_newest_samples(path / "samples.jsonl", notes),
        norms=norms_lib.read(path / "norms.jsonl", notes),
        notes=notes,
    )


def _newest_samples(path: pathlib.Path, notes: list[str]) -> list[dict[str, Any]]:
    """Returns the newest rows of a file of samples, by ascending steps; each step once.

    Args:
      path: the file, which may be missing, and which a run may be writing.
      notes: receives notes on the file to show.
    """
    rows: dict[int, dict[str, Any]] = {}
    for row in rows_lib.of_file(path, notes):
        # If a step has two rows, the later one counts.
        rows[row["step"]] = row
        if len(rows) > _SAMPLES:
            del rows[min(rows)]
    return [rows[step] for step in sorted(rows)]


def _noted(notes: list[str], read: Callable[[], Any], otherwise: Any) -> Any:
    """Returns the result of `read`, or `otherwise` if it is empty or fails; a failure
    is added to the notes.
    """
    try:
        return read() or otherwise
    except errors.UserError as e:
        # Two readers of one file may report the same problem.
        if str(e) not in notes:
            notes.append(str(e))
        return otherwise


def _config(path: pathlib.Path) -> dict[str, Any]:
    """Reads a run's config, flattened; raises UserError if there is no run."""
    if not path.exists():
        raise errors.UserError(f"{path}: there is no such directory.")
    if not path.is_dir():
        raise errors.UserError(
            f"{path} is a file; give the work directories of runs, as in runs/sweep/*/."
        )
    file = path / "config.json"
    if not file.exists():
        hint = ""
        below = ", ".join(p.parent.name for p in sorted(path.glob("*/config.json")))
        if below:
            hint = f" The directories below it are: give {path}/*/, or some of {below}."
        raise errors.UserError(
            f"{path} is not a run's work directory: it has no {file.name}.{hint}"
        )
    config = jsonfile.read(file)
    config.pop(workdir.IDENTITY, None)
    return config_lib.flatten(config)


def _state(
    processes: list[dict[str, Any]], results: dict[str, Any], step: float | None
) -> tuple[str, str]:
    """Returns a run's state, and a description of it."""
    state = status.run_state(processes, results)
    doing = state.doing
    if doing == status.NOT_FINITE and results.get("why"):
        doing = f"not finite: {results['why']}"
    elif state.name == status.STOPPED:
        doing = f"stopped at step {step}"
    elif state.name == status.DONE and results.get("ended"):
        doing = f"done: {results['ended']}"
    elif state.name == status.RUNNING and doing != status.TRAINING:
        doing = f"running: {doing}"
    return state.name, formatting.printable(doing)


def _names(paths: Sequence[pathlib.Path]) -> list[str]:
    """Returns the ends of the paths, just long enough to be distinct."""
    longest = max((len(path.parts) for path in paths), default=0)
    for length in range(1, longest + 1):
        names = [str(pathlib.PurePath(*path.parts[-length:])) for path in paths]
        if len(set(names)) == len(names):
            break
    return [formatting.printable(name) for name in names]
