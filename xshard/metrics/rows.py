"""The rows of a run: what they hold, and how they are read back from a file.

A row maps names to numbers, or to lists of numbers with several groups. Each row has
'step', the number of completed steps. Rows of evaluations have names that begin with
'eval/', rows of roll-backs have names that begin with 'roll_back/', and all other rows
are of training. Values under 'perf/' may differ between runs with the same bits. The
only texts in a row are fingerprints of the state.

The launcher reads rows, too, so this module imports nothing that imports JAX, which
would take a second, unless a function needs it.
"""

import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from xshard.files import disk, jsonfile

Row = dict[str, Any]

EVALUATION = "eval/"
ROLL_BACK = "roll_back/"
PERFORMANCE = "perf/"
# The most lines that a note on skipped lines names.
_NAMED_LINES = 5


def is_of_evaluation(row: Row) -> bool:
    """Returns whether a row has the results of an evaluation."""
    return any(name.startswith(EVALUATION) for name in row)


def is_of_roll_back(row: Row) -> bool:
    """Returns whether a row describes a roll-back."""
    return any(name.startswith(ROLL_BACK) for name in row)


def is_of_training(row: Row) -> bool:
    """Returns whether a row has the metrics of a training step."""
    return not is_of_evaluation(row) and not is_of_roll_back(row)


def flat(row: Row) -> Row:
    """Returns a row with one name per number: 'loss/0', 'loss/1' for a list."""
    numbers: Row = {}
    for name, value in row.items():
        # The names of a list's elements are their positions.
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            numbers |= flat({f"{name}/{key}": inner for key, inner in value.items()})
        else:
            numbers[name] = value
    return numbers


def reproducible(row: Row) -> Row:
    """Returns a row without the values that may differ between runs of equal bits."""
    return {name: x for name, x in row.items() if not name.startswith(PERFORMANCE)}


def numbers(row: Row) -> Row:
    """Returns a row without fingerprints."""
    from xshard.stored import fingerprint  # Imports JAX.

    prefix = fingerprint.PREFIX
    return {name: x for name, x in row.items() if not name.startswith(prefix)}


def to_number(value: Any) -> Any:
    """Converts an array to a value of a row.

    Args:
      value: an array; with several groups, it has a leading dimension of groups.

    Returns:
      A Python number, or a list of them; for a uint32 array, which is a fingerprint, a
      text or a list of texts.
    """
    from xshard.stored import hashing  # Imports JAX.

    array = np.asarray(value)
    if array.dtype == np.uint32:
        return hashing.text(array)
    return array.tolist()


def is_row(value: Mapping[str, Any]) -> bool:
    """Returns whether a JSON object has a 'step' that is an integer of 64 bits."""
    step = value.get("step")
    # Not isinstance, because a bool is an int too.
    return type(step) is int and jsonfile.is_number(step)


def parse(line: bytes) -> Row | None:
    """Returns the row in a line of a file; None if it holds none."""
    try:
        value = jsonfile.loads(line)
    except ValueError:
        return None
    return value if is_row(value) else None


def read(path: pathlib.Path, notes: list[str] | None = None) -> Iterator[Row]:
    """Yields the rows of a file, in its order; none if the file does not exist.

    A run may be writing the file. Lines that hold no row are skipped, such as the last
    line of a process that was killed, or lines that were edited by hand. The rows are
    read one by one, because all rows of a long run would take a lot of memory.

    Args:
      path: the file, such as a run's metrics.jsonl or samples.jsonl.
      notes: receives a sentence about the lines that were skipped, once all are read.

    Raises:
      UserError: if the file cannot be read.
    """
    invalid: list[int] = []
    is_cut_off = False
    for number, (ends_whole, value) in enumerate(jsonfile.read_lines(path), 1):
        if value is not None and is_row(value):
            yield value
        elif ends_whole:
            invalid.append(number)
        else:
            # Only the last line can lack its newline. A run may be writing it, so it is
            # not damage.
            is_cut_off = True
    if notes is None:
        return
    if is_cut_off:
        notes.append(
            f"The last line of {path.name} is incomplete, or still being written. "
            "It was skipped."
        )
    if invalid:
        lines = ", ".join(map(str, invalid[:_NAMED_LINES]))
        if len(invalid) > _NAMED_LINES:
            lines += ", …"
        notes.append(f"{path.name}: skipped {len(invalid)} invalid line(s): {lines}.")


def newest_with(path: pathlib.Path, name: str) -> Row | None:
    """Returns the last row in a file that has a value of this name; None without one.

    It reads from the end of the file, so it is fast if such a row is near there.
    """
    lines = (disk.read(path) or b"").splitlines()
    for line in reversed(lines):
        row = parse(line)
        if row is not None and name in row:
            return row
    return None


def by_step(path: pathlib.Path) -> tuple[dict[int, Row], dict[int, Row]]:
    """Reads the rows of training, and those of evaluations, by their steps.

    Both are without the values that may differ between runs of equal bits. If a step
    has several rows of a kind, the last one counts.
    """
    training: dict[int, Row] = {}
    evaluated: dict[int, Row] = {}
    for row in read(path):
        if is_of_training(row):
            training[row["step"]] = reproducible(row)
        elif is_of_evaluation(row):
            evaluated[row["step"]] = reproducible(row)
    return dict(sorted(training.items())), evaluated


def evaluations(path: pathlib.Path, last: int) -> Iterator[Row]:
    """Yields the evaluations in a file up to a step: 'step', and the metrics by name.

    The names are without 'eval/', and values that were not finite are NaN.
    """
    for row in read(path):
        if row["step"] > last or not is_of_evaluation(row):
            continue
        evaluation: Row = {"step": row["step"]}
        for name, value in row.items():
            if name.startswith(EVALUATION):
                evaluation[name.removeprefix(EVALUATION)] = _null_to_nan(value)
        yield evaluation


def evaluation(path: pathlib.Path, step: int) -> dict[str, Any] | None:
    """Returns the metrics of the evaluation at a step; None if there is none."""
    for row in evaluations(path, step):
        if row.pop("step") == step:
            return row
    return None


def _null_to_nan(value: Any) -> Any:
    """Returns a value of a row with NaN for null, which stands for it in JSON."""
    if isinstance(value, list):
        return [_null_to_nan(number) for number in value]
    if value is None:
        return math.nan
    return value
