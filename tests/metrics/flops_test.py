"""Tests that model FLOPs equal those computed by hand, under any transformation."""

import functools
import types

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from configs import digits
from tests import toy
from xshard import experiment as experiment_lib
from xshard import mesh
from xshard.data import batches
from xshard.metrics import chips, flops
from xshard.run import preflight
from xshard.training import state as state_lib

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


def array(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_perceptron():
    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 16, 4])(x)))
    params = jax.eval_shape(network.init, jax.random.key(0), array(1, 8))
    expected = 2 * 5 * (8 * 32 + 32 * 16 + 16 * 4)
    assert flops.of(network.apply, params, array(5, 8)) == expected
    # The backward pass computes the gradient of each operand except the network's
    # input.
    loss = lambda params, x: jnp.sum(network.apply(params, x))
    counted = flops.of(jax.grad(loss), params, array(5, 8))
    assert counted == 3 * expected - 2 * 5 * 8 * 32


def convolve(x, w, **options):
    dims = ("NHWC", "HWIO", "NHWC")
    options = {"window_strides": (1, 1), "padding": "VALID", **options}
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=dims, **options)


@pytest.mark.parametrize(
    "options, kernel, taps",
    [
        # The kernel of 3 x 3 fits at 9 x 7 positions.
        ({}, (3, 3, 4, 6), 63 * 9 * 4),
        ({"window_strides": (2, 2)}, (3, 3, 4, 6), 5 * 4 * 9 * 4),
        # Of the 11 x 9 positions, those at an edge use only two of the kernel's three
        # rows or columns.
        ({"padding": "SAME"}, (3, 3, 4, 6), (11 * 3 - 2) * (9 * 3 - 2) * 4),
        ({"rhs_dilation": (2, 1)}, (3, 3, 4, 6), 7 * 7 * 9 * 4),
        ({"feature_group_count": 2}, (3, 3, 2, 6), 63 * 9 * 2),
        ({"feature_group_count": 4}, (3, 3, 1, 4), 63 * 9 * 1),
    ],
)
def test_a_convolution(options, kernel, taps):
    f = functools.partial(convolve, **options)
    assert flops.of(f, array(5, 11, 9, 4), array(*kernel)) == 2 * 5 * kernel[-1] * taps


def test_a_transposed_convolution_is_the_gradient_of_one():
    # Each element of the input is multiplied by each element of the kernel once. The
    # zeros in between do not count.
    f = lambda x, w: jax.lax.conv_transpose(x, w, (2, 2), "VALID")
    assert flops.of(f, array(1, 6, 6, 4), array(3, 3, 4, 8)) == 2 * 36 * 9 * 4 * 8


def attention(x, w):
    query, key, value = jnp.split((x @ w).reshape(2, 16, 3, 4, 8), 3, axis=2)
    out = jax.nn.dot_product_attention(
        query[:, :, 0], key[:, :, 0], value[:, :, 0], is_causal=True
    )
    return out.reshape(2, 16, 32)


ATTENTION = 2 * 2 * 16 * 32 * 96 + 2 * (2 * 2 * 4 * 16 * 16 * 8)


def test_causal_attention_counts_as_the_whole_square():
    assert flops.of(attention, array(2, 16, 32), array(32, 96)) == ATTENTION


def layers(step):
    return lambda x, ws: jax.lax.scan(lambda x, w: (step(x, w), None), x, ws)[0]


WRAPPED = {
    "plain": attention,
    "remat": jax.checkpoint(attention),
    "jit": jax.jit(attention),
    "vmap": lambda x, w: jax.vmap(lambda x: attention(x, w))(x[None])[0],
    "custom_jvp": jax.custom_jvp(attention),
    "custom_vjp": jax.custom_vjp(attention),
}
WRAPPED["custom_jvp"].defjvps(lambda t, y, x, w: t, None)
WRAPPED["custom_vjp"].defvjp(
    lambda x, w: (attention(x, w), None), lambda _, g: (g, None)
)


@pytest.mark.parametrize("name", WRAPPED)
def test_transformations_do_not_count_and_loops_do(name):
    x = array(2, 16, 32)
    ws = array(5, 32, 96)
    assert flops.of(layers(WRAPPED[name]), x, ws) == 5 * ATTENTION
    assert flops.of(WRAPPED[name], x, array(32, 96)) == ATTENTION


def test_the_most_expensive_branch_counts():
    small = lambda x: x
    large = lambda x: x @ x @ x
    f = lambda i, x: jax.lax.switch(i, [small, large, lambda x: x @ x], x)
    assert flops.of(f, jnp.int32(0), array(8, 8)) == 2 * 2 * 8**3


