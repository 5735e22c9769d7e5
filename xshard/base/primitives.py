"""The equations of a program: what they call, the axes of their collectives, and their
evaluation one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xshard.base.jax_internals import jaxprs

# Primitives that call an inner program, and the parameter that holds it. JAX 0.11 has
# no closed_call.
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}


def called(eqn: Any) -> jaxprs.ClosedJaxpr | None:
    """Returns the program that an equation calls once; None for any other equation."""
    parameter = CALLS.get(eqn.primitive.name)
    if parameter is None:
        return None
    return jaxprs.closed(eqn.params[parameter])


def all_equations(jaxpr: jaxprs.Jaxpr) -> Iterator[Any]:
    """Yields the equations of a program and of its inner programs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs.inner_programs(eqn):
            yield from all_equations(inner)


def mapped_axes(eqn: Any) -> list[str]:
    """Returns the mapped axes of a collective."""
    # A collective has them as either of two parameters. Other equations may have
    # dimension numbers there, which are left out.
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    if not isinstance(axes, tuple | list):
        axes = [axes]
    return [axis for axis in axes if isinstance(axis, str)]


def evaluate(
    program: jaxprs.ClosedJaxpr,
    args: Sequence[Any],
    of_equation: Callable[[Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Evaluates a program, one equation after the other.

    What `of_equation` traces keeps the equation's line in the user's code, which the
    replay of a step names.

    Args:
      program: the program.
      args: its arguments.
      of_equation: returns the results of an equation, given it and its operands.

    Returns:
      The results. An argument that the program returns unchanged is the same object.
    """
    jaxpr = program.jaxpr
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(variables, [*program.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, jaxprs.Literal):
            return atom.val
        return values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        with jaxprs.at_line_of(eqn):
            results = of_equation(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(eqn: Any, *arrays: Any, **changed: Any) -> list[Any]:
    """Returns the results of an equation on arrays, with some parameters changed."""
    params = {**eqn.params, **changed}
    if eqn.primitive.name == "convert_element_type":
        # The traced sharding is for whole arrays, and does not fit a shard.
        params["sharding"] = None
    results = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]
