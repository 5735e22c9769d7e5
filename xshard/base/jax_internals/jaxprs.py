"""The classes of traced programs, and what a program consists of."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend import core, source_info_util
from jax.interpreters import partial_eval

# The classes of traced programs, which the checks before a run read; JAX has no public
# ones.
Jaxpr = core.Jaxpr
Literal = core.Literal
Primitive = core.Primitive
# In JAX 0.10 a program with its constants is a class of its own. From 0.11 on, a Jaxpr
# has its constants, and this is another name for it, which can go with JAX 0.10.
ClosedJaxpr = core.ClosedJaxpr


def closed(program: Any) -> ClosedJaxpr:
    """Returns a program with its constants, from one with or without.

    In JAX 0.10 an equation's parameter may be either. From 0.11 on all programs have
    their constants, and `closed` can go with JAX 0.10.
    """
    # `ClosedJaxpr(program, ())` would drop the constants that a program of JAX 0.11
    # has.
    return program if hasattr(program, "consts") else core.ClosedJaxpr(program, ())


def opened(program: Any) -> Jaxpr:
    """Returns a program without its constants, from one with or without.

    It can go with JAX 0.10, as `closed`.
    """
    if isinstance(program, core.ClosedJaxpr):
        return program.jaxpr
    return program


def as_function(program: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns the function of a program: of its arguments, to the list of results."""
    return core.jaxpr_as_fun(program)


def with_constants_as_arguments(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose first arguments are the constants of the given one."""
    jaxpr = program.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    return core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=inputs), [])


def without_mesh(x: jax.Array) -> jax.Array:
    """Returns the same array, which JAX no longer types as one on a mesh.

    JAX gives each value in a trace the mesh that it lies on, and a program traced for
    values on a mesh does not accept one device's part of them. It can go when
    `jax.shard_map` accepts such programs.
    """
    return _unchanged(x.shape, x.dtype)(x)[0]


# A step calls it for each array.
@functools.lru_cache(maxsize=4096)
def _unchanged(shape: tuple[int, ...], dtype: Any) -> Callable[..., list[Any]]:
    program = jax.make_jaxpr(jax.jit(lambda x: x))(jax.ShapeDtypeStruct(shape, dtype))
    return as_function(program)


def inner_programs(eqn: Any) -> Iterator[Jaxpr]:
    """Yields the programs in an equation's parameters, such as the body of a loop."""
    return core.jaxprs_in_params(eqn.params)


def argument_names(eqn: Any) -> tuple[str, ...]:
    """Returns the names of the arrays that a call of a jitted function is given.

    One is "tree['linear']['w']". Errors name an array by them. JAX records them for its
    own errors, and has no public way to read them.
    """
    return opened(eqn.params["jaxpr"]).debug_info.arg_names or ()


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns the number of constants and of carried arrays of a scan.

    They come first in its inputs, in this order. The carried arrays are its first
    results. The parameters of JAX 0.10 can go with it.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carried, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carried)


def without_dead_code(
    program: ClosedJaxpr, used: Sequence[bool], *, keep_inputs: bool = False
) -> tuple[ClosedJaxpr, list[bool]]:
    """Returns the part of a program that computes some of its outputs.

    Args:
      program: the program.
      used: for each output, whether the part computes it.
      keep_inputs: whether the part has all inputs, also those that it does not use.

    Returns:
      The part, and for each input of the program whether the part has it.
    """
    jaxpr, reads = partial_eval.dce_jaxpr(program.jaxpr, used, instantiate=keep_inputs)
    return core.ClosedJaxpr(jaxpr, program.consts), reads


def at_line_of(eqn: Any) -> AbstractContextManager[None]:
    """Gives what is traced in the context an equation's line in the user's code."""
    return source_info_util.user_context(eqn.source_info.traceback)
