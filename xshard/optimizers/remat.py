"""A network's own `jax.checkpoint` regions, preserved inside another `jax.checkpoint`
with a different policy.

For nested `jax.checkpoint` calls, JAX applies the outer policy to both. This module
keeps the inner one in force.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xshard import jax_internals
from xshard.optimizers import dependence, primitives


def is_in(jaxpr: jax_internals.Jaxpr) -> bool:
    """Returns whether a program contains a `jax.checkpoint`, which recomputes values
    for the backward pass.
    """
    return any(
        eqn.primitive.name == "remat2" for eqn in primitives.all_equations(jaxpr)
    )


def run(program: jax_internals.ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluates a program so that its `jax.checkpoint` regions keep their policies
    inside another one.
    """
    return primitives.evaluate(program, args, _results)


def _results(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    # Keeps the scope names, which profiles show.
    with jax.named_scope(str(eqn.source_info.name_stack)):
        if name == "remat2":
            return _computed_again(params)(*inputs)
        if name not in ("jit", "scan") or not is_in(params["jaxpr"].jaxpr):
            return primitives.bind(eqn, *inputs)
        run_inner = functools.partial(run, params["jaxpr"])
        if name == "jit":
            return run_inner(*inputs)
        body = jax.make_jaxpr(run_inner)(*params["jaxpr"].in_avals)
        return primitives.bind(eqn, *inputs, jaxpr=body)


def _computed_again(params: Any) -> Any:
    """The function of a `jax.checkpoint`, as a custom_vjp that saves only its arguments
    under any outer policy.
    """
    function = jax_internals.as_function(jax_internals.closed(params["jaxpr"]))
    again = jax.checkpoint(function, policy=params["policy"])

    def backward(inputs: Any, grads: Any) -> tuple[Any, ...]:
        reached = dependence.DependenceTracker()
        named = {str(i): x for i, x in enumerate(inputs)}
        floating = [
            path for path, x in named.items() if jnp.issubdtype(x.dtype, jnp.inexact)
        ]

        def watched(*xs: Any) -> Any:
            noted = reached.watch(dict(zip(named, xs, strict=True)), floating)
            # The tree is sorted by name, so the arguments' own order is restored here.
            return again(*[noted[path] for path in named])

        _, pull = jax.vjp(watched, *inputs)
        # None means that no gradient exists. Zeros would count as a gradient.
        return tuple(
            grad if path in reached.paths else None
            for path, grad in zip(named, pull(grads), strict=True)
        )

    kept = jax.custom_vjp(function)
    kept.defvjp(lambda *inputs: (function(*inputs), inputs), backward)
    return kept
