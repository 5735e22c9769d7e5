"""Products of a network in float8, as the config's `fp8` asks.

The products are those of the network's `hk.Linear` modules, among them the projections
of an `hk.MultiHeadAttention`, and those of `xshard.fp8_dot_general` that have a name.
The network is as it was: its calls are intercepted, and no parameter has another name.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections

from xshard import errors
from xshard.learners import float8, run_context
from xshard.optimizers import trees

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

    with hk.intercept_methods(_Interceptor(params, record)):
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
        if isinstance(module, float8.Product):
            return method(*args, **options)
        if path not in in_float8:
            return method(*args, **kwargs)
        return _linear(module, *args, **options)

    def applied(*args: Any, **kwargs: Any) -> Any:
        with hk.intercept_methods(_Interceptor(params, call)):
            return apply(*args, **kwargs)

    return applied


class _Interceptor:
    """Calls a function in place of each product of a network.

    Attributes:
      params: the network's parameters, which tell the whole paths of modules.
      call: a function of a product's path, the method that computes it, its arguments
        and the module.
    """

    def __init__(self, params: Mapping[str, Any], call: Callable[..., Any]):
        self.params = params
        self.call = call
        # The paths of the modules that have been called, the newest last.
        self._called: list[str] = []

    def __call__(
        self, method: Any, args: Any, kwargs: Any, context: hk.MethodContext
    ) -> Any:
        """Implements what `hk.intercept_methods` takes."""
        module = context.module
        # A module has no name before its constructor has run.
        if context.method_name != "__call__":
            return method(*args, **kwargs)
        path = self._path(module.module_name)
        if _is_product(module, kwargs):
            return self.call(path, method, args, kwargs, module)
        self._called.append(path)
        return method(*args, **kwargs)

    def _path(self, name: str) -> str:
        """Returns the path of a module in the whole network.

        Within a stack of layers, which is a network of its own to Haiku, a module's
        name is only the end of it. What precedes it is the path of a module that was
        called last: with it the parameters of the stack are some of the network's.
        """
        own = hk.get_params()
        if own.keys() == self.params.keys():
            return name
        for outer in reversed(self._called):
            if all(f"{outer}/{module}" in self.params for module in own):
                return f"{outer}/{name}"
        return name


def _is_product(module: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a module's call is a product that may be in float8."""
    if isinstance(module, float8.Product):
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
    result = float8.fp8_dot_general(
        inputs, kernel, dims, gradient_format=gradient_format
    )
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
