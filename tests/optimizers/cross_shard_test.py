"""Tests of CrossShardOptimizer: what it sums, over which replicas, in which types."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers import harness
from xshard.optimizers import axes, cross_shard, loss_scale
from xshard.optimizers import optax as optax_optimizer

CrossShard = cross_shard.CrossShardOptimizer
LossScaled = loss_scale.MixedPrecisionLossScaleOptimizer


def linear_loss(params, x):
    return jnp.sum(params["m"]["w"] * x)


def run_replicas(
    make_optimizer, x, *, steps=1, replicas=8, loss=linear_loss, dtype=np.float32
):
    """Returns each replica's `(value, w, global_step), state` after some steps.

    Each replica has its own x.
    """
    step = harness.transform_step(make_optimizer, loss)
    params = {"m": {"w": jnp.zeros((), dtype)}}
    _, state = step.init(None, params, x[0])
    run = jax.jit(harness.per_replica(step, replicas))
    params, state, n = harness.stack((params, state, jnp.int32(0)), replicas)
    for _ in range(steps):
        (value, params, n), state = run(params, state, x, n)
    return (value, params["m"]["w"], n), state


@pytest.mark.parametrize(
    "reduction,groups,expected",
    [
        ("sum", None, [28] * 8),
        ("mean", None, [3.5] * 8),
        (cross_shard.Reduction.MEAN, [[0, 1, 2, 3, 4, 5, 6, 7]], [3.5] * 8),
        ("sum", [[0, 2], [1, 3], [4, 6], [5, 7]], [2, 4, 2, 4, 10, 12, 10, 12]),
        ("mean", [[0, 2, 4, 6], [1, 3, 5, 7]], [3, 4, 3, 4, 3, 4, 3, 4]),
        (
            "mean",
            ((7, 0), (1, 2), (3, 4), (5, 6)),
            [3.5, 1.5, 1.5, 3.5, 3.5, 5.5, 5.5, 3.5],
        ),
        ("mean", [[i] for i in range(8)], list(range(8))),
    ],
)
def test_reductions_over_groups(reduction, groups, expected):
    make = lambda: CrossShard(optax.sgd(1.0), reduction, group_assignment=groups)
    (value, w, n), _ = run_replicas(make, jnp.arange(8.0))
    np.testing.assert_array_equal(w, -np.array(expected, np.float32))
    np.testing.assert_array_equal(n, np.ones(8))
    np.testing.assert_array_equal(value, np.zeros(8))


def test_the_value_is_the_replicas_own_loss():
    make = lambda: CrossShard(optax.sgd(0.0))
    step = lambda params, x: jnp.sum(params["m"]["w"] * 0 + x)
    (value, _, _), _ = run_replicas(make, jnp.arange(8.0), loss=step)
    np.testing.assert_array_equal(value, np.arange(8.0))


def compute_and_apply(reduction, change):
    """Returns each replica's parameter after a step with `change(grads)`.

    And its gradient before the change.
    """

    def step(params, x):
        opt = CrossShard(optax.sgd(1.0), reduction)
        _, grads = opt.compute_gradients(lambda p: linear_loss(p, x), params)
        return opt.apply_gradients(change(grads), params), grads["m"]["w"]

    step = hk.transform_with_state(step)
    params = {"m": {"w": jnp.zeros(())}}
    _, state = step.init(None, params, 0.0)

    def local(x):
        return jax.tree.map(
            lambda a: a[None], step.apply({}, state, None, params, x[0])[0]
        )

    spec = jax.P("replica")
    mapped = jax.shard_map(
        local, mesh=harness.mesh(), in_specs=spec, out_specs=spec, check_vma=False
    )
    new, grads = jax.jit(mapped)(jnp.array([1.0] * 7 + [1e6]))
    return np.asarray(new["m"]["w"]), np.asarray(grads)


def test_gradients_stay_per_replica_until_they_are_applied():
    clip = functools.partial(jax.tree.map, lambda g: jnp.clip(g, -1, 1))
    new, grads = compute_and_apply("sum", clip)
    np.testing.assert_array_equal(grads, [1.0] * 7 + [1e6])
    np.testing.assert_array_equal(new, [-8.0] * 8)
    # As in TensorFlow, the gradients that a clip sees already include the mean's
    # factor.
    new, grads = compute_and_apply("mean", clip)
    np.testing.assert_array_equal(grads, [0.125] * 7 + [1e6 / 8])
    np.testing.assert_array_equal(new, [-(7 / 8 + 1)] * 8)


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_with_and_without_vma_checks_agree(check_vma):
    step = harness.transform_step(
        lambda: LossScaled(CrossShard(optax.adam(0.1)), "dynamic")
    )
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    run = jax.jit(harness.replicated(step, check_vma=check_vma))
    (value, new, n), state = run(params, state, x)
    expected = optax.adam(0.1)
    grads = jax.grad(harness.loss)(params, x)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = expected.update(grads, expected.init(params), params)
    # Adam's first step depends only on the signs of the gradients. The first moment,
    # which is compared below, also shows a gradient that was summed twice or scaled.
    harness.assert_close(new, optax.apply_updates(params, updates), rtol=1e-5)
    np.testing.assert_allclose(value, harness.loss(params, x), rtol=1e-6)
    mu = state["CrossShardOptimizer/~/optax_optimizer"]["0/mu/mlp/linear_0/w"]
    np.testing.assert_allclose(
        mu, 0.1 * grads["mlp/linear_0"]["w"], rtol=1e-4, atol=1e-7
    )
    assert int(n) == 1


def test_groups_under_vma_checks_are_refused_with_a_remedy():
    step = harness.transform_step(
        lambda: CrossShard(optax.sgd(1.0), group_assignment=[[0, 1], [2, 3]])
    )
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    with pytest.raises(ValueError, match="check_vma=False"):
        harness.replicated(step, check_vma=True, replicas=4)(params, state, x)


def nest(order, groups):
    adam = optax_optimizer.OptaxOptimizer(optax.adam(0.5), name="adam")
    if order == "scale outside":
        return LossScaled(CrossShard(adam, group_assignment=groups), "dynamic")
    return CrossShard(LossScaled(adam, "dynamic"), group_assignment=groups)


@pytest.mark.parametrize("order", ["scale outside", "scale inside"])
@pytest.mark.parametrize("groups", [None, [[0, 2], [1, 3]], [[0, 1], [2, 3]]])
def test_one_bad_replica_skips_its_group_under_both_nestings(order, groups):
    x = jnp.array([1.0, 1.0, jnp.inf, 1.0])
    (_, w, n), state = run_replicas(lambda: nest(order, groups), x, replicas=4)
    skipped = {0, 1, 2, 3} if groups is None else set(next(g for g in groups if 2 in g))
    expected = np.array([i not in skipped for i in range(4)])
    np.testing.assert_array_equal(n, expected.astype(np.int32))
    # Adam's first step has the size of the learning rate, up to the rounding of its
    # bias correction.
    np.testing.assert_allclose(w, -0.5 * expected, rtol=1e-5)
    np.testing.assert_array_equal(state["adam"]["0/count"], expected.astype(np.int32))
    (scale,) = [
        m["current_loss_scale"] for m in state.values() if "current_loss_scale" in m
    ]
    np.testing.assert_array_equal(scale, np.where(expected, 2.0**15, 2.0**14))


def test_groups_may_skip_different_steps_without_hanging():
    make = lambda: LossScaled(
        CrossShard(optax.adam(0.5), group_assignment=[[0, 2, 4, 6], [1, 3, 5, 7]]),
        "dynamic",
    )
    step = harness.transform_step(make, linear_loss)
    params = {"m": {"w": jnp.zeros(())}}
    _, state = step.init(None, params, 0.0)
    run = jax.jit(harness.per_replica(step))
    params, state, n = harness.stack((params, state, jnp.int32(0)))
    for i in range(8):
        x = jnp.ones(8).at[i].set(jnp.inf if i < 6 else 1.0)
        (_, params, n), state = run(params, state, x, n)
    np.testing.assert_array_equal(n, [5] * 8)
    (scale,) = [
        m["current_loss_scale"] for m in state.values() if "current_loss_scale" in m
    ]
    np.testing.assert_array_equal(scale, [2.0**12] * 8)


def test_replicas_of_a_group_stay_equal_bit_by_bit():
    groups = [[0, 3, 5, 6], [1, 2, 4, 7]]
    make = lambda: LossScaled(
        CrossShard(optax.adam(0.1), group_assignment=groups), "dynamic"
    )
    step = harness.transform_step(make)
    params = harness.params()
    x = harness.batch().reshape(8, 2, 3)
    _, state = step.init(None, params, x[0])
    run = jax.jit(harness.per_replica(step))
    params, state, n = harness.stack((params, state, jnp.int32(0)))
    for _ in range(3):
        (_, params, n), state = run(params, state, x, n)
    for leaf in jax.tree.leaves((params, state)):
        for group in groups:
            for replica in group[1:]:
                assert (
                    np.asarray(leaf)[replica].tobytes()
                    == np.asarray(leaf)[group[0]].tobytes()
                )
    w = np.asarray(params["mlp/linear_0"]["w"])
    assert not np.array_equal(w[0], w[1])


def test_a_float16_mean_neither_overflows_nor_underflows():
    # The sum of 3e4 over 8 replicas is beyond the range of float16; the mean is not.
    (_, w, _), _ = run_replicas(
        lambda: CrossShard(optax.sgd(1.0)),
        jnp.full((8,), 3e4, jnp.float16),
        dtype=np.float16,
    )
    assert w.dtype == np.float16
    np.testing.assert_array_equal(w, np.full(8, -3e4, np.float16))
    # The smallest positive float16: the factor 1/8 of the mean, applied before the sum,
    # would round it to zero.
    tiny = np.float16(6e-8)
    (_, w, _), _ = run_replicas(
        lambda: CrossShard(optax.sgd(1.0)), jnp.full((8,), tiny), dtype=np.float16
    )
    np.testing.assert_array_equal(w, np.full(8, -tiny))


@pytest.mark.parametrize("mapped", [jax.vmap, jax.pmap])
def test_vmap_and_pmap_axes_are_reduced_too(mapped):
    step = harness.transform_step(
        lambda: LossScaled(CrossShard(optax.sgd(1.0)), 2), linear_loss
    )
    params = {"m": {"w": jnp.zeros(())}}
    run = lambda x: step.apply({}, {}, None, params, x)[0][1]["m"]["w"]
    np.testing.assert_array_equal(
        mapped(run, axis_name="replica")(jnp.arange(8.0)), [-3.5] * 8
    )


def test_two_axes_are_reduced_by_two_wrappers():
    mesh = jax.make_mesh(
        (2, 4), ("group", "replica"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    step = harness.transform_step(
        lambda: CrossShard(CrossShard(optax.sgd(1.0), axis_name="group"), "sum"),
        linear_loss,
    )
    params = {"m": {"w": jnp.zeros(())}}
    _, state = step.init(None, params, 0.0)

    def local(x):
        return step.apply({}, state, None, params, x[0, 0])[0][1]

    run = jax.shard_map(
        local, mesh=mesh, in_specs=jax.P("group", "replica"), out_specs=jax.P()
    )
    np.testing.assert_array_equal(
        jax.jit(run)(jnp.arange(8.0).reshape(2, 4))["m"]["w"], -14.0
    )


@pytest.mark.parametrize("reduction", ["average", None, "MEAN", 3])
def test_unknown_reductions_are_refused(reduction):
    with pytest.raises(
        ValueError, match="reduction must be one of sum, mean; received"
    ):
        hk.testing.transform_and_run(lambda: CrossShard(optax.sgd(1.0), reduction))()


@pytest.mark.parametrize(
    "groups,match",
    [
        ("01", "must be a list of lists"),
        ([], "must be a list of lists"),
        ([0, 1], "must be a list of lists"),
        ([[0, 1], 2], "must be a list of lists"),
        ([[]], "must be of one size"),
        ([[0, 1], [2]], "must be of one size"),
        ([[0, 1], [1, 2]], "each replica number once"),
        ([[0, 1], [2, 4]], "each replica number once"),
        ([[0, True]], "each replica number once"),
        ([[0, 1.0]], "each replica number once"),
        ([[-1, 0]], "each replica number once"),
    ],
)
def test_malformed_groups_are_refused_at_construction(groups, match):
    with pytest.raises(ValueError, match=match):
        hk.testing.transform_and_run(
            lambda: CrossShard(optax.sgd(1.0), group_assignment=groups)
        )()


def test_groups_that_do_not_fit_the_axis_are_refused():
    with pytest.raises(
        ValueError, match="is for 4 replicas, but the axis 'replica' has 8"
    ):
        run_replicas(
            lambda: CrossShard(optax.sgd(1.0), group_assignment=[[0, 1], [2, 3]]),
            jnp.ones(8),
        )


def test_groups_without_a_mapped_axis_are_refused():
    step = harness.transform_step(
        lambda: CrossShard(optax.sgd(1.0), group_assignment=[[0, 1]])
    )
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    with pytest.raises(
        ValueError, match="is for 2 replicas, but the axis 'replica' has 1"
    ):
        step.apply({}, state, None, params, x)


def test_an_axis_that_is_not_mapped_is_refused():
    with pytest.raises(ValueError, match=r"axis 'data', but the mapped axes here are"):
        run_replicas(lambda: CrossShard(optax.sgd(1.0), axis_name="data"), jnp.ones(8))
    with pytest.raises(ValueError, match="axis_name must be the name of one axis"):
        hk.testing.transform_and_run(
            lambda: CrossShard(optax.sgd(1.0), axis_name=("a", "b"))
        )()


def test_reducing_over_the_same_axis_twice_is_refused():
    with pytest.raises(ValueError, match="already reduces over the axis 'replica'"):
        hk.testing.transform_and_run(
            lambda: CrossShard(LossScaled(CrossShard(optax.sgd(1.0)), 2))
        )()


def test_without_a_mapped_axis_there_is_one_replica_and_one_warning(caplog):
    axes._warn.cache_clear()
    step = harness.transform_step(lambda: CrossShard(optax.sgd(1.0)), linear_loss)
    params = {"m": {"w": jnp.zeros(())}}
    _, state = step.init(None, params, 2.0)
    with caplog.at_level("WARNING"):
        for _ in range(3):
            (_, new, _), _ = step.apply({}, state, None, params, 2.0)
    np.testing.assert_array_equal(new["m"]["w"], -2.0)
    warnings = [r for r in caplog.records if "assuming one replica" in r.getMessage()]
    assert len(warnings) == 1


def plain_gradients(reduction, mark, check_vma):
    """Returns the parameters after a step, by two ways to compute gradients.

    By jax.grad, and by compute_gradients.
    """

    def step(params, x):
        opt = CrossShard(optax.sgd(1.0), reduction)
        loss = lambda p: p["m"]["a"] * x + p["m"]["b"] * x**2
        by_jax_grad = opt.apply_gradients(jax.grad(loss)(mark(params)), params)
        return by_jax_grad, opt.minimize(loss, params)[1]

    step = hk.transform_with_state(step)
    params = {"m": {"a": jnp.zeros(()), "b": jnp.zeros(())}}
    run = jax.shard_map(
        lambda x: step.apply({}, {}, None, params, x[0])[0],
        mesh=harness.mesh(),
        in_specs=jax.P("replica"),
        out_specs=jax.P(),
        check_vma=check_vma,
    )
    return jax.jit(run)(jnp.arange(8.0))


def as_varying(x):
    return jax.lax.pcast(x, "replica", to="varying")


def test_gradients_of_jax_grad_are_summed_once():
    mark = functools.partial(jax.tree.map, as_varying)
    for by_jax_grad, computed in (
        plain_gradients("sum", mark, True),
        plain_gradients("sum", lambda params: params, False),
    ):
        harness.assert_equal(by_jax_grad, computed)
        np.testing.assert_array_equal(by_jax_grad["m"]["a"], -28.0)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_gradients_that_jax_has_summed_are_refused(reduction):
    with pytest.raises(
        ValueError, match=r"'m/a' does not vary over the axis 'replica'.*pcast"
    ):
        plain_gradients(reduction, lambda params: params, True)
    some = lambda params: {"m": {**params["m"], "a": as_varying(params["m"]["a"])}}
    with pytest.raises(ValueError, match="'m/b' does not vary"):
        plain_gradients(reduction, some, True)


@pytest.mark.parametrize("marked,missing", [("slice", "replica"), ("replica", "slice")])
def test_gradients_that_jax_has_summed_over_one_of_two_axes_are_refused(
    marked, missing
):
    auto_axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("slice", "replica"), axis_types=auto_axes)
    params = {"m": {"w": jnp.zeros(())}}

    def step(x):
        opt = CrossShard(optax.sgd(1.0), slice_axis_name="slice")
        varying = jax.lax.pcast(params["m"]["w"], marked, to="varying")
        grads = jax.grad(lambda p: linear_loss(p, x))({"m": {"w": varying}})
        return opt.apply_gradients(grads, params)

    step = hk.transform_with_state(step)
    local = lambda x: step.apply({}, {}, None, x[0, 0])[0]
    run = jax.shard_map(
        local, mesh=mesh, in_specs=jax.P("slice", "replica"), out_specs=jax.P()
    )
    with pytest.raises(ValueError, match=f"does not vary over the axis '{missing}'"):
        jax.eval_shape(run, jnp.ones((2, 4)))


def test_groups_of_one_refuse_gradients_summed_over_all_replicas():
    def step(x):
        opt = CrossShard(optax.sgd(1.0), group_assignment=[[i] for i in range(8)])
        params = {"m": {"w": jnp.zeros(())}}
        return opt.apply_gradients(
            jax.grad(lambda p: linear_loss(p, x))(params), params
        )

    step = hk.transform_with_state(step)
    local = lambda x: step.apply({}, {}, None, x[0])[0]
    run = jax.shard_map(
        local,
        mesh=harness.mesh(),
        in_specs=jax.P("replica"),
        out_specs=jax.P("replica"),
    )
    with pytest.raises(ValueError, match="does not vary"):
        jax.eval_shape(run, jnp.ones(8))


@pytest.mark.parametrize(
    "options", [{"reduce_dtype": "bfloat16"}, {"shard_update": True}]
)
def test_complex_gradients_are_summed_in_full_precision_or_refused(options):
    def step(params, x):
        loss = lambda p: jnp.sum(jnp.abs(p["m"]["w"] - x) ** 2)
        return CrossShard(optax.sgd(0.5), **options).minimize(loss, params)[1]

    step = hk.transform_with_state(step)
    params = {"m": {"w": jnp.zeros(4, jnp.complex64)}}
    local = lambda x: step.apply({}, {}, None, params, x[0])[0]
    run = harness.vmapped(local, jax.P("replica"), jax.P(), 4)
    x = jnp.asarray(np.arange(4) * (1 + 2j), jnp.complex64)
    if "reduce_dtype" in options:
        with pytest.raises(
            ValueError, match="'m/w' is complex; reduce_dtype='bfloat16'"
        ):
            jax.eval_shape(run, x)
    else:
        # A step of size 0.5 reaches the mean of x, and the mean of 0 to 3 is 1.5.
        np.testing.assert_allclose(
            jax.jit(run)(x)["m"]["w"], np.full(4, 1.5 + 3j), rtol=1e-6
        )


def test_numpy_integers_are_valid_replica_numbers():
    groups = [list(group) for group in np.arange(8).reshape(2, 4)]
    assert isinstance(groups[0][0], np.int64)
    make = lambda: CrossShard(optax.sgd(1.0), "sum", group_assignment=groups)
    (_, w, _), _ = run_replicas(make, jnp.arange(8.0))
    np.testing.assert_array_equal(w, [-6.0] * 4 + [-22.0] * 4)


def test_the_warning_names_the_axes_that_are_mapped(caplog):
    axes._warn.cache_clear()
    step = harness.transform_step(lambda: CrossShard(optax.sgd(1.0)), linear_loss)
    params = {"m": {"w": jnp.zeros(())}}
    run = lambda x: step.apply({}, {}, None, params, x)[0][1]["m"]["w"]
    with caplog.at_level("WARNING"):
        seeds = jax.vmap(run, axis_name="seed")(jnp.arange(3.0))
    np.testing.assert_array_equal(seeds, [0.0, -1.0, -2.0])
    (message,) = [
        r.getMessage() for r in caplog.records if "one replica" in r.getMessage()
    ]
    assert "'replica', which is not mapped here" in message and "['seed']" in message
