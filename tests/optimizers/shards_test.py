"""Tests of the sharded update: each replica updates its shard, and the result is that
of a replicated update.
"""

import functools
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests.optimizers import harness
from xshard.optimizers import base, cross_shard, loss_scale
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import optax as optax_optimizer

CrossShard = functools.partial(cross_shard.CrossShardOptimizer, shard_update=True)
LossScaled = loss_scale.MixedPrecisionLossScaleOptimizer
EVERYWHERE = jax.P()


def run_one(make_optimizer, params, grads_of, replicas=4):
    """Returns the new parameters and the state after a step with gradients
    `grads_of(i)` on replica i.
    """
    step = hk.transform_with_state(
        lambda i: make_optimizer().apply_gradients(grads_of(i), params)
    )
    _, state = step.init(None, 0)

    def local(state):
        return step.apply({}, state, None, jax.lax.axis_index("replica"))

    run = harness.vmapped(local, EVERYWHERE, EVERYWHERE, replicas)
    return run(harness.placed(state, params, replicas))


WIDE = {"m": {"w": jnp.zeros(8)}}


@pytest.mark.parametrize("errors", [0, 100])
def test_a_rule_with_its_own_skips_skips_on_all_replicas_or_none(errors):
    # If apply_if_finite saw only a replica's own shard, some replicas would skip the
    # step and others would not.
    finite = lambda: CrossShard(optax.apply_if_finite(optax.sgd(1.0), errors), "sum")
    bad = lambda i: {"m": {"w": jnp.where(jnp.arange(8) == 5, jnp.inf, 1.0)}}
    new, state = run_one(finite, WIDE, bad)
    (counts,) = state.values()
    assert int(counts["notfinite_count"]) == 1 and int(counts["total_notfinite"]) == 1
    applied = np.asarray(new["m"]["w"]) != 0
    assert not applied.any() if errors == 100 else applied.all()


def test_a_global_clip_sees_the_norm_of_whole_gradients():
    clip = lambda: CrossShard(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), "sum"
    )
    new, _ = run_one(clip, WIDE, lambda i: {"m": {"w": jnp.ones(8)}})
    # If each replica clipped its own shard of 2 elements, the norm of the whole update
    # would be 2.
    np.testing.assert_allclose(np.linalg.norm(new["m"]["w"]), 1.0, rtol=1e-6)


def test_a_replica_may_clip_its_own_gradients_before_the_sum():
    def step(i):
        opt = CrossShard(optax.sgd(1.0), "sum")
        grads = {"m": {"w": jnp.where(i == 2, 1e6, 1.0) * jnp.ones(8)}}
        clipped, _ = optax.clip_by_global_norm(8**0.5).update(grads, optax.EmptyState())
        return opt.apply_gradients(clipped, WIDE)

    step = hk.transform_with_state(step)
    update = lambda: step.apply({}, {}, None, jax.lax.axis_index("replica"))[0]
    run = harness.vmapped(update, (), EVERYWHERE, 4)
    np.testing.assert_allclose(run()["m"]["w"], np.full(8, -4.0), rtol=1e-6)


def nest(order):
    adam = optax_optimizer.OptaxOptimizer(optax.adam(0.1), name="opt")
    if order == "scale outside":
        return LossScaled(CrossShard(adam), "dynamic")
    return CrossShard(LossScaled(adam, "dynamic"))


@pytest.mark.parametrize("order", ["scale outside", "scale inside"])
def test_one_bad_element_skips_the_step_on_all_replicas(order):
    make = functools.partial(nest, order)
    step = harness.transform_step(make)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    run = harness.sharded(step, make, 4)
    (_, params, n), state = run(params, state, x)
    (_, new, new_n), new_state = run(params, state, x.at[5, 1].set(jnp.inf), n)
    harness.assert_equal((new, new_n, new_state["opt"]), (params, n, state["opt"]))
    (scale,) = [
        m["current_loss_scale"] for m in new_state.values() if "current_loss_scale" in m
    ]
    assert float(scale) == 2**14
    (_, _, new_n), _ = run(new, new_state, x, new_n)
    assert int(new_n) == 2


