"""The model FLOPs of a training step: its matrix products and convolutions.

They are counted in the trace of the forward pass, so recomputation to save memory and
XLA's transformations do not count. The backward pass counts as two more of each: one
for the gradient of each operand. That is too many for the first layer, which computes
no gradient of the network's input, and for frozen layers.

Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022,
appendix B, https://arxiv.org/abs/2204.02311.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import supervised
from xshard.data import batches
from xshard.learners import run_context
from xshard.metrics import chips, flops
from xshard.training import state as state_lib
from xshard.training import step as step_lib


def of_step(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    batch: Mapping[str, Any],
) -> int:
    """Returns the model FLOPs of a training step, of all groups and devices together.

    For a `Supervised` experiment these are three times the products of the forward pass
    up to the loss. For others it counts all products in the step's program, including
    recomputation for the backward pass.

    Args:
      experiment: the run's experiment.
      mesh: the run's mesh.
      batch: a training batch of all groups; arrays or shapes.

    Raises:
      ValueError: as for `flops.of`.
    """
    if isinstance(experiment, supervised.Supervised):
        return _of_supervised(experiment, mesh, batch)
    state = state_lib.abstract_state(experiment, mesh, 0, _example(batch))
    return flops.of(step_lib.make_train_step(experiment, mesh), state, batch)


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
    return 3 * parts * flops.of(mapped, state, micro_batch, key)


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
        return of_step(experiment, mesh, batch)
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
