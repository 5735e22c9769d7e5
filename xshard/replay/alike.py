"""Compares what two runs of the same flags have left: rows, results, and the arrays of the last checkpoint."""

import hashlib
import itertools
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import parts, source
from xshard.checkpoint import store as store_lib
from xshard.files import jsonfile, workdir
from xshard.metrics import rows as rows_lib
from xshard.metrics import writers
from xshard.replay import past
from xshard.stored import fingerprint

_BUDGET_BYTES = 1 << 30


class Comparison(NamedTuple):
    """The first difference between two runs.

    Attributes:
      row: the first number of a row; None if none differs.
      array: the path of the first array of the last checkpoint; empty if none differs.
      results: which results differ, with their values.
      size: how much was compared, in words.
    """

    row: past.Difference | None
    array: str = ""
    results: str = ""
    size: str = ""

    def lines(self) -> list[str]:
        """Lines for people; none if nothing differs."""
        texts = {"row of step": "", "array": self.array, "results": self.results}
        if self.row:
            step, column, *values = self.row
            texts["row of step"] = f"{step}, {column}: {values[0]} | {values[1]}"
        return [f"{name:<13}{text}" for name, text in texts.items() if text]


def compare(
    first: pathlib.Path, second: pathlib.Path, tolerance: float = 0.0, restored: int = 0
) -> Comparison:
    """Compares the runs in two work directories, both of which have ended.

    Args:
      first: the one.
      second: the other.
      tolerance: 0: their bits. Else floating-point numbers may be so far apart, as a part of the largest in their array, or
        two roundings of their type; those of rows as a part of the largest in their column.
      restored: until this step, and in the state that it leaves, rows are to be of the same bits all the same.
    """
    rows = rows_of(first), rows_of(second)
    array, count, gap = _first_array(first, second, tolerance)
    results = _results(first, second, tolerance=tolerance)
    size = f"{len(rows[0])} rows, {count} arrays"
    if tolerance:
        rows = _without_near(*rows, tolerance, restored)
        size += f", of which numbers are at most {gap:.1g} of their array's largest apart,"
    return Comparison(first_row(*rows), array, results, size)


def first_row(first: list[writers.Row], second: list[writers.Row]) -> past.Difference | None:
    """The first number that differs between rows."""
    for here, there in itertools.zip_longest(first, second, fillvalue=dict[str, Any]()):
        columns = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        # Fingerprints are of the state that the step begins with, the others of what it makes of that.
        columns.sort(key=lambda name: not name.startswith(fingerprint.PREFIX))
        for column in columns:
            step = here.get("step") or there["step"]
            return past.Difference(step, column, here.get(column), there.get(column))
    return None


def rows_of(directory: pathlib.Path) -> list[writers.Row]:
    """A run's rows, without what differs between runs of the same bits."""
    return [*map(rows_lib.reproducible, writers.read(workdir.Workdir(directory).metrics))]


def checkpoints(directory: pathlib.Path) -> dict[int, format_lib.Attempt]:
    """A run's checkpoints that count, by step."""
    store = store_lib.Store(workdir.Workdir(directory).checkpoints)
    return {attempt.step: attempt for attempt in format_lib.committed(store)}


def checksum(x: Any) -> str:
    """The type, the shape and the SHA-256 of an array."""
    array = np.asarray(x)
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def _first_array(
    first: pathlib.Path, second: pathlib.Path, tolerance: float
) -> tuple[str, int, float]:
    """The first array of the last checkpoints that differs, or none; how many there are; and how far they are apart."""
    saved = [checkpoints(directory) for directory in (first, second)]
    ends = [attempts[max(attempts)] for attempts in saved]
    metas = [source.read_array_metas(end) for end in ends]
    differing = sorted(metas[0].keys() ^ metas[1].keys())
    paths = sorted(metas[0].keys() & metas[1].keys())
    arrays = []
    for end, meta in zip(ends, metas, strict=True):
        of_both = {path: meta[path] for path in paths}
        arrays.append(parts.read_arrays(end, of_both, _BUDGET_BYTES))
    largest = 0.0
    for (path, x), (_, y) in zip(*arrays, strict=True):
        gap, allowed = _gap(x, y), 0.0
        if tolerance and 0 < gap < np.inf:
            allowed = max(tolerance, 2 * float(jnp.finfo(x.dtype).eps))
        if gap > allowed:
            differing.append(path)
        else:
            largest = max(largest, gap)
    return min(differing, default=""), len(metas[0]), largest


def _gap(x: np.ndarray, y: np.ndarray) -> float:
    """The largest difference of arrays as a part of the largest number; infinite where they cannot be near."""
    if checksum(x) == checksum(y):
        return 0.0
    if (x.dtype, x.shape) != (y.dtype, y.shape) or not jnp.issubdtype(x.dtype, jnp.floating):
        return np.inf
    wide, other = x.astype(np.float64), y.astype(np.float64)
    gap = np.max(np.abs(wide - other)) / max(np.max(np.abs(wide)), np.finfo(np.float64).tiny)
    return float(gap) if np.isfinite(gap) else np.inf


def _without_near(
    first: list[writers.Row], second: list[writers.Row], tolerance: float, restored: int
) -> tuple[list[writers.Row], list[writers.Row]]:
    """Rows after a step, with the numbers of the first in the second's place where they are near."""
    largest: dict[str, float] = {}
    for row in first:
        for name, x in row.items():
            numbers = [y for y in (x if isinstance(x, list) else [x]) if isinstance(y, float)]
            largest[name] = max([largest.get(name, 0.0), *map(abs, numbers)])
    near = []
    for here, there in zip(first, second, strict=False):
        if there["step"] > restored:
            there = {
                name: _near(here.get(name), x, tolerance, largest.get(name, 0.0))
                for name, x in there.items()
            }
        near.append(there)

    def cut(row: writers.Row) -> writers.Row:
        # The state that is restored is of the same bits; on other devices the next one is not.
        return row if row["step"] <= restored + 1 else rows_lib.numbers(row)

    return [*map(cut, first)], [*map(cut, near), *second[len(first) :]]


def _near(here: Any, there: Any, tolerance: float, largest: float = 0.0) -> Any:
    """Takes from here what is near what is there, else what is there; of each item of lists and dictionaries by itself."""
    if isinstance(here, dict) and isinstance(there, dict):
        return {name: _near(here.get(name), x, tolerance) for name, x in there.items()}
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        return [_near(x, y, tolerance, largest) for x, y in zip(here, there, strict=True)]
    if isinstance(here, float) and isinstance(there, float):
        limit = tolerance * max(abs(here), abs(there), largest)
        return here if abs(here - there) <= limit else there
    return there


def _results(*directories: pathlib.Path, tolerance: float) -> str:
    here, there = (jsonfile.read(directory / workdir.RESULTS) for directory in directories)
    # Samples are shown with digits of numbers.
    left_out = {"run", "samples"} if tolerance else {"run"}
    names = sorted((here.keys() | there.keys()) - left_out)
    if tolerance:
        there = _near(here, there, tolerance)
    differing = [name for name in names if here.get(name) != there.get(name)]
    return ", ".join(f"{name}: {here.get(name)} | {there.get(name)}" for name in differing)
