"""Tests of the arrays sent between replicas and slices.

Their sizes, their types and the cost of rounding.
"""

import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests.optimizers import harness
from xshard.optimizers import base, cross_shard, outer

MESH = (2, 4)
AXES = ("slice", "replica")
PARAMS = {"m": {"w": jnp.zeros((24, 10)), "b": jnp.zeros(3)}}
# One gradient for each replica, with random values, so that sums round.
GRADS = jax.random.normal(jax.random.key(0), (8, 24, 10))


def make_mesh():
    return jax.make_mesh(MESH, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)


def runner(make_optimizer, *, by_vmap=False):
    """Returns the jitted `run(state, grads)` on a mesh of slices, and the state.

    `jax.vmap` maps the replicas if asked for, or if a rule shards its update.
    """

    def step(w, b):
        opt = make_optimizer()
        return opt.apply_gradients({"m": {"w": w, "b": b}}, PARAMS)

    rules = hk.transform_with_state(step)
    _, state = rules.init(None, GRADS[0], jnp.ones(3))

    def local(state, w):
        new, state = rules.apply({}, state, None, w[0], jnp.ones(3))
        return jax.tree.map(lambda x: x[None], new), state

    rules_of = hk.transform(lambda: base.all_rules(make_optimizer()))
    in_shards = any(
        getattr(rule, "shard_update", False) for rule in rules_of.apply({}, None)
    )
    run = on_replicas(local, by_vmap or in_shards, jax.P(AXES))
    return jax.jit(run), state


def on_replicas(local, by_vmap, spec):
    """Maps a step of a rule's state and of numbers over the replicas.

    Under `jax.shard_map` its first result lies by `spec`.
    """
    if by_vmap:
        return xshard.vmap_replicas(
            local, make_mesh(), in_specs=(jax.P(), jax.P(AXES)), out_specs=jax.P()
        )
    return jax.shard_map(
        local,
        mesh=make_mesh(),
        in_specs=(jax.P(), jax.P(AXES)),
        out_specs=(spec, jax.P()),
        check_vma=False,
    )


def options(**more):
    return {"slice_axis_name": "slice", **more}


def reduced(**more):
    """Returns the gradients' sum over all replicas.

    Asserts that it is equal on all of them bit by bit.
    """
    run, state = runner(
        lambda: cross_shard.CrossShardOptimizer(optax.sgd(1.0), "sum", **more)
    )
    new, _ = run(state, GRADS)
    for leaf in jax.tree.leaves(new):
        assert all(
            np.asarray(x).tobytes() == np.asarray(leaf[0]).tobytes() for x in leaf
        )
    np.testing.assert_array_equal(new["m"]["b"][0], np.full(3, -8.0))
    return -np.asarray(new["m"]["w"][0])


# The largest error of the sum of 8 numbers, relative to the largest sum of their
# magnitudes. float32 rounds seven times by 2**-24. bfloat16 rounds each number, and
# each sum of four or two, by 2**-9.
LEVELS = [
    ({}, 7 * 2**-24),
    ({"reduce_dtype": "bfloat16"}, 8 * 2**-9),
    ({"slice_dtype": "bfloat16"}, 4 * 2**-9),
    ({"reduce_dtype": "bfloat16", "slice_dtype": "bfloat16"}, 12 * 2**-9),
]


@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize("more, bound", LEVELS)
def test_the_error_of_each_type_is_within_its_rounding_bound(more, bound, shard_update):
    wanted = np.sum(np.asarray(GRADS, np.float64), axis=0)
    error = np.abs(reduced(**options(shard_update=shard_update, **more)) - wanted).max()
    assert error <= bound * np.abs(GRADS).sum(axis=0).max()
    # The error also shows that the sum is rounded to that type.
    assert error > 0 and (not more or error > 1e-5)


