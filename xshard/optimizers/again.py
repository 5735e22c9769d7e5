"""What a network computes again for its backward pass, in a program of which another policy says what is kept.

Of two `jax.checkpoint`, one within the other, JAX takes the policy of the outer one for both.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from xshard.optimizers import dependence, primitives


def is_in(jaxpr: core.Jaxpr) -> bool:
    """Returns whether a program computes anything again for its backward pass."""
    return any(eqn.primitive.name == "remat2" or _holds(eqn) for eqn in jaxpr.eqns)


def run(program: core.ClosedJaxpr, *args: Any) -> list[Any]:
    """The results of a program, of which what is computed again stays so within another `jax.checkpoint`."""

    def of_equation(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        # The names that profiles show.
        with jax.named_scope(str(eqn.source_info.name_stack)):
            return _results(eqn, inputs)

    return primitives.evaluate(program.jaxpr, program.consts, args, of_equation)


def _holds(eqn: Any) -> bool:
    return any(is_in(jaxpr) for jaxpr in core.jaxprs_in_params(eqn.params))


def _results(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name == "remat2":
        return _computed_again(params)(*inputs)
    if name == "jit" and _holds(eqn):
        return run(params["jaxpr"], *inputs)
    if name == "scan" and _holds(eqn):
        body = params["jaxpr"]
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in body.in_avals
        ]
        params = {**params, "jaxpr": jax.make_jaxpr(lambda *xs: run(body, *xs))(*shapes)}
        return eqn.primitive.bind(*inputs, **params)
    return primitives.bind(eqn, *inputs)


def _computed_again(params: Any) -> Any:
    """The function of a `jax.checkpoint`, which keeps its arguments alone, whatever is around it."""
    function = core.jaxpr_as_fun(core.ClosedJaxpr(params["jaxpr"], ()))
    again = jax.checkpoint(function, policy=params["policy"])

    def backward(inputs: Any, grads: Any) -> tuple[Any, ...]:
        reached = dependence.Reached()
        named = {str(i): x for i, x in enumerate(inputs)}
        floating = [path for path, x in named.items() if jnp.issubdtype(x.dtype, jnp.inexact)]

        def watched(*xs: Any) -> Any:
            noted = reached.watch(dict(zip(named, xs, strict=True)), floating)
            # In their order, which is not that of their names.
            return again(*[noted[path] for path in named])

        _, pull = jax.vjp(watched, *inputs)
        # None is no gradient, where zeros would be one.
        return tuple(
            grad if path in reached.paths else None
            for path, grad in zip(named, pull(grads), strict=True)
        )

    kept = jax.custom_vjp(function)
    kept.defvjp(lambda *inputs: (function(*inputs), inputs), backward)
    return kept
