"""The norms of parameters over the steps, as maps with a row for each parameter."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xshard import errors
from xshard.base import formatting
from xshard.metrics import norms as norms_lib
from xshard.metrics import rows as rows_lib

# The quantities of a map, in the order in which the page offers them.
QUANTITIES = (norms_lib.RATIO, *norms_lib.KINDS)
# The most columns and rows of a map; more could not be told apart.
_MOST_STEPS = 200
_MOST_ROWS = 80


class NormMap(NamedTuple):
    """The norms of a learner's parameters, in one group.

    Attributes:
      name: the learner and the group, if there are several; else empty.
      steps: the steps, ascending.
      paths: the paths of the parameters, or of modules if there are very many
        parameters.
      values: for each of `QUANTITIES` an array of shape [paths, steps]; nan where it is
        not finite or not known.
    """

    name: str
    steps: list[int]
    paths: list[str]
    values: dict[str, np.ndarray]


def read(path: pathlib.Path, notes: list[str]) -> list[NormMap]:
    """Reads the maps from a run's norms.jsonl, which may be missing.

    Args:
      path: the file, which a run may be writing.
      notes: receives notes on the file to show.
    """
    # By learner and group, the norms by path and step.
    cells: dict[tuple[str, int], dict[str, dict[int, dict[str, float]]]] = {}
    most_groups = 1
    for row in _spread_rows(path, notes):
        for norms in norms_lib.parameters(row):
            most_groups = max(most_groups, len(norms.values[norms_lib.RATIO]))
            for group in range(len(norms.values[norms_lib.RATIO])):
                of_group = {kind: x[group] for kind, x in norms.values.items()}
                by_path = cells.setdefault((norms.learner, group), {})
                by_path.setdefault(norms.path, {})[row["step"]] = of_group
    several_learners = len({learner for learner, _ in cells}) > 1
    maps = []
    for (learner, group), by_path in cells.items():
        words = []
        if several_learners or learner:
            words.append(learner)
        if most_groups > 1:
            words.append(f"group {group}")
        maps.append(_map(formatting.printable(", ".join(words)), by_path))
    return maps


def _spread_rows(path: pathlib.Path, notes: list[str]) -> list[rows_lib.Row]:
    """Returns rows of a file at about equal distances, with at most _MOST_STEPS."""
    kept: dict[int, rows_lib.Row] = {}
    number = 0
    stride = 1
    try:
        for row in rows_lib.read(path, notes):
            if not norms_lib.is_row(row):
                continue
            # If a step has two rows, the later one counts.
            if number % stride == 0 or row["step"] in kept:
                kept[row["step"]] = row
            number += 1
            if len(kept) > _MOST_STEPS:
                kept = {step: kept[step] for step in sorted(kept)[::2]}
                stride *= 2
    except errors.UserError as e:
        notes.append(str(e))
    return [kept[step] for step in sorted(kept)]


def _map(name: str, by_path: dict[str, dict[int, dict[str, float]]]) -> NormMap:
    steps = sorted({step for of_path in by_path.values() for step in of_path})
    # The norm of a module is that of all its parameters together.
    names = _names(list(by_path))
    of_names: dict[str, dict[str, np.ndarray]] = {}
    for path, of_path in by_path.items():
        sums = of_names.setdefault(names[path], {})
        for kind in norms_lib.KINDS:
            norms = [of_path.get(step, {}).get(kind, np.nan) for step in steps]
            sums[kind] = np.hypot(sums.get(kind, 0.0), norms)
    values = {}
    for kind in norms_lib.KINDS:
        values[kind] = np.stack([sums[kind] for sums in of_names.values()])
    parameter = values["parameter"]
    is_known = parameter > 0
    values[norms_lib.RATIO] = np.full_like(parameter, np.nan)
    np.divide(values["update"], parameter, out=values[norms_lib.RATIO], where=is_known)
    paths = [formatting.printable(path) for path in of_names]
    return NormMap(name, steps, paths, values)


def _names(paths: Sequence[str]) -> dict[str, str]:
    """Returns the row of each path: the path itself, or a module that contains it.

    Modules have as many words of the path as leave at most _MOST_ROWS.
    """
    for shortened in _shortened(paths):
        if len(set(shortened)) <= _MOST_ROWS:
            break
    return dict(zip(paths, shortened, strict=True))


def _shortened(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yields the paths, then their beginnings, which are shorter each time."""
    words = [path.split("/") for path in paths]
    longest = max(len(of_path) for of_path in words)
    for length in range(longest, 0, -1):
        yield ["/".join(of_path[:length]) for of_path in words]
