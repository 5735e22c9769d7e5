"""Tests of the contract of Optimizer.

Gradients, gates, subsets of parameters, names, invalid input.
"""

import collections

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers import harness
from xshard import errors
from xshard.optimizers import base, cross_shard, gradients, loss_scale
from xshard.optimizers import optax as optax_optimizer

W0 = "mlp/linear_0/w"
B0 = "mlp/linear_0/b"
W1 = "mlp/linear_1/w"


def adam(**kwargs):
    return optax_optimizer.OptaxOptimizer(optax.adam(0.1, **kwargs), name="adam")


def both_rules():
    return loss_scale.MixedPrecisionLossScaleOptimizer(
        cross_shard.CrossShardOptimizer(adam()), loss_scale.DynamicLossScale()
    )


def run(f, *args):
    return hk.testing.transform_and_run(f)(*args)


def compute(loss=harness.loss, opt=adam, params=None, **kwargs):
    params = harness.params() if params is None else params
    x = harness.batch()
    losses = (
        [lambda p, f=f: f(p, x) for f in loss]
        if isinstance(loss, list)
        else lambda p: loss(p, x)
    )
    return run(lambda: opt().compute_gradients(losses, params, **kwargs))


def test_compute_gradients_matches_value_and_grad():
    expected = jax.value_and_grad(harness.loss)(harness.params(), harness.batch())
    for opt in (adam, both_rules):
        harness.assert_equal(compute(opt=opt), expected)


@pytest.mark.parametrize("opt", [adam, both_rules])
def test_aux_is_returned_with_the_value(opt):
    loss = lambda p, x: (harness.loss(p, x), {"n": jnp.int32(x.shape[0]), "p": p})
    (value, aux), grads = compute(loss, opt, has_aux=True)
    assert value == harness.loss(harness.params(), harness.batch()) and aux["n"] == 16
    harness.assert_equal(aux["p"], harness.params())
    harness.assert_equal(grads, compute()[1])


def test_a_loss_may_use_haiku_state_and_keys():
    def step(params):
        def loss(p):
            hk.set_state("calls", hk.get_state("calls", [], jnp.int32, jnp.zeros) + 1)
            return jnp.sum(p["m"]["w"]) * jax.random.uniform(hk.next_rng_key())

        return both_rules().minimize(loss, params)

    step = hk.transform_with_state(step)
    params = {"m": {"w": jnp.ones(2)}}
    _, state = step.init(jax.random.key(0), params)
    _, state = jax.jit(step.apply)({}, state, jax.random.key(1), params)
    assert state["~"]["calls"] == 1


@pytest.mark.parametrize("opt", [adam, both_rules])
def test_grad_loss_weights_the_gradients(opt):
    plain = compute(opt=opt)[1]
    harness.assert_equal(
        compute(opt=opt, grad_loss=2.0),
        (compute()[0], jax.tree.map(lambda g: 2 * g, plain)),
    )
    per_example = lambda p, x: jnp.tanh(
        x @ p["mlp/linear_0"]["w"] + p["mlp/linear_0"]["b"]
    )
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(16, 4)), jnp.float32)
    value, grads = compute(per_example, opt, grad_loss=weight)
    assert value.shape == (16, 4)
    params = harness.params()
    x = harness.batch()
    expected = jax.grad(lambda p: jnp.sum(per_example(p, x) * weight))(params)
    harness.assert_equal(grads["mlp/linear_0"], expected["mlp/linear_0"])


@pytest.mark.parametrize(
    "loss,kwargs,match",
    [
        (lambda p, x: x, {}, r"The loss has shape \(16, 3\) and grad_loss"),
        (lambda p, x: x, {"grad_loss": 1.0}, r"shape \(16, 3\) and grad_loss \(\)"),
        (
            harness.loss,
            {"grad_loss": np.ones(3, np.float32)},
            r"shape \(\) and grad_loss \(3,\)",
        ),
        (
            harness.loss,
            {"gate_gradients": 3},
            "gate_gradients must be one of .*; received 3",
        ),
        (harness.loss, {"gate_gradients": True}, "received True"),
        (
            harness.loss,
            {"aggregation_method": "sum"},
            "aggregation_method must be .*; received 'sum'",
        ),
        (harness.loss, {"var_list": W0}, "var_list must be a sequence of names"),
        (
            harness.loss,
            {"var_list": ["mlp/linear_0/W"]},
            "'mlp/linear_0/W', which is not a parameter; near",
        ),
        (
            harness.loss,
            {"var_list": lambda module, name: False},
            "var_list selects none of",
        ),
        ([], {}, "loss is an empty sequence"),
        (
            [harness.loss] * 2,
            {"grad_loss": [1.0]},
            "grad_loss has 1 entries for 2 losses",
        ),
    ],
)
@pytest.mark.parametrize("opt", [adam, both_rules])
def test_invalid_arguments_of_compute_gradients_are_refused(opt, loss, kwargs, match):
    with pytest.raises(ValueError, match=match):
        compute(loss, opt, **kwargs)


