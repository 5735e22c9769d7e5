"""Rows of numbers: a mapping of names to numbers, or to lists of them where there are several groups.

Texts among them are fingerprints of the state alone.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from xshard.stored import fingerprint, hashing

Row = dict[str, Any]


def flat(row: Row) -> Row:
    """A row with a name for each number: of a list they are 'loss/0', 'loss/1'."""
    numbers: Row = {}
    for name, value in row.items():
        # A list has its positions for names.
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            numbers |= flat({f"{name}/{key}": inner for key, inner in value.items()})
        else:
            numbers[name] = value
    return numbers


def reproducible(row: Row) -> Row:
    """A row without what differs between runs of the same bits."""
    return {name: x for name, x in row.items() if not name.startswith("perf/")}


def is_of_training(row: Row) -> bool:
    """Returns whether a row is a step's, and not an evaluation's or a roll-back's."""
    return not any(name.startswith(("eval/", "roll_back/")) for name in row)


def to_number(value: Any) -> Any:
    """A Python number, or a list of them for several groups; two uint32 are a fingerprint, which is a text."""
    array = np.asarray(value)
    return hashing.text(array) if array.dtype == np.uint32 else array.tolist()


def numbers(row: Row) -> Row:
    """A row without what is no number."""
    return {name: x for name, x in row.items() if not name.startswith(fingerprint.PREFIX)}
