"""Tests that a run evaluates, ranks, samples, exports and loads the parameters that its
rule has for evaluation.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests import rows, toy
from tests.optimizers import harness
from xshard import errors, export, loop
from xshard.learners import learner
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


class Normalized(toy.Averaged):
    """Keeps averages of its parameters, and has a batch norm."""

    def forward(self, batch, *, is_training):
        x = hk.Linear(8, name="first")(batch["x"])
        norm = hk.BatchNorm(True, True, 0.5, name="norm")
        # Haiku's averages mix integers with floats.
        with jax.numpy_dtype_promotion("standard"):
            x = norm(x, is_training)
        return hk.Linear(1, name="last")(jax.nn.relu(x))[:, 0]


class Doubled(toy.Wide):
    """Evaluates twice its parameters, by a function of its own."""

    def optimizer(self):
        double = lambda state, params: jax.tree.map(lambda x: 2 * x, params)
        rule = xshard.OptaxOptimizer(optax.sgd(0.1), evaluation_params=double)
        return xshard.CrossShardOptimizer(rule)


class Rescaled(Normalized):
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
    config.experiment = f"tests.evaluation_params_test.{name}"
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
    assert loop.run(make_config("Free", **changes), str(tmp_path), "") == 0
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
    w = [expected[f"mlp/~/linear_{i}/w"] for i in (0, 1)]
    b = [expected[f"mlp/~/linear_{i}/b"] for i in (0, 1)]
    outputs = (np.maximum(BATCH["x"] @ w[0] + b[0], 0) @ w[1] + b[1])[:, 0]
    np.testing.assert_allclose(trained.predict(BATCH), outputs, rtol=1e-5, atol=1e-6)
    shown = rows.results(tmp_path)["samples"].split()[-2:]
    np.testing.assert_allclose(np.array(shown, float), outputs, atol=1e-5)
    # So do the evaluation, and the choice of the best checkpoint.
    results = rows.results(tmp_path)["eval"]
    data = trained.experiment.eval_data()
    error = np.mean((trained.predict(data) - data["y"]) ** 2)
    np.testing.assert_allclose(results["error"], error, rtol=1e-4)
    assert results["raw/error"] != results["error"]


def test_exports_have_them_unless_told_otherwise(tmp_path):
    assert loop.run(make_config("Free"), str(tmp_path / "run"), "") == 0
    trained = xshard.load(str(tmp_path / "run"))
    said = export.write(trained, tmp_path / "a.safetensors")
    assert said.endswith("those that the run evaluates")
    said = export.write(trained, tmp_path / "b.safetensors", raw=True)
    assert "evaluates" not in said
    from safetensors import numpy as safetensors

    evaluated = safetensors.load_file(tmp_path / "a.safetensors")
    raw = safetensors.load_file(tmp_path / "b.safetensors")
    params = trees.leaves_by_path(trained.params)
    for path, x in trees.leaves_by_path(trained.state.experiment.params).items():
        np.testing.assert_array_equal(raw[f"params/{path}"], x)
        np.testing.assert_array_equal(evaluated[f"params/{path}"], params[path])


def test_the_statistics_of_a_batch_norm_are_averaged_with_the_parameters(tmp_path):
    config = make_config("Normalized", log_every_steps=1)
    assert loop.run(config, str(tmp_path / "whole"), "") == 0
    # Stopped, a run resumes to the same bits.
    watch = rows.ScriptedWatch(5, request.STOP)
    assert loop.run(config, str(tmp_path / "two"), "", watch=watch) == 42
    assert loop.run(config, str(tmp_path / "two"), "") == 0
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
    assert loop.run(config, str(tmp_path), "") == 0
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
        loop.run(config, str(tmp_path / "run"), "")


def test_a_function_of_one_s_own_is_used(tmp_path):
    assert loop.run(make_config("Doubled"), str(tmp_path), "") == 0
    trained = xshard.load(str(tmp_path))
    doubled = jax.tree.map(lambda x: 2 * x, trained.state.experiment.params)
    harness.assert_equal(trained.params, doubled)


def test_a_run_of_an_earlier_version_resumes_without_averaged_statistics(
    tmp_path, capsys, monkeypatch
):
    with monkeypatch.context() as patch:
        # Earlier versions kept no averages of the network's state.
        patch.setattr(learner, "_floats", lambda net_state: {})
        early = make_config("Normalized", steps=6)
        assert loop.run(early, str(tmp_path), "") == 0
    old = xshard.load(str(tmp_path))
    assert "statistics/" not in str(old.state.experiment.opt_state)
    assert "step 6 was saved without averages" in capsys.readouterr().err
    harness.assert_equal(
        old.for_evaluation().experiment.net_state, old.state.experiment.net_state
    )
    config = make_config("Normalized", log_every_steps=1)
    assert loop.run(config, str(tmp_path), "") == 0
    assert "averages of the network's state begin at step 6" in capsys.readouterr().err
    # The parameters are those of a run that had the averages from the beginning.
    assert loop.run(config, str(tmp_path / "new"), "") == 0
    resumed = rows.final_state(tmp_path, config).experiment
    new = rows.final_state(tmp_path / "new", config).experiment
    harness.assert_equal(resumed.params, new.params)
    harness.assert_equal(resumed.net_state, new.net_state)
    left = resumed.opt_state["MovingAverageOptimizer"]
    assert left.keys() == new.opt_state["MovingAverageOptimizer"].keys()
    assert any(name.startswith("statistics/") for name in left)


def test_a_run_says_that_an_experiment_leaves_them_unused(tmp_path, capsys):
    assert loop.run(make_config("Unused"), str(tmp_path), "") == 0
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
        loop.run(make_config(name), str(tmp_path / "run"), "")
    assert not (tmp_path / "run").exists()


def test_what_has_no_clear_meaning_is_refused(tmp_path):
    with pytest.raises(errors.UserError, match="MovingAverageOptimizer and optax_opt"):
        loop.run(make_config("Both"), str(tmp_path), "")
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
        loop.run(config, str(tmp_path), "")
    assert not list(tmp_path.iterdir())
