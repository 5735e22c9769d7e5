"""Tests that a run evaluates, ranks, samples, exports and loads the parameters that its
rule has for evaluation.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export as jax_export
from safetensors import numpy as safetensors

import xshard
from tests import rows, toy, winged
from tests.optimizers import harness
from xshard import checkpoint, errors, export
from xshard.learners import statistics
from xshard.optimizers import trees
from xshard.pod import request

pytestmark = pytest.mark.usefixtures("shared_programs")

BATCH = {"x": np.ones((2, 3), np.float32), "y": np.zeros(2, np.float32)}


class Free(toy.Wide):
    """Trains by a schedule-free rule, and shows predictions as a text sample."""

    def optimizer(self):
        rule = optax.chain(
            optax.clip(10.0), optax.contrib.schedule_free_adamw(0.05, b1=0.9)
        )
        return xshard.CrossShardOptimizer(rule, **self.config.reduction)

    def samples(self, predict, key):
        del key
        return " ".join(f"{x:.6f}" for x in predict(BATCH))

    def frozen(self):
        return self.config.get("kept", "")


class Doubled(toy.Wide):
    """Evaluates twice its parameters, by a function of its own."""

    def optimizer(self):
        double = lambda state, params: jax.tree.map(lambda x: 2 * x, params)
        rule = xshard.OptaxOptimizer(optax.sgd(0.1), evaluation_params=double)
        return xshard.CrossShardOptimizer(rule)


class Rescaled(toy.Normalized):
    """Evaluates twice its first layer, which doubles what its batch norm gets."""

    def optimizer(self):
        def double_first(state, params):
            double = lambda x: 2 * x
            return {**params, "first": jax.tree.map(double, params["first"])}

        rule = xshard.OptaxOptimizer(optax.sgd(0.02), evaluation_params=double_first)
        rule = xshard.CrossShardOptimizer(rule, **self.config.reduction)
        # It skips some steps.
        return xshard.MixedPrecisionLossScaleOptimizer(
            rule, xshard.DynamicLossScale(increment_period=5)
        )


class Unused(Free):
    """Leaves its rule's parameters for evaluation unused, as in the low tier."""

    for_evaluation = xshard.Experiment.for_evaluation


class Misshapen(toy.Wide):
    """Has a rule that returns part of each parameter for evaluation."""

    def optimizer(self):
        part = lambda state, params: jax.tree.map(lambda x: x[:1], params)
        rule = xshard.OptaxOptimizer(optax.sgd(0.1), evaluation_params=part)
        return xshard.CrossShardOptimizer(rule)


class Empty(toy.Wide):
    """Has a rule that returns no parameters for evaluation."""

    def optimizer(self):
        none = lambda state, params: {}
        rule = xshard.OptaxOptimizer(optax.sgd(0.1), evaluation_params=none)
        return xshard.CrossShardOptimizer(rule)


