"""Tests of slots.

The parameters that have them, their contents, their names and their memory.
"""

import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from tests.optimizers import harness, table
from xshard.optimizers import cross_shard, loss_scale, moving_average
from xshard.optimizers import optax as optax_optimizer

W0 = "mlp/linear_0/w"
B0 = "mlp/linear_0/b"
W1 = "mlp/linear_1/w"
# W0 is frozen.
TRAINED = [B0, W1]
STEPS = 3
# Coverage would double the time of the tests that go through all of optax, and other
# tests measure it.
without_coverage = pytest.mark.no_cover


def by_optax(transformation):
    return optax_optimizer.OptaxOptimizer(transformation, name="opt")


def adam():
    return by_optax(optax.adam(0.1))


def both_rules(opt, **options):
    opt = cross_shard.CrossShardOptimizer(opt, **options)
    return loss_scale.MixedPrecisionLossScaleOptimizer(opt, "dynamic")


def averaged(opt):
    return moving_average.MovingAverageOptimizer(opt, 0.9)


def transform(make, var_list=None):
    """Transforms a step `f(params, x, global_step)` that trains some parameters."""

    def step(params, x, global_step=0):
        loss = lambda p: harness.loss(p, x)
        return make().minimize(loss, params, global_step, var_list=var_list)

    return hk.transform_with_state(step)


def applying(make):
    """Transforms `f(grads, params)`, which applies gradients."""
    return hk.transform_with_state(
        lambda grads, params: make().apply_gradients(grads, params)
    )


def without_w0(params):
    layer = {"b": params["mlp/linear_0"]["b"]}
    return {"mlp/linear_0": layer, "mlp/linear_1": params["mlp/linear_1"]}


def gradients(params, number, frozen=True):
    """Returns random gradients of a step, None for the frozen parameter."""
    key = jax.random.fold_in(jax.random.key(7), number)
    result = {
        module: {
            name: jax.random.normal(jax.random.fold_in(key, i), x.shape)
            for name, x in arrays.items()
        }
        for i, (module, arrays) in enumerate(params.items())
    }
    if frozen:
        result["mlp/linear_0"]["w"] = None
    return result


def assert_follows_optax(make, part_of=None):
    """Asserts that a rule that trains all but W0 gives the bits of optax.

    That is given the trained sub-tree.
    """
    params = harness.params()
    bare = (part_of or make)()
    subtree = without_w0(params)
    rule = applying(lambda: by_optax(make()))
    _, state = rule.init(None, gradients(params, 0), params)
    with jax.numpy_dtype_promotion("standard"):
        bare_state = bare.init(subtree)
    for number in range(STEPS):
        grads = gradients(params, number)
        params, state = rule.apply({}, state, None, grads, params)
        with jax.numpy_dtype_promotion("standard"):
            updates, bare_state = bare.update(without_w0(grads), bare_state, subtree)
            subtree = optax.apply_updates(subtree, updates)
    harness.assert_equal(
        params["mlp/linear_0"]["w"], harness.params()["mlp/linear_0"]["w"]
    )
    harness.assert_equal(without_w0(params), subtree)
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): jnp.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(bare_state)
    }
    harness.assert_equal(dict(state.get("opt", {})), named)
    return params, state


@pytest.mark.sample(16)
@without_coverage
@pytest.mark.parametrize("name", sorted(table.OPTIMIZERS.keys() - {"partition"}))
def test_trained_parameters_follow_optax_without_the_frozen_ones(name):
    params, state = assert_follows_optax(table.OPTIMIZERS[name])
    # Each array has its own buffer even if nothing was compiled: donating one buffer
    # twice is an error.
    jax.block_until_ready(jax.jit(lambda *x: x, donate_argnums=(0, 1))(params, state))


LABELS = {"mlp/linear_0": {"w": "adam", "b": "adam"}, "mlp/linear_1": {"w": "sgd"}}
MASK = {"mlp/linear_0": {"w": True, "b": False}, "mlp/linear_1": {"w": True}}


