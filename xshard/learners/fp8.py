"""Products of a network in float8, as the config's `fp8` asks.

The products are those of the network's `hk.Linear` modules, among them the projections
of an `hk.MultiHeadAttention`, and those of `xshard.fp8_dot_general` that have a name.
The network is as it was: its calls are intercepted, and no parameter has another name.

With delayed scaling an update scales each operand by how large it was in the last steps
that were applied. This history is state: the rules' state has it as the module 'fp8',
int32 levels as `float8.level_of` returns them. How large the operands of a backward
pass are leaves it as the gradient of a sensor, see `gradients.Sensed`. Such gradients
count levels, so their sum over the uses of a product, over micro-batches and over the
replicas tells the largest exactly, whatever the order; and XLA combines the sum over
the replicas with those of the other measures, so that it is no further collective.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xshard import errors
from xshard.base import mesh_axes
from xshard.learners import float8, measures, run_context
from xshard.learners import state as state_lib
from xshard.optimizers import replica_calls, trees

# The section of the config, and the module of the rules' state.
KEY = "fp8"
# The kinds of scaling.
CURRENT = "current"
DELAYED = "delayed"
SCALINGS = (DELAYED, CURRENT)
# The metric: how many elements saturated in the step, of all operands.
SATURATED = "fp8/saturated"
# The arrays of a product: the levels of its operands in the last steps, int32 of shape
# [3, steps], the newest first; and how many elements of each saturated in the last
# step, float32 of shape [3]. In an update there is a sensor beside them.
_LEVELS = "levels"
_COUNTS = "saturated"
_SENSOR = "sensor"
# The first chips of NVIDIA's that multiply float8.
_COMPUTE_CAPABILITY = (8, 9)


class _Call(NamedTuple):
    """A product that a network computes: its path, and whether it has to be chosen."""

    path: str
    is_linear: bool


class Fp8(measures.Measure):
    """Products in float8, whose operands are measured."""

    name = "fp8"

    def is_on(self) -> bool:
        """Implements `Measure.is_on`."""
        # Configs made before these keys existed lack them.
        config = self.config.get(KEY, {})
        is_on = bool(config.get("dots", False))
        if is_on:
            _check_keys(config)
        return is_on

    def begin(
        self, state: state_lib.LearnerState, apply: Callable[..., Any]
    ) -> state_lib.LearnerState:
        """Implements `Measure.begin`."""
        _check_chips()
        calls: dict[str, _Call] = {}

        def record(path: str, method: Any, args: Any, kwargs: Any, module: Any) -> Any:
            calls.setdefault(path, _Call(path, isinstance(module, hk.Linear)))
            return method(*args, **kwargs)

        with hk.intercept_methods(_Interceptor(state.params, record)):
            jax.eval_shape(apply, state)
        products = self._chosen(list(calls.values()))
        if self._is_delayed():
            steps = self.config[KEY].history_steps
            kept = {}
            for path in products:
                kept[f"{path}/{_LEVELS}"] = jnp.zeros((3, steps), jnp.int32)
                kept[f"{path}/{_COUNTS}"] = jnp.zeros((3,), jnp.float32)
            state = state.replace(opt_state={**state.opt_state, KEY: kept})
        return state.with_meta(own_products=tuple(products))

    def around(
        self, apply: Callable[..., Any], state: state_lib.LearnerState
    ) -> Callable[..., Any]:
        """Implements `Measure.around`."""
        kept = state.opt_state.get(KEY, {})
        options = {"gradient_format": self.config[KEY].gradient_format}

        def call(path: str, method: Any, args: Any, kwargs: Any, module: Any) -> Any:
            scaling = None
            if f"{path}/{_LEVELS}" in kept:
                levels = jnp.max(kept[f"{path}/{_LEVELS}"], axis=1)
                scaling = float8.Scaling(levels, kept.get(f"{path}/{_SENSOR}"))
            if isinstance(module, float8.Product):
                return method(*args, **{**options, **kwargs, "scaling": scaling})
            if path not in state.meta.own_products:
                return method(*args, **kwargs)
            return _linear(module, *args, **{**options, **kwargs, "scaling": scaling})

        def applied(*args: Any, **kwargs: Any) -> Any:
            with hk.intercept_methods(_Interceptor(state.params, call)):
                return apply(*args, **kwargs)

        return applied

    def sensors(self, state: state_lib.LearnerState) -> Any:
        """Implements `Measure.sensors`."""
        if not self._is_delayed():
            return None
        zeros = jnp.zeros((3, float8.LEVELS), jnp.float32)
        return dict.fromkeys(state.meta.own_products, zeros)

    def with_sensors(
        self, state: state_lib.LearnerState, sensors: Any
    ) -> state_lib.LearnerState:
        """Implements `Measure.with_sensors`."""
        kept = dict(state.opt_state[KEY])
        for path, sensor in sensors.items():
            kept[f"{path}/{_SENSOR}"] = sensor
        return state.replace(opt_state={**state.opt_state, KEY: kept})

    def measure(self, update: measures.Update) -> measures.Measured:
        """Implements `Measure.measure`."""
        if not self._is_delayed():
            return measures.Measured()
        if update.sensed is None:
            raise errors.UserError(
                f"fp8.scaling={DELAYED!r} needs to know how large gradients are within "
                "a backward pass, and a rule's compute_gradients differentiates the "
                "loss without showing it: call self.opt.compute_gradients with the "
                f"loss that it is given, or set fp8.scaling={CURRENT!r}."
            )
        counts = jnp.stack(
            [update.sensed[path] for path in update.state.meta.own_products]
        )
        if self.config.micro_batches > 1:
            counts = jnp.sum(counts, axis=1)
        return measures.Measured(local=counts, equal=update.state.opt_state[KEY])

    def finish(
        self,
        measured: measures.Measured,
        state: state_lib.LearnerState,
        outcome: state_lib.Outcome,
    ) -> tuple[state_lib.LearnerState, state_lib.Outcome]:
        """Implements `Measure.finish`."""
        if not self._is_delayed():
            return state, outcome
        before = measured.equal
        places = jnp.arange(float8.LEVELS)
        # No collective of its own: each count is at least 0, so is a mean of them.
        seen = jnp.where(measured.local > 0, places, float8.NO_LEVEL)
        is_level = places != float8.NO_LEVEL
        levels = jnp.max(jnp.where(is_level, seen, float8.NO_LEVEL), axis=-1)
        replicas = lax.axis_size(mesh_axes.REPLICAS)
        saturated = replicas * measured.local[:, :, float8.NO_LEVEL]
        after = {}
        for i, path in enumerate(state.meta.own_products):
            history = before[f"{path}/{_LEVELS}"]
            newest = levels[i].astype(history.dtype)[:, None]
            moved = jnp.concatenate([newest, history[:, :-1]], axis=1)
            after[f"{path}/{_LEVELS}"] = moved
            after[f"{path}/{_COUNTS}"] = saturated[i]
        kept = jax.tree.map(
            lambda new, old: jnp.where(outcome.applied, new, old), after, before
        )
        if not replica_calls.is_current():
            # As for the parameters, one replica's program shows no collective.
            kept = replica_calls.equal_on_replicas(kept, given=(before, measured.local))
        metrics = {**outcome.metrics, SATURATED: jnp.sum(saturated)}
        state = state.replace(opt_state={**state.opt_state, KEY: kept})
        return state, outcome._replace(metrics=metrics)

    @staticmethod
    def notes(state: state_lib.LearnerState) -> list[str]:
        """Implements `Measure.notes`: names the products that saturated."""
        kept = state.opt_state.get(KEY, {})
        lines = []
        for path in state.meta.own_products:
            if f"{path}/{_COUNTS}" not in kept:
                continue
            # Of several groups, each has its own.
            counts = np.asarray(kept[f"{path}/{_COUNTS}"]).reshape(-1, 3).sum(axis=0)
            for operand, count in zip(float8.OPERANDS, counts, strict=True):
                if count:
                    lines.append(
                        f"saturated in float8: {count:.0f} elements of the {operand} "
                        f"of {path}"
                    )
        return lines

    def _is_delayed(self) -> bool:
        return bool(self.config[KEY].scaling == DELAYED)

    def _chosen(self, calls: list[_Call]) -> list[str]:
        """Returns the paths of the products to compute in float8.

        Args:
          calls: those of the network, in the order of their first calls.

        Raises:
          UserError: if there are none, or the config names others.
        """
        config = self.config[KEY]
        linear = [call.path for call in calls if call.is_linear]
        named = [call.path for call in calls if not call.is_linear]
        if config.dots is not True:
            for path in config.dots:
                if path not in linear:
                    raise errors.UserError(
                        f"fp8.dots names {path!r}, which is no hk.Linear of the "
                        f"network; near it: {trees.near(path, dict.fromkeys(linear))}. "
                        "Give the path of a module, as 'mlp/~/linear_0', or True for "
                        "all of them but the first and the last."
                    )
            linear = [path for path in linear if path in config.dots]
        elif not config.edges:
            linear = linear[1:-1]
        if not linear and not named:
            raise errors.UserError(
                f"fp8.dots={config.dots!r} finds no product to compute in float8: it "
                "takes the hk.Linear modules of a network that is a Haiku function, "
                "without the first and the last unless fp8.edges is True. In other "
                "code, and in a pair of functions, call xshard.fp8_dot_general and set "
                "fp8.dots to False."
            )
        return linear + named


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
    scaling: Any,
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
    result = float8.multiply(
        inputs,
        kernel,
        (((inputs.ndim - 1,), (0,)), ((), ())),
        gradient_format=gradient_format,
        scaling=scaling,
    )
    if module.with_bias:
        bias = hk.get_parameter("b", shape[1:], inputs.dtype, init=module.b_init)
        result = result + jnp.broadcast_to(bias, result.shape)
    return result


def _check_keys(config: Any) -> None:
    """Raises UserError for values that no check of a single key finds."""
    if config.scaling not in SCALINGS:
        raise errors.UserError(
            f"fp8.scaling={config.scaling!r} must be one of {', '.join(SCALINGS)}."
        )
    if config.gradient_format not in float8.GRADIENT_FORMATS:
        raise errors.UserError(
            f"fp8.gradient_format={config.gradient_format!r} must be one of "
            f"{', '.join(float8.GRADIENT_FORMATS)}."
        )


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
