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

    def _take(self, array: np.ndarray, index: Any) -> np.ndarray:
        """Returns a device's rows, from the process's rows."""
        rows = self._local_index[index[0]]
        # Contiguous rows, as without padding, are a view.
        if rows[-1] - rows[0] == len(rows) - 1:
            return array[rows[0] : rows[-1] + 1]
        return array[rows]
