"""Reads the runs of a report from their work directories. Nothing is written there, and
no device is used.
"""

import contextlib
import pathlib
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from xshard import checkpoint, errors
from xshard import config as config_lib
from xshard.base import formatting
from xshard.files import disk, jsonfile, workdir
from xshard.metrics import norms as norms_lib
from xshard.metrics import rows as rows_lib
from xshard.pod import attempts as attempts_lib
from xshard.pod import status

# The numbers under each name: a row for each step, ascending, and a column for each
# group; nan if not finite.
Columns = dict[str, pd.DataFrame]
_CHECKPOINT_SECONDS = 30.0
# The number of sample rows on a page; more would make it too large.
_SAMPLES = 10
# The most columns and rows of a map of norms; more could not be told apart.
_MOST_STEPS = 200
_MOST_ROWS = 80
# What NumPy converts by itself, which is fast: there may be millions of numbers.
_PLAIN = {float, int, types.NoneType}


class Checkpoints(NamedTuple):
    """The checkpoints of a run, and the problem if they are unknown."""

    place: str
    catalog: checkpoint.Catalog = checkpoint.Catalog([], {})
    problem: str = ""


class NormMap(NamedTuple):
    """The norms of a learner's parameters, in one group.

    Attributes:
      name: the learner and the group, if there are several; else empty.
      values: for each quantity, first the ratio, a frame with a row for each path of a
        parameter, or of a module if there are very many parameters, and a column for
        each step, ascending; nan where it is not finite or not known.
    """

    name: str
    values: dict[str, pd.DataFrame]


class Run(NamedTuple):
    """One run.

    Attributes:
      path: its work directory.
      name: the shortest end of that path that no other run has.
      evaluation: the columns of its own evaluations, without 'eval/'.
      evaluation_job: those of the evaluation job.
      attempts: the attempts in order; empty for a run of a version that did not record
        them.
      state: 'done', 'running', 'stopped', 'failed', 'silent' or 'unknown'; `doing`
        describes it in words.
      results: the final evaluation; empty if there is none yet.
      samples: the newest rows of samples, in the format of `xshard.samples`, by
        ascending steps.
      norms: the norms of its parameters over the steps.
      notes: notes on its files to show.
    """

    path: pathlib.Path
    name: str
    config: dict[str, Any]
    training: Columns
    evaluation: Columns
    evaluation_job: Columns
    attempts: list[attempts_lib.Attempt]
    state: str
    doing: str
    step: float | None
    results: dict[str, list[float]]
    checkpoints: Checkpoints
    samples: list[dict[str, Any]]
    norms: list[NormMap]
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
    configs = {}
    problems = []
    for directory in unique.values():
        try:
            configs[directory] = _config(directory)
        except (errors.UserError, OSError) as e:
            problems.append(str(e))
    if problems:
        raise errors.UserError("\n".join(problems))
    # An object store may not answer for a long time, so threads ask, all at once. They
    # are daemons, so that the program can exit without waiting for them.
    listed: dict[pathlib.Path, Checkpoints] = {}
    threads = []
    for directory, config in configs.items():
        elsewhere = config.get("checkpoint.directory")
        place = str(elsewhere or directory / "checkpoints")
        listed[directory] = Checkpoints(place)
        # A run that has not saved yet has no such directory, which is no error.
        if elsewhere or pathlib.Path(place).is_dir():
            late = "the storage did not answer in time"
            listed[directory] = Checkpoints(place, problem=late)
            arguments = (directory, place, listed)
            threads.append(threading.Thread(target=_list, args=arguments, daemon=True))
            threads[-1].start()
    deadline = time.monotonic() + checkpoint_seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    runs = []
    names = _names(list(configs))
    for name, (directory, config) in zip(names, configs.items(), strict=True):
        runs.append(_run(directory, name, config, listed[directory]))
    return runs