def test_groups_of_one_axis_are_refused():
    groups = [[0, 3, 5, 6], [1, 2, 4, 7]]
    with pytest.raises(ValueError, match="give groups a mapped axis of their own"):
        run_one(
            lambda: CrossShard(optax.sgd(0.1), group_assignment=groups),
            WIDE,
            lambda i: WIDE,
            8,
        )


def test_shard_map_is_refused_with_a_remedy():
    step = hk.transform_with_state(
        lambda: CrossShard(optax.sgd(1.0)).apply_gradients(WIDE, WIDE)
    )
    run = jax.shard_map(
        lambda: step.apply({}, {}, None)[0],
        mesh=harness.mesh(4),
        in_specs=(),
        out_specs=EVERYWHERE,
        check_vma=False,
    )
    with pytest.raises(
        ValueError, match=r"use xshard.vmap_replicas with the same specs"
    ):
        run()


def test_untrained_parameters_and_their_slots_do_not_change():
    def make():
        return CrossShard(optax_optimizer.OptaxOptimizer(optax.adam(0.1), name="opt"))

    def step(params, x, n):
        # All parameters have slots, and a step trains one of them.
        var_list = None if hk.running_init() else ["mlp/linear_0/w"]
        return make().minimize(
            lambda p: harness.loss(p, x), params, n, var_list=var_list
        )

    step = hk.transform_with_state(step)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x, 0)
    (_, new, _), after = harness.sharded(step, make, 4)(params, state, x)
    frozen = {"mlp/linear_0/b", "mlp/linear_1/w"}
    before = state["opt"]
    after = after["opt"]
    for path in frozen:
        module, name = path.rsplit("/", 1)
        harness.assert_equal(new[module][name], params[module][name])
        harness.assert_equal(after[f"0/mu/{path}"], before[f"0/mu/{path}"])
    assert not np.array_equal(new["mlp/linear_0"]["w"], params["mlp/linear_0"]["w"])


def test_float16_parameters_are_gathered_in_float16():
    step = harness.transform_step(lambda: CrossShard(optax.adam(0.1)))
    params = harness.params(np.float16)
    x = harness.batch(np.float16)
    _, state = step.init(None, params, x)
    run = harness.sharded(step, lambda: CrossShard(optax.adam(0.1)), 4)
    lowered = jax.jit(run).lower(params, state, x)
    gathered = re.findall(r"all_gather.*-> tensor<[\dx]*x(\w+)>", lowered.as_text())
    assert gathered and set(gathered) == {"f16"}


@pytest.mark.parametrize("steps", [(2, 4), (4, 2), (2, 2, 2)])
def test_scatters_and_gathers_in_steps_match_single_ones(steps):
    params = {"m": {"w": jnp.zeros((24, 3)), "v": jnp.zeros((5, 3)), "b": jnp.zeros(3)}}
    grads = lambda i: jax.tree.map(
        lambda x: jax.random.normal(jax.random.fold_in(jax.random.key(1), i), x.shape),
        params,
    )
    make = lambda **stages: lambda: CrossShard(optax.adam(0.1), "sum", **stages)
    variants = ({"scatter_steps": steps, "gather_steps": steps[::-1]}, {})
    ends = [run_one(make(**stages), params, grads, replicas=8) for stages in variants]
    # Eight numbers are summed in another order, and Adam divides by the magnitude of a
    # gradient.
    harness.assert_close(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"gather_steps": (2, 3)},
        {"scatter_steps": 8},
        {"scatter_steps": (-2, -4)},
    ],
)
def test_steps_that_do_not_match_the_replicas_are_refused(options):
    with pytest.raises(
        ValueError, match="gather_steps must be sizes whose product is the"
    ):
        run_one(
            lambda: CrossShard(optax.sgd(1.0), **options),
            WIDE,
            lambda i: WIDE,
            replicas=8,
        )


