"""The assignment of a batch's rows to devices and processes."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xshard import data, logical


class Rows:
    """The placement of a batch's rows along the replicas of a mesh.

    It is the same for every batch.

    Attributes:
      batch_size: the number of rows of one group's batch.
      count: the number of rows on all devices, including padding.
      local_rows: the rows on this process's devices, ascending, without duplicates.
    """

    def __init__(
        self,
        batch_size: int,
        sharding: jax.sharding.NamedSharding,
        replicas: logical.Replicas | None,
        groups: int = 1,
    ):
        """Computes the rows that each device holds.

        Args:
          batch_size: the number of rows of one group's batch.
          sharding: the sharding of a batch's arrays.
          replicas: the logical replicas, if there are any. Their padding repeats the
            last row.
          groups: the number of groups with different rows.
        """
        padded_size = batch_size
        if replicas is not None:
            padded_size = replicas.rows(batch_size)
        rows_of_group = np.minimum(np.arange(padded_size), batch_size - 1)
        # For each row on the devices, the row of the batch that it holds.
        rows = np.concatenate(
            [group * batch_size + rows_of_group for group in range(groups)]
        )
        local_rows = []
        for index in sharding.addressable_devices_indices_map(rows.shape).values():
            # JAX has no index for a device on which the array does not lie.
            if index:
                local_rows.append(rows[index])
        self.batch_size = batch_size
        self.count = len(rows)
        self.local_rows = np.unique(np.concatenate(local_rows))
        self._sharding = sharding
        # The number of replicas that each device holds rows of, one after the other.
        self._rounds = 1 if replicas is None else replicas.rounds
        # Of the batches of several steps, one after the other.
        self._stacked_sharding = jax.NamedSharding(
            sharding.mesh, jax.P(None, *sharding.spec)
        )
        # For each row on the devices, its index in `local_rows`.
        self._local_index = np.searchsorted(self.local_rows, rows)
        # Whether the process's rows are those of the devices, in their order, so that
        # JAX can divide them by itself, which is faster.
        are_in_order = np.array_equal(self._local_index, np.arange(len(rows)))
        self._are_whole = are_in_order and sharding.is_fully_addressable
        self._rows = rows

    def to_devices(
        self, arrays: data.Arrays, *, copy: bool = False
    ) -> dict[str, jax.Array]:
        """Puts this process's rows of arrays on its devices.

        Args:
          arrays: the arrays by name.
          copy: whether the caller may write into the arrays again. JAX may read them
            later, or keep them as they are.
        """

        def put(array: np.ndarray) -> jax.Array:
            if copy and isinstance(array, np.ndarray):
                array = np.array(array)
            shape = (self.count, *array.shape[1:])

            def rows_of_device(index: Any) -> np.ndarray:
                return array[self._local(index[0])]

            return jax.make_array_from_callback(shape, self._sharding, rows_of_device)

        return {name: put(array) for name, array in arrays.items()}

    def join_on_devices(self, batches: Sequence[data.Arrays]) -> dict[str, jax.Array]:
        """Puts this process's rows of several batches on its devices, as one batch.

        A replica has its rows of the first batch, then those of the second, and so on.
        So its rows depend neither on how many processes there are, nor, if it is a
        logical replica, on how many others share its device.

        Args:
          batches: the arrays by name, of each batch.
        """

        def put(name: str) -> jax.Array:
            shape = (len(batches) * self.count, *batches[0][name].shape[1:])

            def rows_of_device(index: Any) -> np.ndarray:
                taken = []
                for part in self._parts_of_replicas(index[0], shape[0], len(batches)):
                    rows = self._local(part)
                    taken += [batch[name][rows] for batch in batches]
                return np.concatenate(taken)

            return jax.make_array_from_callback(shape, self._sharding, rows_of_device)

        return {name: put(name) for name in batches[0]}

    def stack_on_devices(self, arrays: data.Arrays) -> dict[str, jax.Array]:
        """Puts this process's rows of the batches of several steps on its devices.

        Args:
          arrays: the arrays by name, of shape (steps, joined, rows, ...): each step's
            batch joins `joined` batches, as in `join_on_devices`. The caller does not
            write into them again.

        Returns:
          Arrays of shape (steps, rows on all devices, ...).
        """
        if self._are_whole and all(array.shape[1] == 1 for array in arrays.values()):
            batches = {name: array[:, 0] for name, array in arrays.items()}
            return jax.device_put(batches, self._stacked_sharding)

        def put(array: np.ndarray) -> jax.Array:
            steps, joined = array.shape[:2]
            shape = (steps, joined * self.count, *array.shape[3:])

            def rows_of_device(index: Any) -> np.ndarray:
                taken = []
                for part in self._parts_of_replicas(index[1], shape[1], joined):
                    rows = array[:, :, self._local(part)]
                    # No -1: rows may have no columns.
                    shape_of_part = (steps, joined * rows.shape[2], *array.shape[3:])
                    taken.append(rows.reshape(shape_of_part))
                return taken[0] if len(taken) == 1 else np.concatenate(taken, axis=1)

            return jax.make_array_from_callback(
                shape, self._stacked_sharding, rows_of_device
            )

        return {name: put(array) for name, array in arrays.items()}

    def origins(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns where each row of a batch comes from that joins several.

        Args:
          count: the number of batches that are joined.

        Returns:
          For each row on the devices, the number of its batch, from 0, and its row
          there. The rows of a group g begin at g * batch_size.
        """
        numbers = np.empty(count * self.count, int)
        rows = np.empty(count * self.count, int)
        for index in self._sharding.devices_indices_map(rows.shape).values():
            parts = self._parts_of_replicas(index[0], len(rows), count)
            rows_of_device = [self._rows[part] for part in parts]
            numbers[index] = np.concatenate(
                [np.repeat(np.arange(count), len(part)) for part in rows_of_device]
            )
            rows[index] = np.concatenate(
                [np.tile(part, count) for part in rows_of_device]
            )
        return numbers, rows

    def _parts_of_replicas(self, index: slice, size: int, count: int) -> list[slice]:
        """Returns the rows of one batch that each replica of a device has.

        Args:
          index: the device's part of a batch that joins several.
          size: the number of rows of that batch.
          count: the number of batches that are joined.
        """
        # A device's part of the joined batch begins where its part of one batch would,
        # times the number of batches.
        start, stop, _ = index.indices(size)
        ends = np.linspace(start // count, stop // count, self._rounds + 1, dtype=int)
        return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]

    def _local(self, part: slice) -> Any:
        """Returns the index of some rows on the devices among the process's rows."""
        rows = self._local_index[part]
        # Contiguous rows, as without padding, are a view.
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(rows[0], rows[-1] + 1)
        return rows
