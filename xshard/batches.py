"""Batches that lie on the mesh, each process giving what its devices hold.

A run reads its training data through one iterator on each process, whose state is in the checkpoint.
"""

import base64
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xshard import data, errors
from xshard import mesh as mesh_lib

# Under this name a state of bytes is kept in JSON.
_BYTES = "base64"


class TrainBatches:
    """The batches of a training run, one after the other."""

    def __init__(
        self,
        make: Callable[[data.Part], data.BatchIterator],
        mesh: jax.sharding.Mesh,
        *,
        batch_size: int,
        seed: int,
        micro_batches: int = 1,
    ):
        """Checks the sizes.

        Args:
          make: makes the iterator, such as `functools.partial(xshard.data.iterate, examples)`.
          mesh: the run's mesh.
          batch_size: the examples that one model's gradient is the mean over, on all its replicas.
          seed: the seed of the order.
          micro_batches: the parts that each replica computes one after the other.

        Raises:
          ValueError: if the batch does not divide into replicas and micro-batches, or the iterator is none.

        Attributes:
          example: one row of a batch.
        """
        check_train_batch(batch_size, mesh, micro_batches)
        groups = mesh_lib.num_groups(mesh)
        self._rows = groups * batch_size
        self._sharding = mesh_lib.sharding(mesh, mesh_lib.BATCH)
        self._mine = _addressable_rows(self._sharding, self._rows)
        group_of = self._mine // batch_size
        rows = tuple(self._mine[group_of == g] - g * batch_size for g in range(groups))
        self._iterator = make(data.Part(batch_size, rows, seed))
        self._check_iterator()
        state = self._iterator.get_state()
        first = self._take_next()
        self._iterator.set_state(state)
        # One row, for its names, types and shapes.
        self.example = {name: array[:1] for name, array in first.items()}

    def summary(self) -> str:
        """Returns a summary of the data, to be compared between processes; empty if the iterator has none."""
        said = getattr(self._iterator, "summary", lambda: "")()
        return str(said)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes, types and shardings of a batch."""
        return shapes(self.example, self._rows, self._sharding)

    def __next__(self) -> dict[str, jax.Array]:
        """The next batch, of (groups * batch_size) rows along ('group', 'slice', 'replica')."""
        return {
            name: jax.make_array_from_callback(
                (self._rows, *array.shape[1:]),
                self._sharding,
                functools.partial(_take, array, self._mine),
            )
            for name, array in self._take_next().items()
        }

    def position(self, step: int) -> dict[str, Any]:
        """Returns this process's position in its data after a step, to be saved with it."""
        return {"step": step, "iterator": _plain(self._iterator.get_state())}

    def restore(self, positions: Sequence[Mapping[str, Any]]) -> None:
        """Goes to where a run was when it was saved.

        Args:
          positions: those of all processes that saved it.

        Raises:
          ValueError: if that is no place in this data, or not one for this number of processes.
        """
        step = positions[0]["step"]
        if any("iterator" not in position for position in positions):
            raise errors.UserError(
                f"The checkpoint of step {step} is of a version whose examples came in another order: going on "
                "would repeat some and leave others out. Begin anew in another directory with --init_from."
            )
        states = [position["iterator"] for position in positions]
        # Equal states need not be shared: of files that each process has for itself they may be as far on.
        alike = all(other == states[0] for other in states)
        if alike and getattr(self._iterator, "state_is_shared", False):
            states = [states[0]] * jax.process_count()
        if len(states) != jax.process_count():
            raise errors.UserError(
                f"The checkpoint of step {step} has a state of the experiment's iterator for each of "
                f"{len(states)} processes; there are {jax.process_count()} processes now. Go on with "
                f"{len(states)}; or give the iterator a state that all processes share, such as a number of "
                "batches, and the attribute state_is_shared = True."
            )
        self._iterator.set_state(_unplain(states[jax.process_index()]))

    def _take_next(self) -> data.Arrays:
        try:
            batch = next(self._iterator)
        except StopIteration as e:
            raise errors.UserError(
                "The training data has ended before the run; give an iterator that begins again, as "
                "grain's repeat() does, or fewer steps."
            ) from e
        sizes = {name: len(array) for name, array in batch.items()}
        if set(sizes.values()) != {len(self._mine)}:
            raise errors.UserError(
                f"The experiment's iterator gave arrays of {sizes} rows; this process needs the "
                f"{len(self._mine)} rows of its Part, in each of at least one array."
            )
        return batch

    def _check_iterator(self) -> None:
        lacking = [
            name
            for name in ("__next__", "get_state", "set_state")
            if not callable(getattr(self._iterator, name, None))
        ]
        if lacking:
            raise errors.UserError(
                f"train_batches returned {type(self._iterator).__name__}, which has no {', '.join(lacking)}; an "
                "iterator of training data has __next__, get_state and set_state, as iter() of a "
                "grain.IterDataset has."
            )
        try:
            json.dumps(_plain(self._iterator.get_state()))
        except TypeError as e:
            raise errors.UserError(
                f"get_state of {type(self._iterator).__name__} returned what JSON cannot hold ({e}); it must be of "
                "numbers, texts, lists and dictionaries, or bytes."
            ) from e


