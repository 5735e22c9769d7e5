"""The model FLOPs of a training step: its matrix products and convolutions.

They are counted in the trace of the forward pass, so recomputation to save memory and
XLA's transformations do not count. The backward pass has one more product for the
gradient of each operand that depends on a trained parameter: two of most products, one
of those with the network's input, and none of those before the first trained layer.

Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022,
appendix B, https://arxiv.org/abs/2204.02311, which counts two for every product.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xshard import errors, supervised
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.base.jax_internals import jaxprs
from xshard.data import batches
from xshard.learners import run_context
from xshard.metrics import chips
from xshard.optimizers import trees
from xshard.training import state as state_lib
from xshard.training import step as step_lib


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
    count, _ = _of_jaxpr(jaxpr, [False] * len(jaxpr.invars))
    return count


def times(eqn: Any) -> int:
    """Returns how often an equation runs the programs in it, if that is known."""
    return _times(eqn.primitive.name, eqn.params)


def step(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    batch: Mapping[str, Any],
) -> int:
    """Returns the model FLOPs of a training step, of all groups and devices together.

    For a `Supervised` experiment these are the products of the forward pass up to the
    loss, and those of the backward pass that its trained parameters need. For others it
    counts all products in the step's program, including recomputation for the backward
    pass.

    Args:
      experiment: the run's experiment.
      mesh: the run's mesh.
      batch: a training batch of all groups; arrays or shapes.

    Raises:
      ValueError: as for `of`.
    """
    if isinstance(experiment, supervised.Supervised):
        return _of_supervised(experiment, mesh, batch)
    state = state_lib.abstract_state(experiment, mesh, 0, _example(batch))
    return of(step_lib.make_train_step(experiment, mesh), state, batch)


def _of_supervised(
    experiment: supervised.Supervised, mesh: jax.sharding.Mesh, batch: Mapping[str, Any]
) -> int:
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
    trained = trees.select(state.params, experiment.learner.trained_paths(state.params))

    def is_trained(path: tuple[Any, ...], _: Any) -> bool:
        kind, _, name = trees.path_name(path).partition("/")
        return kind == "params" and name in trained

    depends = jax.tree_util.tree_map_with_path(is_trained, state)
    others = jax.tree.map(lambda _: False, (micro_batch, key))
    jaxpr = jax.make_jaxpr(mapped)(state, micro_batch, key).jaxpr
    count, _ = _of_jaxpr(jaxpr, jax.tree.leaves((depends, *others)))
    return parts * count


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
