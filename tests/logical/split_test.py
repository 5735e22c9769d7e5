"""The split of a replica's program at its collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xshard import errors, logical, mesh
from xshard.logical import split as split_lib

_SIZES = {"slice": 1, "replica": 4}
_BOTH = ("slice", "replica")


def replica_number():
    return lax.axis_index(_BOTH).astype(jnp.float32)


def sum_sine(x):
    return lax.psum(jnp.sin(x), _BOTH)


def printing(w, x):
    jax.debug.print("{}", x)
    return w + sum_sine(x)


def split(f, *args, own=(False, True), left_own=None):
    program = jax.make_jaxpr(f, axis_env=list(_SIZES.items()))(*args)
    left_own = left_own or [False] * len(program.out_avals)
    return split_lib.split(program, "step", _SIZES, own, left_own)


def test_each_part_computes_its_side_of_a_collective():
    def step(w, x):
        local = jax.jit(lambda w, x: lax.psum(w * x + replica_number(), _BOTH))(w, x)
        return w - local, lax.pmax(x, "replica")

    parts = split(step, 2.0, 3.0)
    (collective,) = parts.collectives
    assert [kind.name for kind in collective.kinds] == ["psum", "pmax"]
    assert collective.before([2.0, 3.0, jnp.int32(2)]) == [8.0, 3.0]
    assert parts.after([2.0, None, None, 10.0, 7.0]) == [-8.0, 7.0]


def test_a_collective_may_depend_on_another():
    def step(w, x):
        mean = lax.pmean(x, _BOTH)
        return w + lax.psum((x - mean) ** 2, _BOTH), lax.pmax(x, "replica")

    parts = split(step, 2.0, 3.0)
    kinds = [[kind.name for kind in each.kinds] for each in parts.collectives]
    assert kinds == [["psum", "pmax"], ["psum"]]
    assert [each.results for each in parts.collectives] == [(0, 2), (1,)]
    first, second = (each.before for each in parts.collectives)
    assert first([2.0, 3.0]) == [3.0, 3.0]
    assert second([2.0, 3.0, None, 8.0]) == [1.0]
    assert parts.after([2.0, None, None, 8.0, 5.0, 4.0]) == [7.0, 4.0]


@pytest.mark.parametrize("tiled", [True, False])
def test_a_scattered_shard_differs_by_replica_until_it_is_gathered(tiled):
    def step(x):
        shard = lax.psum_scatter(
            x * replica_number(), "replica", scatter_dimension=1, tiled=tiled
        )
        kept = shard + replica_number()
        return lax.all_gather(2 * shard, "replica", axis=1, tiled=tiled), kept

    parts = split(step, jnp.ones((3, 4)), own=[True], left_own=[False, True])
    first, second = parts.collectives
    assert (first.kinds, first.kept) == ((split_lib.Kind("reduce_scatter", 1),), ())
    assert (second.kinds, second.kept) == ((split_lib.Kind("all_gather", 1),), (0,))
    sent, kept = second.before([None, jnp.int32(2), jnp.ones((3, 1))])
    assert (sent.shape, float(sent[0, 0])) == ((3, 1), 2.0)
    assert (kept.shape, kept.ravel().tolist()) == ((3, 1) if tiled else (3,), [3.0] * 3)
    (whole,) = parts.after([None, None, None, jnp.ones((3, 4))])
    assert whole.shape == (3, 4)
    with pytest.raises(errors.UserError, match="differs between the replicas"):
        split(step, jnp.ones((3, 4)), own=[True])


def test_a_rematerialized_gradient_is_split():
    def step(w, x):
        loss = jax.checkpoint(lambda w: jnp.sin(w * x))
        return lax.pmean(jax.grad(loss)(w), _BOTH)

    parts = split(step, 2.0, 3.0)
    (gradient,) = parts.collectives[0].before([2.0, 3.0])
    np.testing.assert_allclose(gradient, 3 * np.cos(6), rtol=1e-6)
    assert parts.after([None, None, None, 8.0]) == [2.0]


@pytest.mark.parametrize(
    "step, words",
    [
        (
            lambda w, x: functools.reduce(lambda x, _: sum_sine(x), range(17), x),
            "has 17 collectives",
        ),
        (lambda w, x: w + x, "differs between the replicas"),
        (lambda w, x: w + replica_number(), "differs between the replicas"),
        (printing, "has debug_print of a replica's values"),
        (
            lambda w, x: lax.ppermute(x, "replica", [(0, 1)]),
            "ppermute over the replicas",
        ),
        (lambda w, x: lax.psum(x, "slice"), "psum over \\['slice'\\]"),
        (
            lambda w, x: lax.psum(x, "replica", axis_index_groups=[[0, 1], [2, 3]]),
            "groups of",
        ),
        (
            lambda w, x: lax.scan(
                lambda c, _: (lax.psum(c, "replica"), ()), x, length=2
            )[0],
            "inside a scan.*a loss of micro-batches runs in a scan: set micro_batches "
            "to 1",
        ),
        (
            lambda w, x: lax.cond(w > 0, lambda: lax.axis_index("replica"), lambda: 0),
            "inside a cond",
        ),
    ],
)
def test_a_program_that_cannot_be_split_is_refused_with_the_reason(step, words):
    with pytest.raises(errors.UserError, match=words):
        split(step, 2.0, 3.0)


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_batch_of_another_type_gets_its_own_program(is_exact):
    the_mesh = mesh.make_mesh(devices=jax.devices()[:2])
    replicas = logical.Replicas(4, the_mesh, is_exact=is_exact)
    rows = jax.P(mesh.BATCH)
    sizes = logical.Mapped(
        lambda x: lax.pmean(jnp.mean(x * x), _BOTH), (rows,), jax.P()
    )
    program = logical.Program("step", lambda *_: sizes, replicas)
    for dtype in (np.float32, np.int32, jnp.float16):
        batch = np.arange(1, 9).astype(dtype)
        assert program(mesh.put(the_mesh, batch, rows)) == 25.5