def eval_batches(
    examples: data.Examples, mesh: jax.sharding.Mesh, batch_size: int
) -> Iterator[dict[str, jax.Array]]:
    """All examples once, in order, along ('slice', 'replica') and equal for all groups.

    The last batch is filled up; '_mask' is False where a row is no example.

    Raises:
      ValueError: if the replicas do not divide the batch.
    """
    replicas = mesh_lib.num_replicas(mesh)
    check_batch_size("eval_batch_size", batch_size, replicas, f"replicas = {replicas}")
    return _eval_batches(examples, mesh, batch_size)


def eval_shapes(
    examples: data.Examples, mesh: jax.sharding.Mesh, batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes, types and shardings of what `eval_batches` gives."""
    sharding = mesh_lib.sharding(mesh, mesh_lib.REPLICAS)
    example = {**data.take(examples, np.arange(1)), "_mask": np.ones(1, bool)}
    return shapes(example, batch_size, sharding)


def train_shapes(
    example: data.Arrays, mesh: jax.sharding.Mesh, batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes, types and shardings of a batch of `TrainBatches`, of which `example` is a row."""
    rows = batch_size * mesh_lib.num_groups(mesh)
    return shapes(example, rows, mesh_lib.sharding(mesh, mesh_lib.BATCH))


def shapes(
    example: data.Arrays, rows: int, sharding: jax.sharding.Sharding
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes, types and shardings of so many rows like those of an example, on devices."""
    return {
        name: jax.ShapeDtypeStruct(
            (rows, *array.shape[1:]),
            jax.dtypes.canonicalize_dtype(array.dtype),
            sharding=sharding,
        )
        for name, array in example.items()
    }


def check_train_batch(batch_size: int, mesh: jax.sharding.Mesh, micro_batches: int) -> None:
    """Raises ValueError unless a batch divides into replicas and micro-batches."""
    parts = mesh_lib.num_replicas(mesh) * micro_batches
    check_batch_size("batch_size", batch_size, parts, f"replicas x micro_batches = {parts}")


def check_batch_size(key: str, value: int, parts: int, what: str) -> None:
    """Raises ValueError, with the nearest good values, unless `parts` divides `value`."""
    if value < 1 or value % parts:
        near = sorted({max(value // parts, 1) * parts, (max(value, 0) // parts + 1) * parts})
        raise errors.UserError(
            f"{key}={value} must be a positive multiple of {what}; the nearest: "
            f"{' or '.join(map(str, near))}."
        )


def _eval_batches(
    examples: data.Examples, mesh: jax.sharding.Mesh, batch_size: int
) -> Iterator[dict[str, jax.Array]]:
    sharding = mesh_lib.sharding(mesh, mesh_lib.REPLICAS)
    size = data.num_examples(examples)
    mine = _addressable_rows(sharding, batch_size)
    for start in range(0, size, batch_size):
        rows = start + mine
        batch = {**data.take(examples, np.minimum(rows, size - 1)), "_mask": rows < size}
        yield {
            name: jax.make_array_from_callback(
                (batch_size, *array.shape[1:]), sharding, functools.partial(_take, array, mine)
            )
            for name, array in batch.items()
        }


def _addressable_rows(sharding: jax.sharding.NamedSharding, rows: int) -> np.ndarray:
    """The rows of an array, of so many, that this process's devices hold."""
    places = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index] for index in places if index]))


def _take(array: np.ndarray, mine: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
    """A device's rows, from those of the process."""
    start, stop, _ = index[0].indices(int(mine[-1]) + 1)
    first = int(np.searchsorted(mine, start))
    return array[first : first + stop - start]


def _plain(state: Any) -> Any:
    return {_BYTES: base64.b64encode(state).decode()} if isinstance(state, bytes) else state


def _unplain(state: Any) -> Any:
    known = isinstance(state, dict) and state.keys() == {_BYTES}
    return base64.b64decode(state[_BYTES]) if known else state
