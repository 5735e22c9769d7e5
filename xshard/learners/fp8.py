"""Products of a network in float8, as the config's `fp8` asks.

The products are those of the network's `hk.Linear` modules, among them the projections
of an `hk.MultiHeadAttention`, and those of `xshard.fp8_dot_general` that have a name.
The network is as it was: its calls are intercepted, and no parameter has another name.

Operands are float8, and sums float32. An operand is multiplied by a power of two,
rounded to a float8 format, and the result of the product is divided by the same power.
The operand's own largest magnitude decides which power it is, so that nothing saturates
and nothing is kept between steps. Since it is a power of two, scaling itself rounds
nothing.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", 2022,
https://arxiv.org/abs/2209.05433; NVIDIA's Transformer Engine, whose recipe of this name
is current scaling.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax import lax

from xshard import errors
from xshard.learners import run_context
from xshard.optimizers import trees

# The format of operands of a forward pass, and those that gradients may have.
FORWARD = "float8_e4m3fn"
E5M2 = "float8_e5m2"
GRADIENT_FORMATS = (E5M2, FORWARD)
# The operands of a product, for messages.
_OPERANDS = ("input", "kernel")
# An operand is scaled as if its largest magnitude were at least 1.75 times two to the
# power of this, so that the scale and its inverse are normal numbers of float32.
_LEAST = -101
# The bits of 1.75 after the leading 1 of a float32, and where its exponent begins.
_MANTISSA_BITS = 23
_MANTISSA_OF_LARGEST = 0x600000
_BIAS = 127
# The largest number of a format is 1.75 times two to the power of this.
_LARGEST = {FORWARD: 8, E5M2: 15}
# What may be multiplied: wider numbers would lose most of their digits unasked.
_OPERAND_TYPES = ("float32", "bfloat16", "float16")

# The first chips of NVIDIA's that multiply float8.
_COMPUTE_CAPABILITY = (8, 9)


def products(
    config: ml_collections.ConfigDict, params: Any, apply: Callable[[], Any]
) -> tuple[str, ...]:
    """Returns the paths of a network's products to compute in float8.

    Args:
      config: the keys of `fp8`.
      params: the network's parameters.
      apply: applies the network; only its calls matter.

    Raises:
      UserError: if there are none, the config names others, or the chips do not
        multiply float8.
    """
    _check_chips()
    # The paths in the order of their first calls.
    linear: dict[str, None] = {}
    named: dict[str, None] = {}

    def record(path: str, method: Any, args: Any, kwargs: Any, module: Any) -> Any:
        kind = linear if isinstance(module, hk.Linear) else named
        kind[path] = None
        return method(*args, **kwargs)

    with hk.intercept_methods(_interceptor(params, record)):
        jax.eval_shape(apply)
    chosen = list(linear)
    if config.dots is not True:
        for path in config.dots:
            if path not in linear:
                raise errors.UserError(
                    f"fp8.dots names {path!r}, which is no hk.Linear of the network; "
                    f"near it: {trees.near(path, linear)}. Give the path of a module, "
                    "as 'mlp/~/linear_0', or True for all of them but the first and "
                    "the last."
                )
        chosen = [path for path in linear if path in config.dots]
    elif not config.edges:
        chosen = chosen[1:-1]
    if not chosen and not named:
        raise errors.UserError(
            f"fp8.dots={config.dots!r} finds no product to compute in float8: it takes "
            "the hk.Linear modules of a network that is a Haiku function, without the "
            "first and the last unless fp8.edges is True. In other code, and in a pair "
            "of functions, call xshard.fp8_dot_general and set fp8.dots to False."
        )
    return (*chosen, *named)


def around(
    apply: Callable[..., Any],
    params: Any,
    in_float8: Collection[str],
    gradient_format: str,
) -> Callable[..., Any]:
    """Returns a function that applies a network with products in float8.

    Args:
      apply: the function that applies it, of any arguments.
      params: the network's parameters.
      in_float8: the paths of these products, as `products` returns them.
      gradient_format: the format of their gradients, unless a product has its own.
    """

    def call(path: str, method: Any, args: Any, kwargs: Any, module: Any) -> Any:
        options = {"gradient_format": gradient_format, **kwargs}
        if isinstance(module, Product):
            return method(*args, **options)
        if path not in in_float8:
            return method(*args, **kwargs)
        return _linear(module, *args, **options)

    def applied(*args: Any, **kwargs: Any) -> Any:
        with hk.intercept_methods(_interceptor(params, call)):
            return apply(*args, **kwargs)

    return applied


def _interceptor(
    params: Mapping[str, Any], call: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns what calls a function in place of each product of a network.

    Args:
      params: the network's parameters, which tell the whole paths of modules.
      call: a function of a product's path, the method that computes it, its arguments
        and the module.

    Returns:
      A function that `hk.intercept_methods` takes.
    """
    # The paths of the modules that have been called, the newest last.
    called: list[str] = []

    def path_of(name: str) -> str:
        """Returns the path of a module in the whole network.

        Within a stack of layers, which is a network of its own to Haiku, a module's
        name is only the end of it. What precedes it is the path of a module that was
        called last: with it the parameters of the stack are some of the network's.
        """
        own = hk.get_params()
        if own.keys() == params.keys():
            return name
        for outer in reversed(called):
            if all(f"{outer}/{module}" in params for module in own):
                return f"{outer}/{name}"
        return name

    def intercept(
        method: Any, args: Any, kwargs: Any, context: hk.MethodContext
    ) -> Any:
        module = context.module
        # A module has no name before its constructor has run.
        if context.method_name != "__call__":
            return method(*args, **kwargs)
        path = path_of(module.module_name)
        if _is_product(module, kwargs):
            return call(path, method, args, kwargs, module)
        called.append(path)
        return method(*args, **kwargs)

    return intercept


