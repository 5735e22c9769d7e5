"""Tests that members of a run combine on the host what one process combines on its
devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.logical import members
from tests.optimizers import harness
from xshard import errors, logical
from xshard import mesh as mesh_lib

_ROWS = jax.P(mesh_lib.BATCH)
_NAMES = ("slice", "replica")
_NAN = float("nan")


def collective(combine, rows, devices, exchange=None, groups=None):
    """Returns what replicas have combined, one row each."""
    mesh = mesh_lib.make_mesh(groups, devices=jax.devices()[:devices])
    replicas = logical.Replicas(len(rows) // mesh_lib.num_groups(mesh), mesh, True)
    axes = mesh_lib.group_axes(mesh)
    of_group = lambda x: x[None] if axes else x
    mapped = logical.Mapped(
        lambda x: of_group(combine(x[0])), in_specs=(_ROWS,), out_specs=jax.P(*axes)
    )
    program = logical.Program("it", lambda *_: mapped, replicas, exchange)
    size = replicas.rows(replicas.count) * mesh_lib.num_groups(mesh)
    padded = np.full((size, *rows.shape[1:]), 7, rows.dtype)
    padded[: len(rows)] = rows
    return np.asarray(program(mesh_lib.put(mesh, padded, _ROWS)))


def check(combine, rows):
    expected = collective(combine, rows, 1)
    for count, devices in ((1, 1), (2, 1), (3, 2), (4, 1)):
        exchange = members.Members(count)
        got = collective(combine, rows, devices, exchange)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes(), (count, devices)
        assert exchange.calls


def values(dtype, count=5):
    rng = np.random.default_rng(0)
    return (rng.normal(size=(count, 2, 3)) * 10).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.int32])
@pytest.mark.parametrize("name", ["psum", "pmax", "pmin", "all_gather"])
def test_members_get_the_bits_of_one_process(name, dtype):
    combine = functools.partial(getattr(jax.lax, name), axis_name=_NAMES)
    check(combine, values(dtype))


@pytest.mark.parametrize("name", ["pmax", "pmin", "all_gather"])
@pytest.mark.parametrize("signs", [(0.0, -0.0), (-0.0, 0.0), (-0.0, -0.0)])
def test_the_sign_of_zero_does_not_depend_on_the_members(name, signs):
    rows = np.float32([[signs[0], 1.0], [signs[1], -1.0], [signs[0], 0.5]])
    check(functools.partial(getattr(jax.lax, name), axis_name=_NAMES), rows)


@pytest.mark.parametrize("name", ["psum", "pmax", "pmin", "all_gather"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, _NAN])
def test_what_is_not_finite_is_combined_alike(name, value):
    rows = values(np.float32)
    rows[3, 1, 1] = value
    check(functools.partial(getattr(jax.lax, name), axis_name=_NAMES), rows)


def test_a_gather_along_any_dimension_is_in_the_order_of_the_replicas():
    gather = functools.partial(jax.lax.all_gather, axis_name=_NAMES, axis=1)
    check(functools.partial(gather, tiled=True), values(np.float32))
    check(gather, values(np.int8))


def test_one_collective_of_all_kinds_and_one_that_depends_on_it():
    def combine(x):
        total = jax.lax.psum(x, _NAMES)
        largest = jax.lax.pmax(x, _NAMES)
        whole = jax.lax.psum(x.astype(jnp.int32), _NAMES)
        mean = jax.lax.pmean((total + largest) * x, _NAMES)
        rows = jax.lax.all_gather(x, _NAMES, tiled=True)
        return mean + whole.astype(x.dtype) + rows.sum(axis=0)

    check(combine, values(np.float32, count=8))


@pytest.mark.parametrize("devices", [1, 2])
def test_nothing_is_compiled_once_members_wait_for_one_another(devices):
    counts = []

    class Counting(members.Members):
        def combine(self, *args):
            counts.append(harness.compile_count())
            return super().combine(*args)

    def combine(x):
        return jax.lax.psum(x, _NAMES) + jax.lax.all_gather(x, _NAMES).sum(axis=0)

    collective(combine, values(np.float32, count=8), devices, Counting(2))
    assert counts == [harness.compile_count()] * 2


def test_each_group_is_combined_by_itself():
    combine = functools.partial(jax.lax.psum, axis_name=_NAMES)
    rows = values(np.float32, count=4)
    expected = collective(combine, rows, 2, groups=((0,), (1,)))
    assert expected.shape[0] == 2
    shared = collective(combine, rows, 2, members.Members(2), ((0,), (1,)))
    assert shared.tobytes() == expected.tobytes()


def test_each_replica_has_its_shard_of_a_sum_that_is_scattered():
    def combine(x):
        size = jax.lax.axis_size("replica")
        rows = jnp.stack([x * (i + 1) for i in range(size)])
        own = jax.lax.psum_scatter(rows, _NAMES, tiled=False)
        return jax.lax.psum(own * x, _NAMES)

    check(combine, values(np.float32))


def test_what_members_cannot_combine_is_refused_by_name():
    exchange = members.Members(2)
    rows = values(np.float32, count=4)
    with pytest.raises(errors.UserError, match="it sums complex64 over its replicas"):
        collective(
            lambda x: jnp.abs(jax.lax.psum(jax.lax.complex(x, x), _NAMES)),
            rows,
            1,
            exchange,
        )
    with pytest.raises(errors.UserError, match="it returns 1 arrays of which each"):
        mesh = mesh_lib.make_mesh(devices=jax.devices()[:1])
        mapped = logical.Mapped(lambda x: x, in_specs=(_ROWS,), out_specs=_ROWS)
        logical.Program(
            "it", lambda *_: mapped, logical.Replicas(4, mesh, 1), exchange
        ).trace(rows)
