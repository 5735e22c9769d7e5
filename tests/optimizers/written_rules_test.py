"""Tests that rules written by hand train in shards as they do replicated.

They are rules as research has them.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import xshard
from tests.optimizers import harness, written
from xshard import errors


def each(f, *trees):
    """Applies `f(path, leaf, ...)` to the leaves of trees."""
    named = lambda path, *leaves: f(written.path_name(path), *leaves)
    return jax.tree_util.tree_map_with_path(named, *trees)


def slot(name, like, init=jnp.zeros):
    return hk.get_state(name, like.shape, like.dtype, init)


def mean(x):
    return x if hk.running_init() else jax.lax.pmean(x, "replica")


class Wrapper(xshard.OptimizerWrapper):
    """A wrapper with the name of its class."""

    def __init__(self, opt):
        super().__init__(name=type(self).__name__.lower())
        self.opt = opt


class SharpnessAware(Wrapper):
    """Foret et al., 2020: differentiates a step up the group's gradient."""

    def compute_gradients(self, loss, params, **kwargs):
        _, grads = self.opt.compute_gradients(loss, params, **kwargs)
        grads = jax.tree.map(mean, grads)
        scale = 0.05 / (optax.tree.norm(grads) + 1e-9)
        up = jax.tree.map(lambda p, g: p + scale * g, params, grads)
        return self.opt.compute_gradients(loss, up, **kwargs)


class Sophia(xshard.Optimizer):
    """Liu et al., 2023: divides by a moving average of the Hessian's diagonal.

    Hutchinson's estimate of it.
    """

    curvature = None

    def compute_gradients(self, loss, params, **kwargs):
        result = super().compute_gradients(loss, params, **kwargs)
        if hk.running_init():
            return result
        signs = each(
            lambda path, p: jax.random.rademacher(
                jax.random.key(len(path)), p.shape, p.dtype
            ),
            params,
        )
        _, products = jax.jvp(jax.grad(lambda p: jnp.sum(loss(p))), (params,), (signs,))
        self.curvature = jax.tree.map(lambda v, hv: mean(v * hv), signs, products)
        return result

    def update(self, grads, params):
        curvature = self.curvature or jax.tree.map(jnp.zeros_like, params)

        def step(path, p, g, h):
            momentum = slot(f"m/{path}", p)
            hessian = slot(f"h/{path}", p)
            if hk.running_init():
                return p
            momentum = 0.9 * momentum + 0.1 * g
            hessian = 0.9 * hessian + 0.1 * h
            hk.set_state(f"m/{path}", momentum)
            hk.set_state(f"h/{path}", hessian)
            return p - 0.1 * jnp.clip(momentum / jnp.maximum(hessian, 0.1), -1, 1)

        return each(step, params, grads, curvature)


class Shampoo(xshard.Optimizer):
    """Gupta et al., 2018: a factor for each dimension.

    The update takes their inverse fourth roots.
    """

    def update(self, grads, params):
        def step(path, p, g):
            if g is None:
                return p
            for dim, size in enumerate(p.shape):
                init = lambda shape, dtype: 0.1 * jnp.eye(shape[0], dtype=dtype)
                factor = hk.get_state(
                    f"factor_{dim}/{path}", [size, size], p.dtype, init
                )
                if hk.running_init():
                    continue
                rest = [other for other in range(p.ndim) if other != dim]
                factor = factor + jnp.tensordot(g, g, axes=(rest, rest))
                hk.set_state(f"factor_{dim}/{path}", factor)
                values, vectors = jnp.linalg.eigh(factor)
                root = vectors @ jnp.diag(values**-0.25) @ vectors.T
                g = jnp.moveaxis(jnp.tensordot(root, g, axes=(1, dim)), 0, dim)
            return p if hk.running_init() else p - 0.1 * g

        return each(step, params, grads)


class BoundedByEarlier(Wrapper):
    """State before the sum: clips a replica's gradients to the size of earlier sums."""

    def aggregate(self, grads):
        sizes = each(lambda path, g: slot(f"size/{path}", g, jnp.ones), grads)
        total = self.opt.aggregate(
            jax.tree.map(lambda g, s: jnp.clip(g, -s, s), grads, sizes)
        )

        def keep(path, size, g):
            if not hk.running_init():
                hk.set_state(f"size/{path}", 0.9 * size + 0.2 * jnp.abs(g))
            return g

        return each(keep, sizes, total)


class ProjectedGradients(xshard.OptaxOptimizer):
    """Yu et al., 2020 (PCGrad): two tasks.

    Each gradient loses what is against the other.
    """

    def compute_gradients(self, loss, params, **kwargs):
        value, first = super().compute_gradients(loss, params, **kwargs)
        _, second = super().compute_gradients(
            lambda p: jnp.sqrt(1 + loss(p)), params, **kwargs
        )
        dot = sum(map(jnp.vdot, jax.tree.leaves(first), jax.tree.leaves(second)))

        def without(g, other):
            share = jnp.minimum(dot, 0) / (optax.tree.norm(other) ** 2 + 1e-9)
            return jax.tree.map(lambda g, o: g - share * o, g, other)

        joined = jax.tree.map(jnp.add, without(first, second), without(second, first))
        return value, joined