@pytest.mark.parametrize(
    "params,match",
    [
        ({}, "must be a Haiku tree"),
        (jnp.ones(3), "must be a Haiku tree"),
        ({"m": {"w": jnp.ones(3), "n": jnp.int32(3)}}, "The parameter 'm/n' is int32"),
        ({"m": {"w": None}}, "The parameter 'm/w' is None"),
    ],
)
def test_malformed_parameters_are_refused(params, match):
    with pytest.raises(ValueError, match=match):
        compute(lambda p, x: 0.0, params=params)
    with pytest.raises(ValueError, match=match):
        run(lambda: adam().apply_gradients(params, params))


def broken(change):
    grads = harness.params()
    change(grads)
    return grads


@pytest.mark.parametrize(
    "grads,match",
    [
        (broken(lambda g: g.pop("mlp/linear_1")), f"missing: .'{W1}'., unknown: none"),
        (
            broken(lambda g: g["mlp/linear_1"].update(v=1.0)),
            "missing: none, unknown: .'mlp/linear_1/v'.",
        ),
        (
            broken(lambda g: g["mlp/linear_1"].update(w=jnp.ones(2))),
            rf"'{W1}' has shape \(2,\)",
        ),
        (
            jax.tree.map(lambda _: None, harness.params()),
            "There is no gradient for any of",
        ),
        (None, "must have the structure"),
    ],
)
@pytest.mark.parametrize("opt", [adam, both_rules])
def test_malformed_gradients_are_refused(opt, grads, match):
    with pytest.raises(ValueError, match=match):
        run(lambda: opt().apply_gradients(grads, harness.params()))


@pytest.mark.parametrize(
    "var_list", [[W1, B0], lambda module, name: (module, name) != ("mlp/linear_0", "w")]
)
@pytest.mark.parametrize("opt", [adam, both_rules])
def test_var_list_leaves_other_parameters_and_their_slots_unchanged(opt, var_list):
    def step(params, x, subset):
        rule = opt()
        kwargs = {"var_list": var_list} if subset else {}
        _, grads = rule.compute_gradients(
            lambda p: harness.loss(p, x), params, **kwargs
        )
        return rule.apply_gradients(grads, params), grads

    step = hk.transform_with_state(step)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x, False)
    (params, _), state = step.apply({}, state, None, params, x, False)
    (new, grads), new_state = step.apply({}, state, None, params, x, True)
    assert grads["mlp/linear_0"]["w"] is None
    harness.assert_equal(new["mlp/linear_0"]["w"], params["mlp/linear_0"]["w"])
    for slot in ("0/mu", "0/nu"):
        harness.assert_equal(
            new_state["adam"][f"{slot}/{W0}"], state["adam"][f"{slot}/{W0}"]
        )
        for path in (W1, B0):
            assert not np.array_equal(
                new_state["adam"][f"{slot}/{path}"], state["adam"][f"{slot}/{path}"]
            )
    (full, _), full_state = step.apply({}, state, None, params, x, False)
    harness.assert_equal(new["mlp/linear_1"], full["mlp/linear_1"])
    assert new_state["adam"].keys() == full_state["adam"].keys()


def test_a_global_norm_covers_only_trained_parameters():
    opt = lambda: optax_optimizer.OptaxOptimizer(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    )
    params = {"m": {"a": jnp.zeros(1), "b": jnp.zeros(1)}}
    grads = {"m": {"a": jnp.full(1, 4.0), "b": None}}
    new = run(lambda: opt().apply_gradients(grads, params))
    np.testing.assert_array_equal(new["m"]["a"], [-1.0])


