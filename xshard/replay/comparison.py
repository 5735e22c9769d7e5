"""Compares two runs with the same flags: their rows, results, and the arrays of their
last checkpoints.
"""

import hashlib
import itertools
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from xshard.checkpoint import array_reader, metadata_files
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib
from xshard.files import jsonfile, workdir
from xshard.metrics import rows as rows_lib
from xshard.metrics import writers
from xshard.replay import replayer
from xshard.stored import fingerprint


class Comparison(NamedTuple):
    """The first difference between two runs.

    Attributes:
      row: the first number of a row that differs; None if none does.
      array: the path of the first array of the last checkpoint that differs; empty if
        none does.
      results: the results that differ, with their values.
      size: a description of how much was compared.
    """

    row: replayer.Difference | None
    array: str = ""
    results: str = ""
    size: str = ""

    def lines(self) -> list[str]:
        """Returns lines to print; none if nothing differs."""
        texts = {"row of step": "", "array": self.array, "results": self.results}
        if self.row:
            step, column, *values = self.row
            texts["row of step"] = f"{step}, {column}: {values[0]} | {values[1]}"
        return [f"{name:<13}{text}" for name, text in texts.items() if text]


def compare(
    first: pathlib.Path, second: pathlib.Path, tolerance: float = 0.0, restored: int = 0
) -> Comparison:
    """Compares two runs that have ended.

    Args:
      first: the work directory of one run.
      second: the work directory of the other run.
      tolerance: 0 compares bits. Otherwise, the largest difference of floating-point
        numbers: in arrays as a fraction of the array's largest number, but at least two
        roundings of the dtype; in rows as a fraction of the column's largest.
      restored: the rows up to this step, and the state that it leaves, must have the
        same bits in any case.
    """
    rows = rows_of(first), rows_of(second)
    array, count, gap = _first_array(first, second, tolerance)
    results = _results(first, second, tolerance)
    size = f"{len(rows[0])} rows, {count} arrays"
    if tolerance:
        rows = _without_near(*rows, tolerance, restored)
        size += (
            f" (the largest difference in an array is {gap:.1g} of its largest number)"
        )
    return Comparison(first_row(*rows), array, results, size)


def first_row(
    first: list[writers.Row], second: list[writers.Row]
) -> replayer.Difference | None:
    """Returns the first number that differs between rows; None if none does."""
    for here, there in itertools.zip_longest(first, second, fillvalue=dict[str, Any]()):
        columns = [
            name for name in {**here, **there} if here.get(name) != there.get(name)
        ]
        # Fingerprints come first: they are of the state that the step begins with, the
        # other values of its results.
        columns.sort(key=lambda name: not name.startswith(fingerprint.PREFIX))
        for column in columns:
            step = here.get("step") or there["step"]
            return replayer.Difference(
                step, column, here.get(column), there.get(column)
            )
    return None


def rows_of(directory: pathlib.Path) -> list[writers.Row]:
    """Returns a run's rows, without values that may differ between runs with the same
    bits.
    """
    rows = rows_lib.read(workdir.Workdir(directory).metrics)
    return [*map(rows_lib.reproducible, rows)]


def checkpoints(directory: pathlib.Path) -> dict[int, format_lib.SaveAttempt]:
    """Returns a run's committed checkpoints by step."""
    store = store_lib.Store(workdir.Workdir(directory).checkpoints)
    return {attempt.step: attempt for attempt in format_lib.committed(store)}


