"""In-memory data as batches that lie on the mesh.

The batch of a step is a pure function of the seed and the step's number, so that the position in the
data is the step, and a resumed run sees what an uninterrupted one would have seen.
"""

import functools
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from xshard import mesh as mesh_lib

Arrays = Mapping[str, np.ndarray]


class TrainBatches:
    """The batches of a training run.

    Each epoch is a fresh permutation of the examples; what is left at its end, less than a batch, is
    dropped. Group g of several has an order of its own, folded from the seed and g.
    """

    def __init__(
        self,
        data: Arrays,
        mesh: jax.sharding.Mesh,
        *,
        batch_size: int,
        seed: int,
        micro_batches: int = 1,
    ):
        """Checks the sizes.

        Args:
          data: arrays of one leading dimension, the examples.
          mesh: the run's mesh.
          batch_size: the examples that one model's gradient is the mean over, on all its replicas.
          seed: the seed of the order.
          micro_batches: the parts that each replica computes one after the other.

        Raises:
          ValueError: if the batch does not divide into replicas and micro-batches, or is larger than
            the data.
        """
        self._data = dict(data)
        self._size = num_examples(data)
        check_train_batch(batch_size, mesh, micro_batches)
        if batch_size > self._size:
            raise ValueError(f"batch_size={batch_size} must be at most the {self._size} examples.")
        self._batch_size = batch_size
        self._seed = seed
        self._groups = mesh_lib.num_groups(mesh)
        self._sharding = mesh_lib.sharding(mesh, mesh_lib.BATCH)
        self._epochs: dict[int, tuple[int, np.ndarray]] = {}

    def __call__(self, step: int) -> dict[str, jax.Array]:
        """The batch of a step, of (groups * batch_size) rows along ('group', 'slice', 'replica')."""
        rows = np.concatenate([self._rows(step, group) for group in range(self._groups)])
        return {
            name: jax.make_array_from_callback(
                (len(rows), *array.shape[1:]),
                self._sharding,
                functools.partial(_take, array, rows),
            )
            for name, array in self._data.items()
        }

    def position(self, step: int) -> dict[str, int]:
        """Where the run stands in its data after a step, to be saved with it."""
        return {"step": step, "examples": self._size}

    def check_position(self, position: dict[str, int]) -> None:
        """Raises ValueError if a saved position is one in other data: its batches would not be these."""
        if position["examples"] != self._size:
            raise ValueError(
                f"The checkpoint of step {position['step']} was made with {position['examples']} training "
                f"examples, and there are {self._size} now: going on would not be the same run. Give it its "
                "data back, or begin anew in another directory with --init_from."
            )

    def _rows(self, step: int, group: int) -> np.ndarray:
        epoch, position = divmod(step, self._size // self._batch_size)
        if self._epochs.get(group, (-1,))[0] != epoch:
            rng = np.random.default_rng([self._seed, group, epoch])
            self._epochs[group] = (epoch, rng.permutation(self._size))
        start = position * self._batch_size
        return self._epochs[group][1][start : start + self._batch_size]


def eval_batches(
    data: Arrays, mesh: jax.sharding.Mesh, batch_size: int
) -> Iterator[dict[str, jax.Array]]:
    """All examples once, in order, along ('slice', 'replica') and equal for all groups.

    The last batch is filled up; '_mask' is False where a row is no example.

    Raises:
      ValueError: if the replicas do not divide the batch.
    """
    replicas = mesh_lib.num_replicas(mesh)
    check_batch_size("eval_batch_size", batch_size, replicas, f"replicas = {replicas}")
    return _eval_batches(data, mesh, batch_size)


def num_examples(data: Arrays) -> int:
    """The number of examples; ValueError unless all arrays agree on it."""
    sizes = {name: len(array) for name, array in data.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise ValueError(f"All arrays of the data must have as many examples, and some: {sizes}.")
    return next(iter(sizes.values()))


def check_train_batch(batch_size: int, mesh: jax.sharding.Mesh, micro_batches: int) -> None:
    """Raises ValueError unless a batch divides into replicas and micro-batches."""
    parts = mesh_lib.num_replicas(mesh) * micro_batches
    check_batch_size("batch_size", batch_size, parts, f"replicas x micro_batches = {parts}")


def check_batch_size(key: str, value: int, parts: int, what: str) -> None:
    """Raises ValueError, with the nearest good values, unless `parts` divides `value`."""
    if value < 1 or value % parts:
        near = sorted({max(value // parts, 1) * parts, (max(value, 0) // parts + 1) * parts})
        raise ValueError(
            f"{key}={value} must be a positive multiple of {what}; the nearest: "
            f"{' or '.join(map(str, near))}."
        )


def _take(array: np.ndarray, rows: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
    return array[rows[index[0]]]


def _eval_batches(
    data: Arrays, mesh: jax.sharding.Mesh, batch_size: int
) -> Iterator[dict[str, jax.Array]]:
    sharding = mesh_lib.sharding(mesh, mesh_lib.REPLICAS)
    size = num_examples(data)
    for start in range(0, size, batch_size):
        rows = np.arange(start, start + batch_size)
        batch = {name: array[np.minimum(rows, size - 1)] for name, array in data.items()}
        batch["_mask"] = rows < size
        yield {
            name: jax.make_array_from_callback(
                array.shape, sharding, functools.partial(_take, array, np.arange(batch_size))
            )
            for name, array in batch.items()
        }