class Private(xshard.OptaxOptimizer):
    """Abadi et al., 2016 (DP-SGD): clips parts of the gradient, and adds noise.

    The parts are those of a jax.vmap, and the noise is equal on all replicas.
    """

    def compute_gradients(self, loss, params, **kwargs):
        value, _ = super().compute_gradients(loss, params, **kwargs)
        parts = jnp.arange(1.0, 5.0, dtype=value.dtype)
        grads = jax.vmap(lambda part: jax.grad(lambda p: part * loss(p))(params))(parts)
        norms = jax.vmap(optax.tree.norm)(grads)
        scale = jnp.minimum(1, 0.5 / norms)
        return value, jax.tree.map(lambda g: jnp.tensordot(scale, g, axes=1), grads)

    def update(self, grads, params):
        if not hk.running_init():
            noise = lambda path, g: (
                0.01 * jax.random.normal(jax.random.key(len(path)), g.shape, g.dtype)
            )
            grads = each(lambda path, g: g + noise(path, g), grads)
        return super().update(grads, params)


class Robust(Wrapper):
    """Bounds each replica's own gradient by the median of the norms of all replicas."""

    def aggregate(self, grads):
        if not hk.running_init():
            norm = optax.tree.norm(grads)
            bound = jnp.nanmedian(jax.lax.all_gather(norm, "replica"))
            scale = jnp.where(norm > bound, bound / norm, 1.0)
            grads = jax.tree.map(lambda g: g * scale, grads)
        return self.opt.aggregate(grads)


def by_optax(transformation, name="opt"):
    return xshard.OptaxOptimizer(transformation, name=name)


def muon_by_path():
    kinds = lambda params: each(
        lambda path, p: "muon" if path.endswith("w") else "adam", params
    )
    return optax.partition({"muon": contrib.muon(0.1), "adam": optax.adam(0.1)}, kinds)


def reduced(rule, shard_update):
    return xshard.CrossShardOptimizer(rule, shard_update=shard_update)


RULES = {
    "of rules": lambda shard: reduced(
        written.ByLayer(
            by_optax(optax.lamb(0.1), "first"), Shampoo(name="rest"), "by_layer"
        ),
        shard,
    ),
    "state before the sum": lambda shard: BoundedByEarlier(
        reduced(by_optax(optax.adam(0.1)), shard)
    ),
    "lookahead": lambda shard: reduced(
        written.Lookahead(by_optax(optax.adam(0.1)), "lookahead"), shard
    ),
    "sharpness aware": lambda shard: SharpnessAware(
        reduced(by_optax(optax.adam(0.1)), shard)
    ),
    "sophia": lambda shard: reduced(Sophia(name="sophia"), shard),
    "shampoo": lambda shard: reduced(Shampoo(name="shampoo"), shard),
    "muon by path": lambda shard: reduced(by_optax(muon_by_path()), shard),
    "schedule-free": lambda shard: reduced(
        by_optax(contrib.schedule_free_sgd(0.1)), shard
    ),
    "projected": lambda shard: reduced(
        ProjectedGradients(optax.adam(0.1), name="opt"), shard
    ),
    "private": lambda shard: reduced(Private(optax.sgd(0.1), name="opt"), shard),
    "robust": lambda shard: Robust(reduced(by_optax(optax.adam(0.1)), shard)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("replicas", [4, 8])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_trains_in_shards_as_it_does_replicated(name, replicas):
    def make(shard_update):
        rule = RULES[name](shard_update)
        return xshard.MixedPrecisionLossScaleOptimizer(rule, "dynamic")

    with jax.enable_x64(True):
        x = harness.batch(np.float64)
        wanted, got = (
            written.train(functools.partial(make, shard), x, replicas)
            for shard in (False, True)
        )
        for step, ends in enumerate(zip(got, wanted, strict=True)):
            # Sums are in another order, and the rules divide by norms and take roots.
            harness.assert_close(*ends, rtol=1e-8, atol=1e-10)
            assert int(ends[0][1]) == step + 1 - (step >= written.BAD_STEP)
        # One replica's NaN leaves every leaf but the loss scale as it was, on all
        # replicas.
        before, after = got[written.BAD_STEP - 1 : written.BAD_STEP + 1]
        harness.assert_equal(after[:2], before[:2])
        kept = [module for module in after[2] if "scale" not in module]
        harness.assert_equal(*({m: end[2][m] for m in kept} for end in (after, before)))


class Feedback(Wrapper):
    """Error feedback: keeps what a replica's own gradient loses in rounding."""

    def aggregate(self, grads):
        def send(path, g):
            wanted = g + slot(f"lost/{path}", g)
            sent = jnp.round(wanted * 64) / 64
            hk.set_state(f"lost/{path}", wanted - sent)
            return sent

        return self.opt.aggregate(each(send, grads))


def test_errors_of_a_replicas_own_gradients_are_refused_by_name():
    make = lambda: Feedback(reduced(by_optax(optax.adam(0.1)), True))
    with jax.enable_x64(True):
        match = (
            "feedback computes 'lost/mlp/linear_0/b' in the state of feedback from a "
            "value of a rep"
        )
        with pytest.raises(errors.UserError, match=match):
            written.train(make, harness.batch(np.float64), 4)
