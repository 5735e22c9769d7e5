"""Tests that exact sums do not depend on the order of their terms."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xshard import mesh as mesh_lib
from xshard.base import mesh_axes
from xshard.logical import split, sums


def combined(arrays, devices, kind, count=None, exact=True, steps=(None,)):
    """Returns the result that each device has when replicas combine these values on
    `devices` devices.
    """
    mesh = mesh_lib.make_mesh(devices=jax.devices()[:devices])
    count = len(arrays) if count is None else count
    rounds = -(-count // devices)
    padded = np.zeros((rounds * devices, *arrays.shape[1:]), arrays.dtype)
    # The values at places without a replica must not affect the result.
    padded[...] = np.nan if padded.dtype.kind == "f" else 7
    padded[:count] = arrays
    numbers = np.arange(len(padded))

    def local(padded, numbers):
        kinds, sent = [split.Kind(kind)], [[x] for x in padded]
        (result,) = sums.combine(kinds, sent, numbers < count, count, exact, steps)
        return jnp.stack(result) if kind == split.SCATTER else result[None]

    spec = jax.P(mesh_lib.BATCH)
    f = mesh_lib.on_replicas(local, mesh, in_specs=(spec, spec), out_specs=spec)
    return np.asarray(jax.jit(f)(padded, numbers))


def combine(arrays, devices, kind="psum", **options):
    """Returns the result that all devices share, after checking that its bits are the
    same on each.
    """
    result = combined(arrays, devices, kind, **options)
    assert all(x.tobytes() == result[0].tobytes() for x in result)
    return result[0]


def values(count, size=40, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(count, size)) * 10.0 ** rng.integers(-6, 6, size)).astype(
        np.float32
    )


def test_a_sum_does_not_depend_on_the_order_or_the_devices():
    x = values(7)
    expected = combine(x, 1).tobytes()
    for devices, order in itertools.product((2, 3, 8), (range(7), range(6, -1, -1))):
        assert combine(x[list(order)], devices).tobytes() == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [1, 5, 64, 1024])
def test_the_error_is_at_most_half_a_step_for_each_replica(count):
    x = values(count)
    largest = np.abs(x).max()
    bits = 30 - (count - 1).bit_length()
    step = 2.0 ** (np.frexp(largest)[1] - bits)
    true = x.astype(np.float64).sum(axis=0)
    # Conversion to float32 rounds the integer once more.
    allowed = count * step / 2 + np.abs(true) * 2.0**-24
    assert np.all(np.abs(combine(x, 4) - true) <= allowed)
    assert combine(x[::-1], 3).tobytes() == combine(x, 4).tobytes()


def test_powers_of_two_are_summed_without_loss():
    x = np.float32([[2.0**-20, 3.0], [2.0**-19, 1.0], [-(2.0**-20), 0.5]])
    assert combine(x, 2).tolist() == [2.0**-19, 4.5]


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-30, 3e38])
def test_values_at_the_ends_of_the_range_are_summed(value):
    x = np.full((2, 3), value, np.float32)
    x[1] = 0
    np.testing.assert_allclose(combine(x, 2), x[0], rtol=2.0**-24, atol=2.0**-120)


@pytest.mark.parametrize("size", [40, 1 << 14])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_makes_the_array_nan(bad, size):
    x = values(3, size)
    x[1, 2] = bad
    assert np.isnan(combine(x, 2)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_maxima_and_minima_ignore_places_without_a_replica(dtype):
    x = np.array([[-5, 3], [-2, 9], [-7, 1]], dtype)
    assert combine(x, 2, "pmax").tolist() == [-2, 9]
    assert combine(x, 2, "pmin").tolist() == [-7, 1]


def test_scattered_shards_have_the_bits_of_the_whole_sum():
    x = values(6)[:, :36]
    whole = combine(x, 3)
    for devices in (1, 3, 4, 8):
        shards = combined(x, devices, split.SCATTER)
        assert shards[:6].tobytes() == whole.tobytes()


def test_shards_of_a_floating_point_sum_agree_within_rounding():
    x = values(6)[:, :36]
    shards = combined(x, 4, split.SCATTER, exact=False)[:6].reshape(-1)
    np.testing.assert_allclose(shards, x.astype(np.float64).sum(axis=0), rtol=1e-4)


@pytest.mark.parametrize(
    "count, devices, steps",
    [(6, 1, (None,)), (6, 4, (None,)), (8, 8, mesh_axes.step_groups((4, 2)))],
)
def test_gathered_values_are_in_the_order_of_the_replicas(count, devices, steps):
    x = values(count)
    assert combine(x, devices, split.GATHER, steps=steps).tobytes() == x.tobytes()


def test_integers_are_summed_exactly():
    x = np.array([[2**30, -1], [5, 1], [-3, 4]], np.int32)
    assert combine(x, 2).tolist() == [2**30 + 2, 4]


def test_half_precision_is_summed_in_float32():
    x = values(6).astype(jnp.bfloat16)
    total = functools.reduce(np.add, x.astype(np.float64))
    np.testing.assert_allclose(
        combine(x, 3).astype(np.float64), total, rtol=2.0**-8, atol=1e-1
    )
