"""Pipelines with state, such as packing, that resume on any number of processes.

If rows are read by number, as in `data.iterate`, any process can read any row. A packed
row depends on the rows before it. So a fixed number of streams, independent of the
number of processes, feed certain rows of each batch. A process runs the streams for its
rows, and a checkpoint has the state of each stream.
"""

import bisect
import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xshard import data, errors
from xshard.base import arguments

if TYPE_CHECKING:
    import grain

# The order of a mix: each row is this part of a turn after the one before, the golden
# ratio's fraction, whose multiples are spread evenly over any stretch of rows.
_TURN = 2**32
_STEP = 2654435769
# The number of streams, and of rows of each, that are read for a summary.
_SUMMED_STREAMS = 2
_SUMMED_ROWS = 4


@dataclasses.dataclass(frozen=True)
class Stream:
    """The identity of a stream within its group.

    Attributes:
      index: the stream's number, from 0 to below `count`.
      count: the number of streams.
      seed: the seed of the group's order, from 0 to below 2**32; equal for all streams
        of a group.
      rows: the number of rows of each batch that it provides.
      examples: the number of examples that each call of `part` divided.
    """

    index: int
    count: int
    seed: int
    rows: int = 1
    examples: list[int] = dataclasses.field(default_factory=list, compare=False)

    def part(self, examples: "grain.MapDataset") -> "grain.MapDataset":
        """Returns this stream's part of the examples, repeated forever, in a new random
        order each epoch.

        In an epoch each example occurs in one stream, once.

        Raises:
          UserError: if there are fewer examples than streams.
        """
        if len(examples) < self.count:
            raise errors.UserError(
                f"There are {len(examples)} examples for {self.count} streams; each "
                "needs at least one. Give more examples, or fewer streams."
            )
        self.examples.append(len(examples))
        return examples.shuffle(self.seed)[self.index :: self.count].repeat()


class Mix:
    """Rows from several datasets, in proportions that change while a run trains.

    It is the last stage of a stream. Each row is drawn from one dataset, in an order
    that follows from its number and that of the stream: nothing random, so that each
    batch and each stretch of steps has its proportions within a row or two. The state
    is the number of rows, the datasets' states and the table, which is fixed for a run.

    Attributes:
      datasets: the datasets.

    >>> import grain
    >>> stream = Stream(index=0, count=1, seed=0, rows=4)
    >>> one, two = grain.MapDataset.source(['a']), grain.MapDataset.source(['b'])
    >>> datasets = [x.repeat().to_iter_dataset() for x in (one, two)]
    >>> rows = iter(Mix(datasets, [(0, [1, 0]), (2, [1, 3])], stream))
    >>> ''.join(next(rows) for _ in range(16))
    'aaaaaaaabbabbabb'
    """

    def __init__(
        self,
        datasets: Sequence[Iterable[Any]],
        table: Sequence[tuple[int, Sequence[float]]],
        stream: Stream,
    ):
        """Checks the table.

        Args:
          datasets: endless `grain.IterDataset`s of rows.
          table: rows `(steps, weights)`: after that many steps, a row comes from each
            dataset in proportion to its weight. The first is for 0 steps.
          stream: the stream that the rows are for.

        Raises:
          UserError: if the table is not one.
        """
        self.datasets = datasets
        _check_mix(table, len(datasets))
        # As JSON has it in a checkpoint.
        self._table: list[list[Any]] = []
        for steps, weights in table:
            self._table.append([steps, [float(weight) for weight in weights]])
        self._begins = [steps * stream.rows for steps, _ in table]
        self._bounds = [_bounds(weights) for _, weights in self._table]
        # Streams take their rows from different places of the order, so that a batch
        # of one row of each has the proportions, too.
        self._shift = _TURN * stream.index // stream.count

    def __iter__(self) -> "_Mixed":
        iterators = [iter(dataset) for dataset in self.datasets]
        return _Mixed(iterators, self.source, self._table)

    def source(self, row: int) -> int:
        """Returns the number of the dataset that a row comes from."""
        bounds = self._bounds[bisect.bisect_right(self._begins, row) - 1]
        place = (row * _STEP + self._shift) % _TURN
        return bisect.bisect_right(bounds, place)


