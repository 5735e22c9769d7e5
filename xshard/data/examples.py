"""Examples of a data set: their two forms, checks, stacks and checksums."""

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from xshard import errors
from xshard.base import array_types

Arrays = Mapping[str, np.ndarray]
# The limits of a summary's checksum: arrays of at most so many bytes are hashed whole,
# and of larger ones so many rows; of a source, so many examples.
_SUMMED_BYTES = 1 << 30
_SUMMED_ROWS = 4096
_SUMMED_EXAMPLES = 16
# Arrays are hashed in blocks of about this size.
_BLOCK_BYTES = 1 << 24
# What an example may have beside arrays.
_NUMBERS = (np.generic, int, float, complex)
_FORM = "{'image': images, 'label': labels}, NumPy arrays with an example in each row"
_OWN = (
    "an array of NumPy's own or of JAX's: np.asarray(...), or .filled(value) where a "
    "mask hides elements"
)


class Source(Protocol):
    """The interface of examples that are read one by one.

    `grain.sources` and `grain.MapDataset` have it.
    """

    def __len__(self) -> int:
        """Returns the number of examples."""

    def __getitem__(self, index: int, /) -> Arrays:
        """Returns an example, as arrays by name, the same on every process."""


Examples = Arrays | Source


def take(examples: Examples, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the examples with these numbers, stacked.

    Raises:
      ValueError: as `stack` does, with the numbers of the examples.
    """
    if isinstance(examples, Mapping):
        return {name: array[rows] for name, array in examples.items()}
    return stack([_read(examples, int(row)) for row in rows], rows)


def _read(source: Source, number: int) -> Arrays:
    """Returns an example of a source; its error gets the example's number."""
    try:
        return source[number]
    except Exception as e:
        e.add_note(f"This is example {number} of {type(source).__name__}.")
        raise


def stack(
    examples: Sequence[Arrays], numbers: Sequence[int] | np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Stacks single examples into a batch.

    Args:
      examples: the examples.
      numbers: their numbers, for messages; by default their places in the batch.

    Raises:
      UserError: if one is no mapping of arrays or numbers, or has other names or shapes
        than the first.
    """
    if numbers is None:
        numbers = range(len(examples))
    first = None
    last = None
    for number, example in zip(numbers, examples, strict=True):
        # What is like the example before it passes the checks that that one passed.
        kind = kinds(example)
        if kind is not None and kind == last:
            continue
        last = kind
        shapes = _shapes(example, f"Example {number}")
        if first is None:
            first = shapes
        elif shapes != first:
            raise errors.UserError(
                f"Example {number} has the arrays {shapes}, and example {numbers[0]} "
                f"has {first} (shapes by name). All must have the same names and "
                "shapes: give each what it lacks, and pad, or cut, what differs."
            )
    batch = {}
    for name in first or {}:
        batch[name] = np.stack([example[name] for example in examples])
    return batch


def kinds(arrays: Any) -> list[Any] | None:
    """Returns the names, types, dtypes and shapes of a dictionary; None for others."""
    if type(arrays) is not dict:
        return None
    found = []
    for name, x in arrays.items():
        found.append(
            (name, type(x), getattr(x, "dtype", None), getattr(x, "shape", None))
        )
    return found


def _shapes(example: Any, what: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an example's arrays; UserError if it has anything else."""
    if not isinstance(example, Mapping):
        raise errors.UserError(
            f"{what} is of type {type(example).__name__}. An example must be a "
            f"dictionary of arrays. Or return all examples together: {_FORM}."
        )
    shapes = {}
    for name, x in example.items():
        has = f"{what} has {{}} under {name!r}"
        if not array_types.is_array(x) and not isinstance(x, _NUMBERS):
            found = has.format(f"a {type(x).__name__}")
            raise errors.UserError(f"{found}. It must be a number, or {_OWN}.")
        array = np.asarray(x)
        _check_type(array.dtype, has)
        shapes[name] = array.shape
    return shapes


def summary(examples: Examples) -> str:
    """Returns the number of examples and a checksum, which identify the data.

    Arrays of at most 1 GiB together are hashed whole. For larger arrays, and for
    sources, which may be slow to read, the checksum covers some evenly spread examples.
    If a source's examples differ from one reading to the next, it covers only names,
    dtypes and shapes.
    """
    size = num_examples(examples)
    if isinstance(examples, Mapping):
        if sum(array.nbytes for array in examples.values()) <= _SUMMED_BYTES:
            return f"{size} examples, CRC-32 {_checksum(examples):08x}"
        rows = _spread(size, _SUMMED_ROWS)
        checksum = _checksum(examples, rows)
        return f"{size} examples, CRC-32 {checksum:08x} of {len(rows)} of them"
    rows = _spread(size, _SUMMED_EXAMPLES)
    sample = take(examples, rows)
    checksum = _checksum(sample)
    if checksum != _checksum(take(examples, rows)):
        types = {name: array[:0] for name, array in sample.items()}
        return f"{size} examples, CRC-32 {_checksum(types):08x} of their types"
    return f"{size} examples, CRC-32 {checksum:08x} of {len(rows)} of them"


def _spread(size: int, count: int) -> np.ndarray:
    """Returns at most `count` of the numbers below `size`, evenly spread."""
    numbers = np.linspace(0, size - 1, min(size, count))
    return np.unique(numbers.astype(np.int64))


def _checksum(arrays: Arrays, rows: np.ndarray | None = None) -> int:
    """Returns the checksum of names, dtypes, shapes and contents.

    Args:
      arrays: the arrays.
      rows: the rows that it covers; all by default.
    """
    checksum = 0
    for name, array in sorted(arrays.items()):
        if rows is not None:
            array = array[rows]
        header = f"{name} {array.dtype} {array.shape}"
        checksum = zlib.crc32(header.encode(), checksum)
        # Hashed in blocks, since arrays that are not contiguous are copied.
        block = max(1, _BLOCK_BYTES * len(array) // max(1, array.nbytes))
        for start in range(0, len(array), block):
            content = np.ascontiguousarray(array[start : start + block])
            checksum = zlib.crc32(content.tobytes(), checksum)
    return checksum


def splits(examples: Examples | Mapping[str, Examples]) -> dict[str, Examples]:
    """Returns examples by the name of their split; without splits, under the name ''.

    >>> sorted(splits({'x': np.zeros(3)}))
    ['']
    >>> sorted(splits({'test': {'x': np.zeros(3)}, 'easy': {'x': np.zeros(2)}}))
    ['easy', 'test']
    """
    either: Any = examples
    if not isinstance(either, Mapping) or not either:
        return {"": either}
    if not all(_is_split(value) for value in either.values()):
        return {"": either}
    return {str(name): split for name, split in either.items()}


def _is_split(x: Any) -> bool:
    """Returns whether a value is a split of examples, and not an array."""
    if isinstance(x, Mapping):
        return True
    if hasattr(x, "shape") or isinstance(x, list | tuple | str):
        return False
    return hasattr(x, "__len__") and hasattr(x, "__getitem__")


def check(examples: Examples, what: str = "The data") -> None:
    """Checks that a run can read examples. Of a source, only the first example is read.

    Args:
      examples: a mapping of arrays, or a source.
      what: a description for the message, such as 'Digits.train_data
        (experiment.py:31)'.

    Raises:
      UserError: if a run cannot read them; the message describes what to return
        instead.
    """
    kind = type(examples).__name__
    if isinstance(examples, tuple):
        raise errors.UserError(
            f"{what} is a tuple of {len(examples)}; it must be a dictionary of arrays: "
            f"{_FORM}."
        )
    if not isinstance(examples, Mapping):
        _check_source(examples, what)
        return
    if not examples:
        raise errors.UserError(
            f"{what} is an empty {kind}; it must have arrays: {_FORM}."
        )
    for name, array in examples.items():
        if not isinstance(name, str):
            raise errors.UserError(
                f"{what} has an array under {name!r}. Names are strings: {_FORM}."
            )
        if isinstance(array, Mapping):
            raise errors.UserError(
                f"{what} has a dictionary under {name!r}. Arrays form one level: give "
                f"the arrays of {name!r} their own names. Only eval_data may return "
                "several splits, and then nothing else."
            )
        _check_array(array, f"{what} has {{}} under {name!r}")
    num_examples(examples, what)


def check_batch(batch: Any, rows: int) -> None:
    """Raises UserError unless a batch holds arrays by name with `rows` rows each.

    The batch is one of an experiment's iterator.
    """
    what = "A batch of the experiment's iterator"
    if not isinstance(batch, Mapping):
        raise errors.UserError(
            f"{what} is of type {type(batch).__name__}. It must be a dictionary of "
            "arrays by name."
        )
    check(batch, what)
    # All arrays have the same number of rows, by the check above.
    first = next(iter(batch.values()))
    found = len(first)
    if found != rows:
        raise errors.UserError(
            f"{what} has {found} rows. It must have the {rows} rows of this process's "
            "Part: all batches have equally many, also where their sequences are "
            "longer. Fill up with rows that the experiment's `weight` leaves out, or "
            "pack short sequences into one row."
        )


def _check_source(examples: Any, what: str) -> None:
    kind = type(examples).__name__
    if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        raise errors.UserError(
            f"{what} is of type {kind}, without __len__ and __getitem__. It must be a "
            f"dictionary of arrays, {_FORM}; or a source of examples by number. For an "
            "iterator define train_batches."
        )
    num_examples(examples, what)
    _shapes(_read(examples, 0), f"{what} is of type {kind}, and its first example")


def _check_array(array: Any, has: str) -> None:
    kind = type(array).__name__
    if not np.ndim(array):
        raise errors.UserError(
            f"{has.format(f'the scalar {array!r}')}: each array must have a row for "
            "every example. Put a constant into the config, or repeat it with np.full."
        )
    if not array_types.is_array(array):
        raise errors.UserError(
            f"{has.format(f'a {kind}')}. It must be {_OWN}; all together {_FORM}."
        )
    _check_type(array.dtype, has)


def _check_type(dtype: Any, has: str) -> None:
    if not _is_jax_type(np.dtype(dtype)):
        raise errors.UserError(
            f"{has.format(f'an array of type {np.dtype(dtype)}')}, which cannot go to "
            "a device: give numbers of a type that JAX has, such as "
            "array.astype(np.float32) or indices of a list of names, or leave it out."
        )


@functools.cache
def _is_jax_type(dtype: np.dtype) -> bool:
    """Returns whether JAX has arrays of a type.

    Each batch is checked, so the answers are kept.
    """
    try:
        jax.typeof(np.empty(0, dtype))
    except TypeError:
        return False
    return True


def num_examples(examples: Examples, what: str = "The data") -> int:
    """Returns the number of examples.

    Raises:
      UserError: if there is none, or if arrays have different numbers of rows.
    """
    if not isinstance(examples, Mapping):
        if not len(examples):
            raise errors.UserError(
                f"{what} is of type {type(examples).__name__}, without any example."
            )
        return len(examples)
    sizes = {name: len(array) for name, array in examples.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise errors.UserError(
            f"{what} has arrays of different numbers of rows, or of none: {sizes}. All "
            "of them must have one row for each example."
        )
    return next(iter(sizes.values()))
