"""The rows of a run: what they hold, and how they are read back from a file.

A row maps names to numbers, or to lists of numbers with several groups. Each row has
'step', the number of completed steps, and 'kind', what it is about: 'train', a training
step; 'evaluation', whose names begin with 'eval/'; 'roll_back', whose names begin with
'roll_back/'. Rows of samples.jsonl have the kind 'samples', and those of norms.jsonl
'norms'. Values under 'perf/' may differ between runs with the same bits. The only other
texts in a row are fingerprints of the state.

Rows of earlier versions have no kind. It follows from their names then.

The launcher reads rows, too, so this module imports nothing that imports JAX, which
would take a second, unless a function needs it.
"""

import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from xshard.files import jsonfile

Row = dict[str, Any]

# The name under which a row says its kind, and the kinds.
KIND = "kind"
TRAIN = "train"
EVALUATION = "evaluation"
ROLL_BACK = "roll_back"
SAMPLES = "samples"
NORMS = "norms"

# The files of the kinds that have one of their own, in the work directory, and that of
# the others, which hold numbers.
FILES = {SAMPLES: "samples.jsonl", NORMS: "norms.jsonl"}
NUMBERS = "metrics.jsonl"
# The order of the rows of a step.
_ORDER = (ROLL_BACK, TRAIN, NORMS, EVALUATION, SAMPLES)

# What the names of some values begin with.
OF_EVALUATION = "eval/"
OF_ROLL_BACK = "roll_back/"
PERFORMANCE = "perf/"
# The most lines that a note on skipped lines names.
_NAMED_LINES = 5


def kind(row: Mapping[str, Any]) -> str:
    """Returns the kind of a row.

    >>> kind({'step': 5, 'kind': 'train', 'loss': 0.3})
    'train'
    >>> kind({'step': 5, 'eval/loss': 0.4})
    'evaluation'
    """
    said = row.get(KIND)
    if isinstance(said, str):
        return said
    # An earlier version wrote the row.
    if isinstance(row.get(SAMPLES), Mapping):
        return SAMPLES
    if isinstance(row.get(NORMS), Mapping):
        return NORMS
    if any(name.startswith(OF_ROLL_BACK) for name in row):
        return ROLL_BACK
    if any(name.startswith(OF_EVALUATION) for name in row):
        return EVALUATION
    return TRAIN


def has_numbers(row: Mapping[str, Any]) -> bool:
    """Returns whether a row is one of numbers by name, neither samples nor norms."""
    return kind(row) not in FILES


def place(row: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the place of a row among all rows: its step, and its place within it."""
    of_kind = kind(row)
    if of_kind not in _ORDER:
        # The file may have been edited by hand.
        of_kind = TRAIN
    return row["step"], _ORDER.index(of_kind)


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
    """Returns a row without the values that may differ between runs of equal bits.

    Its kind is left out, too, which rows of earlier versions lack.
    """
    kept = {}
    for name, value in row.items():
        if name != KIND and not name.startswith(PERFORMANCE):
            kept[name] = value
    return kept


def without_fingerprints(row: Row) -> Row:
    """Returns a row without fingerprints."""
    from xshard.training import fingerprint  # Imports JAX.

    prefix = fingerprint.PREFIX
    return {name: x for name, x in row.items() if not name.startswith(prefix)}


def numbers(row: Row) -> Row:
    """Returns a row without fingerprints and without its kind."""
    values = without_fingerprints(row)
    values.pop(KIND, None)
    return values


def of_groups(value: Any) -> list[float]:
    """Returns the numbers of all groups in a value of a row, nan for those that are not
    finite; an empty list for anything else.
    """
    listed = value if isinstance(value, list) else [value]
    of_all = []
    for number in listed:
        if number is None:
            of_all.append(math.nan)
        elif jsonfile.is_number(number):
            of_all.append(float(number))
        else:
            return []
    return of_all


def to_number(value: Any) -> Any:
    """Converts an array to a value of a row.

    Args:
      value: an array; with several groups, it has a leading dimension of groups.

    Returns:
      A Python number, or a list of them; for a uint32 array, which is a fingerprint, a
      text or a list of texts.
    """
    from xshard.base import hashing  # Imports JAX.

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


def by_step(path: pathlib.Path) -> tuple[dict[int, Row], dict[int, Row]]:
    """Reads the rows of training, and those of evaluations, by their steps.

    Both are without the values that may differ between runs of equal bits. If a step
    has several rows of a kind, the last one counts.
    """
    training: dict[int, Row] = {}
    evaluated: dict[int, Row] = {}
    for row in read(path):
        of_kind = kind(row)
        if of_kind == TRAIN:
            training[row["step"]] = reproducible(row)
        elif of_kind == EVALUATION:
            evaluated[row["step"]] = reproducible(row)
    return dict(sorted(training.items())), evaluated


def evaluations(path: pathlib.Path, last: int) -> Iterator[Row]:
    """Yields the evaluations in a file up to a step: 'step', and the metrics by name.

    The names are without 'eval/', and values that were not finite are NaN.
    """
    for row in read(path):
        if row["step"] > last or kind(row) != EVALUATION:
            continue
        evaluation: Row = {"step": row["step"]}
        for name, value in row.items():
            if name.startswith(OF_EVALUATION):
                evaluation[name.removeprefix(OF_EVALUATION)] = _null_to_nan(value)
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
