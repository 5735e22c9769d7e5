"""The model FLOPs of a training step: what its matrix products and convolutions take, however it is computed.

They are counted in the trace of the forward pass, so that what is computed again to save memory does not
count, nor what XLA makes of it. A step counts three times its forward pass: the backward pass is one product
for the gradient of each of a product's two operands.

Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B,
https://arxiv.org/abs/2204.02311.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from xshard import errors, supervised
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard import step as step_lib
from xshard.data import batches
from xshard.learners import within
from xshard.metrics import chips


def of(f: Callable[..., Any], *args: Any) -> int:
    """The FLOPs of a function's matrix products and convolutions, two for each multiplication with its addition.

    What is in a scan counts as often as it is done; of a conditional's branches the most expensive one; of those of
    `lax.platform_dependent` the default, whatever the backend, so that a step counts the same on each; what is
    mapped by `jax.shard_map` for all devices of the axes that it maps; a Pallas kernel as often as its grid
    says. A product counts whole, however much of it is masked: of causal attention the whole square.
    Products of a convolution's padding do not count. Nothing else counts: no decompositions, no Fourier
    transforms, nothing in a foreign function.

    Args:
      f: a function.
      args: its arguments, of which only shapes and types count.

    Raises:
      ValueError: if there is such a product in a `while` loop: nothing says how often it is done.
    """
    return _of_jaxpr(jax.make_jaxpr(f)(*args).jaxpr)


def forward(
    experiment: supervised.Supervised, mesh: jax.sharding.Mesh, batch: Mapping[str, Any]
) -> int:
    """The FLOPs of a training step's forward pass, to the loss: of all groups, on all devices together.

    Args:
      experiment: of the run.
      mesh: of the run.
      batch: as the training step takes it, of all groups; arrays or shapes.

    Raises:
      ValueError: as `of`.
    """
    parts = experiment.config.micro_batches
    # The network computes a part of the batch at a time.
    rows = next(iter(batch.values())).shape[0]
    micro_batch = batches.shapes(batch, rows // parts)
    key = jax.random.key(0)
    rules = experiment.sharding_rules()
    example = _example(batch)
    state = state_lib.abstract_state(experiment, mesh, 0, example, whole=True).experiment
    if mesh_lib.num_groups(mesh) > 1:
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)

    def local(state: Any, batch: Mapping[str, Any]) -> jax.Array:
        with within.run_on(mesh, rules):
            value = experiment.learner.value(state, experiment.training_loss, batch, key)
        # What is sharded over devices needs a dimension to be sharded over.
        return value[None]

    everywhere, split = jax.P(), jax.P(mesh_lib.BATCH)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        axis_names={mesh_lib.GROUP, *mesh_lib.REPLICAS},
        in_specs=(everywhere, split),
        out_specs=split,
        check_vma=False,
    )
    return parts * of(mapped, state, micro_batch)


def step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, batch: Mapping[str, Any]
) -> int:
    """The model FLOPs of a training step, of all groups, on all devices together.

    Of a `Supervised` experiment they are three times those of `forward`, which has the arguments and errors. Of others
    they are those of all products in the step's program, what is computed again for the backward pass too.
    """
    if isinstance(experiment, supervised.Supervised):
        return 3 * forward(experiment, mesh, batch)
    state = state_lib.abstract_state(experiment, mesh, 0, _example(batch))
    return of(step_lib.make_train_step(experiment, mesh), state, batch)


def _example(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """An example for its names, types and shape, whose numbers do not count."""
    return {name: np.zeros((1, *x.shape[1:]), x.dtype) for name, x in batch.items()}


def if_known(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    batch: Mapping[str, Any],
    say: Callable[[str], None],
) -> int | None:
    """The model FLOPs of a training step that can be traced; None, and the reason said, if they cannot be counted."""
    try:
        return step(experiment, mesh, batch)
    except Exception as e:
        # Not a mistake in the experiment, whose step has been traced.
        say(f"model FLOPs are not logged: {e}")
        return None


def peak(mesh: jax.sharding.Mesh, dtype: Any) -> float | None:
    """The FLOPs a second that all devices together can do at most, which MFU is a share of.

    Args:
      mesh: the devices.
      dtype: what the run computes in.

    Returns:
      The rate; None where that of such devices in this type is not known.
    """
    name = np.dtype(dtype).name
    total = 0.0
    for device in mesh.devices.flat:
        rate = chips.peak_flops(device.device_kind, name)
        if rate is None:
            return None
        total += rate
    return total


def _of_jaxpr(jaxpr: core.Jaxpr) -> int:
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(eqn: Any) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name in _COUNTED:
        return _COUNTED[name](eqn)
    inner = [_of_jaxpr(jaxpr) for jaxpr in core.jaxprs_in_params(params)]
    if not any(inner):
        return 0
    if name == "cond":
        # One branch is done, and which one only the data says, or the backend.
        platforms = params.get("branches_platforms") or ()
        return inner[platforms.index(None)] if None in platforms else max(inner)
    if name == "while":
        raise errors.UserError(
            "There is a matrix product in a while loop, and nothing says how often it is done: its model FLOPs "
            "cannot be counted. Use jax.lax.scan, or jax.lax.fori_loop with numbers that are known to Python."
        )
    return sum(inner) * _times(name, params)


def _times(name: str, params: Mapping[str, Any]) -> int:
    """Counts how often the functions in an equation are done."""
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":
        return math.prod(int(size) for size in params["grid_mapping"].grid)
    return 1


def _products(eqn: Any, contracted: Sequence[int]) -> int:
    """Counts the multiplications of a product: for each element of the result, one for each that it sums over."""
    left = eqn.invars[0].aval.shape
    return math.prod(eqn.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)


def _dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * _products(eqn, contracted)


def _ragged_dot(eqn: Any) -> int:
    """Counts products of rows in groups, each with a matrix of its own: each row is multiplied once."""
    dims = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = dims.dot_dimension_numbers
    total = 2 * _products(eqn, contracted)
    if set(dims.lhs_ragged_dimensions) <= set(contracted):
        # What is summed over is in groups: there is a result for each, of its own rows.
        sizes = eqn.invars[2].aval
        return total // sizes.shape[-1]
    return total


def _convolution(eqn: Any) -> int:
    params = eqn.params
    numbers = params["dimension_numbers"]
    left, right = (x.aval.shape for x in eqn.invars)
    result = eqn.outvars[0].aval.shape
    batch, features, *places = numbers.out_spec
    total = 2 * result[batch] * result[features] * right[numbers.rhs_spec[1]]
    for i, place in enumerate(places):
        total *= _taps(
            left[numbers.lhs_spec[2 + i]],
            right[numbers.rhs_spec[2 + i]],
            result[place],
            before=params["padding"][i][0],
            stride=params["window_strides"][i],
            apart=params["lhs_dilation"][i],
            spread=params["rhs_dilation"][i],
        )
    return total


def _taps(
    size: int, kernel: int, result: int, *, before: int, stride: int, apart: int, spread: int
) -> int:
    """Counts the pairs of a place in the kernel and one in the result that meet an element of the input.

    Args:
      size: the size of the input in this dimension.
      kernel: that of the kernel.
      result: that of the result.
      before: the padding before the input.
      stride: the distance of two results.
      apart: the distance of two elements of the input, between which are zeros.
      spread: the distance of two elements of the kernel.
    """
    places = np.arange(result)[:, None] * stride + np.arange(kernel) * spread - before
    is_inside = (places >= 0) & (places <= (size - 1) * apart)
    # Between the elements of the input are zeros.
    return int((is_inside & (places % apart == 0)).sum())


_COUNTED: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}