def are_matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels_by_shape(params):
    return jax.tree.map(lambda x: "sgd" if x.ndim > 1 else "adam", params)


def adamw_of_a_schedule():
    schedule = optax.linear_schedule(0.1, 0.0, 5)
    return optax.inject_hyperparams(optax.adamw)(schedule)


def partitioned(labels):
    return optax.partition(
        {"adam": optax.adam(0.1), "sgd": optax.sgd(0.1, momentum=0.9)}, labels
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda part=lambda tree: tree: partitioned(part(LABELS)),
        lambda part=None: partitioned(labels_by_shape),
        lambda part=lambda tree: tree: optax.masked(optax.adam(0.1), part(MASK)),
        lambda part=None: optax.masked(optax.adam(0.1), are_matrices),
        lambda part=None: optax.flatten(optax.adam(0.1)),
        lambda part=None: optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(0.1)),
        lambda part=None: optax.MultiSteps(optax.lamb(0.1), 2),
        lambda part=None: adamw_of_a_schedule(),
    ],
)
def test_composed_transformations_follow_optax_without_frozen_ones(make):
    assert_follows_optax(make, lambda: make(without_w0))


def test_a_frozen_parameter_has_no_state_in_any_rule():
    step = transform(lambda: averaged(both_rules(adam())), TRAINED)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    names = {name for arrays in state.values() for name in arrays if "/" in name}
    slots = {
        f"{slot}/{path}" for slot in ("0/mu", "0/nu", "average") for path in TRAINED
    }
    assert names == {"0/count", *slots}
    (_, new, n), after = jax.jit(step.apply)({}, state, None, params, x, 0)
    assert jax.tree.structure(after) == jax.tree.structure(state) and n == 1
    harness.assert_equal(new["mlp/linear_0"]["w"], params["mlp/linear_0"]["w"])
    assert not np.array_equal(new["mlp/linear_1"]["w"], params["mlp/linear_1"]["w"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [optax.adamw, optax.lamb])
@pytest.mark.parametrize("replicas", [4, 8])
def test_sharded_slots_match_replicated_ones(make, replicas):
    sharded_rule = lambda: averaged(both_rules(by_optax(make(0.1)), shard_update=True))
    plain = transform(lambda: averaged(both_rules(by_optax(make(0.1)))), TRAINED)
    params = harness.params()
    x = harness.batch()
    _, state = plain.init(None, params, x)
    run = harness.sharded(transform(sharded_rule, TRAINED), sharded_rule, replicas)
    replicated = jax.jit(harness.replicated(plain, replicas=replicas))
    result = (params, state)
    wanted = (params, state)
    for _ in range(STEPS):
        (_, new, _), after = run(*result, x)
        result = new, after
        (_, new, _), after = replicated(*wanted, x)
        wanted = new, after
    # Norms, and gradients of all replicas, are summed in another order.
    harness.assert_close(result, wanted, rtol=1e-5, atol=1e-6)
    harness.assert_equal(result[0]["mlp/linear_0"]["w"], params["mlp/linear_0"]["w"])


def test_frozen_parameters_have_no_slots_in_groups():
    groups = [[0, 2], [1, 3]]
    step = transform(lambda: both_rules(adam(), group_assignment=groups), TRAINED)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    args = harness.stack((params, state), 4)
    run = jax.jit(harness.per_replica(step, replicas=4))
    (_, new, n), after = run(*args, x.reshape(4, 4, 3), jnp.zeros(4, jnp.int32))
    assert n.tolist() == [1] * 4
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for a, b in groups:
        harness.assert_equal(*(jax.tree.map(lambda x, i=i: x[i], new) for i in (a, b)))


def test_a_rule_may_train_one_parameter_after_another():
    def step(params, x):
        opt = adam()
        for path in (W0, B0):
            _, params = opt.minimize(
                lambda p: harness.loss(p, x), params, var_list=[path]
            )
        return params

    step = hk.transform_with_state(step)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    slots = {f"0/{slot}/{path}" for slot in ("mu", "nu") for path in (W0, B0)}
    assert state["opt"].keys() == {"0/count", *slots}
    new, after = step.apply({}, state, None, params, x)
    assert int(after["opt"]["0/count"]) == 2
    assert not np.array_equal(new["mlp/linear_0"]["b"], params["mlp/linear_0"]["b"])
    harness.assert_equal(new["mlp/linear_1"], params["mlp/linear_1"])


def test_a_gradient_for_a_parameter_without_a_slot_is_refused_by_name():
    params = harness.params()
    x = harness.batch()
    _, state = transform(adam, TRAINED).init(None, params, x)
    with pytest.raises(
        ValueError, match=f"'{W0}' has a gradient, but opt has no slot .*var_list"
    ):
        transform(adam).apply({}, state, None, params, x)
    # A rule without slots accepts the gradient.
    opt = lambda: by_optax(optax.sgd(0.1))
    _, state = transform(opt, TRAINED).init(None, params, x)
    transform(opt).apply({}, state, None, params, x)


def test_a_flattened_slot_needs_the_same_parameters_in_each_step():
    rule = applying(lambda: by_optax(optax.flatten(optax.adam(0.1))))
    params = harness.params()
    _, state = rule.init(None, gradients(params, 0, frozen=False), params)
    match = (
        r"state '0/mu' of opt has the shape \(24,\), .* have \(12,\): .*optax.flatten"
    )
    with pytest.raises(ValueError, match=match):
        rule.apply({}, state, None, gradients(params, 0), params)


@without_coverage
@pytest.mark.parametrize("name", table.NAMES)
def test_slot_names_and_slots_are_the_same_before_and_after_an_update(name):
    make = table.make_optimizer(name)
    params = harness.params()
    x = harness.batch()

    def look(update):
        opt = make()
        if update:
            opt.minimize(lambda p: harness.loss(p, x), params)
        arrays = {
            key
            for module in ("opt", "MovingAverageOptimizer", "OuterOptimizer")
            for key in state.get(module, {})
        }
        result = {}
        for slot in opt.get_slot_names():
            # If a slot has several arrays for a parameter, their paths end in a number.
            paths = {
                key.split(f"{slot}/", 1)[-1]
                for key in arrays
                if f"/{slot}/" in f"/{key}"
            }
            slots = {path: opt.get_slot(path, slot) for path in paths}
            assert paths and all(array is not None for array in slots.values())
            result[slot] = {path: array.shape for path, array in slots.items()}
            assert opt.get_slot("mlp/none", slot) is None
        return result

    _, state = jax.eval_shape(transform(make).init, None, params, x)
    seen = []
    for update in (False, True):
        looking = hk.transform_with_state(
            lambda update=update: seen.append(look(update))
        )
        jax.eval_shape(
            lambda state, looking=looking: looking.apply({}, state, None)[1], state
        )
    assert seen[0] == seen[1]


def test_a_module_may_have_the_name_of_a_slot():
    params = {
        "linear": {"w": jnp.ones(2)},
        "mu/linear": {"w": jnp.ones(3)},
        "nu": {"w": jnp.ones(4)},
    }

    def step(params, update):
        opt = adam()
        if update:
            opt.apply_gradients(params, params)
        shapes = [
            opt.get_slot(var, slot).shape
            for var in ("linear/w", "mu/linear/w", "nu/w")
            for slot in ("mu", "0/nu")
        ]
        assert (
            opt.get_slot("w", "nu") is None
            and opt.get_slot("linear/w", "mu/mu") is None
        )
        return shapes, opt.get_slot_names()

    step = hk.transform_with_state(step)
    _, state = step.init(None, params, True)
    wanted = [(2,), (2,), (3,), (3,), (4,), (4,)], ["mu", "nu"]
    for update in (False, True):
        assert step.apply({}, state, None, params, update)[0] == wanted


def test_slots_that_depend_on_module_names_are_known_after_an_update():
    labels = lambda p: {module: "sgd" if p[module] else "adam" for module in p}
    params = harness.params()
    x = harness.batch()

    def step(params, early):
        opt = by_optax(partitioned(labels))
        if early:
            opt.get_slot_names()
        opt.minimize(lambda p: harness.loss(p, x), params)
        return opt.get_slot_names(), opt.get_slot(W0, "trace")

    step = hk.transform_with_state(step)
    # During init there are no slots yet, so asking early is allowed.
    _, state = step.init(None, params, True)
    (names, slot), _ = step.apply({}, state, None, params, False)
    assert names == ["trace"] and slot.shape == (3, 4)
    with pytest.raises(
        ValueError, match="slots of opt are known only after it has updated"
    ):
        step.apply({}, state, None, params, True)


@pytest.mark.sample(32)
@without_coverage
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", sorted(table.OPTIMIZERS))
def test_each_array_of_the_initial_state_has_its_own_buffer(name, jitted):
    step = transform(lambda: averaged(table.make_optimizer(name)()))
    params = harness.params()
    x = harness.batch()
    init = jax.jit(step.init) if jitted else step.init
    _, state = init(None, params, x)
    # Donating one buffer twice is an error.
    donate = jax.jit(lambda params, state: (params, state), donate_argnums=(0, 1))
    jax.block_until_ready(donate(params, state))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))


