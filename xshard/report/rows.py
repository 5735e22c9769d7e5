"""Reads the rows of a metrics.jsonl as columns, one for each name."""

import collections
import math
import pathlib
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from xshard import errors
from xshard.metrics import formatting
from xshard.metrics import rows as logged_rows


class Column(NamedTuple):
    """The numbers under one name: steps, ascending, [rows]; and values, [rows, groups],
    nan if not finite.
    """

    steps: np.ndarray
    values: np.ndarray


Columns = dict[str, Column]
# For each name, the steps of the rows that have it, and their values.
_Table = collections.defaultdict[str, tuple[list[int], list[Any]]]


class Rows(NamedTuple):
    """The columns of training rows, the columns of evaluation rows without 'eval/', and
    notes to show.
    """

    training: Columns
    evaluation: Columns
    notes: list[str]


def read(path: pathlib.Path) -> Rows:
    """Reads a file, which a run may be writing; a missing file has no rows."""
    training: _Table = collections.defaultdict(lambda: ([], []))
    evaluation: _Table = collections.defaultdict(lambda: ([], []))
    notes: list[str] = []
    for row in _rows(path, notes):
        if logged_rows.is_of_roll_back(row):
            continue
        step = row.pop("step")
        table = evaluation if logged_rows.is_of_evaluation(row) else training
        for name, value in logged_rows.numbers(row).items():
            steps, values = table[name]
            steps.append(step)
            values.append(value)
    evaluated = {
        name.removeprefix(logged_rows.EVALUATION): column
        for name, column in _columns(evaluation, path.name, notes).items()
    }
    return Rows(_columns(training, path.name, notes), evaluated, notes)


def newest_samples(
    path: pathlib.Path, most: int, notes: list[str]
) -> list[dict[str, Any]]:
    """Returns the newest rows of a file of samples, by ascending steps; each step once.

    Args:
      path: the file, which may be missing, and which a run may be writing.
      most: the most rows to return.
      notes: receives notes on the file to show.
    """
    rows: dict[int, dict[str, Any]] = {}
    for row in _rows(path, notes):
        # If a step has two rows, the later one counts.
        rows[row["step"]] = row
        if len(rows) > most:
            del rows[min(rows)]
    return [rows[step] for step in sorted(rows)]


def numbers_of(values: Any) -> dict[str, list[float]]:
    """Returns the numbers of all groups under each name of a mapping, without values
    that are not numbers.
    """
    if not isinstance(values, dict):
        return {}
    columns = {
        formatting.printable(name): _numbers(value) for name, value in values.items()
    }
    return {name: numbers for name, numbers in columns.items() if numbers}


def _rows(path: pathlib.Path, notes: list[str]) -> Iterator[logged_rows.Row]:
    """Yields the rows of a file. A file that cannot be read is a note, not an error."""
    try:
        yield from logged_rows.read(path, notes)
    except errors.UserError as e:
        notes.append(str(e))


def _columns(table: _Table, file: str, notes: list[str]) -> Columns:
    columns = {}
    are_means = False
    for name, (all_steps, all_values) in table.items():
        # If a step has two rows, the later one counts: the run has repeated the step.
        steps, last = np.unique(np.array(all_steps, np.int64)[::-1], return_index=True)
        values = [all_values[-1 - index] for index in last.tolist()]
        kept, array, is_mean = _array(values)
        are_means |= is_mean
        name = formatting.printable(name)
        lost = len(values) - len(array)
        if lost:
            notes.append(
                f"{file}: skipped {lost} value(s) of '{name}' that are not numbers."
            )
        if len(array):
            columns[name] = Column(
                steps[kept], np.where(np.isfinite(array), array, np.nan)
            )
    if are_means:
        notes.append(
            f"{file}: the number of slices has changed, so their mean is shown."
        )
    return columns


def _array(values: list[Any]) -> tuple[slice | list[int], np.ndarray, bool]:
    """Returns the numbers of values that have any.

    Args:
      values: the values of the rows.

    Returns:
      The indices of the values; their numbers, [rows, groups]; and whether these are
      means over groups, [rows, 1], because the number of groups changes. Only that of
      slices that train one model does.
    """
    # Most columns are plain numbers. There may be millions, so these are converted at
    # once. NumPy converts None to nan.
    if set(map(type, values)) <= {float, types.NoneType}:
        return slice(None), np.array(values, np.float64)[:, np.newaxis], False
    numbers = [_numbers(value) for value in values]
    kept = [index for index, row in enumerate(numbers) if row]
    is_mean = len({len(numbers[index]) for index in kept}) > 1
    if is_mean:
        numbers = [[sum(x / len(row) for x in row)] for row in numbers]
    return kept, np.array([numbers[index] for index in kept], np.float64), is_mean


def _numbers(value: Any) -> list[float]:
    """Returns the numbers of all groups, with nan for null; an empty list for anything
    else.
    """
    numbers = value if isinstance(value, list) else [value]
    if not all(number is None or isinstance(number, int | float) for number in numbers):
        return []
    return [_number(number) for number in numbers]


def _number(number: float | None) -> float:
    """Returns a number as a float; nan for None, or for too large an integer."""
    try:
        return math.nan if number is None else float(number)
    except OverflowError:
        return math.nan
