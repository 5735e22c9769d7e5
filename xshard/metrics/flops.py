"""The FLOPs of a traced program: its matrix products and convolutions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

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
    total = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _COUNTED:
            total += _COUNTED[name](eqn)
            continue
        counts = [of_program(program) for program in jaxprs.inner_programs(eqn)]
        if name == "while" and any(counts):
            raise errors.UserError(
                "There is a matrix product in a while loop whose number of iterations "
                "is unknown: its model FLOPs cannot be counted. Use jax.lax.scan, or "
                "jax.lax.fori_loop with bounds that are Python integers."
            )
        if name == "cond":
            total += _of_branches(eqn, counts)
        else:
            total += sum(counts) * times(eqn)
    return total


def times(eqn: Any) -> int:
    """Returns how often an equation runs the programs in it, if that is known."""
    name = eqn.primitive.name
    params = eqn.params
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":
        sizes = params["mesh"].shape
        return math.prod(sizes[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":
        return math.prod(int(size) for size in params["grid_mapping"].grid)
    return 1


def _of_branches(eqn: Any, counts: Sequence[int]) -> int:
    """Returns the FLOPs of a conditional: the data decides which branch runs, or the
    backend, and the platform of a default branch is None.
    """
    platforms = eqn.params.get("branches_platforms") or ()
    if None in platforms:
        return counts[platforms.index(None)]
    return max(counts)


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


_COUNTED: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}
