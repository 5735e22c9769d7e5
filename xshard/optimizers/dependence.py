"""The parameters that a loss depends on."""

from collections.abc import Callable, Container
from typing import Any

import jax

from xshard.optimizers import trees


class DependenceTracker:
    """Records the parameters that values depend on, as their differentiation shows.

    A parameter counts if JAX propagates a derivative to it. Those behind
    `lax.stop_gradient`, or used only in computations that do not affect the value, do
    not count. A derivative that happens to be zero counts, and so does one that JAX
    cannot tell to be zero, such as behind a `lax.optimization_barrier`.

    Attributes:
      paths: the paths of the parameters, complete once the backward passes have been
        traced.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def watch(self, params: trees.Params, paths: Container[str]) -> trees.Params:
        """The same parameters. Each of those in `paths` is recorded when a backward
        pass reaches it.
        """
        leaves = trees.leaves_by_path(params)
        for path in leaves:
            if path in paths:
                leaves[path] = self._identity(path)(leaves[path])
        return trees.rebuild(params, leaves)

    def _identity(self, path: str) -> Callable[[Any], Any]:
        """A function that returns its argument, and whose backward pass records the
        path.
        """
        same = jax.custom_vjp(lambda x: x)

        def backward(_: None, cotangent: Any) -> tuple[Any]:
            # JAX represents a derivative that it knows to be zero as a symbol.
            if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
                self.paths.add(path)
            return (cotangent,)

        same.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
        return same
