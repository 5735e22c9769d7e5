"""The parameters that a loss depends on, as its differentiation shows."""

from collections.abc import Callable, Container
from typing import Any

import jax

from xshard.optimizers import trees


class DependenceTracker:
    """Records the parameters that losses depend on.

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
        """Returns the same parameters; a backward pass records which it reaches.

        Args:
          params: a Haiku tree.
          paths: the paths of the parameters to record.
        """
        leaves = trees.leaves_by_path(params)
        for path in leaves:
            if path in paths:
                identity = self._recording_identity(path)
                leaves[path] = identity(leaves[path])
        return trees.rebuild(params, leaves)

    def _recording_identity(self, path: str) -> Callable[[Any], Any]:
        """Returns an identity whose backward pass records a path."""
        identity = jax.custom_vjp(lambda x: x)

        def forward(x: Any) -> tuple[Any, None]:
            # With `symbolic_zeros` the argument comes in a wrapper.
            return x.value, None

        def backward(_: None, cotangent: Any) -> tuple[Any]:
            # JAX represents a derivative that it knows to be zero as a symbol.
            if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
                self.paths.add(path)
            return (cotangent,)

        identity.defvjp(forward, backward, symbolic_zeros=True)
        return identity