def test_the_default_branch_of_platform_dependent_counts():
    more = lambda x: x @ x @ x
    less = lambda x: x @ x
    for kernel, default in ((more, less), (less, more), (jnp.sin, less)):
        f = lambda x: jax.lax.platform_dependent(
            x, tpu=kernel, cuda=jnp.cos, default=default
        )
        times = 2 if default is more else 1
        counted = flops.of(layers(lambda x, _: f(x)), array(8, 8), array(5, 1))
        assert counted == 5 * times * 2 * 8**3
    # Without a default, the backend is unknown, so the most expensive branch counts.
    f = lambda x: jax.lax.platform_dependent(x, tpu=more, cpu=less)
    assert flops.of(f, array(8, 8)) == 2 * 2 * 8**3


def test_loops_with_known_and_unknown_numbers_of_iterations():
    body = lambda i, x: x @ x
    known = lambda x: jax.lax.fori_loop(0, 7, body, x)
    assert flops.of(known, array(8, 8)) == 7 * 2 * 8**3
    unknown = lambda n, x: jax.lax.fori_loop(0, n, body, x)
    with pytest.raises(
        ValueError, match="matrix product in a while loop.*Use jax.lax.scan"
    ):
        flops.of(unknown, jnp.int32(7), array(8, 8))
    without_products = lambda n: jax.lax.fori_loop(0, n, lambda i, x: x + 1, 0)
    assert flops.of(without_products, jnp.int32(7)) == 0


def test_a_mapped_function_counts_on_all_devices():
    the_mesh = mesh.make_mesh(((0, 1), (2, 3)), model=2)
    f = jax.shard_map(
        lambda x, w: x @ w,
        mesh=the_mesh,
        axis_names={"group", "slice", "replica"},
        in_specs=(jax.P(("group", "slice", "replica")), jax.P()),
        out_specs=jax.P(("group", "slice", "replica")),
    )
    assert flops.of(f, array(12, 8), array(8, 6)) == 2 * 12 * 8 * 6


def test_a_kernel_counts_once_per_grid_cell():
    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...])

    def f(x, w):
        rows = pallas.BlockSpec((8, 16), lambda i, j: (i, 0))
        columns = (16, 4)
        return pallas.pallas_call(
            kernel,
            out_shape=array(32, 12),
            grid=(4, 3),
            in_specs=[rows, pallas.BlockSpec(columns, lambda i, j: (0, j))],
            out_specs=pallas.BlockSpec((8, 4), lambda i, j: (i, j)),
        )(x, w)

    assert flops.of(f, array(32, 16), array(16, 12)) == 2 * 32 * 16 * 12


def test_a_ragged_product_counts_each_row_once():
    sizes = array(3, dtype=np.int32)
    f = lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes)
    args = (array(24, 8), array(3, 8, 5), sizes)
    assert flops.of(f, *args) == 2 * 24 * 8 * 5
    # In the gradient of the matrices, each row counts once, too.
    loss = lambda w, x, sizes: jnp.sum(f(x, w, sizes))
    assert flops.of(jax.grad(loss), args[1], args[0], sizes) == 2 * 2 * 24 * 8 * 5


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
    # Each product counts three times, but for the gradient of the network's input.
    expected = 2 * 16 * (2 * 3 * 16 + 3 * 16) * (len(groups) or 1)
    batch = batch_of(config, groups)
    assert flops.step(experiment, the_mesh, batch) == expected


class Frozen(toy.Wide):
    """Trains only one of its two layers."""

    def frozen(self):
        return self.config.frozen


@pytest.mark.parametrize(
    "frozen, backward",
    # The gradient of the last layer's matrix; or that of its input, and then that of
    # the first layer's matrix.
    [("linear_0", 16), ("linear_1", 16 + 3 * 16)],
)
def test_gradients_of_frozen_parameters_do_not_count(frozen, backward):
    config = toy.get_config()
    config.frozen = frozen
    batch = batch_of(config, ())
    forward = 3 * 16 + 16
    assert flops.step(Frozen(config), mesh.make_mesh(), batch) == 2 * 16 * (
        forward + backward
    )


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

    def frozen(self):
        return self.config.frozen


@pytest.mark.parametrize(
    "frozen, first, middle, last",
    # How often the products of each layer count.
    [("", 2, 3, 3), ("middle", 2, 2, 3), ("first|middle", 1, 1, 2), ("last", 2, 3, 2)],
)
def test_frozen_layers_count_no_gradients_in_scans_and_recomputation(
    frozen, first, middle, last
):
    config = toy.get_config()
    config.frozen = frozen
    counted = flops.step(Stacked(config), mesh.make_mesh(), batch_of(config, ()))
    products = first * 3 * 16 + middle * 2 * 16 * 16 + last * 16
    assert counted == 2 * 16 * products


