"""The order in which each process reads its part of the examples.

The order depends on the seed, the group and the epoch, and not on the number of
processes. The position in it is a number of batches. So a run resumes with the next
example on any number of processes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from xshard import errors
from xshard.data import examples as examples_lib

# The threads that read a source, and the number of batches that they read ahead.
_READ_THREADS = 4
_READ_AHEAD = 8


class BatchIterator(Protocol):
    """The interface of a resumable iterator over one process's part of each batch.

    A `grain.DatasetIterator` has it.

    A run resumes only on the same number of processes, unless the iterator has one of
    these:

    - The attribute `state_is_shared = True`. Then its state must be a position in the
      data that all processes read together, such as a number of batches, and equal on
      all of them.
    - A method `join_states`, which merges the states of all processes into one that
      each process takes its part of. See `xshard.data.pipelines.Streams`.

    Further optional members:

    - `acts_every_steps = n`: the iterator uses the model. Before steps 1, n + 1, 2n +
      1, ... the run calls its method `act(step, predict)` on all processes. `predict`
      is the experiment's, of the current state; it takes a batch on the host that is
      equal on all processes. The iterator's state must include everything it keeps
      until its next `act`. Before a run, the framework takes the first batch and calls
      `act` up to its first prediction; then it restores the state from before both.
    - `summary()`: describes the data in a few words. The processes compare the texts
      before a run.
    - `epoch_examples`: the number of examples per epoch, if the iterator repeats a
      fixed number of them.
    - `next_batches(count)`: the next `count` batches at once, as arrays of shape
      (count, rows, ...) by name. The iterator does not write into them again. For data
      that is read faster so. A class with a `__next__` of its own needs it too: that of
      a base class, or of an iterator within, is not called.
    - `arrays_are_new = True`: the iterator never writes into the arrays of a batch
      again, so the run need not copy them.
    """

    def __next__(self) -> examples_lib.Arrays:
        """Returns this process's rows of the next batch: see `Part`."""

    def get_state(self) -> Any:
        """Returns the position after the last `next`.

        It consists of JSON values, bytes, tuples and arrays.
        """

    def set_state(self, state: Any) -> None:
        """Restores the position from a call of `get_state`."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of each batch that one process reads.

    Attributes:
      batch_size: the number of rows of one group's batch.
      rows: for each group, the rows of its batch on this process's devices, ascending.
        The process's batch has the rows of the first group, then those of the second,
        and so on. If one model is spread over several processes, all of them read its
        rows.
      seed: the seed of the order.
    """

    batch_size: int
    rows: tuple[np.ndarray, ...]
    seed: int


class _Iterator:
    """An iterator whose state is the number of batches.

    The number of examples is in the state too, to identify the data.
    """

    state_is_shared = True
    arrays_are_new = True

    def __init__(
        self,
        batches_from: Callable[[int], Iterator[examples_lib.Arrays]],
        examples: examples_lib.Examples,
    ):
        """Starts at the first batch.

        Args:
          batches_from: returns the batches from a number on.
          examples: the examples that the batches consist of.
        """
        self._batches_from = batches_from
        self._examples = examples
        self.epoch_examples = examples_lib.num_examples(examples)
        self._start_at(0)

    def summary(self) -> str:
        return examples_lib.summary(self._examples)

    def __next__(self) -> examples_lib.Arrays:
        batch = next(self._batches)
        self._count += 1
        return batch

    def get_state(self) -> dict[str, int]:
        return {"batches": self._count, "examples": self.epoch_examples}

    def set_state(self, state: dict[str, int]) -> None:
        if not isinstance(state, dict) or state.keys() != {"batches", "examples"}:
            raise errors.UserError(
                f"The checkpoint's position in the training data is {state!r}, which a "
                "different iterator wrote; this one counts batches. Restore the "
                "experiment's earlier train_batches, or start a new run in another "
                "directory with --init_from."
            )
        if state["examples"] != self.epoch_examples:
            raise errors.UserError(
                f"The checkpoint was written with {state['examples']} training "
                f"examples, but there are now {self.epoch_examples}, so a resume would "
                "not continue the same run. Restore the earlier data, or start a new "
                "run in another directory with --init_from."
            )
        self._start_at(state["batches"])

    def _start_at(self, count: int) -> None:
        self._count = count
        self._batches = self._batches_from(count)


class _ArrayIterator(_Iterator):
    """An iterator over arrays, which reads several batches as fast as one."""

    def __init__(
        self,
        batches_from: Callable[[int], Iterator[examples_lib.Arrays]],
        examples: examples_lib.Examples,
        read_many: Callable[[int, int], examples_lib.Arrays],
    ):
        """Starts at the first batch.

        Args:
          batches_from: returns the batches from a number on.
          examples: the examples that the batches consist of.
          read_many: returns some batches from a number on, of shape (count, rows, ...).
        """
        super().__init__(batches_from, examples)
        self._read_many = read_many

    def next_batches(self, count: int) -> examples_lib.Arrays:
        taken = self._read_many(self._count, count)
        self._start_at(self._count + count)
        return taken


