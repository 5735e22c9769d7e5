"""Reads the rows of a metrics.jsonl as columns, one for each name."""

import contextlib
import math
import pathlib
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xshard import errors
from xshard.base import formatting
from xshard.metrics import rows as logged_rows


class Column(NamedTuple):
    """The numbers under one name: steps, ascending, [rows]; and values, [rows, groups],
    nan if not finite.
    """

    steps: np.ndarray
    values: np.ndarray


Columns = dict[str, Column]


class _Alike(NamedTuple):
    """The rows of a file that have the same names, in their order.

    Attributes:
      numbers: the place of each row in the file.
      values: the values of each row, in the order of the names.
    """

    numbers: list[int]
    values: list[tuple[Any, ...]]


# The rows of a kind, by their names. There may be hundreds of thousands, but few that
# differ in their names. So they are turned into columns many at a time.
_Table = dict[tuple[str, ...], _Alike]


class Rows(NamedTuple):
    """The columns of training rows, the columns of evaluation rows without 'eval/', and
    notes to show.
    """

    training: Columns
    evaluation: Columns
    notes: list[str]


def read(path: pathlib.Path) -> Rows:
    """Reads a file, which a run may be writing; a missing file has no rows."""
    tables: dict[str, _Table] = {logged_rows.TRAIN: {}, logged_rows.EVALUATION: {}}
    notes: list[str] = []
    for number, row in enumerate(_rows(path, notes)):
        table = tables.get(logged_rows.kind(row))
        if table is None:
            continue
        names = tuple(row)
        if names not in table:
            table[names] = _Alike([], [])
        alike = table[names]
        alike.numbers.append(number)
        alike.values.append(tuple(row.values()))
    training = _columns(tables[logged_rows.TRAIN], path.name, notes)
    evaluated = {}
    of_evaluations = _columns(tables[logged_rows.EVALUATION], path.name, notes)
    for name, column in of_evaluations.items():
        evaluated[name.removeprefix(logged_rows.OF_EVALUATION)] = column
    return Rows(training, evaluated, notes)


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
    # For each set of names, the rows' numbers and their values by name.
    parts = []
    for names, alike in table.items():
        of_names = dict(zip(names, zip(*alike.values, strict=True), strict=True))
        parts.append((np.array(alike.numbers), of_names))
    # An empty row with all names, in the order in which they first appear.
    all_names = dict.fromkeys(name for names in table for name in names)
    columns = {}
    are_means = False
    # Many names occur in the same rows.
    orders: dict[tuple[int, ...], tuple[np.ndarray, list[int] | None]] = {}
    for name in logged_rows.numbers(all_names):
        if name == "step":
            continue
        indices = tuple(i for i, (_, part) in enumerate(parts) if name in part)
        if indices not in orders:
            orders[indices] = _order([parts[i] for i in indices])
        steps, order = orders[indices]
        values: Sequence[Any] = parts[indices[0]][1][name]
        if len(indices) > 1:
            values = [value for i in indices for value in parts[i][1][name]]
        if order is not None:
            values = [values[i] for i in order]
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


def _order(
    parts: Sequence[tuple[np.ndarray, dict[str, tuple[Any, ...]]]],
) -> tuple[np.ndarray, list[int] | None]:
    """Returns the steps of rows, ascending and each once, and the row of each.

    If a step has two rows, the later one counts: the run has repeated the step.

    Args:
      parts: the numbers of the rows and their values by name, in several parts.

    Returns:
      The steps; and their rows, as indices into the rows of all parts, one after
      another, or None if they are all rows as they are.
    """
    numbers = np.concatenate([part[0] for part in parts])
    steps = np.concatenate([np.array(part[1]["step"], np.int64) for part in parts])
    if np.all(np.diff(steps) > 0):
        return steps, None
    in_file = np.argsort(numbers)
    ascending, last = np.unique(steps[in_file][::-1], return_index=True)
    return ascending, in_file[::-1][last].tolist()


def _array(values: Sequence[Any]) -> tuple[slice | list[int], np.ndarray, bool]:
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
    if set(map(type, values)) <= {float, int, types.NoneType}:
        # An integer may be too large for a float.
        with contextlib.suppress(OverflowError):
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
