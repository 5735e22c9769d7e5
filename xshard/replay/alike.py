"""Compares what two runs of the same flags have left: rows, results, and the arrays of the last checkpoint."""

import hashlib
import itertools
import pathlib
from typing import Any, NamedTuple

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
    """What differs first between two runs.

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


def compare(first: pathlib.Path, second: pathlib.Path) -> Comparison:
    """Compares the runs in two work directories, both of which have ended."""
    rows = rows_of(first), rows_of(second)
    here, there = _arrays(first), _arrays(second)
    array = min((path for path, _ in here.items() ^ there.items()), default="")
    size = f"{len(rows[0])} rows, {len(here)} arrays"
    return Comparison(first_row(*rows), array, _results(first, second), size)


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


def _arrays(directory: pathlib.Path) -> dict[str, str]:
    """The checksums of the arrays of the last checkpoint, by path."""
    saved = checkpoints(directory)
    last = saved[max(saved)]
    metas = source.read_array_metas(last)
    return {path: checksum(x) for path, x in parts.read_arrays(last, metas, _BUDGET_BYTES)}


def _results(*directories: pathlib.Path) -> str:
    here, there = (jsonfile.read(directory / workdir.RESULTS) for directory in directories)
    names = sorted((here.keys() | there.keys()) - {"run"})
    differing = [name for name in names if here.get(name) != there.get(name)]
    return ", ".join(f"{name}: {here.get(name)} | {there.get(name)}" for name in differing)