def checksum(x: Any) -> str:
    """Returns the dtype, the shape and the SHA-256 of an array."""
    array = np.asarray(x)
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def _first_array(
    first: pathlib.Path, second: pathlib.Path, tolerance: float
) -> tuple[str, int, float]:
    """Compares the last checkpoints; returns the first array that differs or '', the
    number of arrays, and the largest gap.
    """
    end, other_end = _last_checkpoint(first), _last_checkpoint(second)
    metas = metadata_files.read_array_metas(end)
    others = metadata_files.read_array_metas(other_end)
    # An array that only one run has is a difference.
    differing = sorted(metas.keys() ^ others.keys())
    paths = sorted(metas.keys() & others.keys())
    arrays = array_reader.read_arrays(end, {path: metas[path] for path in paths})
    other_arrays = array_reader.read_arrays(
        other_end, {path: others[path] for path in paths}
    )
    largest = 0.0
    for (path, x), (_, y) in zip(arrays, other_arrays, strict=True):
        gap, allowed = _gap(x, y), 0.0
        if tolerance and 0 < gap < np.inf:
            allowed = max(tolerance, 2 * float(jnp.finfo(x.dtype).eps))
        if gap > allowed:
            differing.append(path)
        else:
            largest = max(largest, gap)
    return min(differing, default=""), len(metas), largest


def _last_checkpoint(directory: pathlib.Path) -> format_lib.SaveAttempt:
    attempts = checkpoints(directory)
    return attempts[max(attempts)]


def _gap(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the largest difference as a fraction of the largest number; inf if dtypes
    or shapes differ or are not floats.
    """
    if checksum(x) == checksum(y):
        return 0.0
    if (x.dtype, x.shape) != (y.dtype, y.shape) or not jnp.issubdtype(
        x.dtype, jnp.floating
    ):
        return np.inf
    wide, other = x.astype(np.float64), y.astype(np.float64)
    # `tiny` avoids a division by zero for an array of zeros.
    gap = np.max(np.abs(wide - other)) / max(
        np.max(np.abs(wide)), np.finfo(np.float64).tiny
    )
    return float(gap) if np.isfinite(gap) else np.inf


def _without_near(
    first: list[writers.Row], second: list[writers.Row], tolerance: float, restored: int
) -> tuple[list[writers.Row], list[writers.Row]]:
    """Returns the rows of both, where numbers of the second after `restored` that are
    near the first's are replaced by them.
    """
    largest: dict[str, float] = {}
    for row in first:
        for name, x in row.items():
            for number in x if isinstance(x, list) else [x]:
                if isinstance(number, float):
                    largest[name] = max(largest.get(name, 0.0), abs(number))
    near = []
    for here, there in zip(first, second, strict=False):
        if there["step"] > restored:
            there = {
                name: _near(here.get(name), x, tolerance, largest.get(name, 0.0))
                for name, x in there.items()
            }
        near.append(there)

    def cut(row: writers.Row) -> writers.Row:
        # The restored state has the same bits. On other devices, later states and so
        # their fingerprints may differ.
        return row if row["step"] <= restored + 1 else rows_lib.numbers(row)

    return [*map(cut, first)], [*map(cut, near), *second[len(first) :]]


def _near(here: Any, there: Any, tolerance: float, largest: float = 0.0) -> Any:
    """Returns `there` with each number that is within the tolerance of its counterpart
    in `here` replaced by it.
    """
    if isinstance(here, dict) and isinstance(there, dict):
        return {name: _near(here.get(name), x, tolerance) for name, x in there.items()}
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        return [
            _near(x, y, tolerance, largest) for x, y in zip(here, there, strict=True)
        ]
    if isinstance(here, float) and isinstance(there, float):
        limit = tolerance * max(abs(here), abs(there), largest)
        return here if abs(here - there) <= limit else there
    return there


def _results(first: pathlib.Path, second: pathlib.Path, tolerance: float) -> str:
    here = jsonfile.read(first / workdir.RESULTS)
    there = jsonfile.read(second / workdir.RESULTS)
    # Samples may contain digits of numbers, which differ within the tolerance.
    left_out = {"run", "samples"} if tolerance else {"run"}
    names = sorted((here.keys() | there.keys()) - left_out)
    if tolerance:
        there = _near(here, there, tolerance)
    differing = [name for name in names if here.get(name) != there.get(name)]
    return ", ".join(
        f"{name}: {here.get(name)} | {there.get(name)}" for name in differing
    )
