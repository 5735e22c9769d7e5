"""Rows: mappings of names to numbers, or to lists of numbers with several groups.

The only texts in a row are fingerprints of the state.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from xshard.stored import fingerprint, hashing

Row = dict[str, Any]


def flat(row: Row) -> Row:
    """Returns a row with one name per number; the numbers of a list become 'loss/0',
    'loss/1'.
    """
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
    """Returns a row without the values that may differ between runs with the same bits."""
    return {name: x for name, x in row.items() if not name.startswith("perf/")}


def is_of_training(row: Row) -> bool:
    """Returns whether a row belongs to a training step, not to an evaluation or a
    roll-back.
    """
    return not any(name.startswith(("eval/", "roll_back/")) for name in row)


def to_number(value: Any) -> Any:
    """Converts an array to a Python number, or a list with several groups; a uint32
    array is a fingerprint, and becomes a text.
    """
    array = np.asarray(value)
    return hashing.text(array) if array.dtype == np.uint32 else array.tolist()


def numbers(row: Row) -> Row:
    """Returns a row without fingerprints."""
    return {
        name: x for name, x in row.items() if not name.startswith(fingerprint.PREFIX)
    }
