"""The parameters that a loss depends on."""

from collections.abc import Callable, Container
from typing import Any

import jax

from xshard.optimizers import trees


class Reached:
    """The parameters that values depend on, as differentiating these shows.

    What JAX hands a derivative on to counts: neither `lax.stop_gradient`, nor what is computed beside a
    value. A derivative that happens to be zero counts, and so does one that JAX does not know to be, such as
    behind a `lax.optimization_barrier`.

    Attributes:
      paths: their paths, known once the backward passes have been traced.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def watch(self, params: trees.Params, paths: Container[str]) -> trees.Params:
        """The same parameters, of which those of the paths are noted when a backward pass comes to them."""
        leaves = trees.leaves_by_path(params)
        for path in leaves:
            if path in paths:
                leaves[path] = self._identity(path)(leaves[path])
        return trees.rebuild(params, leaves)

    def _identity(self, path: str) -> Callable[[Any], Any]:
        """A function that returns its argument, and whose backward pass notes the path."""
        same = jax.custom_vjp(lambda x: x)

        def backward(_: None, cotangent: Any) -> tuple[Any]:
            # What JAX knows to be zero it computes as a symbol.
            if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
                self.paths.add(path)
            return (cotangent,)

        same.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
        return same
