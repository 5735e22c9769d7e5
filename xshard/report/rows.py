"""Reads the rows of a metrics.jsonl as columns, one for each name."""

import collections
import math
import pathlib
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from xshard import errors
from xshard.files import jsonfile
from xshard.metrics import formatting
from xshard.metrics import rows as logged_rows

_EVALUATION = "eval/"


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
    for step, row in _rows(path, notes):
        is_evaluation = any(name.startswith(_EVALUATION) for name in row)
        table = evaluation if is_evaluation else training
        for name, value in logged_rows.numbers(row).items():
            steps, values = table[name]
            steps.append(step)
            values.append(value)
    evaluated = {
        name.removeprefix(_EVALUATION): column
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
    for step, row in _rows(path, notes):
        # If a step has two rows, the later one counts.
        rows[step] = {"step": step, **row}
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


def _rows(path: pathlib.Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields rows with their steps, one by one: all rows of a long run would take a lot
    of memory.
    """
    damaged: list[int] = []
    ends_whole, number = True, 0
    try:
        for number, (is_whole, row) in enumerate(jsonfile.read_lines(path), 1):
            ends_whole = is_whole
            step = _step(row.pop("step", None)) if row else None
            if row is None or step is None:
                damaged.append(number)
            else:
                yield step, row
    except errors.UserError as e:
        notes.append(str(e))
    # An incomplete last line is not damage: a run may be writing it.
    if not ends_whole and number in damaged:
        damaged.remove(number)
        notes.append(
            f"The last line of {path.name} is incomplete, or still being written. It "
            "was skipped."
        )
    if damaged:
        lines = ", ".join(map(str, damaged[:5]))
        if len(damaged) > 5:
            lines += ", …"
        notes.append(f"{path.name}: skipped {len(damaged)} invalid line(s): {lines}.")


def _step(value: Any) -> int | None:
    """Returns a step as an integer of 64 bits; None if it is not one."""
    try:
        return int(np.int64(value))
    except (ValueError, TypeError, OverflowError):
        return None


def _columns(table: _Table, file: str, notes: list[str]) -> Columns:
    columns = {}
    for name, (all_steps, all_values) in table.items():
        # If a step has two rows, the later one counts: the run has repeated the step.
        steps, last = np.unique(np.array(all_steps, np.int64)[::-1], return_index=True)
        values = [all_values[-1 - index] for index in last.tolist()]
        kept, array = _array(values)
        name = formatting.printable(name)
        lost = len(values) - len(array)
        if lost:
            notes.append(
                f"{file}: skipped {lost} value(s) of '{name}' that are not numbers, or "
                "that have another number of groups than the last one."
            )
        if len(array):
            columns[name] = Column(
                steps[kept], np.where(np.isfinite(array), array, np.nan)
            )
    return columns


def _array(values: list[Any]) -> tuple[slice | list[int], np.ndarray]:
    """Returns the indices of the values with as many groups as the last one, and their
    numbers, [rows, groups].
    """
    # Most columns are plain numbers. There may be millions, so these are converted at
    # once. NumPy converts None to nan.
    if set(map(type, values)) <= {float, types.NoneType}:
        return slice(None), np.array(values, np.float64)[:, np.newaxis]
    numbers = [_numbers(value) for value in values]
    groups = len(numbers[-1])
    kept = [index for index, row in enumerate(numbers) if groups and len(row) == groups]
    return kept, np.array([numbers[index] for index in kept], np.float64)


def _numbers(value: Any) -> list[float]:
    """Returns the numbers of all groups, with nan for null; an empty list for anything
    else.
    """
    numbers = value if isinstance(value, list) else [value]
    if not all(number is None or isinstance(number, int | float) for number in numbers):
        return []
    return [_number(number) for number in numbers]


def _number(number: float | None) -> float:
    """Returns the number as a float; nan for None, or for an integer that is too large."""
    try:
        return math.nan if number is None else float(number)
    except OverflowError:
        return math.nan
