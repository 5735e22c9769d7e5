"""The FLOPs of a traced program: its matrix products and convolutions.

Those of a backward pass can be counted with those of the forward pass. It has one more
product for the gradient of each operand that depends on a trained parameter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xshard import errors
from xshard.base.jax_internals import jaxprs


def of(f: Callable[..., Any], *args: Any) -> int:
    """Returns the FLOPs of a function's matrix products and convolutions.

    - A multiply-add counts as two.
    - The body of a scan counts once per iteration, and a Pallas kernel once per grid
      cell.
    - A conditional counts its most expensive branch. `lax.platform_dependent` counts
      the default branch on any backend, so that a step counts the same on each.
    - The body of `jax.shard_map` counts for all devices of the axes that it maps.
    - A product counts whole even if a part is masked: causal attention counts the whole
      square.
    - Products with a convolution's padding do not count.

    Nothing else counts: no decompositions, no Fourier transforms, no foreign functions.

    Args:
      f: a function.
      args: its arguments; only their shapes and dtypes matter.

    Raises:
      ValueError: if a product is in a `while` loop, since its number of iterations is
        unknown.
    """
    return of_program(jax.make_jaxpr(f)(*args).jaxpr)


def of_program(jaxpr: jaxprs.Jaxpr) -> int:
    """Returns the FLOPs of a traced program, as `of` counts those of a function."""
    return with_backward(jaxpr, [False] * len(jaxpr.invars))


def with_backward(jaxpr: jaxprs.Jaxpr, depends: Sequence[bool]) -> int:
    """Returns the FLOPs of a traced program and of its backward pass.

    Args:
      jaxpr: the program.
      depends: for each of its inputs, whether it depends on a trained parameter.
    """
    count, _ = _of_jaxpr(jaxpr, depends)
    return count


def times(eqn: Any) -> int:
    """Returns how often an equation runs the programs in it, if that is known."""
    return _times(eqn.primitive.name, eqn.params)


def _of_jaxpr(jaxpr: jaxprs.Jaxpr, depends: Sequence[bool]) -> tuple[int, list[bool]]:
    """Counts the FLOPs of a program and of its backward pass.

    Args:
      jaxpr: the program.
      depends: for each of its inputs, whether it depends on a trained parameter.

    Returns:
      The FLOPs, and for each output whether it depends on a trained parameter.
    """
    known = dict(zip(jaxpr.invars, depends, strict=True))

    def lookup(variables: Sequence[Any]) -> list[bool]:
        # Literals and constants depend on nothing.
        is_literal = lambda x: isinstance(x, jaxprs.Literal)
        return [not is_literal(x) and known.get(x, False) for x in variables]

    total = 0
    for eqn in jaxpr.eqns:
        count, outputs = _of_equation(eqn, lookup(eqn.invars))
        total += count
        known.update(zip(eqn.outvars, outputs, strict=True))
    return total, lookup(jaxpr.outvars)


def _of_equation(eqn: Any, depends: list[bool]) -> tuple[int, list[bool]]:
    """Counts an equation as `_of_jaxpr` counts a program."""
    name = eqn.primitive.name
    outputs = [False] * len(eqn.outvars)
    if any(depends) and name not in _WITHOUT_DERIVATIVE:
        outputs = [jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in eqn.outvars]
    if name in _COUNTED:
        # The operands come first; a ragged product also has the sizes of its groups.
        return _COUNTED[name](eqn) * (1 + sum(depends[:2])), outputs
    programs = list(jaxprs.inner_programs(eqn))
    if name == "scan":
        return _of_scan(eqn, programs[0], depends)
    if name == "cond":
        return _of_cond(eqn, programs, depends[1:])
    if len(programs) == 1 and len(programs[0].invars) == len(depends):
        count, outputs = _of_jaxpr(programs[0], depends)
        return count * _times(name, eqn.params), outputs
    # A kernel or a loop, whose inputs do not correspond to those of the equation.
    total = 0
    for program in programs:
        total += _of_jaxpr(program, [False] * len(program.invars))[0]
    if total and name == "while":
        raise errors.UserError(
            "There is a matrix product in a while loop whose number of iterations is "
            "unknown: its model FLOPs cannot be counted. Use jax.lax.scan, or "
            "jax.lax.fori_loop with bounds that are Python integers."
        )
    if any(outputs):
        # As if both operands of each of its products depended on the parameters.
        total *= 3
    return total * _times(name, eqn.params), outputs


def _of_scan(
    eqn: Any, body: jaxprs.Jaxpr, depends: list[bool]
) -> tuple[int, list[bool]]:
    num_consts, num_carried = jaxprs.scan_counts(eqn)
    depends = list(depends)
    carried = slice(num_consts, num_consts + num_carried)
    while True:
        count, outputs = _of_jaxpr(body, depends)
        # What an iteration makes dependent is dependent in the next one.
        pairs = zip(depends[carried], outputs[:num_carried], strict=True)
        joined = [before or after for before, after in pairs]
        if joined == depends[carried]:
            return count * _times("scan", eqn.params), outputs
        depends[carried] = joined


def _of_cond(
    eqn: Any, branches: Sequence[jaxprs.Jaxpr], depends: list[bool]
) -> tuple[int, list[bool]]:
    counted = [_of_jaxpr(branch, depends) for branch in branches]
    counts = [count for count, _ in counted]
    outputs = [any(x) for x in zip(*(outputs for _, outputs in counted), strict=True)]
    # One branch runs. The data, or the backend, decides which one. The platform of a
    # default branch is None.
    platforms = eqn.params.get("branches_platforms") or ()
    if None in platforms:
        return counts[platforms.index(None)], outputs
    return max(counts), outputs


def _times(name: str, params: Mapping[str, Any]) -> int:
    """Returns how often an equation runs the functions in it."""
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":
        sizes = params["mesh"].shape
        return math.prod(sizes[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":
        return math.prod(int(size) for size in params["grid_mapping"].grid)
    return 1


def _products(eqn: Any, contracted: Sequence[int]) -> int:
    """Counts the multiplications of a product.

    Each element of the result is a sum over the contracted dimensions.

    Args:
      eqn: the product's equation.
      contracted: the contracted dimensions of the left operand.
    """
    left = eqn.invars[0].aval.shape
    result = eqn.outvars[0].aval.shape
    return math.prod(result) * math.prod(left[dim] for dim in contracted)


def _dot(eqn: Any) -> int:
    # ((contracted of the left, of the right), (batch of the left, of the right)).
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * _products(eqn, contracted)


def _ragged_dot(eqn: Any) -> int:
    """Counts a product in which each group of rows is multiplied by another matrix.

    Each row is multiplied once.
    """
    dims = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = dims.dot_dimension_numbers
    total = 2 * _products(eqn, contracted)
    if set(dims.lhs_ragged_dimensions) <= set(contracted):
        # The contracted dimension is grouped: each group's result sums only over its
        # own rows.
        sizes = eqn.invars[2].aval
        return total // sizes.shape[-1]
    return total


def _convolution(eqn: Any) -> int:
    params = eqn.params
    left = eqn.invars[0].aval.shape
    kernel = eqn.invars[1].aval.shape
    result = eqn.outvars[0].aval.shape
    # The dimensions of the left operand are (batch, features, *spatial), those of the
    # kernel are (output features, input features, *spatial).
    numbers = params["dimension_numbers"]
    batch, features, *spatial = numbers.out_spec
    input_features = kernel[numbers.rhs_spec[1]]
    total = 2 * result[batch] * result[features] * input_features
    for i, dim in enumerate(spatial):
        total *= taps(
            left[numbers.lhs_spec[2 + i]],
            kernel[numbers.rhs_spec[2 + i]],
            result[dim],
            before=params["padding"][i][0],
            stride=params["window_strides"][i],
            apart=params["lhs_dilation"][i],
            spread=params["rhs_dilation"][i],
        )
    return total


def taps(
    size: int,
    kernel: int,
    result: int,
    *,
    before: int,
    stride: int,
    apart: int,
    spread: int,
) -> int:
    """Counts the multiplications of a convolution in one dimension.

    These are the pairs of a position in the kernel and one in the result that meet an
    element of the input, not the padding or a zero between two elements.

    Args:
      size: the size of the input in this dimension.
      kernel: the size of the kernel.
      result: the size of the result.
      before: the padding before the input.
      stride: the distance between two results.
      apart: the distance between two elements of the input (input dilation); zeros lie
        between them.
      spread: the distance between two elements of the kernel (kernel dilation).
    """
    end = (size - 1) * apart
    count = 0
    for tap in range(kernel):
        first = tap * spread - before
        # Counts the i in range(result) for which first + i * stride is in [0, end] and
        # a multiple of `apart`: positions between two elements of the input hold zeros.
        low = max(0, -(first // stride))
        high = min(result - 1, (end - first) // stride)
        if apart == 1:
            count += max(0, high - low + 1)
        else:
            count += sum(
                (first + i * stride) % apart == 0 for i in range(low, high + 1)
            )
    return count


# What a derivative does not pass.
_WITHOUT_DERIVATIVE = ("stop_gradient",)
_COUNTED: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}