class Adapted(toy.Toy):
    """Has wide layers, each with a small branch of low rank beside it."""

    def forward(self, batch, *, is_training):
        del is_training
        x = hk.Linear(128, name="encoder_in")(batch["x"])
        for number in range(2):
            branch = hk.Linear(128, name=f"up_{number}", with_bias=False)
            reduced = hk.Linear(4, name=f"down_{number}", with_bias=False)(x)
            x = hk.Linear(128, name=f"encoder_{number}")(x) + branch(reduced)
        return hk.Linear(1, name="last")(jax.nn.relu(x))[:, 0]

    def frozen(self):
        return self.config.frozen


@pytest.mark.parametrize(
    "frozen", ["", "encoder", "encoder|up|down", "encoder|last", "_0"]
)
def test_model_flops_are_nearly_those_that_xla_counts(frozen):
    config = toy.get_config()
    config.update({"frozen": frozen, "batch_size": 128, "examples": 128})
    config.fingerprint_every_steps = 0
    experiment = Adapted(config)
    the_mesh = mesh.make_mesh(devices=jax.devices()[:1])
    train = batches.TrainBatches(
        experiment.train_batches, the_mesh, batch_size=128, seed=0
    )
    batch = next(train)
    state = state_lib.abstract_state(experiment, the_mesh, 0, train.example)
    program = preflight.jitted_step(experiment, the_mesh)
    by_xla = program.lower(state, batch).compile().cost_analysis()["flops"]
    # XLA also counts what is no product, such as the update: a few percent here.
    assert 0.9 * by_xla < flops.step(experiment, the_mesh, batch) <= by_xla


def test_a_step_s_flops_take_the_batches_of_a_run():
    config = toy.get_config()
    experiment = toy.Wide(config)
    the_mesh = mesh.make_mesh()
    train = batches.TrainBatches(
        experiment.train_batches, the_mesh, batch_size=16, seed=0
    )
    counted = flops.step(experiment, the_mesh, next(train))
    assert counted == 2 * 16 * (2 * 3 * 16 + 3 * 16)


def test_the_flops_of_digits():
    config = digits.get_config()
    experiment = experiment_lib.load(config.experiment)(config)
    with jax.numpy_dtype_promotion("standard"):
        counted = flops.step(experiment, mesh.make_mesh(), batch_of(config, ()))
    # The padding of the 3 x 3 convolutions does not count. At 8 x 8 positions, 22 of 24
    # rows and columns are left, with 24 features; at 4 x 4 positions, 11 of 12, with 48
    # features. Dense layers map 4 x 4 x 48 to 96 to 10.
    first = 22 * 22 * 24
    others = 11 * 11 * 24 * 48 + 768 * 96 + 96 * 10
    assert counted == 2 * 128 * (2 * first + 3 * others)


class Devices:
    """Stands in for a mesh of devices that the machine does not have."""

    def __init__(self, *kinds):
        self.devices = np.array(
            [types.SimpleNamespace(device_kind=kind) for kind in kinds], dtype=object
        )


def test_the_peak_of_all_devices():
    v5e = Devices(*["TPU v5 lite"] * 4)
    assert flops.peak(v5e, jnp.bfloat16) == pytest.approx(4 * 197e12)
    assert flops.peak(v5e, np.float32) is None
    assert flops.peak(mesh.make_mesh(), jnp.bfloat16) is None
    assert flops.peak(Devices("NVIDIA H200", "another"), jnp.float16) is None


@pytest.mark.parametrize(
    "kind, dtype, peak",
    [
        ("TPU v4", "bfloat16", 275e12),
        ("TPU v5 lite", "bfloat16", 197e12),
        ("TPU v5p", "bfloat16", 459e12),
        ("TPU v5", "bfloat16", 459e12),
        ("TPU v6 lite", "bfloat16", 918e12),
        ("TPU v6 lite", "float16", None),
        ("NVIDIA A100-SXM4-80GB", "float16", 312e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5e12),
        ("NVIDIA H200", "float16", 989.5e12),
        ("NVIDIA H200", "float32", None),
        ("cpu", "bfloat16", None),
    ],
)
def test_the_peak_of_each_kind_of_device(kind, dtype, peak):
    assert chips.peak_flops(kind, dtype) == peak