def _is_product(module: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a module's call is a product that may be in float8."""
    if isinstance(module, Product):
        return True
    if not isinstance(module, hk.Linear):
        return False
    # A subclass that computes something else has a method of its own; and whoever asks
    # for a precision means that one.
    is_as_written = type(module).__call__ is hk.Linear.__call__
    return is_as_written and kwargs.get("precision") is None


def _linear(
    module: hk.Linear,
    inputs: Any,
    *,
    precision: None = None,
    gradient_format: str,
) -> jax.Array:
    """Computes in float8 what an `hk.Linear` does, whose method is being called.

    Its parameters exist, so no initializer runs. A precision is not given, or the
    product would be the network's own.
    """
    del precision
    inputs = jnp.asarray(inputs)
    size = inputs.shape[-1]
    module.input_size = size
    shape = [size, module.output_size]
    kernel = hk.get_parameter("w", shape, inputs.dtype, init=module.w_init)
    dims = (((inputs.ndim - 1,), (0,)), ((), ()))
    result = fp8_dot_general(inputs, kernel, dims, gradient_format=gradient_format)
    if module.with_bias:
        bias = hk.get_parameter("b", shape[1:], inputs.dtype, init=module.b_init)
        result = result + jnp.broadcast_to(bias, result.shape)
    return result


def _check_chips() -> None:
    """Raises UserError on chips that do not multiply float8."""
    mesh = run_context.current_mesh()
    if not isinstance(mesh, jax.sharding.Mesh):
        # Nothing is known of devices before there are any.
        return
    for device in mesh.devices.flat:
        version = getattr(device, "compute_capability", None)
        if device.platform != "gpu" or not version:
            continue
        capability = tuple(int(part) for part in str(version).split("."))
        if capability < _COMPUTE_CAPABILITY:
            raise errors.UserError(
                f"fp8.dots needs chips that multiply float8; {device.device_kind} has "
                f"the compute capability {version}, and 8.9 is the first with it. Set "
                "fp8.dots to False, and compute=bfloat16 or float16 in `precision`."
            )


class Product(hk.Module):
    """A product with a name, which a learner computes as the config's `fp8` says."""

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, **options: Any
    ) -> jax.Array:
        """Multiplies, as `fp8_dot_general` does."""
        return fp8_dot_general(lhs, rhs, dimension_numbers, **options)


