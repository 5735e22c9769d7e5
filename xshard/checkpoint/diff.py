"""The arrays in which two checkpoints differ."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from xshard.checkpoint import array_reader
from xshard.checkpoint import format as format_lib


class ArrayPair(NamedTuple):
    """An array that differs between two checkpoints.

    Attributes:
      path: its path.
      first: its value in the first checkpoint.
      second: its value in the second one. Both values are None if only one checkpoint
        has the array, or if their shapes or dtypes differ.
    """

    path: str
    first: np.ndarray | None
    second: np.ndarray | None


def differing_arrays(
    first: format_lib.SaveAttempt, second: format_lib.SaveAttempt
) -> Iterator[ArrayPair]:
    """Yields the arrays in which two checkpoints differ in any bit, sorted by path.

    Raises:
      DamagedError: at the first array that is not what was written.
    """
    metas = format_lib.read_array_metas(first)
    other_metas = format_lib.read_array_metas(second)
    in_both = {}
    for path in sorted(metas.keys() & other_metas.keys()):
        if metas[path].kind == other_metas[path].kind:
            in_both[path] = metas[path]
    # The arrays are read one by one, so that both checkpoints together may exceed the
    # memory.
    arrays = array_reader.read_arrays(first, in_both)
    other_arrays = array_reader.read_arrays(
        second, {path: other_metas[path] for path in in_both}
    )
    for path in sorted(metas.keys() | other_metas.keys()):
        if path not in in_both:
            yield ArrayPair(path, None, None)
            continue
        _, array = next(arrays)
        _, other_array = next(other_arrays)
        # Compared as bytes: equal NaNs are no difference, and 0 and -0 are one.
        if array.tobytes() != other_array.tobytes():
            yield ArrayPair(path, array, other_array)
