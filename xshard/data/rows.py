"""The assignment of a batch's rows to devices and processes."""

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
        # For each row on the devices, its index in `local_rows`.
        self._local_index = np.searchsorted(self.local_rows, rows)
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
            return jax.make_array_from_callback(
                shape, self._sharding, lambda index: self._take(array, index)
            )

        return {name: put(array) for name, array in arrays.items()}

    def join_on_devices(self, batches: Sequence[data.Arrays]) -> dict[str, jax.Array]:
        """Puts this process's rows of several batches on its devices, as one batch.

        A device holds its rows of the first batch, then those of the second, and so on.
        So the rows of a replica do not depend on how many processes there are.

        Args:
          batches: the arrays by name, of each batch.
        """

        def put(name: str) -> jax.Array:
            shape = (len(batches) * self.count, *batches[0][name].shape[1:])

            def rows_of_device(index: Any) -> np.ndarray:
                # A device's part of the joined batch begins where its part of one batch
                # would, times the number of batches.
                start, stop, _ = index[0].indices(shape[0])
                part = slice(start // len(batches), stop // len(batches))
                taken = [self._take(batch[name], (part,)) for batch in batches]
                return np.concatenate(taken)

            return jax.make_array_from_callback(shape, self._sharding, rows_of_device)

        return {name: put(name) for name in batches[0]}

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
            start, stop, _ = index[0].indices(len(rows))
            part = self._rows[start // count : stop // count]
            numbers[index] = np.repeat(np.arange(count), len(part))
            rows[index] = np.tile(part, count)
        return numbers, rows

    def _take(self, array: np.ndarray, index: Any) -> np.ndarray:
        """Returns a device's rows, from the process's rows."""
        rows = self._local_index[index[0]]
        # Contiguous rows, as without padding, are a view.
        if rows[-1] - rows[0] == len(rows) - 1:
            return array[rows[0] : rows[-1] + 1]
        return array[rows]
