"""A replica's program, split at what is exchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from xshard import errors
from xshard.logical import split as split_lib

_SIZES = {"slice": 1, "replica": 4}
_BOTH = ("slice", "replica")


def number():
    return lax.axis_index(_BOTH).astype(jnp.float32)


def split(f, *args, own=(False, True)):
    program = jax.make_jaxpr(f, axis_env=list(_SIZES.items()))(*args)
    return split_lib.split(program, "step", _SIZES, own)


def run(part, number_or_results, *args):
    return core.jaxpr_as_fun(part.program)(*(args[i] for i in part.reads), *number_or_results)


def test_each_part_computes_what_is_its_own():
    def step(w, x):
        local = jax.jit(lambda w, x: lax.psum(w * x + number(), _BOTH))(w, x)
        return w - local, lax.pmax(x, "replica")

    found = split(step, 2.0, 3.0)
    assert found.kinds == ("psum", "pmax")
    assert found.before.reads == (0, 1) and found.after.reads == (0,)
    assert run(found.before, [jnp.int32(2)], 2.0, 3.0) == [8.0, 3.0]
    assert run(found.after, [10.0, 7.0], 2.0, 3.0) == [-8.0, 7.0]


def test_what_is_computed_again_for_the_backward_pass_is_found():
    def step(w, x):
        loss = jax.checkpoint(lambda w: jnp.sin(w * x))
        return lax.pmean(jax.grad(loss)(w), _BOTH)

    found = split(step, 2.0, 3.0)
    (gradient,) = run(found.before, [jnp.int32(0)], 2.0, 3.0)
    np.testing.assert_allclose(gradient, 3 * np.cos(6), rtol=1e-6)
    assert run(found.after, [8.0], 2.0, 3.0) == [2.0]


@pytest.mark.parametrize(
    "step, words",
    [
        (lambda w, x: lax.psum(x - lax.pmean(x, _BOTH), _BOTH), "depends on an earlier exchange"),
        (lambda w, x: w + x, "differs between the replicas"),
        (lambda w, x: w + number(), "differs between the replicas"),
        (lambda w, x: lax.all_gather(x, "replica"), "all_gather over the replicas"),
        (lambda w, x: lax.psum(x, "replica", axis_index_groups=[[0, 1], [2, 3]]), "groups of"),
        (
            lambda w, x: lax.scan(lambda c, _: (lax.psum(c, "replica"), ()), x, length=2)[0],
            "inside a scan",
        ),
        (
            lambda w, x: lax.cond(w > 0, lambda: lax.axis_index("replica"), lambda: 0),
            "inside a cond",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(step, words):
    with pytest.raises(errors.UserError, match=words):
        split(step, 2.0, 3.0)
