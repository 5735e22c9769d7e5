"""The rows of a metrics.jsonl as columns, one for each name."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from xshard import errors
from xshard.files import jsonfile
from xshard.metrics import show

EVALUATION = "eval/"


@dataclasses.dataclass(frozen=True)
class Column:
    """The numbers under one name.

    Attributes:
      steps: the step of each row, ascending; int64 of shape [rows].
      values: the numbers, float64 of shape [rows, groups]; nan where there is no finite one.
    """

    steps: np.ndarray
    values: np.ndarray

    @property
    def not_finite(self) -> int:
        """Counts the numbers that are not finite."""
        return int(np.count_nonzero(np.isnan(self.values)))


Columns = dict[str, Column]
# The steps and what was found at them, by name.
_Values = dict[str, tuple[list[int], list[Any]]]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a file.

    Attributes:
      training: the columns of training rows.
      evaluation: those of evaluation rows; their names without 'eval/'.
      notes: what is to be known of the file, for people.
    """

    training: Columns
    evaluation: Columns
    notes: list[str]


def read(path: pathlib.Path) -> Rows:
    """Reads a file, which a run may be writing; a file that is not there has no rows."""
    found: tuple[_Values, _Values] = {}, {}
    notes: list[str] = []
    for row in _rows(path, notes):
        step = row.pop("step")
        into = found[any(name.startswith(EVALUATION) for name in row)]
        for name, value in row.items():
            steps, values = into.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    training, evaluation = (_columns(values, path.name, notes) for values in found)
    evaluation = {name.removeprefix(EVALUATION): column for name, column in evaluation.items()}
    return Rows(training, evaluation, notes)


def numbers_of(values: Any) -> dict[str, list[float]]:
    """The numbers of all groups under each name of a mapping; what is none is left out."""
    if not isinstance(values, dict):
        return {}
    found = {show.printable(name): _numbers(value) for name, value in values.items()}
    return {name: numbers for name, numbers in found.items() if numbers}


def _rows(path: pathlib.Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The rows one by one: all of a long run's would need a lot of memory."""
    damaged, whole, number = [], True, 0
    try:
        for number, (is_whole, row) in enumerate(jsonfile.read_lines(path), 1):
            whole = is_whole
            step = None if row is None else _step(row.get("step"))
            if row is None or step is None:
                damaged.append(number)
            else:
                yield row | {"step": step}
    except errors.UserError as e:
        notes.append(str(e))
    if not whole and damaged and damaged[-1] == number:
        damaged.pop()
        notes.append(
            f"The last line of {path.name} is cut off, as by a process that was killed or is writing "
            "it: it is left out."
        )
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + (", …" if len(damaged) > 5 else "")
        notes.append(f"{path.name}: {len(damaged)} lines are no rows and left out (line {shown}).")


def _step(value: Any) -> int | None:
    """A step as an array holds it; a step of another kind is no step."""
    try:
        return int(np.int64(value))
    except (ValueError, TypeError, OverflowError):
        return None


def _columns(found: _Values, file: str, notes: list[str]) -> Columns:
    columns = {}
    for name, (steps, values) in found.items():
        column = _column(steps, values)
        name = show.printable(name)
        if column is None or len(column.steps) < len(set(steps)):
            left = len(set(steps)) - (0 if column is None else len(column.steps))
            notes.append(
                f"{file}: {left} values of '{name}' are no numbers, or for another number of groups "
                "than the last one, and left out."
            )
        if column is not None:
            columns[name] = column
    return columns


def _column(steps: list[int], values: list[Any]) -> Column | None:
    """The column of what is as the last value: a number, or a list of as many; None if that is none."""
    # Of two rows of a step the later one counts: it was made again.
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        by_step = dict(zip(steps, values, strict=True))
        steps = sorted(by_step)
        values = [by_step[step] for step in steps]
    if not set(map(type, values)) <= {float, int, type(None)}:
        lists = [_numbers(value) for value in values]
        kept = [index for index, numbers in enumerate(lists) if len(numbers) == len(lists[-1])]
        steps, values = [steps[index] for index in kept], [lists[index] for index in kept]
    try:
        array = np.array(values, np.float64)
    except OverflowError:
        array = np.array([_numbers(value) for value in values], np.float64)
    array = array.reshape(len(steps), -1) if array.size else array
    array = np.where(np.isfinite(array), array, np.nan)
    return Column(np.array(steps, np.int64), array) if array.size else None


def _numbers(value: Any) -> list[float]:
    """The numbers of all groups, nan for one that is not finite; none if it is something else."""
    numbers = []
    for one in value if isinstance(value, list) else [value]:
        if one is not None and not isinstance(one, int | float):
            return []
        try:
            number = math.nan if one is None else float(one)
        except OverflowError:
            number = math.nan
        numbers.append(number if math.isfinite(number) else math.nan)
    return numbers