class Holder(xshard.Optimizer):
    """Holds a rule, but forwards only its update."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def update(self, grads, params):
        return self.rule.update(grads, params)


class Held(toy.Wide):
    """Has a rule whose holder does not forward evaluation_params."""

    def optimizer(self):
        rule = xshard.OptaxOptimizer(optax.contrib.schedule_free_sgd(0.1))
        return xshard.CrossShardOptimizer(Holder(rule))


class Both(toy.Wide):
    def optimizer(self):
        rule = xshard.MovingAverageOptimizer(optax.contrib.schedule_free_sgd(0.1))
        return xshard.CrossShardOptimizer(rule)


def make_config(name, **changes):
    config = toy.get_config()
    module = "toy" if hasattr(toy, name) else "evaluation_params_test"
    config.experiment = f"tests.{module}.{name}"
    config.checkpoint.update({"keep_best": 1, "best_mode": "min"})
    config.reduction.update(changes.pop("reduction", {}))
    with config.unlocked():
        config.update(changes)
    return config.lock()


def expected_by_optax(trained):
    """Returns what optax's own function makes of a run's state."""
    state = trained.state.experiment
    (names,) = (x for x in state.opt_state.values() if "1/step_count" in x)
    params = trees.leaves_by_path(state.params)
    expected = {}
    for path, y in params.items():
        z = names.get(f"1/z/{path}")
        expected[path] = y
        if z is not None:
            expected[path] = (y - (1 - 0.9) * z) / 0.9
    return expected


def predict_by_hand(params):
    """Returns the outputs for `BATCH` with parameters by path."""
    w = [params[f"mlp/~/linear_{i}/w"] for i in (0, 1)]
    b = [params[f"mlp/~/linear_{i}/b"] for i in (0, 1)]
    return (np.maximum(BATCH["x"] @ w[0] + b[0], 0) @ w[1] + b[1])[:, 0]


@pytest.mark.wing("samples")
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kept": "linear_0"},
        {"reduction": {"shard_update": True}},
        {"reduction": {"shard_params": True, "shard_update": True}},
        {"group_assignment": ((0, 1, 2, 3), (4, 5, 6, 7))},
    ],
    ids=str,
)
def test_a_schedule_free_rule_is_evaluated_at_its_averages(tmp_path, capsys, changes):
    assert winged.run(make_config("Free", **changes), str(tmp_path), "") == 0
    assert "optax_optimizer.evaluation_params; 'raw/...' are" in capsys.readouterr().out
    trained = xshard.load(str(tmp_path))
    expected = expected_by_optax(trained)
    found = trees.leaves_by_path(trained.params)
    moved = 0
    for path, value in expected.items():
        # XLA may fuse the same operations in another way.
        np.testing.assert_allclose(found[path], value, rtol=1e-5, atol=1e-6)
        raw = trees.leaves_by_path(trained.state.experiment.params)[path]
        moved += not np.array_equal(raw, value)
    assert moved == (2 if "kept" in changes else 4)
    if "group_assignment" in changes:
        return
    # The prediction and the samples use them.
    outputs = predict_by_hand(expected)
    np.testing.assert_allclose(trained.predict(BATCH), outputs, rtol=1e-5, atol=1e-6)
    shown = rows.results(tmp_path)["samples"].split()[-2:]
    np.testing.assert_allclose(np.array(shown, float), outputs, atol=1e-5)
    # So do the evaluation, and the choice of the best checkpoint.
    results = rows.results(tmp_path)["eval"]
    data = trained.experiment.eval_data()
    error = np.mean((trained.predict(data) - data["y"]) ** 2)
    np.testing.assert_allclose(results["error"], error, rtol=1e-4)
    assert results["raw/error"] != results["error"]


FREE = optax.contrib.schedule_free_sgd
ONE_OF_TWO = {"m": {"w": True, "b": False}}
NESTED = {
    "inject_hyperparams": lambda: optax.inject_hyperparams(FREE)(learning_rate=0.1),
    "MultiSteps": lambda: optax.MultiSteps(FREE(0.1), 2),
    "named_chain": lambda: optax.named_chain(("a", optax.clip(1.0)), ("b", FREE(0.1))),
    "masked": lambda: optax.masked(FREE(0.1), ONE_OF_TWO),
    "partition": lambda: optax.partition(
        {True: FREE(0.1), False: FREE(0.2, b1=0.5)}, ONE_OF_TWO
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NESTED)
def test_a_schedule_free_rule_is_found_within_others(name):
    params = {"m": {"w": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}}

    def step(params):
        rule = xshard.OptaxOptimizer(NESTED[name](), name="opt")
        loss = lambda params: sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        _, new = rule.minimize(loss, params)
        return new, rule.evaluation_params(new)

    step = hk.transform_with_state(step)
    _, state = step.init(None, params)
    # The parameters are y. From the same gradients, z and x follow from the definition.
    z = x = y = params
    for count in range(1, 5):
        before = y
        (y, found), state = step.apply({}, state, None, before)
        if name == "MultiSteps" and count % 2:
            continue
        number = count // 2 if name == "MultiSteps" else count
        for leaf, rate, b1 in (("w", 0.1, 0.9), ("b", 0.2, 0.5)):
            if name != "partition":
                rate = 0.1
                b1 = 0.9
            if name == "masked" and leaf == "b":
                # What a mask leaves out is no average.
                np.testing.assert_array_equal(found["m"]["b"], y["m"]["b"])
                continue
            gradient = 2 * before["m"][leaf]
            if name == "named_chain":
                gradient = jnp.clip(gradient, -1, 1)
            z = {"m": {**z["m"], leaf: z["m"][leaf] - rate * gradient}}
            mean = x["m"][leaf] + (z["m"][leaf] - x["m"][leaf]) / number
            x = {"m": {**x["m"], leaf: mean}}
            # x is a difference of y and z in float32.
            np.testing.assert_allclose(found["m"][leaf], mean, rtol=1e-5)
            expected = b1 * mean + (1 - b1) * z["m"][leaf]
            np.testing.assert_allclose(y["m"][leaf], expected, rtol=1e-5)


def test_a_new_run_begins_to_average_at_the_parameters_that_it_takes(tmp_path):
    assert winged.run(make_config("Free"), str(tmp_path / "first"), "") == 0
    source = checkpoint.Source(str(tmp_path / "first"))
    run = winged.Run(make_config("Free", steps=24), str(tmp_path / "second"), source)
    state = run.resume_or_init().state
    taken = rows.final_state(tmp_path / "first", make_config("Free"))
    harness.assert_equal(state.experiment.params, taken.experiment.params)
    values = run.evaluate(state)
    # Without rounding they would be equal.
    assert values["error"] == pytest.approx(values["raw/error"], rel=1e-5)
    # A step donates its state, so no two of its arrays may share a buffer.
    assert (
        winged.run(make_config("Free", steps=24), str(tmp_path / "2"), "", source) == 0
    )


def test_exports_have_them_unless_told_otherwise(tmp_path):
    assert winged.run(make_config("Free"), str(tmp_path / "run"), "") == 0
    trained = xshard.load(str(tmp_path / "run"))
    said = export.write(trained, tmp_path / "a.safetensors")
    assert said.endswith("; those that the run evaluates")
    said = export.write(trained, tmp_path / "b.safetensors", raw=True)
    assert said.endswith("; those that train, not those that the run evaluates")
    evaluated = safetensors.load_file(tmp_path / "a.safetensors")
    raw = safetensors.load_file(tmp_path / "b.safetensors")
    params = trees.leaves_by_path(trained.params)
    for path, x in trees.leaves_by_path(trained.state.experiment.params).items():
        np.testing.assert_array_equal(raw[f"params/{path}"], x)
        np.testing.assert_array_equal(evaluated[f"params/{path}"], params[path])


def test_the_statistics_of_a_batch_norm_are_averaged_with_the_parameters(tmp_path):
    config = make_config("Normalized", log_every_steps=1)
    assert winged.run(config, str(tmp_path / "whole"), "") == 0
    # Stopped, a run resumes to the same bits.
    watch = rows.ScriptedWatch(5, request.STOP)
    assert winged.run(config, str(tmp_path / "two"), "", watch=watch) == 42
    assert winged.run(config, str(tmp_path / "two"), "") == 0
    left = rows.final_state(tmp_path / "whole", config)
    harness.assert_equal(left, rows.final_state(tmp_path / "two", config))
    state = left.experiment
    averages = state.opt_state["MovingAverageOptimizer"]
    evaluated = xshard.load(str(tmp_path / "whole")).for_evaluation().experiment
    floats = 0
    for path, x in trees.leaves_by_path(state.net_state).items():
        found = trees.leaves_by_path(evaluated.net_state)[path]
        if not jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_array_equal(found, x)
            continue
        floats += 1
        np.testing.assert_array_equal(found, averages[f"statistics/{path}"])
        assert not np.array_equal(found, x)
    assert floats == 4


def test_exported_predictions_are_those_of_the_chosen_parameters(tmp_path):
    assert winged.run(make_config("Free"), str(tmp_path / "run"), "") == 0
    trained = xshard.load(str(tmp_path / "run"))
    expected = {
        False: trained.predict(BATCH),
        True: predict_by_hand(trees.leaves_by_path(trained.state.experiment.params)),
    }
    assert not np.allclose(expected[False], expected[True], rtol=1e-3)
    for raw, outputs in expected.items():
        path = tmp_path / f"{raw}.stablehlo"
        export.write(trained, path, raw=raw)
        program = jax_export.deserialize(bytearray(path.read_bytes()))
        batch = {"x": BATCH["x"]}
        np.testing.assert_allclose(program.call(batch), outputs, rtol=1e-5)
        # The arrays that a program takes are those that a file of arrays has.
        export.write(trained, tmp_path / f"{raw}.safetensors", raw=raw)
        export.write(trained, path, raw=raw, arguments=True, overwrite=True)
        program = jax_export.deserialize(bytearray(path.read_bytes()))
        arrays = safetensors.load_file(tmp_path / f"{raw}.safetensors")
        np.testing.assert_allclose(program.call(arrays, batch), outputs, rtol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reduction": {"shard_params": True, "shard_update": True}},
        {"reduction": {"arithmetic": "exact"}, "logical_replicas": 8},
        {"group_assignment": ((0, 1, 2, 3), (4, 5, 6, 7))},
    ],
    ids=str,
)
def test_statistics_are_estimated_for_the_evaluated_parameters(tmp_path, changes):
    config = make_config(
        "Rescaled", estimate_statistics=True, overflow_above=2.0, **changes
    )
    assert winged.run(config, str(tmp_path), "") == 0
    state = rows.final_state(tmp_path, config).experiment
    steps = np.max(state.global_step)
    assert 0 < steps < config.steps
    (slots,) = (x for x in state.opt_state.values() if any("stat" in y for y in x))
    # The mean of inputs twice as large is twice as large, and the variance four times.
    for kind, factor in (("mean", 2), ("var", 4)):
        for name in ("average", "hidden"):
            path = f"norm/~/{kind}_ema/{name}"
            trained = trees.leaves_by_path(state.net_state)[path]
            assert np.all(trained != 0)
            # The mean is a sum of numbers that cancel.
            np.testing.assert_allclose(
                slots[f"statistics/{path}"], factor * trained, rtol=1e-4, atol=1e-5
            )
    # The norm divides by what they estimate.
    results = rows.results(tmp_path)["eval"]
    np.testing.assert_allclose(results["error"], results["raw/error"], rtol=1e-3)


def test_nothing_to_estimate_is_refused(tmp_path):
    config = make_config("Free", estimate_statistics=True)
    with pytest.raises(errors.UserError, match="estimate_statistics=True has no eff"):
        winged.run(config, str(tmp_path / "run"), "")


def test_a_function_of_one_s_own_is_used(tmp_path):
    assert winged.run(make_config("Doubled"), str(tmp_path), "") == 0
    trained = xshard.load(str(tmp_path))
    doubled = jax.tree.map(lambda x: 2 * x, trained.state.experiment.params)
    harness.assert_equal(trained.params, doubled)


def test_a_run_of_an_earlier_version_resumes_without_averaged_statistics(
    tmp_path, capsys, monkeypatch
):
    with monkeypatch.context() as patch:
        # Earlier versions kept no averages of the network's state.
        patch.setattr(statistics, "floats", lambda net_state: {})
        early = make_config("Normalized", steps=6)
        assert winged.run(early, str(tmp_path), "") == 0
    old = xshard.load(str(tmp_path))
    assert "statistics/" not in str(old.state.experiment.opt_state)
    assert "step 6 was saved without averages" in capsys.readouterr().err
    harness.assert_equal(
        old.for_evaluation().experiment.net_state, old.state.experiment.net_state
    )
    config = make_config("Normalized", log_every_steps=1)
    assert winged.run(config, str(tmp_path), "") == 0
    assert "averages of the network's state begin at step 6" in capsys.readouterr().err
    # The parameters are those of a run that had the averages from the beginning.
    assert winged.run(config, str(tmp_path / "new"), "") == 0
    resumed = rows.final_state(tmp_path, config).experiment
    new = rows.final_state(tmp_path / "new", config).experiment
    harness.assert_equal(resumed.params, new.params)
    harness.assert_equal(resumed.net_state, new.net_state)
    left = resumed.opt_state["MovingAverageOptimizer"]
    assert left.keys() == new.opt_state["MovingAverageOptimizer"].keys()
    assert any(name.startswith("statistics/") for name in left)


def test_a_run_says_that_an_experiment_leaves_them_unused(tmp_path, capsys):
    assert winged.run(make_config("Unused"), str(tmp_path), "") == 0
    printed = capsys.readouterr().out
    assert "Unused does not define for_evaluation" in printed
    assert "'raw/...' are those that train" not in printed
    assert "raw/error" not in rows.results(tmp_path)["eval"]


@pytest.mark.parametrize(
    "name, message",
    [
        ("Held", "evaluation_params does not call that of optax_optimizer"),
        ("Misshapen", "with the shape .1,.; the parameter has .16,."),
        ("Empty", "a dict of 0 that lacks 'mlp/~/linear_0/b'"),
    ],
)
def test_a_rule_that_returns_something_else_is_refused_first(tmp_path, name, message):
    with pytest.raises(errors.UserError, match=message):
        winged.run(make_config(name), str(tmp_path / "run"), "")
    assert not (tmp_path / "run").exists()


def test_what_has_no_clear_meaning_is_refused(tmp_path):
    with pytest.raises(errors.UserError, match="MovingAverageOptimizer and optax_opt"):
        winged.run(make_config("Both"), str(tmp_path), "")
    rule = optax.contrib.schedule_free_sgd(0.1)
    make = lambda: xshard.OptaxOptimizer(rule, backs_off=True)
    with pytest.raises(ValueError, match="cannot back off with .*schedule_free"):
        hk.transform_with_state(lambda: make().init({"m": {"w": jnp.ones(2)}})).init(
            None
        )
    config = make_config("Free")
    with config.unlocked():
        config.checkpoint.best_metric = "average/error"
    renamed = "metric of the evaluation: .*raw/error.*best_metric='error' is what"
    with pytest.raises(errors.UserError, match=renamed):
        winged.run(config, str(tmp_path), "")
    assert not list(tmp_path.iterdir())