TAKES_MORE = {
    "its transformation: .*scale_by_zoom_linesearch.* 'grad' and 'value_fn'": (
        lambda: optax.lbfgs()
    ),
    "its transformation: .*obj_fn must be provided to hutchinson": (
        lambda: contrib.sophia(0.1)
    ),
    "its transformation: .*grad_fn must be provided": lambda: contrib.sam(
        optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True
    ),
    "optax.lookahead": lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
}


@pytest.mark.parametrize("requirement", TAKES_MORE)
def test_transformations_that_need_more_than_gradients_are_refused(requirement):
    step = transform(lambda: both_rules(by_optax(TAKES_MORE[requirement]())))
    with pytest.raises(ValueError, match=f"opt cannot use {requirement}"):
        step.init(None, harness.params(), harness.batch())


@pytest.mark.parametrize("shape, per_example", [((4, 3), (3,)), ((4,), ()), ((1,), ())])
def test_transformations_of_per_example_gradients_are_refused(shape, per_example):
    private = contrib.differentially_private_aggregate(0.1, 0.1, key=jax.random.key(0))
    rule = applying(lambda: by_optax(private))
    params = {"m": {"w": jnp.ones(shape)}}
    # A vector looks like examples of a number, whose mean is a number.
    match = re.escape(
        f"update of 'm/w' has the shape {per_example}, and the parameter {shape}"
    )
    with pytest.raises(ValueError, match=match):
        rule.init(None, params, params)


def test_init_does_not_need_the_mapped_axis_that_an_update_uses():
    def update(grads, state, params):
        del params
        return jax.tree.map(
            lambda g: -jax.lax.pmean(g, harness.MESH_AXIS), grads
        ), state

    summing = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    step = transform(lambda: by_optax(summing))
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    (_, new, _), _ = harness.replicated(step)(params, state, x)
    grads = jax.grad(harness.loss)(params, x)
    # The mean of eight parts rounds differently.
    wanted = jax.tree.map(lambda p, g: p - g, params, grads)
    harness.assert_close(new, wanted, rtol=1e-5, atol=1e-6)


def test_an_error_in_a_transformation_is_raised_unchanged():
    def helper(grads, rate):
        return jax.tree.map(lambda g: -rate * g, grads)

    broken = optax.stateless(lambda grads, params: helper(grads))
    step = transform(lambda: by_optax(broken))
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    with pytest.raises(
        TypeError, match="helper.*missing 1 required positional argument: 'rate'"
    ):
        step.apply({}, state, None, params, x)
