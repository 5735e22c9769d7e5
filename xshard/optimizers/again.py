"""What a network computes again for its backward pass, in a program of which another policy says what is kept.

Of two `jax.checkpoint`, one within the other, JAX takes the policy of the outer one for both.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from xshard.optimizers import dependence


def is_in(jaxpr: core.Jaxpr) -> bool:
    """Returns whether a program computes anything again for its backward pass."""
    return any(eqn.primitive.name == "remat2" or _holds(eqn) for eqn in jaxpr.eqns)


def run(program: core.ClosedJaxpr, *args: Any) -> list[Any]:
    """The results of a program, of which what is computed again stays so within another `jax.checkpoint`."""
    jaxpr = program.jaxpr
    found = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))
    read = lambda x: x.val if isinstance(x, core.Literal) else found[x]
    for eqn in jaxpr.eqns:
        # The names that profiles show.
        with jax.named_scope(str(eqn.source_info.name_stack)):
            results = _results(eqn, [read(x) for x in eqn.invars])
        found.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


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
    results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


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
