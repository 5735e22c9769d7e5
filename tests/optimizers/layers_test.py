"""Tests that functions of stacked layers give the same results on some layers, or are refused if they mix layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from optax import contrib

from xshard.optimizers import layers
from xshard.optimizers.values import Layers

STACK = np.random.default_rng(0).normal(size=(5, 4, 6)).astype(np.float32)
# The layers that the replica holds.
HELD = slice(2, 4)
SCALES = np.linspace(1, 2, 3, dtype=np.float32)


def products(x):
    gram = x @ x.transpose(0, 2, 1)
    return 2.0 * gram @ x + x


def by_rounds(x):
    def body(carry, scale):
        count, y = carry
        y = lax.cond(count == 0, lambda y: scale * y, lambda y: y - products(y) / 100, y)
        return (count + 1, y), scale

    return lax.scan(body, (0, x), SCALES)[0][1]


def orthogonal(x):
    rule = contrib.scale_by_muon(
        weight_dimension_numbers=lambda params: contrib.MuonDimensionNumbers(1, 2),
        preconditioning="aol",
    )
    return rule.update(x, rule.init(x))[0]


PER_LAYER = {
    "elements": lambda x: jnp.where(x > 0, jnp.exp(-x), 1.0),
    "rows": lambda x: x / jnp.linalg.norm(x, axis=2, keepdims=True),
    "shapes": lambda x: x.reshape(5, 2, 2, 6).transpose(0, 2, 3, 1)[:, None].squeeze(1),
    "numbers": lambda x: jnp.max(x, axis=(1, 2)),
    "products": products,
    "with an array": lambda x: x @ jnp.asarray(STACK[0].T),
    "rounds": by_rounds,
    "decomposed": lambda x: jnp.linalg.svd(x, full_matrices=False, compute_uv=False),
    "muon": orthogonal,
}
MIXED = {
    "sum": lambda x: jnp.sum(x, axis=0),
    "all": lambda x: x / jnp.sqrt(jnp.sum(x * x)),
    "running": lambda x: jnp.cumsum(x, axis=0),
    "order": lambda x: x[::-1],
    "transposed": lambda x: x.transpose(1, 0, 2),
    "merged": lambda x: x.reshape(20, 6).reshape(5, 4, 6),
    "spread": lambda x: jnp.tensordot(x, x, axes=((0,), (0,))),
    "second": lambda x: lax.dot_general(STACK[0], x, (((0,), (1,)), ((), ()))),
    "scanned": lambda x: lax.scan(lambda total, y: (total + y, y), x[0] * 0, x)[0],
    "other layers": lambda x: x + jnp.asarray(STACK),
    "one branch": lambda x: lax.cond(x.sum() > 0, lambda: x, lambda: x * 0),
}


def on_layers(f):
    closed = jax.make_jaxpr(f)(STACK)
    (result,) = layers.run(closed, [Layers(jnp.asarray(STACK[HELD]))])
    return result


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", PER_LAYER)
def test_held_layers_match_an_evaluation_of_the_whole_stack(name):
    result, whole = on_layers(PER_LAYER[name]), PER_LAYER[name](jnp.asarray(STACK))
    assert isinstance(result, Layers)
    # The float32 products are summed in another order.
    np.testing.assert_allclose(result.array, whole[HELD], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MIXED)
def test_a_function_that_mixes_layers_is_refused(name):
    with pytest.raises(layers.MixedError):
        on_layers(MIXED[name])


def test_a_value_that_does_not_depend_on_layers_is_returned_as_is():
    f = lambda x: lax.scan(lambda count, _: (count + 1, None), 0, length=3)[0] + 0 * x.shape[0]
    assert on_layers(f) == 3
