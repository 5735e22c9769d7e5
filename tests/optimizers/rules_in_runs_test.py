"""Tests that the rules of optax's list train in a run as they do replicated.

The run has groups, slices and shards.
"""

import dataclasses

import jax
import numpy as np
import pytest

from tests import toy
from tests.optimizers import harness, table
from xshard import mesh
from xshard.data import batches
from xshard.training import state, step

STEPS = 4
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
# What a run has besides a sharded update.
LAYOUTS = {
    "groups": {"group_assignment": HALVES, "micro_batches": 2},
    "slices": {"slices": 2, "micro_batches": 2},
    # Of this width, all parameters but the last bias are held in shards.
    "parameters": {"hidden": 1024, "shard_params": True},
}


# The rules of the table that name the parameters of the harness, or that need slices
# which train apart: see tests/run/slices_test.py.
LEFT_OUT = ("partition", "OuterOptimizer inside", "OuterOptimizer outside")


class Ruled(toy.Wide):
    """Trains by a rule of the table; a dynamic loss scale skips some steps."""

    def optimizer(self):
        return table.make_optimizer(
            self.config.rule, slice_axis_name="slice", **self.config.reduction
        )()


def train(rule, sharded, **changes):
    """Returns the state and the metrics after a few steps in float64."""
    config = toy.get_config()
    config.rule = rule
    config.precision = "params=float64,compute=float64,output=float64"
    # The first step of a replica with a larger loss overflows, and all replicas of its
    # group skip it.
    config.overflow_above = 1.98
    config.fingerprint_every_steps = 0
    params_too = changes.pop("shard_params", False)
    config.reduction.shard_update = sharded
    config.reduction.shard_params = sharded and params_too
    config.group_assignment = changes.pop("group_assignment", ())
    config.update(changes)
    experiment = Ruled(config.lock())
    the_mesh = mesh.make_mesh(config.group_assignment or None, slices=config.slices)
    examples = batches.TrainBatches(
        experiment.train_batches,
        the_mesh,
        batch_size=config.batch_size,
        seed=0,
        micro_batches=config.micro_batches,
    )
    reached = state.init(experiment, the_mesh, 0, examples.example)
    apply = jax.jit(step.make_train_step(experiment, the_mesh), donate_argnums=0)
    for _ in range(STEPS):
        reached, metrics = apply(reached, next(examples))
    return jax.device_get((dataclasses.replace(reached, rng=None), metrics))


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", [name for name in table.NAMES if name not in LEFT_OUT])
def test_a_rule_trains_in_shards_as_it_does_replicated(rule, layout):
    # The experiment is float32 where its config has no say, as in its data.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wanted, metrics = train(rule, False, **LAYOUTS[layout])
        got, its_metrics = train(rule, True, **LAYOUTS[layout])
    np.testing.assert_array_equal(
        got.experiment.global_step, wanted.experiment.global_step
    )
    assert 0 < np.min(wanted.experiment.global_step) < STEPS
    # float64 keeps 16 digits. Sums are in another order, which some rules amplify.
    harness.assert_close(got.experiment, wanted.experiment, rtol=1e-8, atol=1e-10)
    # Metrics are float32.
    harness.assert_close(its_metrics, metrics, rtol=1e-5, atol=1e-7)