@pytest.mark.parametrize(
    "shape, count, spec, dim, part",
    [
        ((16, 3), 8, (), 0, (2, 3)),
        # If both dimensions could be sharded, the first one whose shards fill the tiles
        # of a TPU is.
        ((16, 1024), 8, (), 1, (16, 128)),
        ((64, 1024), 8, (), 0, (8, 1024)),
        ((3, 16), 8, (), 1, (3, 2)),
        ((16, 16), 8, ("model",), 1, (16, 2)),
        ((16, 5), 8, ("model", None), None, (16, 5)),
        ((3, 5), 8, (), None, (3, 5)),
        ((7,), 8, (), None, (7,)),
        ((), 8, (), None, ()),
        ((5, 3), 1, (), 0, (5, 3)),
    ],
)
def test_layouts_of_arrays(shape, count, spec, dim, part):
    layout = layouts_lib.layout("w", shape, count, spec)
    assert (layout.dim, layout.shard_shape) == (dim, part)
    x = jnp.arange(float(np.prod(shape, dtype=int))).reshape(shape)
    mesh = jax.sharding.Mesh(jax.devices()[:count], ("replica",))
    place = jax.NamedSharding(mesh, layout.spec("replica", manual=True))
    lying = jax.device_put(x, place).addressable_shards
    parts = [shard.data for shard in sorted(lying, key=lambda shard: shard.device.id)]
    parts = [jax.device_put(part, jax.devices()[0]) for part in parts]
    assert all(x.shape == part for x in parts)
    harness.assert_equal(parts[0] if dim is None else jnp.concatenate(parts, dim), x)


class Sorted(base.OptimizerWrapper):
    """A custom wrapper that mixes elements in each phase."""

    def __init__(self, opt):
        super().__init__()
        self.opt = opt

    def aggregate(self, grads):
        return jax.tree.map(jnp.sort, self.opt.aggregate(grads))

    def vote(self, grads):
        (grad,) = jax.tree.leaves(grads)
        return jnp.sort(-grad)[0] == -7.0

    def update(self, grads, params):
        return self.opt.update(
            jax.tree.map(lambda g: jnp.cumsum(g[::-1]), grads), params
        )


def test_each_phase_may_mix_elements():
    grads = {"m": {"w": 7.0 - jnp.arange(8.0)}}
    new, _ = run_one(
        lambda: Sorted(CrossShard(optax.sgd(1.0), "sum")),
        WIDE,
        lambda i: jax.tree.map(lambda g: g / 4, grads),
    )
    np.testing.assert_array_equal(new["m"]["w"], -np.cumsum(np.arange(8.0)[::-1]))


def test_two_sharded_updates_are_refused():
    with pytest.raises(ValueError, match="already scatters gradients"):
        hk.testing.transform_and_run(
            lambda: CrossShard(CrossShard(optax.sgd(1.0), axis_name="group"))
        )()


def follow(update, params=None, grads=None, replicas=4):
    """Returns the new parameters of a stateless `update(grads, params)`, computed in
    shards and on whole arrays.
    """
    params = (
        {"m": {"w": jnp.arange(1.0, 65).reshape(8, 8)}} if params is None else params
    )
    grads = jax.tree.map(lambda p: 10 - p, params) if grads is None else grads
    transformation = optax.stateless(update)
    share = jax.tree.map(lambda g: g / replicas, grads)
    new, _ = run_one(
        lambda: CrossShard(transformation), params, lambda i: share, replicas
    )
    updates, _ = transformation.update(grads, optax.EmptyState(), params)
    return new, optax.apply_updates(params, updates)


def per_array(f):
    """Returns a function of trees that applies `f(gradient, param)` to each array."""
    return lambda grads, params: jax.tree.map(f, grads, params)


