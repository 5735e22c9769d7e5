"""Examples, and the order in which each process reads its part of them.

The order is decided by the seed, the group and the epoch, and not by how many processes there are; where
one is in it is a number of batches. So a run goes on with the next example on however many processes.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from xshard import errors

Arrays = Mapping[str, np.ndarray]
_READ_THREADS, _READ_AHEAD = 4, 8
# The most that a summary hashes: bytes of arrays; rows of larger ones; examples of a source.
_SUMMED_BYTES, _SUMMED_ROWS, _SUMMED_EXAMPLES = 1 << 30, 4096, 16
_BLOCK_BYTES = 1 << 24


class Source(Protocol):
    """Examples that are read one by one, as `grain.sources` and `grain.MapDataset` have them."""

    def __len__(self) -> int:
        """The number of examples."""

    def __getitem__(self, index: int, /) -> Arrays:
        """An example, as arrays by name: equal on all processes, whoever reads it."""


class BatchIterator(Protocol):
    """An iterator over a process's batches, from where its state says: as `grain.DatasetIterator`.

    Where its state is a place in what all processes read together, such as a number of batches, and the same
    on all of them, it says so by an attribute `state_is_shared = True`: a run may then go on with more or
    fewer processes. So it may where a method `join_states` makes one of the states of all processes, of which
    each takes its part: see `xshard.data.pipelines.Streams`. Else it goes on with as many.

    One with an attribute `acts_every_steps = n` acts on the model: before steps 1, n + 1, 2n + 1, ... its method
    `act(step, predict)` is called, on all processes alike. `predict` is the experiment's of the current state, of
    a batch on the host that is equal on all processes. What it holds until it acts again is in its state.
    Before a run the first batch is asked for, `act` is called up to its first prediction, and both are taken back.

    One that has a method `summary`, which says in a few words what data all processes read, has these compared
    between them before a run. One that goes through a known number of examples again and again says how many these
    are by an attribute `epoch_examples`.
    """

    def __next__(self) -> Arrays:
        """This process's rows of the next batch: see `Part`."""

    def get_state(self) -> Any:
        """Returns its position, as JSON can hold it, bytes, tuples or arrays: after what `next` has returned."""

    def set_state(self, state: Any) -> None:
        """Goes to where `get_state` was called."""


Examples = Arrays | Source


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of each batch that one process reads.

    Attributes:
      batch_size: the rows of a batch, of one group.
      rows: for each group, the rows of its batch that lie on this process's devices, ascending. A batch of
        the process holds those of the first group, then those of the second, and so on. Where a model
        lies on several processes, all of them read its rows.
      seed: of the order.
    """

    batch_size: int
    rows: tuple[np.ndarray, ...]
    seed: int


class _Iterator:
    """An iterator of grain's, whose state says which data it is a place in."""

    state_is_shared = True

    def __init__(self, iterator: Any, examples: Examples):
        self._iterator = iterator
        self._examples = examples
        self.epoch_examples = num_examples(examples)

    def summary(self) -> str:
        return summary(self._examples)

    def __next__(self) -> Arrays:
        return next(self._iterator)

    def get_state(self) -> dict[str, int]:
        batches = self._iterator.get_state()["next_index"]
        return {"batches": batches, "examples": self.epoch_examples}

    def set_state(self, state: dict[str, int]) -> None:
        if not isinstance(state, dict) or state.keys() != {"batches", "examples"}:
            raise errors.UserError(
                f"The checkpoint's place in the training data is {state!r}, of another iterator than this one, "
                "which counts batches: give the experiment the train_batches that it had, or begin anew in "
                "another directory with --init_from."
            )
        if state["examples"] != self.epoch_examples:
            raise errors.UserError(
                f"The checkpoint was made with {state['examples']} training examples, and there are "
                f"{self.epoch_examples} now: going on would not be the same run. Give it its data back, or begin anew "
                "in another directory with --init_from."
            )
        self._iterator.set_state({"next_index": state["batches"]})