def test_sums_that_are_gathered_in_steps_are_equal_under_vmap_too():
    # JAX cannot see that what is gathered in steps is equal, so the rule declares it.
    steps = options(scatter_steps=(2, 2), gather_steps=(2, 2))
    make = lambda: cross_shard.CrossShardOptimizer(optax.sgd(1.0), "sum", **steps)
    run, state = runner(make, by_vmap=True)
    new, _ = run(state, GRADS)
    np.testing.assert_array_equal(-np.asarray(new["m"]["w"][0]), reduced(**steps))


def collectives_of(**more):
    """Returns the collectives of a step.

    Each is `(operation, elements, type, number of devices that take part)`.
    """
    run, state = runner(
        lambda: cross_shard.CrossShardOptimizer(optax.sgd(1.0), "sum", **more)
    )
    # The program is lowered for a TPU, because for a CPU all sums are written in
    # float32.
    text = run.trace(state, GRADS).lower(lowering_platforms=("tpu",)).as_text()
    sizes = dict(re.findall(r'name = "(\w+)", size = (\d+)', text))
    # Before JAX 0.12 the groups are a table, with one row for each, and from then on
    # the names of axes of the mesh.
    pattern = re.compile(
        r'"stablehlo\.(all_reduce|all_gather|reduce_scatter)".*?replica_groups = '
        r"(?:dense<[^>]*> : tensor<\d+x(\d+)xi64>"
        r"|#stablehlo\.replica_group_mesh_axes<(.*?)>,)"
        r".*?[)>] : \(tensor<((?:\d+x)*)(\w+)>\) ->",
        re.DOTALL,
    )
    found = set()
    for kind, listed, axes, shape, dtype in pattern.findall(text):
        members = (
            [listed]
            if listed
            else [sizes[x] for x in re.findall(r'name = "(\w+)"', axes)]
        )
        elements = np.prod([int(n) for n in shape.split("x") if n])
        found.add((kind, int(elements), dtype, int(np.prod([int(n) for n in members]))))
    return found


def test_collectives_within_a_slice_and_between_slices():
    # All 240 elements of w are summed within a slice of four replicas, and a quarter of
    # them between the two slices. b has three elements, fewer than there are replicas,
    # and is summed whole.
    assert collectives_of(**options()) == {
        ("reduce_scatter", 240, "f32", 4),
        ("all_reduce", 60, "f32", 2),
        ("all_gather", 60, "f32", 4),
        ("all_reduce", 3, "f32", 4),
        ("all_reduce", 3, "f32", 2),
    }
    assert collectives_of(
        **options(reduce_dtype="bfloat16", slice_dtype="bfloat16")
    ) == {
        ("reduce_scatter", 240, "bf16", 4),
        ("all_reduce", 60, "bf16", 2),
        ("all_gather", 60, "bf16", 4),
        ("all_reduce", 3, "bf16", 4),
        ("all_reduce", 3, "bf16", 2),
    }
    # The parameters are gathered, and not the sums.
    assert collectives_of(**options(slice_dtype="bfloat16", shard_update=True)) == {
        ("reduce_scatter", 240, "f32", 4),
        ("all_reduce", 60, "bf16", 2),
        ("all_gather", 60, "f32", 4),
        ("all_reduce", 3, "f32", 4),
        ("all_reduce", 3, "bf16", 2),
    }


def test_bfloat16_halves_the_bytes_of_a_sum_without_slices():
    def lowered(dtype):
        step = harness.transform_step(
            lambda: cross_shard.CrossShardOptimizer(optax.sgd(1.0), reduce_dtype=dtype)
        )
        params = harness.params()
        x = harness.batch()
        _, state = step.init(None, params, x)
        traced = jax.jit(harness.replicated(step)).trace(params, state, x)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        return re.findall(r"\}\) : \(tensor<(?:\d+x)+(\w+)>\) -> ", text)

    assert set(lowered("float32")) == {"f32"} and set(lowered("bfloat16")) == {"bf16"}


