"""Rows of numbers: a mapping of names to numbers, or to lists of them where there are several groups."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Row = dict[str, Any]


def flat(row: Row) -> Row:
    """A row with a name for each number: of a list they are 'loss/0', 'loss/1'."""
    found: Row = {}
    for name, value in row.items():
        if isinstance(value, list | Mapping):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            found |= flat({f"{name}/{key}": v for key, v in items})
        else:
            found[name] = value
    return found


def to_number(value: Any) -> Any:
    """A Python number, or a list of them for several groups."""
    return np.asarray(value).tolist()
