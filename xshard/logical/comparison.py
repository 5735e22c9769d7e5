"""A comparison of what a program computes on several devices with what it would on one.

JAX's compilers do not promise that a program rounds alike for any number of devices.
Where exact sums rely on it, this looks: a part of the program is compiled once more,
for one device, and applied to the arrays of that device.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xshard import mesh as mesh_lib
from xshard.base import places
from xshard.logical.segments import Mapped


class Comparison:
    """Compares the parts of one call of a function.

    Attributes:
      differing: the names of the parts that computed other bits than one device did.
    """

    def __init__(self, mesh: jax.sharding.Mesh, jit: Callable[..., Any]):
        """Chooses the first device of this process.

        Args:
          mesh: the mesh of devices that the function is called on.
          jit: compiles a part, with the options that its own compilation has.
        """
        process = places.own().index
        local = [x for x in mesh.devices.flat if x.process_index == process]
        self.differing: list[str] = []
        self._device = local[0]
        self._mesh = mesh_lib.of_one_device(mesh, self._device)
        self._jit = jit

    def on_one_device(self, part: Mapped, *args: Any) -> Any:
        """Computes a part as if the device were the only one.

        Args:
          part: the part.
          *args: its arguments on all devices.

        Returns:
          The results for the arrays that the device holds.
        """
        args = jax.device_put(self._local_shards(args), mesh_lib.sharding(self._mesh))
        return self._jit(part.on(self._mesh))(*args)

    def compare(self, what: str, expected: Any, made: Any) -> None:
        """Records a part if its results differ.

        Args:
          what: the name of the part.
          expected: the results of `on_one_device`.
          made: the results on all devices.
        """
        expected_leaves = jax.tree.leaves(expected)
        made_leaves = jax.tree.leaves(self._local_shards(made))
        for x, y in zip(expected_leaves, made_leaves, strict=True):
            if not _has_same_bits(x, y):
                self.differing.append(what)
                return

    def _local_shards(self, arrays: Any) -> Any:
        """Returns the device's shard of each array."""

        def local_shard(array: jax.Array) -> jax.Array:
            for shard in array.addressable_shards:
                if shard.device == self._device:
                    return shard.data
            raise AssertionError(f"{self._device} has no shard of {array.sharding}.")

        return jax.tree.map(local_shard, arrays)


def _has_same_bits(x: jax.Array, y: jax.Array) -> bool:
    """Returns whether arrays have the same bytes. A NaN equals itself."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
        y = jax.random.key_data(y)
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()