def iterate(examples: examples_lib.Examples, part: Part) -> BatchIterator:
    """Iterates over examples forever, each once per epoch, in random order.

    Each epoch has a new order. Batches continue across the ends of epochs. Each group g
    has its own order, drawn from the seed, g and the epoch. The order takes 8 bytes of
    memory per example. Sources are read ahead in threads; arrays are not. A
    `grain.MapDataset` is read at the indices of its later epochs, so that its random
    transformations differ between epochs. Do not shuffle it.

    Args:
      examples: a mapping of arrays that share their first dimension; or a source of
        single examples.
      part: the part of each batch that this process reads.

    Returns:
      An iterator whose state is the number of batches, for any number of processes.

    Raises:
      ValueError: if a batch needs more examples than there are.
    """
    examples_lib.check(examples)
    size = examples_lib.num_examples(examples)
    if part.batch_size > size:
        raise errors.UserError(
            f"batch_size={part.batch_size} exceeds the {size} examples."
        )
    numbers_at = order(examples, part.seed, groups=len(part.rows))
    # A batch may have one row, or all of its rows lack what the first example has.
    names = examples_lib.take(examples, np.arange(1)).keys()

    def read(step: int) -> examples_lib.Arrays:
        begin = step * part.batch_size
        numbers = []
        for group, rows in enumerate(part.rows):
            numbers.append(numbers_at(group, begin + rows))
        rows = np.concatenate(numbers)
        batch = examples_lib.take(examples, rows)
        if batch.keys() != names:
            raise errors.UserError(
                f"Example {rows[0]} has the arrays {list(batch)}, and example 0 has "
                f"{list(names)}. All must have the same names."
            )
        return batch

    def batches_from(count: int) -> Iterator[examples_lib.Arrays]:
        if isinstance(examples, Mapping):
            return map(read, itertools.count(count))
        return _read_ahead(read, count)

    if not isinstance(examples, Mapping):
        return _Iterator(batches_from, examples)

    def read_many(step: int, count: int) -> examples_lib.Arrays:
        firsts = (step + np.arange(count)) * part.batch_size
        numbers = []
        for group, rows in enumerate(part.rows):
            numbers.append(numbers_at(group, firsts[:, None] + rows))
        return examples_lib.take(examples, np.concatenate(numbers, axis=1))

    return _ArrayIterator(batches_from, examples, read_many)


def _read_ahead(
    read: Callable[[int], examples_lib.Arrays], start: int
) -> Iterator[examples_lib.Arrays]:
    """Returns the batches from a number on, read by threads."""
    # Imported here, since it takes half a second and arrays do not need it.
    import grain

    options = grain.ReadOptions(
        num_threads=_READ_THREADS, prefetch_buffer_size=_READ_AHEAD
    )
    # The range is longer than any run.
    return iter(grain.MapDataset.range(start, 2**48).map(read).to_iter_dataset(options))


def order(
    examples: examples_lib.Examples, seed: int, groups: int
) -> Callable[[int, np.ndarray], np.ndarray]:
    """Returns the endless order of examples.

    Args:
      examples: the examples.
      seed: the seed of the order.
      groups: the number of groups, each of which has an order.

    Returns:
      A function of a group and of positions in its order, an array, which returns the
      numbers of the examples there.
    """
    size = examples_lib.num_examples(examples)
    has_epochs = _has_epochs(examples)

    # A batch that crosses the end of an epoch reads two permutations of each group.
    @functools.lru_cache(maxsize=2 * groups)
    def permutation(group: int, epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, group, epoch]).permutation(size)

    def numbers_at(group: int, positions: np.ndarray) -> np.ndarray:
        if not positions.size:
            return positions
        first = int(positions.min()) // size
        last = int(positions.max()) // size
        # Most batches lie within one epoch.
        if first == last and not has_epochs:
            return permutation(group, first)[positions - first * size]
        epochs, offsets = np.divmod(positions, size)
        numbers = np.empty_like(positions)
        for epoch in range(first, last + 1):
            in_epoch = epochs == epoch
            numbers[in_epoch] = permutation(group, epoch)[offsets[in_epoch]]
            if has_epochs:
                numbers[in_epoch] += epoch * size
        return numbers

    return numbers_at


def _has_epochs(examples: examples_lib.Examples) -> bool:
    """Returns whether a later epoch has other indices than the first one."""
    if isinstance(examples, Mapping):
        return False
    import grain

    return isinstance(examples, grain.MapDataset)
