"""Pipelines with a state of their own, such as packing, that go on with other numbers of processes.

Where batches are rows by number, as of `data.iterate`, any process can read any row. A packed row comes from those
before it. So each of several streams, whose number is not that of the processes, feeds certain rows of each batch;
a process runs those whose rows it has, and a checkpoint has the state of each.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xshard import data, errors

if TYPE_CHECKING:
    import grain

# Of so many streams so many rows are read for a summary.
_SUMMED_STREAMS, _SUMMED_ROWS = 2, 4


@dataclasses.dataclass(frozen=True)
class Stream:
    """The number of a stream among its group's.

    Attributes:
      index: its number, from 0 to below `count`.
      count: the number of streams.
      seed: of the group's order, from 0 to below 2**32; equal for all streams of a group.
    """

    index: int
    count: int
    seed: int

    def part(self, examples: "grain.MapDataset") -> "grain.MapDataset":
        """This stream's part of the examples, for ever, in an order of each epoch's own.

        In an epoch each example is in one stream, once.

        Raises:
          UserError: if there are fewer examples than streams.
        """
        if len(examples) < self.count:
            raise errors.UserError(
                f"There are {len(examples)} examples for {self.count} streams; each needs one at least: give more "
                "examples, or fewer streams."
            )
        return examples.shuffle(self.seed)[self.index :: self.count].repeat()


class Streams:
    """An iterator over a process's batches, which several streams feed: a `data.BatchIterator`.

    Stream i of n gives rows i * batch_size / n to (i + 1) * batch_size / n of each batch. Each group has streams of
    its own. Where rows of one stream lie on several processes, each of them runs it.
    """

    def __init__(self, make: Callable[[Stream], Iterable[Any]], count: int, part: data.Part):
        """Makes the streams of a process.

        Args:
          make: makes a stream, a `grain.IterDataset` of rows that are arrays by name, without an end; the same on
            all processes, and in all runs that go on from one another.
          count: the number of streams of each group, which divides the batch. It stays as it is throughout a run;
            more are more work that can lie on more processes.
          part: what this process reads.

        Raises:
          UserError: if `count` does not divide the batch.
        """
        if count < 1 or part.batch_size % count:
            raise errors.UserError(
                f"{count} streams do not fit batch_size={part.batch_size}: each feeds as many rows of a batch, so that "
                "their number must divide it."
            )
        self._make, self._count, self._seed = make, count, part.seed
        self._rows = part.batch_size // count
        # Of each row of the process its stream, and which of the stream's rows of a batch it is.
        self._places = [
            (f"{group}/{row // self._rows}", int(row % self._rows))
            for group, rows in enumerate(part.rows)
            for row in rows
        ]
        names = dict.fromkeys(name for name, _ in self._places)
        self._iterators = {name: self._open(*map(int, name.split("/"))) for name in names}

    def _open(self, group: int, index: int) -> Any:
        seed = np.random.SeedSequence([self._seed, group]).generate_state(1)[0]
        stream = iter(self._make(Stream(index, self._count, int(seed))))
        if not (hasattr(stream, "get_state") and hasattr(stream, "set_state")):
            raise errors.UserError(
                f"A stream is of type {type(stream).__name__}, which has no get_state and set_state; it must be a "
                "grain.IterDataset."
            )
        return stream

    @functools.cached_property
    def _data(self) -> str:
        """A checksum of the first rows of some streams, the same on all processes."""
        checksum = 0
        for index in range(min(self._count, _SUMMED_STREAMS)):
            rows = data.stack(list(itertools.islice(self._open(0, index), _SUMMED_ROWS)))
            for name, array in sorted(rows.items()):
                about = f"{name} {array.dtype} {array.shape}"
                checksum = zlib.crc32(about.encode() + array.tobytes(), checksum)
        return f"CRC-32 {checksum:08x} of their first rows"

    def summary(self) -> str:
        """Returns what is compared between processes, and between the parts of a run."""
        return f"{self._count} streams, {self._data}"

    def __next__(self) -> data.Arrays:
        rows = {
            name: [next(stream) for _ in range(self._rows)]
            for name, stream in self._iterators.items()
        }
        return data.stack([rows[name][place] for name, place in self._places])

    def get_state(self) -> dict[str, Any]:
        """Returns the states of this process's streams, by group and stream."""
        states = {name: stream.get_state() for name, stream in self._iterators.items()}
        return {"streams": states, "count": self._count, "rows": self._rows, "data": self._data}

    def join_states(self, states: Sequence[Any]) -> dict[str, Any]:
        """Returns one state of those of all processes."""
        streams: dict[str, Any] = {}
        for state in states:
            self._check(state)
            streams |= state["streams"]
        return {**states[0], "streams": streams}

    def set_state(self, state: Any) -> None:
        """Goes to where `get_state` was called, on whichever processes.

        Raises:
          UserError: if the state is of other streams than these.
        """
        self._check(state)
        lacking = self._iterators.keys() - state["streams"].keys()
        if lacking:
            raise errors.UserError(
                f"The checkpoint's place in the training data lacks the streams {', '.join(sorted(lacking))} of this "
                "process (group/stream). Go on with the groups that the run had."
            )
        for name, stream in self._iterators.items():
            stream.set_state(state["streams"][name])

    def _check(self, state: Any) -> None:
        wanted = {"count": self._count, "rows": self._rows, "data": self._data}
        if not isinstance(state, Mapping) or state.keys() != {"streams", *wanted}:
            raise errors.UserError(
                f"The checkpoint's place in the training data is {str(state)[:200]}, of another iterator than this one, "
                "which has streams: give the experiment the train_batches that it had, or begin anew in another "
                "directory with --init_from."
            )
        had = {name: state[name] for name in wanted}
        if had != wanted:
            raise errors.UserError(
                f"The checkpoint was made with {_in_words(had)}; now it is {_in_words(wanted)}. Going on would not be "
                "the same run: give it the streams, the batch size and the data that it had, or begin anew in another "
                "directory with --init_from."
            )


def _in_words(state: Mapping[str, Any]) -> str:
    return f"{state['count']} streams of {state['rows']} rows of a batch, {state['data']}"