def iterate(examples: Examples, part: Part) -> BatchIterator:
    """Goes through examples for ever, each once an epoch, in an order of each epoch's own.

    Batches follow one another through the epochs' ends. Group g of several has an order of its own, which
    is drawn from the seed, g and the epoch. The order takes 8 bytes of memory for each example. What is no
    mapping of arrays is read ahead, in threads. A `grain.MapDataset` is asked for indices of its later
    epochs, so that its random transformations differ between epochs; it is not to be shuffled.

    Args:
      examples: a mapping of arrays, which share their first dimension; or a source of single examples.
      part: what this process reads.

    Returns:
      An iterator whose state is the number of batches, on any number of processes.

    Raises:
      ValueError: if there are fewer examples than a batch has.
    """
    # It takes half a second, and only runs need it.
    import grain

    check(examples)
    size = num_examples(examples)
    if part.batch_size > size:
        raise errors.UserError(f"batch_size={part.batch_size} must be at most the {size} examples.")
    numbers = order(examples, part.seed, len(part.rows))

    def read(step: int) -> Arrays:
        begin = step * part.batch_size
        chosen = [numbers(group, begin + rows) for group, rows in enumerate(part.rows)]
        return take(examples, np.concatenate(chosen))

    threads, ahead = (0, 0) if isinstance(examples, Mapping) else (_READ_THREADS, _READ_AHEAD)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
    # More steps than any run makes.
    batches = grain.MapDataset.range(2**48).map(read).to_iter_dataset(options)
    return _Iterator(iter(batches), examples)


def order(examples: Examples, seed: int, groups: int) -> Callable[[int, np.ndarray], np.ndarray]:
    """The function of a group and positions in its endless order to the numbers of the examples there."""
    import grain  # It takes half a second.

    size, in_epochs = num_examples(examples), isinstance(examples, grain.MapDataset)
    of_epoch = functools.lru_cache(maxsize=2 * groups)(
        lambda group, epoch: np.random.default_rng([seed, group, epoch]).permutation(size)
    )

    def numbers(group: int, positions: np.ndarray) -> np.ndarray:
        epochs, offsets = np.divmod(positions, size)
        chosen = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = of_epoch(group, int(epoch))[offsets[here]] + in_epochs * epoch * size
        return chosen

    return numbers


