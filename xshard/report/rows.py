"""Reads the rows of a metrics.jsonl as frames, one for each name."""

import contextlib
import pathlib
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from xshard import errors
from xshard.base import formatting
from xshard.metrics import rows as logged_rows

# The numbers under each name: a row for each step, ascending, and a column for each
# group; nan if not finite.
Columns = dict[str, pd.DataFrame]
# What NumPy converts by itself, which is fast: there may be millions of numbers.
_PLAIN = {float, int, types.NoneType}


class Rows(NamedTuple):
    """The columns of training rows, the columns of evaluation rows without 'eval/', and
    notes to show.
    """

    training: Columns
    evaluation: Columns
    notes: list[str]


def read(path: pathlib.Path) -> Rows:
    """Reads a file, which a run may be writing; a missing file has no rows."""
    notes: list[str] = []
    # By kind and name, the steps and the values.
    values: dict[str, dict[str, tuple[list[int], list[Any]]]] = {
        logged_rows.TRAIN: {},
        logged_rows.EVALUATION: {},
    }
    for row in of_file(path, notes):
        of_kind = values.get(logged_rows.kind(row))
        if of_kind is None:
            continue
        step = row.pop("step")
        for name, value in row.items():
            if name not in of_kind:
                of_kind[name] = ([], [])
            steps, listed = of_kind[name]
            steps.append(step)
            listed.append(value)
    training = _columns(values[logged_rows.TRAIN], path.name, notes)
    evaluation = _columns(values[logged_rows.EVALUATION], path.name, notes)
    return Rows(training, evaluation, notes)


def of_file(path: pathlib.Path, notes: list[str]) -> Iterator[logged_rows.Row]:
    """Yields the rows of a file. A file that cannot be read is a note, not an error."""
    try:
        yield from logged_rows.read(path, notes)
    except errors.UserError as e:
        notes.append(str(e))


def numbers_of(values: Any) -> dict[str, list[float]]:
    """Returns the numbers of all groups under each name of a mapping, without values
    that are not numbers.
    """
    if not isinstance(values, dict):
        return {}
    numbers = {}
    for name, value in values.items():
        of_name = logged_rows.of_groups(value)
        if of_name:
            numbers[formatting.printable(name)] = of_name
    return numbers


def _columns(
    values: Mapping[str, tuple[list[int], list[Any]]], file: str, notes: list[str]
) -> Columns:
    columns = {}
    are_means = False
    for name, (steps, listed) in logged_rows.numbers(dict(values)).items():
        # If a step has two rows, the later one counts: the run has repeated the step.
        by_step = dict(zip(steps, listed, strict=True))
        name = formatting.printable(name.removeprefix(logged_rows.OF_EVALUATION))
        frame, is_mean = _frame({step: by_step[step] for step in sorted(by_step)})
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
        numbers = logged_rows.of_groups(value)
        if numbers:
            groups[step] = numbers
    is_mean = len(set(map(len, groups.values()))) > 1
    if is_mean:
        groups = {step: [float(np.mean(x))] for step, x in groups.items()}
    return _finite(groups), is_mean


def _finite(by_step: dict[int, Any]) -> pd.DataFrame:
    """Returns numbers as a frame, with nan for those that are not finite."""
    array = np.array(list(by_step.values()), np.float64)
    array[~np.isfinite(array)] = np.nan
    return pd.DataFrame(array, index=list(by_step))