def barriers(gate, opt):
    step = lambda p, x: opt().compute_gradients(
        lambda p: harness.loss(p, x), p, gate_gradients=gate
    )
    step = hk.transform_with_state(step)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    text = (
        jax.jit(lambda p, s, x: step.apply({}, s, None, p, x))
        .lower(params, state, x)
        .as_text()
    )
    return [
        line.count("%")
        for line in text.splitlines()
        if "stablehlo.optimization_barrier" in line
    ]


@pytest.mark.parametrize("opt", [adam, both_rules])
def test_gates_are_barriers_in_the_lowered_program(opt):
    assert barriers(base.Optimizer.GATE_NONE, opt) == []
    # GATE_OP has a barrier for each of three gradients, with one result and one
    # operand. GATE_GRAPH has one barrier with three operands, and MLIR prints its three
    # results under one name.
    assert barriers(base.Optimizer.GATE_OP, opt) == [2, 2, 2]
    assert barriers(base.Optimizer.GATE_GRAPH, opt) == [4]


@pytest.mark.parametrize("method", [None, 0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_several_losses_are_summed(method, count):
    scales = np.random.default_rng(3).normal(size=count).astype(np.float32)
    losses = [lambda p, x, s=s: (harness.loss(p, x) * s, s) for s in scales]
    (value, aux), grads = compute(losses, aggregation_method=method, has_aux=True)
    expected_value, expected = compute(lambda p, x: harness.loss(p, x) * scales.sum())
    # The tolerances allow for up to five float32 terms that are added in another order.
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    harness.assert_close(grads, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(aux, scales)


def test_losses_sum_in_float32_in_the_order_of_the_aggregation_method():
    # In float16 1 + 2**-12 rounds to 1. In float32 2**24 + 1 rounds to 2**24, so the
    # sum shows its order.
    half = {"m": {"w": jnp.ones((), jnp.float16)}}
    losses = [lambda p, x, s=s: p["m"]["w"] * jnp.float16(s) for s in (1.0, 2.0**-12)]
    assert compute(losses, params=half)[1]["m"]["w"] == 1 + 2.0**-12
    single = {"m": {"w": jnp.ones(())}}
    losses = [lambda p, x, s=s: p["m"]["w"] * s for s in (2.0**24, 1.0, 1.0, 1.0)]
    sums = [
        compute(losses, params=single, aggregation_method=m)[1]["m"]["w"]
        for m in (0, 1, 2)
    ]
    assert sums == [2.0**24, 2.0**24 + 2, 2.0**24]


def test_accumulation_orders_the_losses():
    step = lambda p, x: adam().compute_gradients(
        [lambda p: harness.loss(p, x)] * 3, p, gate_gradients=0, aggregation_method=2
    )
    step = hk.transform_with_state(step)
    text = jax.jit(lambda p, x: step.apply({}, {}, None, p, x)).lower(
        harness.params(), harness.batch()
    )
    # The second and the third loss, and their gradients, wait for the sum of the
    # gradients before them.
    assert text.as_text().count("stablehlo.optimization_barrier") >= 2


def test_colocated_gradients_have_their_parameters_sharding():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.NamedSharding(mesh, jax.P(None, "model"))
    params = {"m": {"w": jax.device_put(jnp.ones((4, 8)), sharded)}}
    table = jax.device_put(jnp.ones((4, 8)), jax.NamedSharding(mesh, jax.P()))

    def grads(params, table, colocate):
        # The gradient equals the table, so only colocation ties it to the parameter's
        # sharding.
        step = lambda p: adam().compute_gradients(
            lambda p: jnp.sum(p["m"]["w"] * table),
            p,
            colocate_gradients_with_ops=colocate,
        )
        return hk.transform_with_state(step).apply({}, {}, None, params)[0][1]

    run = jax.jit(grads, static_argnums=2)
    assert run(params, table, True)["m"]["w"].sharding.spec == jax.P(None, "model")
    assert run(params, table, False)["m"]["w"].sharding.spec == jax.P()


def test_minimize_updates_and_increments_the_global_step():
    params = harness.params()
    x = harness.batch()

    def step(params, x, global_step):
        loss = lambda p: (harness.loss(p, x), jnp.int32(7))
        return adam().minimize(loss, params, global_step, has_aux=True, name="scope")

    step = hk.transform_with_state(step)
    _, state = step.init(None, params, x, 5)
    ((value, aux), new, n), _ = step.apply({}, state, None, params, x, 5)
    assert (int(n), int(aux)) == (6, 7) and value == harness.loss(params, x)
    assert not np.array_equal(new["mlp/linear_1"]["w"], params["mlp/linear_1"]["w"])
    lowered = jax.jit(lambda p, x: step.apply({}, state, None, p, x, 5)).lower(
        params, x
    )
    assert "scope/" in lowered.as_text(debug_info=True)


def test_rule_names_and_slots():
    def look():
        rule = both_rules()
        if hk.running_init():
            assert rule.get_slot_names() == [] and rule.get_slot(W0, "mu") is None
        rule.apply_gradients(harness.params(), harness.params())
        return (
            rule.get_name(),
            rule.opt.get_name(),
            rule.get_slot_names(),
            rule.get_slot(W1, "nu").shape,
        )

    assert run(look) == (
        "CrossShardOptimizer",
        "CrossShardOptimizer",
        ["mu", "nu"],
        (4, 2),
    )

    def twice():
        opt = optax_optimizer.OptaxOptimizer(
            optax.chain(optax.trace(0.9), optax.trace(0.5))
        )
        opt.apply_gradients(harness.params(), harness.params())
        assert opt.get_slot(W0, "0/trace").shape == (3, 4)
        with pytest.raises(
            ValueError, match=r"Several slots are named 'trace'.*'0/trace', '1/trace'"
        ):
            opt.get_slot(W0, "trace")
        return opt.get_slot_names()

    assert run(twice) == ["0/trace", "1/trace"]


def test_variables_returns_all_state_arrays():
    def look():
        rule = both_rules()
        rule.minimize(lambda p: harness.loss(p, harness.batch()), harness.params())
        return rule.variables(), rule.state_by_name()

    variables, by_name = run(look)
    assert len(variables) == 9 and sorted(by_name)[:2] == [
        "adam/0/count",
        f"adam/0/mu/{B0}",
    ]
    assert "dynamic_loss_scale/good_steps" in by_name


def test_a_skipped_step_restores_all_haiku_state_of_a_custom_rule():
    class Averaged(base.OptimizerWrapper):
        """Keeps an average of the parameters."""

        def __init__(self, opt):
            super().__init__(name="averaged")
            self.opt = opt

        def update(self, grads, params):
            params = self.opt.update(grads, params)
            with jax.numpy_dtype_promotion("standard"):
                hk.ExponentialMovingAverage(0.9, name="ema")(
                    params["mlp/linear_1"]["w"]
                )
            return params

    make = lambda: loss_scale.MixedPrecisionLossScaleOptimizer(
        Averaged(adam()), "dynamic"
    )
    step = harness.transform_step(make)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    (_, params, _), state = step.apply({}, state, None, params, x)
    (_, new, _), skipped = step.apply({}, state, None, params, x * jnp.nan)
    harness.assert_equal(new, params)
    for module in state:
        if not module.endswith("dynamic_loss_scale"):
            harness.assert_equal(skipped[module], state[module])
    assert any("ema" in module for module in state)


class Refusing(base.OptimizerWrapper):
    """Votes against gradients with a magnitude of 10 or more."""

    def __init__(self, opt):
        super().__init__(name="refusing")
        self.opt = opt

    def vote(self, grads):
        return jnp.max(jnp.abs(grads["m"]["w"])) < 10


@pytest.mark.parametrize("scale", [2, "dynamic"])
@pytest.mark.parametrize("size,expected", [(1.0, -1.0), (100.0, 0.0), (np.inf, 0.0)])
def test_a_step_is_applied_only_if_every_rule_votes_for_it(scale, size, expected):
    def step(size):
        opt = Refusing(optax_optimizer.OptaxOptimizer(optax.sgd(1.0)))
        opt = loss_scale.MixedPrecisionLossScaleOptimizer(opt, scale)
        params = {"m": {"w": jnp.zeros(())}}
        return opt.apply_gradients({"m": {"w": size}}, params)["m"]["w"]

    assert run(step, jnp.float32(size)) == expected


def test_a_rule_may_have_no_slots():
    class Descent(base.Optimizer):
        def update(self, grads, params):
            return jax.tree.map(lambda p, g: p - g, params, grads)

    def look():
        opt = Descent()
        assert (opt.get_slot_names(), opt.get_slot(W0, "mu"), opt.variables()) == (
            [],
            None,
            [],
        )
        return opt.apply_gradients(harness.params(), harness.params()), opt.get_name()

    params, name = run(look)
    assert name == "descent" and not np.any(params["mlp/linear_0"]["w"])


def test_slots_of_narrow_parameters_are_float32():
    make = lambda: loss_scale.MixedPrecisionLossScaleOptimizer(adam(), "dynamic")
    step = harness.transform_step(make)
    params = harness.params(jnp.bfloat16)
    x = harness.batch(jnp.bfloat16)
    _, state = step.init(None, params, x)
    (_, new, _), new_state = step.apply({}, state, None, params, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {jnp.dtype(jnp.bfloat16)}
    for s in (state, new_state):
        assert s["adam"][f"0/mu/{W0}"].dtype == jnp.float32
    narrow = harness.transform_step(lambda: adam(mu_dtype=jnp.bfloat16))
    _, state = narrow.init(None, params, x)
    assert state["adam"][f"0/mu/{W0}"].dtype == jnp.bfloat16


@pytest.mark.parametrize("bad", [None, 3, "adam", object(), optax.adam])
def test_a_value_that_is_no_transformation_is_refused(bad):
    with pytest.raises(ValueError, match="received"):
        run(lambda: optax_optimizer.OptaxOptimizer(bad))


def test_the_base_optimizer_reports_the_missing_update():
    with pytest.raises(NotImplementedError, match="does not implement update"):
        run(
            lambda: base.Optimizer(name="empty").apply_gradients(
                harness.params(), harness.params()
            )
        )


def test_grad_loss_with_a_loss_of_fewer_parameters():
    per_example = lambda p, x: jnp.tanh(x @ p["mlp/linear_0"]["w"])
    _, grads = compute(per_example, both_rules, grad_loss=jnp.ones((16, 4)))
    assert grads["mlp/linear_1"]["w"] is None and grads["mlp/linear_0"]["b"] is None
    assert np.any(grads["mlp/linear_0"]["w"])


def first_layer(p, x):
    return jnp.mean((x @ p["mlp/linear_0"]["w"] + p["mlp/linear_0"]["b"]) ** 2)


def second_layer(p):
    return jnp.sum(p["mlp/linear_1"]["w"] ** 2)


def scanned(p, x):
    body = lambda total, _: (total + first_layer(p, x), None)
    return jax.lax.scan(body, jnp.zeros(()), None, length=2)[0]


def conditional(p, x):
    twice = lambda p: 2 * first_layer(p, x)
    return jax.lax.cond(
        p["mlp/linear_1"]["w"][0, 0] > 0, lambda p: first_layer(p, x), twice, p
    )


def with_unused_output(p, x):
    return jax.jit(lambda p: (first_layer(p, x), second_layer(p)))(p)[0]


def stopped(p, x):
    return first_layer(p, x) + second_layer(jax.lax.stop_gradient(p))


@pytest.mark.parametrize(
    "loss",
    [
        first_layer,
        scanned,
        conditional,
        with_unused_output,
        stopped,
        jax.checkpoint(with_unused_output),
    ],
)
def test_a_parameter_that_the_loss_does_not_depend_on_has_no_gradient(loss):
    _, grads = compute(loss, both_rules)
    assert grads["mlp/linear_1"]["w"] is None
    expected = jax.grad(loss)(harness.params(), harness.batch())
    harness.assert_equal(grads["mlp/linear_0"], expected["mlp/linear_0"])


def test_a_zero_gradient_is_not_treated_as_missing():
    _, grads = compute(lambda p, x: first_layer(p, x) + 0 * second_layer(p))
    np.testing.assert_array_equal(grads["mlp/linear_1"]["w"], np.zeros((4, 2)))


@pytest.mark.parametrize("method", [0, 1, 2])
def test_a_parameter_used_by_one_of_several_losses_has_a_gradient(method):
    options = {"aggregation_method": method}
    assert compute([first_layer] * 3, **options)[1]["mlp/linear_1"]["w"] is None
    _, grads = compute(
        [first_layer, lambda p, x: second_layer(p), first_layer], **options
    )
    np.testing.assert_allclose(
        grads["mlp/linear_1"]["w"], 2 * harness.params()["mlp/linear_1"]["w"], rtol=1e-6
    )
    with_aux = lambda p, x: (first_layer(p, x), second_layer(p))
    _, grads = compute([with_aux] * 2, has_aux=True, **options)
    assert grads["mlp/linear_1"]["w"] is None
    batches = gradients.MicroBatches(with_aux, harness.batch().reshape(4, 4, 3))
    rule = lambda: adam().compute_gradients(
        batches, harness.params(), has_aux=True, **options
    )
    assert run(rule)[1]["mlp/linear_1"]["w"] is None


def decaying():
    return optax_optimizer.OptaxOptimizer(
        optax.adamw(0.1, weight_decay=0.5), name="adam"
    )


@pytest.mark.parametrize("shard_update", [False, True])
def test_an_unused_parameter_keeps_its_value_and_its_existing_slots(shard_update):
    def make():
        cross = cross_shard.CrossShardOptimizer(decaying(), shard_update=shard_update)
        return loss_scale.MixedPrecisionLossScaleOptimizer(cross, "dynamic")

    step = harness.transform_step(make, first_layer)
    params = harness.params()
    x = harness.batch()
    _, state = step.init(None, params, x)
    assert state["adam"][f"0/mu/{W1}"].shape == (4, 2)
    (_, new, n), after = harness.sharded(step, make, 4)(params, state, x)
    assert int(n) == 1
    harness.assert_equal(new["mlp/linear_1"], params["mlp/linear_1"])
    assert np.any(np.asarray(new["mlp/linear_0"]["w"]) != params["mlp/linear_0"]["w"])
    for slot in ("0/mu", "0/nu"):
        harness.assert_equal(
            after["adam"][f"{slot}/{W1}"], state["adam"][f"{slot}/{W1}"]
        )
        assert np.any(after["adam"][f"{slot}/{W0}"])


def test_a_loss_is_traced_once():
    calls = []

    def step(params):
        def loss(p):
            calls.append(hk.running_init())
            return jnp.sum(p["m"]["w"]) * jax.random.uniform(hk.next_rng_key())

        return both_rules().compute_gradients(loss, params)

    step = hk.transform_with_state(step)
    params = {"m": {"w": jnp.ones(2)}}
    key = jax.random.key(1)
    _, state = step.init(key, params)
    (value, _), _ = step.apply({}, state, key, params)
    assert calls == [True, False]
    drawn = hk.transform(lambda: jax.random.uniform(hk.next_rng_key())).apply({}, key)
    np.testing.assert_array_equal(value, 2 * drawn)


def test_a_loss_that_depends_on_no_parameter_is_refused():
    with pytest.raises(
        ValueError, match="There is no gradient for any of .* loss depends on"
    ):
        run(lambda: adam().minimize(lambda p: jnp.float32(1), harness.params()))


def complex_params():
    rng = np.random.default_rng(5)
    draw = lambda *shape: jnp.asarray(
        rng.normal(size=shape) + 1j * rng.normal(size=shape)
    )
    return {"m": {"w": draw(3).astype(jnp.complex64), "b": jnp.ones(2)}}


def complex_loss(p, x):
    distance = jnp.abs(p["m"]["w"] * x.astype(jnp.complex64) - 1j)
    return jnp.sum(distance**2) + jnp.sum(p["m"]["b"] ** 2)


def in_pairs(params):
    """Returns the same parameters, with real and imaginary parts of the complex one."""
    w = params["m"]["w"]
    return {"m": {"u": jnp.real(w), "v": jnp.imag(w), "b": params["m"]["b"]}}


def pair_loss(p, x):
    return complex_loss(
        {"m": {"w": jax.lax.complex(p["m"]["u"], p["m"]["v"]), "b": p["m"]["b"]}}, x
    )


@pytest.mark.parametrize("micro", [False, True])
def test_a_complex_parameter_trains_like_its_real_and_imaginary_parts(micro):
    def make():
        clipped = optax.chain(
            optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)
        )
        cross = cross_shard.CrossShardOptimizer(clipped)
        return loss_scale.MixedPrecisionLossScaleOptimizer(cross, "dynamic")

    def train(loss, params):
        def step(p, x, n):
            parts = (
                gradients.MicroBatches(loss, jnp.stack([x, x + 1])) if micro else None
            )
            opt = make()
            value, grads = opt.compute_gradients(parts or (lambda p: loss(p, x)), p)
            return value, *opt.apply_gradients(grads, p, n)

        step = hk.transform_with_state(step)
        _, state = step.init(None, params, jnp.ones(3), 0)
        values = []
        n = jnp.int32(0)
        for scale in (1.0, 1.0, np.nan, 1.0):
            x = jnp.full(3, scale)
            (value, params, n), state = step.apply({}, state, None, params, x, n)
            values.append(float(value))
        assert int(n) == 3
        return params, values

    params = complex_params()
    new, values = train(complex_loss, params)
    pairs, expected = train(pair_loss, in_pairs(params))
    # Both runs compute the same sums in float32, but from different terms, which round
    # differently.
    harness.assert_close(in_pairs(new), pairs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert values[3] < values[1] < values[0]


def test_gradients_of_complex_parameters_match_jax_grad():
    params = complex_params()
    loss = lambda p: complex_loss(p, jnp.full(3, 2.0))
    _, grads = run(lambda: both_rules().compute_gradients(loss, params))
    harness.assert_close(grads, jax.grad(loss)(params), rtol=1e-6)
    with pytest.raises(
        ValueError, match="'m/b' is complex64 and its parameter float32"
    ):
        bad = {"m": {**grads["m"], "b": jnp.ones(2, jnp.complex64)}}
        run(lambda: adam().apply_gradients(bad, params))


def test_haiku_flat_mappings_behave_like_dicts():
    plain = harness.params()
    flat = hk.data_structures.to_immutable_dict(plain)
    make = lambda: loss_scale.MixedPrecisionLossScaleOptimizer(
        cross_shard.CrossShardOptimizer(decaying()), "dynamic"
    )

    def step(params, x):
        opt = make()
        subset = [W0, W1]
        value, grads = opt.compute_gradients(
            lambda p: harness.loss(p, x), params, var_list=subset
        )
        assert type(grads) is type(params)
        return value, opt.apply_gradients(grads, params), opt.get_slot(W0, "mu")

    step = hk.transform_with_state(step)
    results = []
    for params in (plain, flat):
        _, state = step.init(None, params, harness.batch())
        (value, new, slot), after = step.apply({}, state, None, params, harness.batch())
        assert type(new) is type(params)
        results.append(
            (value, hk.data_structures.to_mutable_dict(new), slot, state, after)
        )
    harness.assert_equal(results[1], results[0])


def test_gradients_may_use_another_mapping_type_than_parameters():
    params = harness.params()
    ordered = collections.OrderedDict(
        (module, collections.OrderedDict(reversed(arrays.items())))
        for module, arrays in reversed(params.items())
    )
    expected = run(lambda: both_rules().apply_gradients(params, params))
    harness.assert_equal(
        run(lambda: both_rules().apply_gradients(ordered, params)), expected
    )


@pytest.mark.parametrize(
    "params",
    [
        {"a/b": {"c": jnp.ones(2)}, "a": {"b/c": jnp.ones(2)}},
        {"a": {"b": {"c": jnp.ones(2)}, "b/c": jnp.ones(2)}},
    ],
)
def test_parameters_with_the_same_path_are_refused(params):
    match = r"Two parameters have the path 'a/b/c': \['a.*\] and \['a.*rename"
    with pytest.raises(ValueError, match=match):
        compute(lambda p, x: 0.0, params=params)
    with pytest.raises(ValueError, match=match):
        run(lambda: adam().apply_gradients(params, params))
    single_path = {"a/b": {"c": jnp.ones(2)}}
    with pytest.raises(ValueError, match="Two gradients have the path 'a/b/c'"):
        run(lambda: adam().apply_gradients(params, single_path))


def test_a_parameter_may_have_a_slash_in_its_name():
    params = {"a": {"b/c": jnp.ones(2)}, "a/b": {"d": jnp.ones(2)}}
    new = run(lambda: adam().minimize(lambda p: jnp.sum(p["a"]["b/c"] ** 2), params)[1])
    assert np.all(np.asarray(new["a"]["b/c"]) < 1)
    harness.assert_equal(new["a/b"], params["a/b"])


def test_a_python_number_is_a_valid_parameter():
    params = {"m": {"w": 1.0}}
    new = run(lambda: both_rules().minimize(lambda p: p["m"]["w"] ** 2, params)[1])
    assert (
        new["m"]["w"].dtype == jnp.float32 and not jax.typeof(new["m"]["w"]).weak_type
    )
    np.testing.assert_allclose(new["m"]["w"], 0.9, rtol=1e-5)


@pytest.mark.parametrize(
    "bad", [0.0, True, jnp.zeros(3, jnp.int32), jnp.float32(1), "1", [1]]
)
def test_a_global_step_that_is_no_integer_scalar_is_refused(bad):
    with pytest.raises(
        ValueError, match="global_step must be an integer scalar.*received"
    ):
        run(lambda: adam().minimize(lambda p: second_layer(p), harness.params(), bad))


@pytest.mark.parametrize(
    "loss,options,match",
    [
        (
            jnp.float32(3),
            {},
            r"must be a function.*received an array of the shape \(\).*lambda",
        ),
        (3.0, {}, "must be a function.*received float: 3.0"),
        ([second_layer, 3.0], {}, "must be a function.*received float"),
        (
            gradients.MicroBatches(3.0, jnp.ones(2)),
            {},
            "must be a function.*received float",
        ),
        (
            second_layer,
            {"has_aux": True},
            r"has_aux=True a loss must return \(value, aux\)",
        ),
        (lambda p: (second_layer(p), 1), {}, "returned tuple.*pass has_aux=True"),
        (lambda p: None, {}, "must return an array; it returned NoneType"),
        (lambda p: second_layer(p) > 0, {}, "floating-point number; it is bool"),
        (
            lambda p: second_layer(p).astype(jnp.complex64),
            {},
            "it is complex64.*real part",
        ),
    ],
)
def test_an_invalid_loss_is_refused(loss, options, match):
    for opt in (adam, both_rules):
        with pytest.raises(ValueError, match=match):
            run(lambda: opt().minimize(loss, harness.params(), **options))


class Halved(base.OptimizerWrapper):
    """Halves gradients in an overriding compute_gradients.

    It does not mark that as hk.transparent.
    """

    def __init__(self, opt):
        super().__init__(name="halved")
        self.opt = opt

    def compute_gradients(self, loss, params, **kwargs):
        value, grads = self.opt.compute_gradients(loss, params, **kwargs)
        return value, jax.tree.map(lambda g: g / 2, grads)


def test_a_custom_compute_gradients_does_not_rename_state():
    def names(make):
        def loss(p):
            hk.set_state("calls", hk.get_state("calls", [], jnp.int32, jnp.zeros) + 1)
            return jnp.sum(hk.Linear(1, name="head", w_init=jnp.ones)(p["m"]["w"]))

        step = hk.transform_with_state(lambda p: make().minimize(loss, p))
        initialized = step.init(jax.random.key(0), {"m": {"w": jnp.ones((1, 2))}})
        return [sorted(tree) for tree in initialized]

    params, state = names(lambda: Halved(adam()))
    assert [params, state] == names(adam) == [["head"], ["adam", "~"]]


class Polyak(base.Optimizer):
    """Keeps the loss as state where it computes gradients.

    By Haiku's functions or in a method of its own.
    """

    def __init__(self, in_a_method):
        super().__init__(name="polyak")
        self._in_a_method = in_a_method

    def compute_gradients(self, loss, params, **kwargs):
        value, grads = super().compute_gradients(loss, params, **kwargs)
        if self._in_a_method:
            self.keep(value)
        else:
            hk.set_state("loss", value)
        return value, grads

    def keep(self, value):
        hk.set_state("loss", value)

    def update(self, grads, params):
        value = hk.get_state("loss", (), jnp.float32, jnp.zeros)
        squares = sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))
        return jax.tree.map(lambda p, g: p - value / squares * g, params, grads)


def test_state_that_compute_gradients_would_leave_with_the_caller_is_refused():
    params = {"m": {"w": jnp.zeros(4)}}
    loss = lambda p: jnp.sum((p["m"]["w"] - 1) ** 2)
    step = lambda in_a_method: hk.transform_with_state(
        lambda p: Polyak(in_a_method).minimize(loss, p)
    )
    with pytest.raises(
        errors.UserError, match="Polyak.compute_gradients keeps the state 'loss'"
    ):
        step(False).init(None, params)
    _, state = step(True).init(None, params)
    (_, new), state = step(True).apply({}, state, None, params)
    # A step of Polyak's rule halves the distance to the minimum of a parabola.
    np.testing.assert_allclose(new["m"]["w"], 0.5)
    assert list(state) == ["polyak"]