class _Mixed(Iterator[Any]):
    """The iterator over a `Mix`."""

    def __init__(
        self,
        iterators: Sequence[Any],
        source: Callable[[int], int],
        table: list[Any],
    ):
        self._iterators = iterators
        self._source = source
        self._table = table
        self._count = 0

    def __next__(self) -> Any:
        row = next(self._iterators[self._source(self._count)])
        self._count += 1
        return row

    def get_state(self) -> dict[str, Any]:
        states = [iterator.get_state() for iterator in self._iterators]
        return {"rows": self._count, "datasets": states, "table": self._table}

    def set_state(self, state: Mapping[str, Any]) -> None:
        names = {"rows", "datasets", "table"}
        if not isinstance(state, Mapping) or state.keys() != names:
            raise errors.UserError(
                "The checkpoint's position in the training data is "
                f"{str(state)[:200]}, which no pipelines.Mix wrote. Restore the "
                "earlier stream, or start a new run in another directory with "
                "--init_from."
            )
        if len(state["datasets"]) != len(self._iterators):
            raise errors.UserError(
                f"The checkpoint was written with a mix of {len(state['datasets'])} "
                f"datasets, but there are now {len(self._iterators)}. A resume would "
                "not continue the same run: restore them, or start a new run in "
                "another directory with --init_from."
            )
        # The first rows, which identify the data, may be the same by both tables.
        if state["table"] != self._table:
            raise errors.UserError(
                f"The checkpoint was written with a mix by the table {state['table']}; "
                f"the run now has {self._table}. A resume would not continue the same "
                "run: restore the table, or start a new run in another directory with "
                "--init_from."
            )
        self._count = state["rows"]
        for iterator, inner in zip(self._iterators, state["datasets"], strict=True):
            iterator.set_state(inner)


def _check_mix(table: Any, count: int) -> None:
    """Raises UserError unless a table has weights of `count` datasets for all steps."""
    rule = (
        "must be rows (steps, weights) with rising steps from 0 on, and a weight of at "
        f"least 0, and finite, for each of the {count} datasets, not all 0, as in "
        f"[(0, {[1] * count}), (1000, {[1] * count})]"
    )
    try:
        steps = [row[0] for row in table]
        weights = [list(row[1]) for row in table]
        is_good = steps[:1] == [0] and all(a < b for a, b in itertools.pairwise(steps))
        is_good = is_good and all(type(step) is int for step in steps)
        for row in weights:
            is_good = is_good and len(row) == count
            is_good = is_good and all(0 <= float(x) < math.inf for x in row)
            is_good = is_good and not any(isinstance(x, str | bytes) for x in row)
            is_good = is_good and any(x > 0 for x in row)
    # A number may be too large for a float.
    except (TypeError, ValueError, OverflowError, IndexError, KeyError):
        is_good = False
    if not is_good:
        raise errors.UserError(f"The table {table!r} of a mix {rule}.")


def _bounds(weights: Sequence[float]) -> list[int]:
    """Returns the ends of each dataset's share of a turn, but for the last one."""
    # Scaled by a power of two, which rounds nothing, so that no sum overflows.
    _, exponent = math.frexp(max(weights))
    ends = list(itertools.accumulate(math.ldexp(x, -exponent) for x in weights))
    return [round(_TURN * (end / ends[-1])) for end in ends[:-1]]


