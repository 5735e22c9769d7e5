"""Tests that a step's model FLOPs equal those computed by hand."""

import types

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from tests import toy
from xshard import experiment as experiment_lib
from xshard import mesh
from xshard.data import batches
from xshard.run import preflight
from xshard.training import state as state_lib
from xshard.wings.utilisation import model_flops

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


def array(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def batch_of(config, groups):
    examples = experiment_lib.load(config.experiment)(config).train_data()
    rows = config.batch_size * (len(groups) or 1)
    return {
        name: array(rows, *x.shape[1:], dtype=x.dtype) for name, x in examples.items()
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batches": 2},
        {"group_assignment": HALVES},
        {"slices": 2, "model_parallel": 2},
    ],
    ids=str,
)
def test_a_step_counts_on_all_devices(changes):
    config = toy.get_config()
    groups = changes.pop("group_assignment", ())
    config.group_assignment = groups
    config.update({"experiment": "tests.toy.Wide", **changes})
    the_mesh = mesh.make_mesh(
        groups or None, slices=config.slices, model=config.model_parallel
    )
    experiment = experiment_lib.load(config.experiment)(config)
    expected = 3 * 2 * 16 * (3 * 16 + 16) * (len(groups) or 1)
    batch = batch_of(config, groups)
    assert model_flops.of_step(experiment, the_mesh, batch) == expected


class Stacked(toy.Toy):
    """Has two equal layers, which a scan computes and the backward pass computes again,
    between its first layer and its last.
    """

    def forward(self, batch, *, is_training):
        del is_training
        x = hk.Linear(16, name="first")(batch["x"])
        layers = hk.experimental.layer_stack(2, name="layers")
        x = layers(hk.remat(hk.Linear(16, name="middle")))(x)
        return hk.Linear(1, name="last")(x)[:, 0]


def test_layers_in_a_scan_count_each_and_recomputation_does_not():
    config = toy.get_config()
    counted = model_flops.of_step(
        Stacked(config), mesh.make_mesh(), batch_of(config, ())
    )
    assert counted == 3 * 2 * 16 * (3 * 16 + 2 * 16 * 16 + 16)


class Dense(toy.Toy):
    """Has wide layers."""

    def forward(self, batch, *, is_training):
        del is_training
        return hk.nets.MLP([128, 128, 128, 1])(batch["x"])[:, 0]


def test_model_flops_are_nearly_those_that_xla_counts():
    config = toy.get_config()
    config.update({"batch_size": 128, "examples": 128, "fingerprint_every_steps": 0})
    experiment = Dense(config)
    the_mesh = mesh.make_mesh(devices=jax.devices()[:1])
    train = batches.TrainBatches(
        experiment.train_batches, the_mesh, batch_size=128, seed=0
    )
    batch = next(train)
    state = state_lib.abstract_state(experiment, the_mesh, 0, train.example)
    program = preflight.jitted_step(experiment, the_mesh)
    by_xla = program.lower(state, batch).compile().cost_analysis()["flops"]
    # XLA also counts what is no product, such as the update, and no gradient of the
    # network's input: a few percent here, and one.
    counted = model_flops.of_step(experiment, the_mesh, batch)
    assert 0.9 * by_xla < counted <= by_xla


def test_a_step_s_flops_take_the_batches_of_a_run():
    config = toy.get_config()
    experiment = toy.Wide(config)
    the_mesh = mesh.make_mesh()
    train = batches.TrainBatches(
        experiment.train_batches, the_mesh, batch_size=16, seed=0
    )
    counted = model_flops.of_step(experiment, the_mesh, next(train))
    assert counted == 3 * 2 * 16 * (3 * 16 + 16)


def test_the_flops_of_digits():
    config = digits.get_config()
    experiment = experiment_lib.load(config.experiment)(config)
    with jax.numpy_dtype_promotion("standard"):
        counted = model_flops.of_step(
            experiment, mesh.make_mesh(), batch_of(config, ())
        )
    # The padding of the 3 x 3 convolutions does not count. At 8 x 8 positions, 22 of 24
    # rows and columns are left, with 24 features; at 4 x 4 positions, 11 of 12, with 48
    # features. Dense layers map 4 x 4 x 48 to 96 to 10.
    first = 22 * 22 * 24
    others = 11 * 11 * 24 * 48 + 768 * 96 + 96 * 10
    assert counted == 3 * 2 * 128 * (first + others)


class Devices:
    """Stands in for a mesh of devices that the machine does not have."""

    def __init__(self, *kinds):
        self.devices = np.array(
            [types.SimpleNamespace(device_kind=kind) for kind in kinds], dtype=object
        )


def test_the_peak_of_all_devices():
    v5e = Devices(*["TPU v5 lite"] * 4)
    assert model_flops.peak(v5e, jnp.bfloat16) == pytest.approx(4 * 197e12)
    assert model_flops.peak(v5e, np.float32) is None
    assert model_flops.peak(mesh.make_mesh(), jnp.bfloat16) is None
    assert model_flops.peak(Devices("NVIDIA H200", "another"), jnp.float16) is None
