"""The assignment of a batch's rows to devices and processes."""

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
      rows: for each row on the devices, the row of the batch that it holds; those of
        a group g begin at g * batch_size.
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
        rows = np.concatenate(
            [group * batch_size + rows_of_group for group in range(groups)]
        )
        local_rows = []
        for index in sharding.addressable_devices_indices_map(rows.shape).values():
            # JAX has no index for a device on which the array does not lie.
            if index:
                local_rows.append(rows[index])
        self.batch_size = batch_size
        self.rows = rows
        self.count = len(rows)
        self.local_rows = np.unique(np.concatenate(local_rows))
        self._sharding = sharding
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

    def stack_on_devices(self, arrays: data.Arrays) -> dict[str, jax.Array]:
        """Puts this process's rows of the batches of several steps on its devices.

        Args:
          arrays: the arrays by name, of shape (steps, rows, ...). The caller does not
            write into them again.

        Returns:
          Arrays of shape (steps, rows on all devices, ...).
        """
        if self._are_whole:
            return jax.device_put(dict(arrays), self._stacked_sharding)

        def put(array: np.ndarray) -> jax.Array:
            shape = (len(array), self.count, *array.shape[2:])

            def rows_of_device(index: Any) -> np.ndarray:
                return array[:, self._local(index[1])]

            return jax.make_array_from_callback(
                shape, self._stacked_sharding, rows_of_device
            )

        return {name: put(array) for name, array in arrays.items()}

    def _local(self, part: slice) -> Any:
        """Returns the index of some rows on the devices among the process's rows."""
        rows = self._local_index[part]
        # Contiguous rows, as without padding, are a view.
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(rows[0], rows[-1] + 1)
        return rows