def _list(
    directory: pathlib.Path, place: str, listed: dict[pathlib.Path, Checkpoints]
) -> None:
    """Lists the checkpoints of a run."""
    try:
        found = Checkpoints(place, checkpoint.read_catalog(place))
    except Exception as e:
        # No error here may prevent the rest of the page.
        found = Checkpoints(place, problem=str(e) or type(e).__name__)
    listed[directory] = found


def _run(
    path: pathlib.Path, name: str, config: dict[str, Any], checkpoints: Checkpoints
) -> Run:
    notes: list[str] = []
    notes_of_job: list[str] = []
    training, evaluation = read_rows(path / rows_lib.NUMBERS, notes)
    _, evaluation_job = read_rows(path / "eval" / rows_lib.NUMBERS, notes_of_job)
    notes += [f"eval/: {note}" for note in notes_of_job]
    results = _noted(notes, lambda: jsonfile.read_if_exists(path / workdir.RESULTS), {})
    processes = _noted(notes, lambda: status.read_if_exists(path), [])
    columns = [*training.values(), *evaluation.values()]
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
    final = {}
    if isinstance(results.get("eval"), dict):
        for metric, value in results["eval"].items():
            numbers = rows_lib.of_groups(value)
            if numbers:
                final[formatting.printable(metric)] = numbers
    # The newest samples; if a step has two rows, the later one counts.
    samples: dict[int, dict[str, Any]] = {}
    for row in _rows(path / rows_lib.FILES[rows_lib.SAMPLES], notes):
        samples[row["step"]] = row
        if len(samples) > _SAMPLES:
            del samples[min(samples)]
    return Run(
        path=path,
        name=name,
        config=config,
        training=training,
        evaluation=evaluation,
        evaluation_job=evaluation_job,
        attempts=_noted(notes, lambda: attempts_lib.read(path), []),
        state=state,
        doing=doing,
        step=step,
        results=final,
        checkpoints=checkpoints,
        samples=[samples[step] for step in sorted(samples)],
        norms=read_norms(path / rows_lib.FILES[rows_lib.NORMS], notes),
        notes=notes,
    )


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
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    ends = [str(pathlib.PurePath(*path.parts[-length:])) for path in paths]
    return [formatting.printable(end) for end in ends]


def read_rows(path: pathlib.Path, notes: list[str]) -> tuple[Columns, Columns]:
    """Returns the columns of the training rows of a file, and of its evaluation rows.

    Args:
      path: the file, which a run may be writing; a missing file has no rows.
      notes: receives notes on the file to show.
    """
    # By kind, name and step. If a step has two rows, the later one counts: the run has
    # repeated the step.
    values: dict[str, dict[str, dict[int, Any]]] = {
        rows_lib.TRAIN: {},
        rows_lib.EVALUATION: {},
    }
    for row in _rows(path, notes):
        of_kind = values.get(rows_lib.kind(row))
        if of_kind is not None:
            step = row.pop("step")
            for name, value in row.items():
                of_kind.setdefault(name, {})[step] = value
    training, evaluation = (
        _columns(of_kind, path.name, notes) for of_kind in values.values()
    )
    return training, evaluation


def _rows(path: pathlib.Path, notes: list[str]) -> Iterator[rows_lib.Row]:
    """Yields the rows of a file. A file that cannot be read is a note, not an error."""
    try:
        yield from rows_lib.read(path, notes)
    except errors.UserError as e:
        notes.append(str(e))


def _columns(values: dict[str, dict[int, Any]], file: str, notes: list[str]) -> Columns:
    columns = {}
    are_means = False
    for name, by_step in rows_lib.numbers(dict(values)).items():
        name = formatting.printable(name.removeprefix(rows_lib.OF_EVALUATION))
        frame, is_mean = _frame(by_step)
        are_means |= is_mean
        lost = len(by_step) - len(frame)
        if lost:
            notes.append(
                f"{file}: skipped {lost} value(s) of '{name}' that are not numbers."
            )
        if len(frame):
            columns[name] = frame
    if are_means:
        notes.append(
            f"{file}: the number of slices has changed, so their mean is shown."
        )
    return columns