FOLLOWED = {
    "vdot": lambda g, p: g * jnp.vdot(g, p),
    "norm": lambda g, p: g / jnp.linalg.norm(p),
    "cond": lambda g, p: jax.lax.cond(
        jnp.sum(p) > 0, lambda: g / jnp.max(jnp.abs(g)), lambda: p
    ),
    "switch": lambda g, p: jax.lax.switch(
        2, [lambda: g, lambda: p, lambda: g * jnp.sum(p)]
    ),
    "barrier": lambda g, p: jnp.add(*jax.lax.optimization_barrier((g, p))),
    "barrier of numbers": lambda g, p: (
        g * jnp.add(*jax.lax.optimization_barrier((jnp.ones(2), 1.0)))[0]
    ),
    "remat": lambda g, p: jax.checkpoint(lambda x: jnp.tanh(x) * jnp.sum(x))(g),
    "grad": lambda g, p: jax.grad(lambda x: jnp.sum(jnp.sin(x)))(g),
    "grad of tanh": lambda g, p: jax.grad(lambda x: jnp.sum(jnp.tanh(x)))(g),
    "log2": lambda g, p: g * jnp.log2(p),
    "iota": lambda g, p: g * jnp.arange(64.0).reshape(8, 8),
    "clip": lambda g, p: jnp.clip(g, -1, 1) + jnp.clip(p, g.min(), g.max()),
    "any": lambda g, p: jnp.where(jnp.any(g > 5) & jnp.all(p > 0), g, p),
    "reshape": lambda g, p: (g.reshape(4, 16) * 2).reshape(8, 8),
    "shapes": lambda g, p: (
        g * p.reshape(4, 16).reshape(64, 1).sum(axis=1).reshape(8, 8)
    ),
    "trace of a product": lambda g, p: g * jnp.einsum("ij,ji->", g, p),
    "matmul": lambda g, p: g @ p,
    "transpose": lambda g, p: g.T,
    "rows": lambda g, p: g / jnp.sum(p, axis=1, keepdims=True),
    "columns": lambda g, p: g / jnp.max(p, axis=0) + jnp.min(p, axis=0, keepdims=True),
    "truth of rows": lambda g, p: jnp.where(
        jnp.any(g > 9, axis=1) & jnp.max(p > 50, axis=0), g, p
    ),
    "rows of another shape": lambda g, p: g * p.reshape(4, 16).sum(axis=0).sum(),
    "repeated": lambda g, p: (
        g * (p.reshape(64, 1) * jnp.arange(1.0, 3)).sum(axis=1).reshape(8, 8)
    ),
    "one column": lambda g, p: g[:, :1] * p,
    "loop": lambda g, p: jax.lax.fori_loop(0, 3, lambda i, x: x * 2 + i, g),
    "loop while": lambda g, p: jax.lax.while_loop(
        lambda x: x[0, 0] < 99, lambda x: x * 2, p
    ),
    "sort": lambda g, p: jnp.sort(g),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_sharded_rules_match_rules_on_whole_arrays(name):
    new, wanted = follow(per_array(FOLLOWED[name]))
    harness.assert_close(new, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(8, 4, 6), (3, 4, 6), (4, 8, 2)])
def test_a_number_for_each_layer_meets_the_whole_stack(shape):
    def trust(grad, param):
        return grad * jnp.einsum("lij,lij->l", grad, param)[:, None, None]

    params = {"stack": {"w": jnp.linspace(-1, 1, np.prod(shape)).reshape(shape)}}
    new, wanted = follow(per_array(trust), params)
    harness.assert_close(new, wanted, rtol=1e-5, atol=1e-4)


class ClippedBySlot(base.OptimizerWrapper):
    """A custom wrapper that clips each replica's own gradients to the size of earlier
    ones, which it keeps as slots.
    """

    def __init__(self, opt):
        super().__init__(name="clipped_by_slot")
        self.opt = opt

    def aggregate(self, grads):
        def clip(module, name, grad):
            size = hk.get_state(
                f"size/{module}/{name}", grad.shape, grad.dtype, jnp.ones
            )
            return jnp.clip(grad, -size, size)

        return self.opt.aggregate(hk.data_structures.map(clip, grads))


def test_a_slot_may_meet_a_replicas_own_gradient():
    grads = lambda i: {"m": {"w": jnp.where(i == 1, 50.0, 0.5) * jnp.ones((16, 8))}}
    params = {"m": {"w": jnp.zeros((16, 8))}}
    rule = lambda: CrossShard(
        ClippedBySlot(optax_optimizer.OptaxOptimizer(optax.sgd(1.0))), "sum"
    )
    new, _ = run_one(rule, params, grads)
    # Each replica's own gradient is clipped to 1 before the sum.
    np.testing.assert_array_equal(new["m"]["w"], np.full((16, 8), -2.5))


