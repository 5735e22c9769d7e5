"""The norms of parameters over the steps, as maps with a row for each parameter."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from xshard.base import formatting
from xshard.metrics import norms as norms_lib
from xshard.metrics import rows as logged_rows
from xshard.report import rows as rows_lib

# The most columns and rows of a map; more could not be told apart.
_MOST_STEPS = 200
_MOST_ROWS = 80


class NormMap(NamedTuple):
    """The norms of a learner's parameters, in one group.

    Attributes:
      name: the learner and the group, if there are several; else empty.
      values: for each quantity, first the ratio, a frame with a row for each path of a
        parameter, or of a module if there are very many parameters, and a column for
        each step, ascending; nan where it is not finite or not known.
    """

    name: str
    values: dict[str, pd.DataFrame]


def read(path: pathlib.Path, notes: list[str]) -> list[NormMap]:
    """Reads the maps from a run's norms.jsonl, which may be missing.

    Args:
      path: the file, which a run may be writing.
      notes: receives notes on the file to show.
    """
    records = []
    for row in _spread_rows(path, notes):
        for norms in norms_lib.parameters(row):
            of_kinds = [norms.values[kind] for kind in norms_lib.KINDS]
            for group, values in enumerate(zip(*of_kinds, strict=True)):
                place = (norms.learner, group, norms.path, row["step"])
                records.append((*place, *values))
    names = ["learner", "group", "path", "step", *norms_lib.KINDS]
    frame = pd.DataFrame(records, columns=names)
    has_learners = frame["learner"].nunique() > 1
    has_groups = frame["group"].nunique() > 1
    maps = []
    for (learner, group), part in frame.groupby(["learner", "group"], sort=False):
        words = []
        if has_learners or learner:
            words.append(learner)
        if has_groups:
            words.append(f"group {group}")
        maps.append(NormMap(formatting.printable(", ".join(words)), _values(part)))
    return maps


def _spread_rows(path: pathlib.Path, notes: list[str]) -> list[logged_rows.Row]:
    """Returns rows of a file at about equal distances, with at most _MOST_STEPS."""
    kept: dict[int, logged_rows.Row] = {}
    stride = 1
    for number, row in enumerate(rows_lib.of_file(path, notes)):
        # If a step has two rows, the later one counts.
        if norms_lib.is_row(row) and (number % stride == 0 or row["step"] in kept):
            kept[row["step"]] = row
        if len(kept) > _MOST_STEPS:
            kept = {step: kept[step] for step in sorted(kept)[::2]}
            stride *= 2
    return list(kept.values())


def _values(part: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Returns the norms by quantity, path and step.

    Args:
      part: the norms of one learner and group; a row for each path and step.
    """
    paths = part["path"].unique()
    names = dict(zip(paths, _names(paths), strict=True))
    # The norm of a module is that of all its parameters together.
    squares = part[list(norms_lib.KINDS)] ** 2
    places = [part["path"].map(names), part["step"]]
    norms = squares.groupby(places, sort=False).sum(skipna=False) ** 0.5
    values = {}
    for kind in norms_lib.KINDS:
        of_kind = norms[kind].unstack("step", sort=False)
        values[kind] = of_kind.sort_index(axis="columns")
    parameter = values["parameter"]
    ratio = values["update"] / parameter.where(parameter > 0)
    return {norms_lib.RATIO: ratio, **values}


def _names(paths: Sequence[str]) -> list[str]:
    """Returns the row of each path: the path itself, or a module that contains it.

    Modules have as many words of the path as leave at most _MOST_ROWS.
    """
    words = [path.split("/") for path in paths]
    for length in range(max(map(len, words)), 0, -1):
        names = [formatting.printable("/".join(path[:length])) for path in words]
        if len(set(names)) <= _MOST_ROWS:
            break
    return names
