"""The rows of a batch, on the devices and processes that hold them."""

from typing import Any

import jax
import numpy as np

from xshard import data, logical


class Rows:
    """The rows of a batch along the replicas of a mesh, which stay where they are from batch to batch."""

    def __init__(
        self,
        batch_size: int,
        sharding: jax.sharding.NamedSharding,
        replicas: logical.Replicas | None,
        groups: int = 1,
    ):
        """Finds who holds which.

        Args:
          batch_size: the rows of a batch, of one group.
          sharding: that of a batch's arrays.
          replicas: the logical replicas, if there are any. The last row fills the places where there is none.
          groups: the groups that have rows of their own.

        Attributes:
          batch_size: as given.
          count: the rows that lie on all devices, those that fill places among them.
          mine: the rows that this process's devices hold, ascending, each once.
        """
        places = replicas.rows(batch_size) if replicas else batch_size
        of_group = np.minimum(np.arange(places), batch_size - 1)
        lying = np.concatenate([group * batch_size + of_group for group in range(groups)])
        here = sharding.addressable_devices_indices_map(lying.shape).values()
        self.batch_size, self.count = batch_size, len(lying)
        self.mine = np.unique(np.concatenate([lying[index] for index in here if index]))
        self._sharding = sharding
        # Of each row on the devices its place among this process's.
        self._at = np.searchsorted(self.mine, lying)

    def lay(self, arrays: data.Arrays) -> dict[str, jax.Array]:
        """Lays this process's rows of arrays on its devices."""

        def put(array: np.ndarray) -> jax.Array:
            shape = self.count, *array.shape[1:]
            take = lambda index: self._take(array, index)
            return jax.make_array_from_callback(shape, self._sharding, take)

        return {name: put(array) for name, array in arrays.items()}

    def _take(self, array: np.ndarray, index: tuple[Any, ...]) -> np.ndarray:
        """A device's rows, from those of the process."""
        at = self._at[index[0]]
        # No copy, where no row fills a place.
        return array[at[0] : at[-1] + 1] if at[-1] - at[0] == len(at) - 1 else array[at]
