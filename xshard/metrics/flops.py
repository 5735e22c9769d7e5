"""The model FLOPs of a training step: its matrix products and convolutions.

They are counted in the trace of the forward pass, so recomputation to save memory and
XLA's transformations do not count. A step counts three times its forward pass, because
the backward pass has one product for the gradient of each of a product's two operands.

Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022,
appendix B, https://arxiv.org/abs/2204.02311.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xshard import errors, jax_internals, supervised
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard import step as step_lib
from xshard.data import batches
from xshard.learners import run_context
from xshard.metrics import chips


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
    return _of_jaxpr(jax.make_jaxpr(f)(*args).jaxpr)


def forward(
    experiment: supervised.Supervised, mesh: jax.sharding.Mesh, batch: Mapping[str, Any]
) -> int:
    """Returns the FLOPs of a training step's forward pass up to the loss.

    They are those of all groups and devices together.

    Args:
      experiment: the run's experiment.
      mesh: the run's mesh.
      batch: a training batch of all groups; arrays or shapes.

    Raises:
      ValueError: as for `of`.
    """
    parts = experiment.config.micro_batches
    # The network computes one micro-batch at a time.
    rows = next(iter(batch.values())).shape[0]
    micro_batch = batches.shapes(batch, rows // parts)
    # Only its shape and type: a key made here would be computed by a program, which is
    # compiled first.
    key = jax.eval_shape(lambda: jax.random.key(0))
    rules = experiment.sharding_rules()
    example = _example(batch)
    state = state_lib.abstract_state(experiment, mesh, 0, example).experiment
    if mesh_lib.num_groups(mesh) > 1:
        # A replica has the state of its own group, without the dimension of groups.
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state
        )

    def local(state: Any, batch: Mapping[str, Any], key: jax.Array) -> jax.Array:
        with run_context.run_on(mesh, rules):
            value = experiment.learner.value(
                state, experiment.training_loss, batch, key
            )
        # The result needs a dimension for `out_specs` to shard.
        return value[None]

    split = jax.P(mesh_lib.BATCH)
    mapped = mesh_lib.on_replicas(
        local, mesh, in_specs=(jax.P(), split, jax.P()), out_specs=split
    )
    return parts * of(mapped, state, micro_batch, key)


def step(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    batch: Mapping[str, Any],
) -> int:
    """Returns the model FLOPs of a training step, of all groups and devices together.

    For a `Supervised` experiment this is three times `forward`, which describes the
    arguments and errors. For others, and with frozen parameters, whose gradients are
    not computed, it counts all products in the step's program, including recomputation
    for the backward pass.
    """
    if isinstance(experiment, supervised.Supervised) and not experiment.frozen():
        return 3 * forward(experiment, mesh, batch)
    state = state_lib.abstract_state(experiment, mesh, 0, _example(batch))
    return of(step_lib.make_train_step(experiment, mesh), state, batch)


def _example(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns one example of zeros, for its names, dtypes and shapes."""
    return {name: np.zeros((1, *x.shape[1:]), x.dtype) for name, x in batch.items()}


def if_known(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    batch: Mapping[str, Any],
    say: Callable[[str], None],
) -> int | None:
    """Returns the model FLOPs of a training step; None if they cannot be counted.

    Args:
      experiment: the run's experiment.
      mesh: the run's mesh.
      batch: a training batch of all groups; arrays or shapes.
      say: called with the reason if they cannot be counted.
    """
    try:
        return step(experiment, mesh, batch)
    except Exception as e:
        # This is not a mistake in the experiment, whose step has been traced before.
        say(f"model FLOPs are not logged: {e}")
        return None


def peak(mesh: jax.sharding.Mesh, dtype: Any) -> float | None:
    """Returns the peak FLOPs per second of all devices: the denominator of MFU.

    Args:
      mesh: the devices.
      dtype: the compute dtype of the run.

    Returns:
      The rate; None if the peak of a device in this dtype is unknown.
    """
    name = np.dtype(dtype).name
    total = 0.0
    for device in mesh.devices.flat:
        rate = chips.peak_flops(device.device_kind, name)
        if rate is None:
            return None
        total += rate
    return total


def _of_jaxpr(jaxpr: jax_internals.Jaxpr) -> int:
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(eqn: Any) -> int:
    name = eqn.primitive.name
    params = eqn.params
    if name in _COUNTED:
        return _COUNTED[name](eqn)
    inner = [_of_jaxpr(jaxpr) for jaxpr in jax_internals.inner_programs(eqn)]
    if not any(inner):
        return 0
    if name == "cond":
        # One branch runs. The data, or the backend, decides which one. The platform
        # of a default branch is None.
        platforms = params.get("branches_platforms") or ()
        if None in platforms:
            return inner[platforms.index(None)]
        return max(inner)
    if name == "while":
        raise errors.UserError(
            "There is a matrix product in a while loop whose number of iterations is "
            "unknown: its model FLOPs cannot be counted. Use jax.lax.scan, or "
            "jax.lax.fori_loop with bounds that are Python integers."
        )
    return sum(inner) * _times(name, params)


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


_COUNTED: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}
