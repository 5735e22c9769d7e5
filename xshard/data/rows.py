"""The assignment of a batch's rows to devices and processes."""

from typing import Any

import jax
import numpy as np

from xshard import data, logical


class Rows:
    """The placement of a batch's rows along the replicas of a mesh, the same for every
    batch.
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
          groups: the number of groups with their own rows.

        Attributes:
          batch_size: the argument.
          count: the number of rows on all devices, including padding.
          local_rows: the rows on this process's devices, ascending, without duplicates.
        """
        places = replicas.rows(batch_size) if replicas else batch_size
        of_group = np.minimum(np.arange(places), batch_size - 1)
        row_of_slot = np.concatenate(
            [group * batch_size + of_group for group in range(groups)]
        )
        here = sharding.addressable_devices_indices_map(row_of_slot.shape).values()
        self.batch_size, self.count = batch_size, len(row_of_slot)
        self.local_rows = np.unique(
            np.concatenate([row_of_slot[index] for index in here if index])
        )
        self._sharding = sharding
        # For each row on the devices, its index in `local_rows`.
        self._at = np.searchsorted(self.local_rows, row_of_slot)

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
            array = np.array(array) if copy and isinstance(array, np.ndarray) else array
            shape = self.count, *array.shape[1:]
            take = lambda index: self._take(array, index)
            return jax.make_array_from_callback(shape, self._sharding, take)

        return {name: put(array) for name, array in arrays.items()}

    def _take(self, array: np.ndarray, index: tuple[Any, ...]) -> np.ndarray:
        """Returns a device's rows, from the process's rows."""
        at = self._at[index[0]]
        # Contiguous rows, as without padding, are a view.
        if at[-1] - at[0] == len(at) - 1:
            return array[at[0] : at[-1] + 1]
        return array[at]