def fp8_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    gradient_format: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """Multiplies arrays as `jax.lax.dot_general` does, in float8.

    Both operands are rounded to float8_e4m3fn, and in the backward pass the gradient of
    the result to `gradient_format`; sums are in float32. Each of these arrays is
    multiplied by a power of two before, such that its largest finite magnitude fits. So
    no number saturates; numbers below about 2**-17 of the largest become 0 in e4m3fn,
    and below 2**-31 in e5m2. If a number is not finite, neither is what it is
    multiplied into.

    It may stand wherever `dot_general` does, as in `jnp.einsum(..., _dot_general=
    xshard.fp8_dot_general)`, in a network of any library.

    Args:
      lhs: the input, an array of float32, bfloat16 or float16.
      rhs: the kernel, likewise.
      dimension_numbers: as for `jax.lax.dot_general`.
      precision: None; a product in float8 has no other.
      preferred_element_type: the type of the result; by default that of the operands.
      out_sharding: None; constrain the result instead.
      gradient_format: 'float8_e5m2', the default, or 'float8_e4m3fn'.
      name: a name for the product, in a network that is a Haiku function. A learner
        with the config's `fp8.dots` then counts it among its products, and its
        gradients have the format of `fp8.gradient_format`.

    Raises:
      UserError: if the operands or options are of other kinds.

    >>> x = jnp.array([[1.0, 2.0, 3.3]])
    >>> w = jnp.array([[0.5], [0.25], [100.0]])
    >>> print(xshard.fp8_dot_general(x, w, (((1,), (0,)), ((), ()))))
    [[313.]]
    """
    if precision is not None or out_sharding is not None:
        raise errors.UserError(
            f"fp8_dot_general(precision={precision!r}, out_sharding={out_sharding!r}) "
            "must both be None: float8 has one precision, with sums in float32. Use "
            "jax.lax.dot_general for another one."
        )
    if gradient_format not in (None, *GRADIENT_FORMATS):
        raise errors.UserError(
            f"gradient_format={gradient_format!r} must be one of "
            f"{', '.join(GRADIENT_FORMATS)}."
        )
    if name is not None:
        options = {"preferred_element_type": preferred_element_type}
        if gradient_format is not None:
            options["gradient_format"] = gradient_format
        return Product(name=name)(lhs, rhs, dimension_numbers, **options)
    lhs = jnp.asarray(lhs)
    rhs = jnp.asarray(rhs)
    for operand, x in zip(_OPERANDS, (lhs, rhs), strict=True):
        if x.dtype.name not in _OPERAND_TYPES:
            raise errors.UserError(
                f"The {operand} of a product in float8 is {x.dtype.name} of shape "
                f"{x.shape}; it must be one of {', '.join(_OPERAND_TYPES)}. Integers, "
                "complex numbers and wider ones have no scale here: cast it, or use "
                "jax.lax.dot_general."
            )
    if preferred_element_type is None:
        preferred_element_type = jnp.result_type(lhs, rhs)
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers
    # Arguments of the derivative that are no arrays must be hashable.
    dims = (
        (tuple(lhs_sum), tuple(rhs_sum)),
        (tuple(lhs_batch), tuple(rhs_batch)),
    )
    result = _multiply(
        dims, gradient_format or E5M2, _varying_as(lhs, rhs), _varying_as(rhs, lhs)
    )
    return result.astype(preferred_element_type)