class Streams:
    """An iterator over a process's batches that are fed by several streams.

    It is a `data.BatchIterator`. Stream i of n provides rows i * batch_size / n to (i +
    1) * batch_size / n of each batch. Each group has its own streams. If rows of one
    stream are on several processes, each of these runs the stream.
    """

    arrays_are_new = True

    def __init__(
        self, make: Callable[[Stream], Iterable[Any]], count: int, part: data.Part
    ):
        """Creates the streams of a process.

        Args:
          make: creates a stream: an endless `grain.IterDataset` of rows, which are
            arrays by name. It must do the same on all processes, and in all parts of a
            run.
          count: the number of streams of each group; it must divide the batch. It is
            fixed for a run. More streams can use more processes, and cost more work.
          part: the part of each batch that this process reads.

        Raises:
          UserError: if `count` does not divide the batch.
        """
        is_count = arguments.is_integer(count)
        if not is_count or count < 1 or part.batch_size % count:
            raise errors.UserError(
                f"{count!r} streams do not fit batch_size={part.batch_size}: each "
                "feeds equally many rows of a batch, so their number must divide it."
            )
        self._make = make
        self._count = count
        self._seed = part.seed
        # The number of rows of a batch that a stream provides.
        self._rows = part.batch_size // count
        # What the parts of the streams were taken from, equal for all streams.
        self._examples: list[int] = []
        # For each row of the process: the name of its stream, and its position among
        # the stream's rows of a batch.
        self._sources: list[tuple[str, int]] = []
        self._iterators: dict[str, Any] = {}
        for group, rows in enumerate(part.rows):
            for row in rows:
                index, position = divmod(int(row), self._rows)
                name = f"{group}/{index}"
                self._sources.append((name, position))
                if name not in self._iterators:
                    self._iterators[name] = self._open(group, index)

    def _make_stream(self, group: int, index: int) -> Any:
        seed = np.random.SeedSequence([self._seed, group]).generate_state(1)[0]
        identity = Stream(index, self._count, int(seed), self._rows)
        stream = self._make(identity)
        self._examples = identity.examples
        return stream

    def _open(self, group: int, index: int) -> Any:
        stream = iter(self._make_stream(group, index))
        if not (hasattr(stream, "get_state") and hasattr(stream, "set_state")):
            raise errors.UserError(
                f"A stream is of type {type(stream).__name__}, which has no get_state "
                "and set_state; it must be a grain.IterDataset, or a Mix."
            )
        return stream

    @functools.cached_property
    def _data(self) -> str:
        """A checksum of the first rows of some streams, which identifies the data.

        Every process computes the same one.
        """
        checksum = 0
        for index in range(min(self._count, _SUMMED_STREAMS)):
            stream = self._make_stream(0, index)
            # The first rows of a mix may come from some of its datasets only.
            for rows in (stream, *getattr(stream, "datasets", ())):
                examples = list(itertools.islice(rows, _SUMMED_ROWS))
                if not examples:
                    raise errors.UserError(
                        f"Stream {index} of {self._count}, or a dataset that it mixes, "
                        "has no rows: give each at least one, or fewer streams."
                    )
                first_rows = data.stack(examples)
                for name, array in sorted(first_rows.items()):
                    about = f"{name} {array.dtype} {array.shape}"
                    checksum = zlib.crc32(about.encode() + array.tobytes(), checksum)
        return f"CRC-32 {checksum:08x} of their first rows"

    def summary(self) -> str:
        """Returns a summary of the data.

        It is compared between processes, and between parts of a run.
        """
        return f"{self._count} streams, {self._data}"

    def __next__(self) -> data.Arrays:
        rows = {}
        for name, stream in self._iterators.items():
            # A stream that ends raises StopIteration, which the run reports.
            rows[name] = [next(stream) for _ in range(self._rows)]
        return data.stack([rows[name][position] for name, position in self._sources])

    def get_state(self) -> dict[str, Any]:
        """Returns the states of this process's streams, by group and stream."""
        states = {name: stream.get_state() for name, stream in self._iterators.items()}
        return {
            "streams": states,
            "count": self._count,
            "rows": self._rows,
            "data": self._data,
            "examples": self._examples,
        }

    def join_states(self, states: Sequence[Any]) -> dict[str, Any]:
        """Merges the states of all processes into one."""
        streams: dict[str, Any] = {}
        for state in states:
            self._check(state)
            streams |= state["streams"]
        return {**states[0], "streams": streams}

    def set_state(self, state: Any) -> None:
        """Restores a position from `get_state` or `join_states`.

        The number of processes may be another one.

        Raises:
          UserError: if the state belongs to other streams.
        """
        self._check(state)
        lacking = self._iterators.keys() - state["streams"].keys()
        if lacking:
            raise errors.UserError(
                "The checkpoint's position in the training data lacks the streams "
                f"{', '.join(sorted(lacking))} of this process (group/stream). Resume "
                "with the groups that the run had."
            )
        for name, stream in self._iterators.items():
            stream.set_state(state["streams"][name])

    def _check(self, state: Any) -> None:
        expected = {"count": self._count, "rows": self._rows, "data": self._data}
        names = {"streams", *expected}
        # States of earlier versions lack the numbers of examples.
        if not isinstance(state, Mapping) or state.keys() - {"examples"} != names:
            raise errors.UserError(
                "The checkpoint's position in the training data is "
                f"{str(state)[:200]}, which a different iterator wrote; this one has "
                "streams. Restore the experiment's earlier train_batches, or start a "
                "new run in another directory with --init_from."
            )
        expected["examples"] = self._examples
        received = {name: state.get(name, expected[name]) for name in expected}
        if received != expected:
            raise errors.UserError(
                f"The checkpoint was written with {_in_words(received)}; the run now "
                f"has {_in_words(expected)}. A resume would not continue the same run. "
                "Restore the earlier streams, batch size and data, or start a new run "
                "in another directory with --init_from."
            )


def _in_words(state: Mapping[str, Any]) -> str:
    words = (
        f"{state['count']} streams of {state['rows']} rows of a batch, {state['data']}"
    )
    for count in state["examples"]:
        words += f", {count} examples"
    return words
