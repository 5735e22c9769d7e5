"""Tests of products in float8: what they round, and what scales them."""

import math

import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen
from jax import export, lax

import xshard
from xshard import errors
from xshard.learners import fp8

# Dimension numbers: of a matrix, of several summed dimensions in each order, of batches
# in each order, and of vectors.
CASES = (
    ((4, 5, 6), (6, 7), (((2,), (0,)), ((), ()))),
    ((4, 5, 2, 3), (2, 3, 7), (((2, 3), (0, 1)), ((), ()))),
    ((4, 5, 2, 3), (3, 2, 7), (((2, 3), (1, 0)), ((), ()))),
    ((4, 5, 2, 3), (3, 2, 7), (((3, 2), (0, 1)), ((), ()))),
    ((3, 4, 5), (3, 6, 5), (((2,), (2,)), ((0,), (0,)))),
    ((5, 3, 4), (6, 3, 5), (((0,), (2,)), ((1,), (1,)))),
    ((2, 3, 4, 5), (3, 5, 6, 2), (((3,), (1,)), ((1, 0), (0, 3)))),
    ((2, 3), (3,), (((1,), (0,)), ((), ()))),
    ((5,), (5,), (((0,), (0,)), ((), ()))),
)
MATRICES = (((1,), (0,)), ((), ()))
FORMATS = {"float8_e4m3fn": (448.0, 2.0**-4), "float8_e5m2": (57344.0, 2.0**-3)}


def rounded(x, format_, largest=None):
    """Rounds float64 numbers as a product does, in NumPy: by the power of two that
    brings the largest magnitude below the format's largest number.
    """
    largest = np.max(np.abs(x)) if largest is None else largest
    limit, _ = FORMATS[format_]
    scale = 2.0 ** math.floor(math.log2(limit / largest))
    narrow = np.clip(x * scale, -limit, limit).astype(getattr(ml_dtypes, format_))
    return narrow.astype(np.float64) / scale


def drawn(rng, shape, spread=1.0):
    signs = rng.choice([-1.0, 1.0], size=shape)
    return jnp.asarray(signs * np.exp(spread * rng.normal(size=shape)), jnp.float32)