def _frame(by_step: dict[int, Any]) -> tuple[pd.DataFrame, bool]:
    """Returns the numbers of values that have any, with a column for each group; and
    whether they are means over groups, because the number of groups changes. Only that
    of slices that train one model does.
    """
    if set(map(type, by_step.values())) <= _PLAIN:
        # An integer may be too large for a float.
        with contextlib.suppress(OverflowError):
            return _finite(by_step), False
    groups = {}
    for step, value in by_step.items():
        numbers = rows_lib.of_groups(value)
        if numbers:
            groups[step] = numbers
    is_mean = len(set(map(len, groups.values()))) > 1
    if is_mean:
        groups = {step: [float(np.mean(x))] for step, x in groups.items()}
    return _finite(groups), is_mean


def _finite(by_step: dict[int, Any]) -> pd.DataFrame:
    """Returns numbers by ascending steps, with nan for those that are not finite."""
    array = np.array(list(by_step.values()), np.float64)
    array[~np.isfinite(array)] = np.nan
    return pd.DataFrame(array, index=list(by_step)).sort_index()


def read_norms(path: pathlib.Path, notes: list[str]) -> list[NormMap]:
    """Reads the maps from a run's norms.jsonl, which may be missing.

    Args:
      path: the file, which a run may be writing.
      notes: receives notes on the file to show.
    """
    # Rows at about equal distances; if a step has two, the later one counts.
    kept: dict[int, rows_lib.Row] = {}
    stride = 1
    for number, row in enumerate(_rows(path, notes)):
        is_due = number % stride == 0 or row["step"] in kept
        if is_due and rows_lib.kind(row) == rows_lib.NORMS:
            kept[row["step"]] = row
        if len(kept) > _MOST_STEPS:
            kept = {step: kept[step] for step in sorted(kept)[::2]}
            stride *= 2
    records = []
    for step, row in kept.items():
        for norms in norms_lib.parameters(row):
            of_kinds = [norms.values[kind] for kind in norms_lib.KINDS]
            for group, values in enumerate(zip(*of_kinds, strict=True)):
                records.append((norms.learner, group, norms.path, step, *values))
    names = ["learner", "group", "path", "step", *norms_lib.KINDS]
    frame = pd.DataFrame(records, columns=names)
    maps = []
    for (learner, group), part in frame.groupby(["learner", "group"], sort=False):
        words = []
        if learner or frame["learner"].nunique() > 1:
            words.append(learner)
        if frame["group"].nunique() > 1:
            words.append(f"group {group}")
        maps.append(NormMap(formatting.printable(", ".join(words)), _values(part)))
    return maps


def _values(part: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Returns the norms by quantity, path and step.

    Args:
      part: the norms of one learner and group; a row for each path and step.
    """
    paths = part["path"].unique()
    words = [path.split("/") for path in paths]
    # A path is shown as a module that contains it, of as many words as leave at most
    # `_MOST_ROWS` rows.
    for length in range(max(map(len, words)), 0, -1):
        names = [formatting.printable("/".join(path[:length])) for path in words]
        if len(set(names)) <= _MOST_ROWS:
            break
    # The norm of a module is that of all its parameters together.
    squares = part[list(norms_lib.KINDS)] ** 2
    places = [part["path"].map(dict(zip(paths, names, strict=True))), part["step"]]
    norms = squares.groupby(places, sort=False).sum(skipna=False) ** 0.5
    values = {}
    for kind in norms_lib.KINDS:
        of_kind = norms[kind].unstack("step", sort=False)
        values[kind] = of_kind.sort_index(axis="columns")
    parameter = values["parameter"]
    ratio = values["update"] / parameter.where(parameter > 0)
    return {norms_lib.RATIO: ratio, **values}
