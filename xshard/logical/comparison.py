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
from xshard.logical.segments import Mapped


class Comparison:
    """Compares the parts of one call of a function.

    Attributes:
      differing: the names of the parts that computed other bits than one device did.
    """

    def __init__(self, on: jax.sharding.Mesh, jit: Callable[..., Any]):
        """Chooses the first device of this process.

        Args:
          on: the mesh that the function is called on.
          jit: compiles a part, with the options that its own compilation has.
        """
        index = jax.process_index()
        self._device = next(x for x in on.devices.flat if x.process_index == index)
        self._mesh = mesh_lib.of_one_device(on, self._device)
        self._jit = jit
        self.differing: list[str] = []

    def on_one_device(self, part: Mapped, *args: Any) -> Any:
        """Returns what a part computes from the arrays of the device, if it is compiled
        for this device alone.
        """
        whole = mesh_lib.sharding(self._mesh)
        return self._jit(part.on(self._mesh))(*jax.device_put(self._held(args), whole))

    def compare(self, what: str, expected: Any, made: Any) -> None:
        """Records a part if its results differ.

        Args:
          what: the name of the part.
          expected: the results of `on_one_device`.
          made: the results on all devices.
        """
        pairs = zip(
            jax.tree.leaves(expected), jax.tree.leaves(self._held(made)), strict=True
        )
        if not all(_has_same_bits(x, y) for x, y in pairs):
            self.differing.append(what)

    def _held(self, arrays: Any) -> Any:
        """Returns what the device holds of arrays."""

        def held(array: jax.Array) -> Any:
            parts = [
                x.data for x in array.addressable_shards if x.device == self._device
            ]
            return parts[0]

        return jax.tree.map(held, arrays)


def _has_same_bits(x: jax.Array, y: jax.Array) -> bool:
    """Returns whether arrays have the same bytes. A NaN equals itself."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()