def take(examples: Examples, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The examples of these numbers, stacked.

    Raises:
      ValueError: if examples of a source differ in names or shapes.
    """
    if isinstance(examples, Mapping):
        return {name: array[rows] for name, array in examples.items()}
    return stack([examples[int(row)] for row in rows])


def stack(examples: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """Single examples as a batch; UserError if they differ in names or shapes."""
    try:
        return {name: np.stack([example[name] for example in examples]) for name in examples[0]}
    except (KeyError, ValueError, TypeError) as e:
        raise errors.UserError(
            f"Examples cannot be stacked ({e}): each must be a mapping of the same names to arrays of the "
            "same shapes."
        ) from e


def summary(examples: Examples) -> str:
    """The number of examples and a checksum, by which other data is told.

    Arrays of at most 1 GiB together are hashed whole. Of larger ones, and of a source, which may be slow to
    read, some examples are, evenly spread. A source whose examples differ from one reading to the next is told
    by their number, names, types and shapes.
    """
    size = num_examples(examples)
    if isinstance(examples, Mapping):
        whole = sum(array.nbytes for array in examples.values()) <= _SUMMED_BYTES
        chosen = None if whole else _spread(size, _SUMMED_ROWS)
        checksum = _checksum(examples, chosen)
        return f"{size} examples, CRC-32 {checksum:08x}" + (
            "" if chosen is None else f" of {len(chosen)} of them"
        )
    chosen = _spread(size, _SUMMED_EXAMPLES)
    sample = take(examples, chosen)
    checksum = _checksum(sample)
    if checksum != _checksum(take(examples, chosen)):
        kinds = {name: array[:0] for name, array in sample.items()}
        return f"{size} examples, CRC-32 {_checksum(kinds):08x} of their types"
    return f"{size} examples, CRC-32 {checksum:08x} of {len(chosen)} of them"


def _spread(size: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, size - 1, min(size, count)).astype(np.int64))


def _checksum(arrays: Arrays, rows: np.ndarray | None = None) -> int:
    """The checksum of names, types, shapes and contents; of some rows, or of all."""
    checksum = 0
    for name, array in sorted(arrays.items()):
        chosen = array if rows is None else array[rows]
        checksum = zlib.crc32(f"{name} {chosen.dtype} {chosen.shape}".encode(), checksum)
        # In blocks: what is not contiguous is copied for it.
        block = max(1, _BLOCK_BYTES * len(chosen) // max(1, chosen.nbytes))
        for start in range(0, len(chosen), block):
            content = np.ascontiguousarray(chosen[start : start + block])
            checksum = zlib.crc32(content.tobytes(), checksum)
    return checksum


def splits(examples: Examples | Mapping[str, Examples]) -> dict[str, Examples]:
    """Examples by the name of their split; without one where they are not split.

    >>> sorted(splits({'x': np.zeros(3)})), sorted(splits({'test': {'x': np.zeros(3)}, 'easy': {'x': np.zeros(2)}}))
    ([''], ['easy', 'test'])
    """
    is_split = lambda x: isinstance(x, Mapping) or (not hasattr(x, "shape") and _is_source(x))
    either: Any = examples
    if isinstance(either, Mapping) and either and all(map(is_split, either.values())):
        return {str(name): split for name, split in either.items()}
    return {"": either}


def _is_source(x: Any) -> bool:
    return (
        hasattr(x, "__len__")
        and hasattr(x, "__getitem__")
        and not isinstance(x, list | tuple | str)
    )


def check(examples: Examples, what: str = "The data") -> None:
    """Sees that examples are what a run can read; nothing but the first of a source is read.

    Args:
      examples: a mapping of arrays, or a source.
      what: what they are, for the message, such as 'Digits.train_data (experiment.py:31)'.

    Raises:
      UserError: with what to give instead.
    """
    kind = type(examples).__name__
    form = "{'image': images, 'label': labels}, NumPy arrays with an example in each row"
    if isinstance(examples, tuple):
        raise errors.UserError(
            f"{what} is a tuple of {len(examples)}; it must be a dictionary of arrays: {form}."
        )
    if not isinstance(examples, Mapping):
        _check_source(examples, what, form)
        return
    if not examples:
        raise errors.UserError(f"{what} is an empty {kind}; it must have arrays: {form}.")
    for name, array in examples.items():
        if isinstance(array, Mapping):
            raise errors.UserError(
                f"{what} has a dictionary under {name!r}. There is one level of arrays: give those of {name!r} "
                "names of their own. What eval_data returns may have several splits, and then nothing else."
            )
        _check_array(array, f"{what} has {{}} under {name!r}", form)
    num_examples(examples, what)


def _check_source(examples: Any, what: str, form: str) -> None:
    kind = type(examples).__name__
    if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        raise errors.UserError(
            f"{what} is of type {kind}, without __len__ and __getitem__. It must be a dictionary of arrays, "
            f"{form}; or a source of examples by number. For an iterator define train_batches."
        )
    num_examples(examples, what)
    example = examples[0]
    if not isinstance(example, Mapping):
        raise errors.UserError(
            f"{what} is of type {kind}, whose first example is of type {type(example).__name__}. An example must "
            f"be a dictionary of arrays; or all examples together {form}."
        )
    for name, array in example.items():
        _check_type(np.asarray(array).dtype, f"{what} has examples with {{}} under {name!r}")


def _check_array(array: Any, has: str, form: str) -> None:
    kind = type(array).__name__
    if not np.ndim(array):
        raise errors.UserError(
            f"{has.format(f'the scalar {array!r}')}: each array must have a row for every example. Put a constant "
            "into the config, or repeat it with np.full."
        )
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise errors.UserError(
            f"{has.format(f'a {kind}')}. It must be an array: np.asarray(...); all together {form}."
        )
    _check_type(array.dtype, has)


def _check_type(dtype: Any, has: str) -> None:
    if np.dtype(dtype).kind in "OSUMm":
        raise errors.UserError(
            f"{has.format(f'an array of type {np.dtype(dtype)}')}, which cannot go to a device: give numbers, such "
            "as indices of a list of names, or leave it out."
        )


def num_examples(examples: Examples, what: str = "The data") -> int:
    """The number of examples; ValueError if there is none, or arrays do not agree on it."""
    if not isinstance(examples, Mapping):
        if not len(examples):
            raise errors.UserError(
                f"{what} is of type {type(examples).__name__}, without any example."
            )
        return len(examples)
    sizes = {name: len(array) for name, array in examples.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise errors.UserError(
            f"{what} has arrays of different numbers of rows, or of none: {sizes}. All of them must have one row "
            "for each example."
        )
    return next(iter(sizes.values()))