@pytest.mark.parametrize("shard_update", [False, True])
def test_a_global_clip_uses_the_sum_over_all_slices(shard_update):
    clipped = optax.chain(optax.clip_by_global_norm(2.0), optax.sgd(1.0))
    run, state = runner(
        lambda: cross_shard.CrossShardOptimizer(
            clipped, "sum", **options(shard_update=shard_update)
        )
    )
    new, _ = run(state, GRADS)
    total = {"w": jnp.sum(GRADS, axis=0), "b": jnp.full(3, 8.0)}
    wanted, _ = optax.clip_by_global_norm(2.0).update(total, optax.EmptyState())
    for name, leaf in wanted.items():
        # Eight numbers are summed in another order.
        np.testing.assert_allclose(-new["m"][name][0], leaf, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_int8_does_not_hide_nonfinite_values(bad):
    # XLA's maximum of a large array may lose NaN on the CPU.
    size = 1 << 14
    codes, scales = jax.jit(outer.quantize)(jnp.ones(size).at[300].set(bad))
    restored = outer.dequantize(codes, scales, (size,))
    # Only the block of the bad element is not finite.
    np.testing.assert_array_equal(
        ~np.isfinite(restored), (np.arange(size) >= 256) & (np.arange(size) < 512)
    )


def test_zeros_stay_zero_in_int8():
    codes, scales = outer.quantize(jnp.zeros((3, 5)))
    np.testing.assert_array_equal(
        outer.dequantize(codes, scales, (3, 5)), np.zeros((3, 5))
    )


def test_a_mean_is_over_the_replicas_of_all_slices():
    step = harness.transform_step(
        lambda: cross_shard.CrossShardOptimizer(optax.sgd(1.0), **options()),
        lambda params, x: jnp.sum(params["m"]["w"] * x),
    )
    params = {"m": {"w": jnp.zeros(())}}
    _, state = step.init(None, params, 0.0)
    run = jax.shard_map(
        lambda x: step.apply({}, state, None, params, x[0])[0][1],
        mesh=make_mesh(),
        in_specs=jax.P(AXES),
        out_specs=jax.P(),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(run)(jnp.arange(8.0))["m"]["w"], -3.5)


def construct(**more):
    return hk.testing.transform_and_run(
        lambda: cross_shard.CrossShardOptimizer(optax.sgd(1.0), **more)
    )


@pytest.mark.parametrize(
    "more, match",
    [
        (
            {"reduce_dtype": "float16"},
            "reduce_dtype must be one of float32, bfloat16; received 'fl",
        ),
        ({"reduce_dtype": "int8"}, "reduce_dtype must be one of"),
        (
            options(slice_dtype="int8"),
            "slice_dtype must be one of float32, bfloat16; received 'int8'",
        ),
        ({"slice_dtype": "bfloat16"}, "give slice_axis_name too"),
        ({"slice_axis_name": 3}, "must be the name of one axis"),
        (options(group_assignment=[[0], [1]]), "exclude each other"),
        (options(axis_name="slice"), "two different axes"),
    ],
)
def test_incompatible_options_are_refused_at_construction(more, match):
    with pytest.raises(ValueError, match=match):
        construct(**more)()


@pytest.mark.parametrize("more", [{}, {"shard_update": True}])
def test_parameters_without_a_gradient_are_not_sent(more):
    make = lambda: cross_shard.CrossShardOptimizer(
        optax.sgd(1.0), "sum", **options(**more)
    )

    def step(x):
        opt = make()
        first = opt.minimize(lambda p: jnp.sum(p["m"]["w"]) * x, PARAMS)[1]
        return opt.minimize(lambda p: jnp.sum(p["m"]["b"]) * x, first)[1]

    rules = hk.transform_with_state(step)
    _, state = rules.init(None, jnp.ones(()))
    local = lambda state, x: rules.apply({}, state, None, x[0])
    run = on_replicas(local, "shard_update" in more, jax.P())
    new, after = jax.jit(run)(state, jnp.ones(8))
    for leaf in jax.tree.leaves(new):
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, -8.0))
    assert jax.tree.structure(after) == jax.tree.structure(state)
