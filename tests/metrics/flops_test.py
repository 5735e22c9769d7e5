"""Tests that counted FLOPs equal those computed by hand, under any transformation."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from xshard import mesh
from xshard.metrics import chips, flops


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
    # And in those of two layers, which have group sizes each.
    dims = jax.lax.RaggedDotDimensionNumbers((([1], [1]), ([0], [0])), [1], [])
    grads = functools.partial(
        jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=dims
    )
    args = (array(2, 24, 8), array(2, 24, 5), array(2, 3, dtype=np.int32))
    assert flops.of(grads, *args) == 2 * 2 * 24 * 8 * 5


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