@pytest.mark.parametrize("lhs_shape, rhs_shape, dims", CASES)
def test_what_float8_represents_is_multiplied_exactly(lhs_shape, rhs_shape, dims):
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.integers(-8, 9, lhs_shape), jnp.float32)
    rhs = jnp.asarray(rng.integers(-8, 9, rhs_shape), jnp.float32)
    found, pull = jax.vjp(lambda x, w: xshard.fp8_dot_general(x, w, dims), lhs, rhs)
    expected, pull_expected = jax.vjp(
        lambda x, w: lax.dot_general(x, w, dims), lhs, rhs
    )
    np.testing.assert_array_equal(found, expected)
    gradient = jnp.asarray(rng.integers(-3, 4, found.shape), jnp.float32)
    pairs = zip(pull(gradient), pull_expected(gradient), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("gradient_format", FORMATS)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_products_and_gradients_are_those_of_rounded_operands(gradient_format, spread):
    rng = np.random.default_rng(1)
    x, w, g = (
        drawn(rng, (6, 32), spread),
        drawn(rng, (32, 5)),
        drawn(rng, (6, 5), spread),
    )
    multiply = lambda x, w: xshard.fp8_dot_general(
        x, w, MATRICES, gradient_format=gradient_format
    )
    found, pull = jax.vjp(multiply, x, w)
    wide_x, wide_w, wide_g = (np.asarray(a, np.float64) for a in (x, w, g))
    narrow_x = rounded(wide_x, "float8_e4m3fn")
    narrow_w = rounded(wide_w, "float8_e4m3fn")
    narrow_g = rounded(wide_g, gradient_format)
    # Sums in float32 are in another order than NumPy's.
    near = {"rtol": 1e-5, "atol": 1e-5 * float(np.max(np.abs(found)))}
    np.testing.assert_allclose(found, narrow_x @ narrow_w, **near)
    x_gradient, w_gradient = pull(g)
    np.testing.assert_allclose(x_gradient, narrow_g @ narrow_w.T, **near)
    np.testing.assert_allclose(w_gradient, narrow_x.T @ narrow_g, **near)
    # Each operand is off by at most half a step of its format, or of its smallest
    # numbers: so much is known of the product of the numbers as they were.
    for wide, narrow, format_ in (
        (wide_x, narrow_x, "float8_e4m3fn"),
        (wide_g, narrow_g, gradient_format),
    ):
        limit, step = FORMATS[format_]
        tiny = float(ml_dtypes.finfo(format_).smallest_subnormal)
        floor = tiny * np.max(np.abs(wide)) / limit
        assert np.all(np.abs(narrow - wide) <= step * np.abs(wide) + floor)


def test_the_result_has_the_type_of_the_operands_or_the_one_asked_for():
    x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    result, pull = jax.vjp(lambda x, w: xshard.fp8_dot_general(x, w, MATRICES), x, w)
    assert result.dtype == jnp.bfloat16
    assert [grad.dtype for grad in pull(result)] == [jnp.bfloat16, jnp.bfloat16]
    wide = xshard.fp8_dot_general(x, w, MATRICES, preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32


def test_it_stands_in_for_the_products_of_einsum():
    x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
    multiply = lambda x: jnp.einsum(
        "btd,df->fbt", x, w, _dot_general=xshard.fp8_dot_general
    )
    np.testing.assert_array_equal(multiply(x), jnp.full((5, 2, 3), 4.0))
    assert "f8e4m3fn" in str(jax.make_jaxpr(multiply)(x)).replace("_", "")


@pytest.mark.parametrize(
    "largest", [1e-30, 2.0**-90, 1e-3, 1.75, 1.7500002, 448.0, 448.1, 3e38]
)
@pytest.mark.parametrize("format_", FORMATS)
def test_the_largest_number_fits_and_uses_the_range(largest, format_):
    limit, _ = FORMATS[format_]
    cast = fp8._cast(jnp.float32([-largest, 0.0]), format_)
    narrow = abs(float(cast.narrow[0].astype(jnp.float32)))
    assert limit / 2 * (1 - 2.0**-4) <= narrow <= limit
    assert math.log2(float(cast.inverse)).is_integer()


@pytest.mark.parametrize("format_", FORMATS)
def test_each_exponent_has_a_scale_of_its_own(format_):
    limit, _ = FORMATS[format_]
    at = np.float32(1.75 * 2.0 ** np.arange(-101.0, 128.0))
    above = np.nextafter(at, np.float32(np.inf))
    cast = jax.vmap(lambda x: fp8._cast(x, format_))
    assert np.all(np.asarray(cast(at).narrow, np.float32) == limit)
    np.testing.assert_array_equal(cast(above).inverse, 2 * cast(at).inverse)


@pytest.mark.parametrize("x", [0.0, 1e-42, 1e-38, jnp.inf, jnp.nan])
def test_an_array_without_a_magnitude_has_a_scale_that_is_finite(x):
    cast = fp8._cast(jnp.full((2,), x, jnp.float32), "float8_e5m2")
    assert jnp.isfinite(cast.inverse) and cast.inverse > 0
    empty = fp8._cast(jnp.zeros((0,)), "float8_e5m2")
    assert jnp.isfinite(empty.inverse) and empty.inverse > 0


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("where", ["input", "kernel", "gradient"])
def test_what_is_not_finite_is_neither_afterwards(bad, where):
    arrays = {
        "input": jnp.ones((2, 3)),
        "kernel": jnp.ones((3, 4)),
        "gradient": jnp.ones((2, 4)),
    }
    arrays[where] = arrays[where].at[0, 0].set(bad)
    multiply = lambda x, w: xshard.fp8_dot_general(x, w, MATRICES)
    found, pull = jax.vjp(multiply, arrays["input"], arrays["kernel"])
    x_gradient, w_gradient = pull(arrays["gradient"])
    bad_result = ~np.isfinite(np.asarray(found))
    if where == "gradient":
        assert not bad_result.any()
        assert not np.isfinite(x_gradient[0]).any()
        assert not np.isfinite(w_gradient[:, 0]).any()
    else:
        rows = bad_result[0] if where == "input" else bad_result[:, 0]
        assert rows.all() and not bad_result[1:, 1:].any()


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_what_is_finite_keeps_its_scale_beside_what_is_not(bad, size):
    x = size * jnp.float32([[1.0, 2.0], [3.0, 3.5]])
    beside = jnp.concatenate([x, jnp.full((1, 2), bad)])
    w = jnp.float32([[2.0], [1.0]])
    found = xshard.fp8_dot_general(beside, w, MATRICES)
    np.testing.assert_array_equal(found[:2], xshard.fp8_dot_general(x, w, MATRICES))
    np.testing.assert_allclose(found[:2, 0], x @ w[:, 0], rtol=2.0**-4)
    assert not np.isfinite(found[2, 0])


@pytest.mark.parametrize("exponent", [-3, 0, 2])
def test_flax_rounds_alike_where_its_scale_is_a_power_of_two(exponent):
    rng = np.random.default_rng(2)
    make = lambda shape, limit: jnp.asarray(
        np.append(rng.uniform(-limit, limit, math.prod(shape) - 1), limit).reshape(
            shape
        ),
        jnp.float32,
    )
    # The largest numbers of the history, of which its scale follows.
    x = make((4, 8), 448.0 * 2.0**exponent)
    w = make((8, 3), 448.0)
    g = make((4, 3), 57344.0 * 2.0**-exponent)
    history = lambda a: jnp.full((2,), jnp.max(jnp.abs(a)))
    module = linen.Fp8DirectDotGeneralOp(amax_history_length=2)
    variables = module.init(jax.random.key(0), x, w, MATRICES)
    ((group, state),) = variables.items()
    operands = {"input": x, "kernel": w, "output_grad": g}
    for name, operand in operands.items():
        state = {**state, f"{name}_amax_history": history(operand)}
    theirs = lambda x, w: module.apply({group: state}, x, w, MATRICES)

    def both(multiply):
        result, pull = jax.vjp(multiply, x, w)
        return result, *pull(g)

    found = jax.jit(lambda: both(lambda x, w: xshard.fp8_dot_general(x, w, MATRICES)))()
    expected = jax.jit(lambda: both(theirs))()
    for ours, other in zip(found, expected, strict=True):
        # The same products, summed in another order.
        np.testing.assert_allclose(
            ours, other, rtol=1e-5, atol=1e-6 * float(jnp.max(jnp.abs(other)))
        )


def test_replicas_under_the_check_of_what_varies_sum_the_kernels_gradient():
    mesh = jax.make_mesh((8,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.integers(-4, 5, (16, 6)), jnp.float32)
    w = jnp.asarray(rng.integers(-4, 5, (6, 3)), jnp.float32)

    def gradients(multiply):
        loss = lambda x, w: jnp.sum(multiply(x, w, MATRICES))
        mapped = jax.shard_map(
            jax.grad(loss, (0, 1)),
            mesh=mesh,
            in_specs=(jax.P("r"), jax.P()),
            out_specs=(jax.P("r"), jax.P()),
        )
        return jax.jit(mapped)(x, w)

    pairs = zip(
        gradients(xshard.fp8_dot_general), gradients(lax.dot_general), strict=True
    )
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowered_programs_multiply_float8(platform):
    def loss(x, w):
        result = xshard.fp8_dot_general(x, w, MATRICES)
        return jnp.sum(result.astype(jnp.float32) ** 2)

    arguments = (jnp.ones((16, 32), jnp.bfloat16), jnp.ones((32, 16), jnp.bfloat16))
    exported = export.export(jax.jit(jax.grad(loss, (0, 1))), platforms=[platform])(
        *arguments
    )
    text = exported.mlir_module()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    forward, *backward = sorted(products, key=lambda line: "f8E5M2" in line)
    assert forward.count("f8E4M3FN>") == 2 and "f8E5M2" not in forward
    assert len(backward) == 2
    for line in backward:
        assert line.count("f8E4M3FN>") == 1 and line.count("f8E5M2>") == 1
    assert all(line.rstrip().count("xf32>") >= 1 for line in products)


@pytest.mark.parametrize(
    "dtype", ["int32", "bool", "complex64", "float8_e4m3fn", "float64"]
)
@pytest.mark.parametrize("which", [0, 1])
def test_other_types_are_refused_by_name(dtype, which):
    operands = [np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)]
    with jax.enable_x64(dtype == "float64"):
        operands[which] = jnp.ones((2, 2), dtype)
        name = ("input", "kernel")[which]
        text = f"The {name} of a product in float8 is {dtype} of shape"
        with pytest.raises(errors.UserError, match=text):
            xshard.fp8_dot_general(*operands, MATRICES)


def test_options_that_float8_lacks_are_refused_by_name():
    x = jnp.ones((2, 2))
    with pytest.raises(errors.UserError, match="^fp8_dot_general.precision=Precis"):
        xshard.fp8_dot_general(x, x, MATRICES, lax.Precision.HIGHEST)
    with pytest.raises(
        errors.UserError, match="^gradient_format='float8_e3m4' must be"
    ):
        xshard.fp8_dot_general(x, x, MATRICES, gradient_format="float8_e3m4")


def test_a_name_makes_it_a_module_without_parameters():
    multiply = lambda x, w: xshard.fp8_dot_general(x, w, MATRICES, name="product")
    transformed = hk.transform_with_state(multiply)
    params, state = transformed.init(None, jnp.ones((2, 2)), jnp.eye(2))
    assert not params and not state
    found, _ = transformed.apply({}, {}, None, jnp.ones((2, 2)), jnp.eye(2))
    np.testing.assert_array_equal(found, jnp.ones((2, 2)))


def test_each_example_of_vmap_has_a_scale_of_its_own():
    rng = np.random.default_rng(4)
    sizes = jnp.float32([1.0, 1e-9, 1e9])[:, None, None]
    xs = sizes * jnp.asarray(rng.integers(-8, 9, (3, 4, 5)), jnp.float32)
    w = jnp.asarray(rng.integers(-8, 9, (5, 2)), jnp.float32)
    loss = lambda x, w: jnp.sum(xshard.fp8_dot_general(x, w, MATRICES) ** 2)
    gradients = jax.grad(loss, (0, 1))
    mapped = jax.jit(jax.vmap(gradients, (0, None)))(xs, w)
    for i, x in enumerate(xs):
        for ours, alone in zip(mapped, gradients(x, w), strict=True):
            np.testing.assert_array_equal(ours[i], alone)
