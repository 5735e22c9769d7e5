"""Sums whose order does not show."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xshard import mesh as mesh_lib
from xshard.logical import split, sums


def exchanged(arrays, devices, kind, count=None, limbs=1, steps=(None,)):
    """What replicas with these values exchange on so many devices, as each device has it."""
    mesh = mesh_lib.make_mesh(devices=jax.devices()[:devices])
    count = len(arrays) if count is None else count
    rounds = -(-count // devices)
    held = np.zeros((rounds * devices, *arrays.shape[1:]), arrays.dtype)
    # What stands at an empty place must not matter.
    held[...] = np.nan if held.dtype.kind == "f" else 7
    held[:count] = arrays
    numbers = np.arange(len(held))

    def local(held, numbers):
        kinds, brought = [split.Kind(kind)], [[x] for x in held]
        (made,) = sums.combine(kinds, brought, numbers < count, count, limbs, steps)
        return jnp.stack(made) if kind == split.SCATTER else made[None]

    spec = jax.P(mesh_lib.BATCH)
    f = mesh_lib.on_replicas(local, mesh, in_specs=(spec, spec), out_specs=spec)
    return np.asarray(jax.jit(f)(held, numbers))


def combine(arrays, devices, kind="psum", **options):
    """The same, as all devices have it."""
    made = exchanged(arrays, devices, kind, **options)
    assert all(x.tobytes() == made[0].tobytes() for x in made)
    return made[0]


def values(count, size=40, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(count, size)) * 10.0 ** rng.integers(-6, 6, size)).astype(np.float32)


def test_neither_the_order_nor_the_devices_show():
    x = values(7)
    expected = combine(x, 1).tobytes()
    for devices, order in itertools.product((2, 3, 8), (range(7), range(6, -1, -1))):
        assert combine(x[list(order)], devices).tobytes() == expected


@pytest.mark.parametrize("limbs", [1, 2])
@pytest.mark.parametrize("count", [1, 5, 64, 1024])
def test_what_is_lost_is_half_a_step_for_each_replica(count, limbs):
    x = values(count)
    largest = np.abs(x).max()
    bits = 30 - (count - 1).bit_length()
    step = 2.0 ** (np.frexp(largest)[1] - limbs * bits)
    true = x.astype(np.float64).sum(axis=0)
    # And a rounding to float32: of each integer, and of what they add up to.
    allowed = count * step / 2 + np.abs(true) * limbs * 2.0**-24
    assert np.all(np.abs(combine(x, 4, limbs=limbs) - true) <= allowed)
    assert combine(x[::-1], 3, limbs=limbs).tobytes() == combine(x, 4, limbs=limbs).tobytes()


def test_two_integers_keep_what_is_small_beside_what_is_large():
    x = np.float32([[1e6, 3e-7], [2e6, 1e-7]])
    lost, kept = combine(x, 2), combine(x, 2, limbs=2)
    assert lost[1] == 0
    # Half a unit of each: 2**-58 of the power of two above the largest.
    np.testing.assert_allclose(kept, x.sum(axis=0), rtol=0, atol=2.0 ** (21 - 58))


def test_powers_of_two_are_summed_without_loss():
    x = np.float32([[2.0**-20, 3.0], [2.0**-19, 1.0], [-(2.0**-20), 0.5]])
    assert combine(x, 2).tolist() == [2.0**-19, 4.5]


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-30, 3e38])
def test_the_ends_of_the_range(value):
    x = np.full((2, 3), value, np.float32)
    x[1] = 0
    np.testing.assert_allclose(combine(x, 2), x[0], rtol=2.0**-24, atol=2.0**-120)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_makes_the_array_nan(bad):
    x = values(3)
    x[1, 2] = bad
    assert np.isnan(combine(x, 2)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_maxima_and_minima_are_of_the_replicas_alone(dtype):
    x = np.array([[-5, 3], [-2, 9], [-7, 1]], dtype)
    assert combine(x, 2, "pmax").tolist() == [-2, 9]
    assert combine(x, 2, "pmin").tolist() == [-7, 1]


@pytest.mark.parametrize("limbs", [1, 2])
def test_a_shard_is_that_of_the_sum(limbs):
    x = values(6)[:, :36]
    whole = combine(x, 3, limbs=limbs)
    for devices in (1, 3, 4, 8):
        shards = exchanged(x, devices, split.SCATTER, limbs=limbs)
        assert shards[:6].tobytes() == whole.tobytes()


def test_a_shard_of_a_sum_of_floats_is_rounded():
    x = values(6)[:, :36]
    shards = exchanged(x, 4, split.SCATTER, limbs=0)[:6].reshape(-1)
    np.testing.assert_allclose(shards, x.astype(np.float64).sum(axis=0), rtol=1e-4)


@pytest.mark.parametrize(
    "count, devices, steps",
    [(6, 1, (None,)), (6, 4, (None,)), (8, 8, mesh_lib.step_groups((4, 2)))],
)
def test_what_is_gathered_is_in_the_order_of_the_replicas(count, devices, steps):
    x = values(count)
    assert combine(x, devices, split.GATHER, steps=steps).tobytes() == x.tobytes()


def test_integers_are_summed_as_they_are():
    x = np.array([[2**30, -1], [5, 1], [-3, 4]], np.int32)
    assert combine(x, 2).tolist() == [2**30 + 2, 4]


def test_half_precision_is_summed_in_float32():
    x = values(6).astype(jnp.bfloat16)
    total = functools.reduce(np.add, x.astype(np.float64))
    np.testing.assert_allclose(combine(x, 3).astype(np.float64), total, rtol=2.0**-8, atol=1e-1)
