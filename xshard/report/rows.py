"""The rows of a metrics.jsonl as columns, one for each name."""

import itertools
import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from xshard import errors
from xshard.files import jsonfile
from xshard.metrics import show

_EVALUATION = "eval/"


class Column(NamedTuple):
    """The ascending steps under one name, [rows], and the numbers, [rows, groups]; nan for none finite."""

    steps: np.ndarray
    values: np.ndarray


Columns = dict[str, Column]
# The steps of the rows that have a name, and what they have under it.
_Values = dict[str, tuple[list[int], list[Any]]]


class Rows(NamedTuple):
    """The columns of training rows, those of evaluation rows without 'eval/', and notes for people."""

    training: Columns
    evaluation: Columns
    notes: list[str]


def read(path: pathlib.Path) -> Rows:
    """Reads a file, which a run may be writing; a file that is not there has no rows."""
    training: _Values = {}
    evaluation: _Values = {}
    notes: list[str] = []
    for step, row in _rows(path, notes):
        is_evaluation = any(name.startswith(_EVALUATION) for name in row)
        table = evaluation if is_evaluation else training
        for name, value in row.items():
            steps, values = table.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    judged = _columns(evaluation, path.name, notes)
    judged = {name.removeprefix(_EVALUATION): column for name, column in judged.items()}
    return Rows(_columns(training, path.name, notes), judged, notes)


def numbers_of(values: Any) -> dict[str, list[float]]:
    """The numbers of all groups under each name of a mapping; what is none is left out."""
    if not isinstance(values, dict):
        return {}
    columns = {show.printable(name): _numbers(value) for name, value in values.items()}
    return {name: numbers for name, numbers in columns.items() if numbers}


def _rows(path: pathlib.Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows one by one, with their steps: all of a long run's would need a lot of memory."""
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
    if not ends_whole and number in damaged:
        damaged.remove(number)
        notes.append(f"The last line of {path.name} is cut off, or being written: it is left out.")
    if damaged:
        lines = ", ".join(map(str, damaged[:5])) + (", …" if len(damaged) > 5 else "")
        notes.append(f"{path.name}: {len(damaged)} lines are no rows and left out (line {lines}).")


def _step(value: Any) -> int | None:
    """A step as an array holds it; a step of another kind is no step."""
    try:
        return int(np.int64(value))
    except (ValueError, TypeError, OverflowError):
        return None


def _columns(table: _Values, file: str, notes: list[str]) -> Columns:
    columns = {}
    for name, (steps, values) in table.items():
        column = _column(steps, values)
        name = show.printable(name)
        lost = len(set(steps)) - len(column.steps)
        if lost:
            notes.append(
                f"{file}: {lost} values of '{name}' are no numbers, or for another number of groups "
                "than the last one, and left out."
            )
        if len(column.steps):
            columns[name] = column
    return columns


def _column(steps: list[int], values: list[Any]) -> Column:
    """The column of what is as the last value: a number, or a list of as many."""
    # Of two rows of a step the later one counts: it was made again.
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        by_step = dict(zip(steps, values, strict=True))
        steps = sorted(by_step)
        values = [by_step[step] for step in steps]
    numbers = [_numbers(value) for value in values]
    groups = len(numbers[-1])
    kept = [index for index, row in enumerate(numbers) if groups and len(row) == groups]
    array = np.array([numbers[index] for index in kept], np.float64)
    array = np.where(np.isfinite(array), array, np.nan)
    return Column(np.array([steps[index] for index in kept], np.int64), array)


def _numbers(value: Any) -> list[float]:
    """The numbers of all groups, nan for null; none if it is something else."""
    # Most are plain numbers, and there may be millions of them.
    if type(value) is float:
        return [value]
    numbers = value if isinstance(value, list) else [value]
    if not all(number is None or isinstance(number, int | float) for number in numbers):
        return []
    return [_number(number) for number in numbers]


def _number(number: float | None) -> float:
    """The number; nan in the place of none, or of an integer that is too large."""
    try:
        return math.nan if number is None else float(number)
    except OverflowError:
        return math.nan