def compiled(transformation, params, replicas=4):
    """Returns an update of a state in shards, compiled, and the state's specs."""
    rule = hk.transform_with_state(
        lambda: CrossShard(transformation).apply_gradients(params, params)
    )
    _, state = rule.init(None)
    place = lambda spec: jax.NamedSharding(harness.mesh(replicas), spec)
    specs = layouts_lib.StateSharding(state, params, replicas).specs
    run = xshard.vmap_replicas(
        lambda state: rule.apply({}, state, None),
        harness.mesh(replicas),
        in_specs=EVERYWHERE,
        out_specs=EVERYWHERE,
    )
    shardings = jax.tree.map(place, specs)
    jitted = jax.jit(
        run, in_shardings=(shardings,), out_shardings=(place(EVERYWHERE), shardings)
    )
    return jitted.lower(state).compile(), specs


@pytest.mark.parametrize(
    "transformation", [optax.adam(0.1), optax.lamb(0.1), optax.contrib.prodigy(1.0)]
)
def test_an_elementwise_rule_gathers_only_the_new_parameters(transformation):
    params = {"m": {"w": jnp.ones((8, 16)), "v": jnp.ones((24, 4))}}
    program, _ = compiled(transformation, params)
    assert len(re.findall(r"= \S+ all-gather\(", program.as_text())) == 2


def test_each_replica_holds_its_shards_of_slots():
    params = {"m": {"w": jnp.ones((8, 16)), "b": jnp.ones(3)}}
    program, specs = compiled(optax.adam(0.1), params)
    (specs,) = specs.values()
    assert (
        specs["0/mu/m/w"] == jax.P("replica", None) and specs["0/mu/m/b"] == EVERYWHERE
    )
    # Two slots of each array, in float32, and a count.
    assert (
        program.memory_analysis().argument_size_in_bytes == 2 * 4 * (8 * 16 / 4 + 3) + 4
    )


def test_max_and_min_accept_booleans():
    params = {"m": {"w": jnp.zeros((5, 3))}}
    for limit, grads in ((jnp.max, 1.0), (jnp.min, -1.0)):
        found = per_array(lambda g, p, limit=limit: jnp.where(limit(g < 0), g, 0 * g))
        new, wanted = follow(found, params, {"m": {"w": jnp.full((5, 3), grads)}})
        harness.assert_equal(new, wanted)


def test_a_reduction_over_another_axis_may_wrap_a_sharded_one():
    axes = (jax.sharding.AxisType.Auto,) * 2
    the_mesh = jax.make_mesh((2, 4), ("pod", "replica"), axis_types=axes)

    def make():
        inner = CrossShard(
            optax_optimizer.OptaxOptimizer(optax.adam(0.1), name="opt"), "sum"
        )
        return cross_shard.CrossShardOptimizer(inner, "sum", axis_name="pod")

    step = hk.transform_with_state(
        lambda g: make().apply_gradients({"m": {"w": g}}, WIDE)
    )
    _, state = step.init(None, jnp.ones(8))
    run = xshard.vmap_replicas(
        lambda state: step.apply({}, state, None, jnp.ones(8)),
        the_mesh,
        in_specs=EVERYWHERE,
        out_specs=EVERYWHERE,
    )
    new, state = jax.jit(run)(state)
    np.testing.assert_allclose(new["m"]["w"], np.full(8, -0.1), rtol=1e-5)
    np.testing.assert_allclose(state["opt"]["0/mu/m/w"], np.full(8, 0.8), rtol=1e-6)


@pytest.mark.parametrize("value", ["False", 1, None])
def test_a_shard_update_that_is_no_boolean_is_refused(value):
    with pytest.raises(
        ValueError, match="shard_update must be True or False; received"
    ):
        hk.testing.transform_and_run(
            lambda: cross_shard.CrossShardOptimizer(optax.sgd(1.0), shard_update=value)
        )()
