"""The equations of a program: what they call, the axes of their collectives, and their
evaluation one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xshard import jax_internals

# Primitives that call an inner program, and the parameter that holds it. JAX 0.11 has
# no closed_call.
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}


def called(eqn: Any) -> jax_internals.ClosedJaxpr | None:
    """The program that an equation calls once; None for any other equation."""
    if eqn.primitive.name not in CALLS:
        return None
    return jax_internals.closed(eqn.params[CALLS[eqn.primitive.name]])


def all_equations(jaxpr: jax_internals.Jaxpr) -> Iterator[Any]:
    """The equations of a program and of its inner programs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax_internals.inner_programs(eqn):
            yield from all_equations(inner)


def mapped_axes(eqn: Any) -> list[str]:
    """The mapped axes of a collective. Other equations may have dimension numbers
    there, which are left out.
    """
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    if not isinstance(axes, tuple | list):
        axes = [axes]
    return [axis for axis in axes if isinstance(axis, str)]


def evaluate(
    program: jax_internals.ClosedJaxpr,
    args: Sequence[Any],
    of_equation: Callable[[Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Evaluates a program, where each equation's results are `of_equation(eqn,
    operands)`.

    An argument that the program returns unchanged is the same object in the results.
    What `of_equation` traces keeps the equation's line in the user's code, which the
    replay of a step names.
    """
    jaxpr = program.jaxpr
    env = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True)
    )
    read = lambda atom: (
        atom.val if isinstance(atom, jax_internals.Literal) else env[atom]
    )
    for eqn in jaxpr.eqns:
        with jax_internals.at_line_of(eqn):
            results = of_equation(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(eqn: Any, *arrays: Any, **changed: Any) -> list[Any]:
    """The results of an equation on arrays, with some of its parameters changed."""
    params = {**eqn.params, **changed}
    if eqn.primitive.name == "convert_element_type":
        # The traced sharding is for whole arrays, and does not fit a shard.
        params["sharding"] = None
    results = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]
