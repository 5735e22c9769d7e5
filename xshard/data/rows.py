"""The rows of a batch, on the devices and processes that hold them."""

import functools

import jax
import numpy as np

from xshard import data, logical


def lying_rows(batch_size: int, replicas: logical.Replicas | None, groups: int = 1) -> np.ndarray:
    """The rows of a batch as they lie on the devices: the last fills the places where there is no replica."""
    places = replicas.rows(batch_size) if replicas else batch_size
    rows = np.minimum(np.arange(places), batch_size - 1)
    return np.concatenate([group * batch_size + rows for group in range(groups)])


def addressable_rows(sharding: jax.sharding.NamedSharding, lying: np.ndarray) -> np.ndarray:
    """The rows of a batch that this process's devices hold."""
    places = sharding.addressable_devices_indices_map(lying.shape).values()
    return np.unique(np.concatenate([lying[index] for index in places if index]))


def lay(
    arrays: data.Arrays,
    mine: np.ndarray,
    lying: np.ndarray,
    sharding: jax.sharding.NamedSharding,
) -> dict[str, jax.Array]:
    """The rows of this process, as arrays of which each device has its rows."""
    batch: dict[str, jax.Array] = {}
    for name, array in arrays.items():
        take = functools.partial(_take, array, mine, lying)
        shape = len(lying), *array.shape[1:]
        batch[name] = jax.make_array_from_callback(shape, sharding, take)
    return batch


def _take(
    array: np.ndarray, mine: np.ndarray, lying: np.ndarray, index: tuple[slice, ...]
) -> np.ndarray:
    """A device's rows, from those of the process."""
    at = np.searchsorted(mine, lying[index[0]])
    # No copy, where no row fills a place.
    return array[at[0] : at[-1] + 1] if at[-1] - at[0] == len(at) - 1 else array[at]