def _varying_as(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns an array that also varies over the axes that another one varies over.

    Where `jax.shard_map` checks what varies, a gradient varies as its array does. So
    JAX sums it over the axes that are added here.
    """
    never = jnp.zeros((), jnp.bool_)
    # A sum of no elements.
    varying = lax.stop_gradient(jnp.sum(jnp.ravel(other)[:0])).astype(x.dtype)
    return jnp.where(never, varying, x)


class _Cast(NamedTuple):
    """An array in float8.

    Attributes:
      narrow: its elements times a power of two.
      inverse: the power's inverse, a float32 scalar.
    """

    narrow: jax.Array
    inverse: jax.Array


def _cast(x: jax.Array, format_: str) -> _Cast:
    """Rounds an array to a format, by the scale of its largest finite magnitude."""
    is_finite = jnp.isfinite(x)
    largest = jnp.max(jnp.where(is_finite, jnp.abs(x), 0), initial=0)
    bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32)
    # The least power of two of which 1.75 times is at least as large.
    exponent = (bits >> _MANTISSA_BITS) - _BIAS
    is_above = (bits & (2**_MANTISSA_BITS - 1)) > _MANTISSA_OF_LARGEST
    exponent = jnp.maximum(exponent + is_above.astype(jnp.int32), _LEAST)
    exponent = _LARGEST[format_] - exponent
    wide = x.astype(jnp.float32) * _power_of_two(exponent)
    # A chip's cast may make a number of infinity.
    narrow = jnp.where(is_finite, wide, jnp.nan).astype(format_)
    return _Cast(narrow, _power_of_two(-exponent))


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns a normal float32 power of two, exactly on every chip."""
    return lax.bitcast_convert_type((exponent + _BIAS) << _MANTISSA_BITS, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(
    dims: Any, gradient_format: str, lhs: jax.Array, rhs: jax.Array
) -> jax.Array:
    """Multiplies in float8; returns float32."""
    return _forward(dims, gradient_format, lhs, rhs)[0]


def _forward(
    dims: Any, gradient_format: str, lhs: jax.Array, rhs: jax.Array
) -> tuple[jax.Array, Any]:
    del gradient_format
    left = _cast(lhs, FORWARD)
    right = _cast(rhs, FORWARD)
    # The backward pass keeps the operands in 8 bits. What has no elements tells their
    # types, which are no arrays.
    types = (jnp.zeros((0,), lhs.dtype), jnp.zeros((0,), rhs.dtype))
    return _product(left, right, dims), (left, right, types)


def _backward(
    dims: Any, gradient_format: str, residuals: Any, gradient: jax.Array
) -> tuple[Any, Any]:
    left, right, (left_type, right_type) = residuals
    narrow = _cast(gradient, gradient_format)
    left_gradient = _gradient(narrow, right, dims, left.narrow.ndim)
    # The gradient's dimensions are those of the batch, of the left and of the right.
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dims
    swapped = ((rhs_sum, lhs_sum), (rhs_batch, lhs_batch))
    right_gradient = _gradient(
        narrow, left, swapped, right.narrow.ndim, is_swapped=True
    )
    return (
        left_gradient.astype(left_type.dtype),
        right_gradient.astype(right_type.dtype),
    )


_multiply.defvjp(_forward, _backward)


def _product(left: _Cast, right: _Cast, dims: Any) -> jax.Array:
    result = lax.dot_general(
        left.narrow, right.narrow, dims, preferred_element_type=jnp.float32
    )
    # One after the other, since the product of both may not be a float32.
    return result * left.inverse * right.inverse


def _gradient(
    gradient: _Cast, other: _Cast, dims: Any, ndim: int, *, is_swapped: bool = False
) -> jax.Array:
    """Returns the gradient of an operand of a product.

    Args:
      gradient: the gradient of the result.
      other: the other operand.
      dims: the dimension numbers, of this operand first.
      ndim: the number of this operand's dimensions.
      is_swapped: whether this operand is the right one.
    """
    (own_sum, other_sum), (own_batch, other_batch) = dims
    own_kept = _others(ndim, own_sum, own_batch)
    other_kept = _others(other.narrow.ndim, other_sum, other_batch)
    batch = tuple(range(len(own_batch)))
    begin = len(batch) if is_swapped else len(batch) + len(own_kept)
    of_other = tuple(range(begin, begin + len(other_kept)))
    result = _product(gradient, other, ((of_other, other_kept), (batch, other_batch)))
    # The other's summed dimensions come last, in the order that it has them in.
    summed = [own_sum[i] for i in np.argsort(other_sum)]
    places = np.argsort([*own_batch, *own_kept, *summed])
    return lax.transpose(result, [int(place) for place in places])


def _others(ndim: int, *used: Sequence[int]) -> tuple[int, ...]:
    """Returns the dimensions that are not used, in order."""
    taken = {axis for axes in used for axis in axes}
    return tuple(axis for axis in range(ndim) if axis not in taken)
