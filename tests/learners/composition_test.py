"""Tests that a plain optax transformation trains as the rule that is composed of it by
hand.
"""

import haiku as hk
import jax
import numpy as np
import optax
import pytest

import xshard
from tests import rows, toy, turns
from tests.optimizers import harness
from xshard import checkpoint, errors, loop
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard.learners import run_context
from xshard.training import state as state_lib

FLOAT16 = "params=float32,compute=float16,output=float32"
DYNAMIC = {
    "precision": FLOAT16,
    "loss_scale.kind": "dynamic",
    "loss_scale.initial_loss_scale": 2.0**10,
    "loss_scale.increment_period": 2,
    "loss_scale.multiplier": 4.0,
    # The losses of some batches are infinite, so their steps are skipped.
    "overflow_above": 2.0,
}
FIXED = {
    "precision": FLOAT16,
    "loss_scale.kind": "fixed",
    "loss_scale.loss_scale_value": 64.0,
}
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
# Each reads every key of `reduction` or `loss_scale` that it sets.
VARIANTS = {
    "float32": {},
    "dynamic": DYNAMIC,
    "fixed": FIXED,
    "groups": DYNAMIC | {"group_assignment": HALVES, "reduction.shard_update": True},
    "shards": DYNAMIC | {"reduction.shard_params": True, "micro_batches": 2},
    "sum": FIXED | {"reduction.reduction": "sum", "reduction.reduce_dtype": "bfloat16"},
    "slices": DYNAMIC | {"slices": 2, "reduction.slice_dtype": "bfloat16"},
    "slices apart": DYNAMIC | {"slices": 2, "outer.every_steps": 3},
    "exact": DYNAMIC | {"logical_replicas": 8, "reduction.arithmetic": "exact"},
    "skip": {"on_nonfinite": "skip", "overflow_above": 2.0},
}


def by_hand(transformation, config):
    """Returns the rule that a run makes of a transformation, as its user would."""
    opt = xshard.CrossShardOptimizer(
        xshard.OptaxOptimizer(transformation),
        slice_axis_name="slice",
        **config.reduction,
    )
    options = config.loss_scale
    if options.kind == "none":
        return opt
    if options.kind == "fixed":
        scale = options.loss_scale_value
    else:
        scale = xshard.DynamicLossScale(
            options.initial_loss_scale, options.increment_period, options.multiplier
        )
    return xshard.MixedPrecisionLossScaleOptimizer(opt, scale)


class Plain(toy.Wide):
    """Returns the transformation alone."""

    def optimizer(self):
        return optax.adamw(self.config.optimizer.learning_rate)


class Composed(Plain):
    """Composes the rule by hand."""

    def optimizer(self):
        return by_hand(super().optimizer(), self.config)


class PlainSteps(toy.Wide):
    """Returns an object that is no tuple, but has a transformation's functions."""

    def optimizer(self):
        return optax.MultiSteps(optax.adamw(self.config.optimizer.learning_rate), 2)


class ComposedSteps(PlainSteps):
    """Composes the rule by hand, of the transformation that optax makes of it."""

    def optimizer(self):
        steps = super().optimizer().gradient_transformation()
        return by_hand(steps, self.config)


class PlainTurns(turns.Turns):
    """Gives one learner a transformation, and the other a function that returns one."""

    def __init__(self, config):
        super().__init__(config)
        sgd = optax.sgd(1e-4, momentum=0.9)
        self.guess = xshard.Learner(self._guess, sgd, self.config)
        self.doubt = xshard.Learner(self._doubt, lambda: sgd, self.config)


class ComposedTurns(turns.Turns):
    """Composes both rules by hand."""

    def _optimizer(self):
        return by_hand(optax.sgd(1e-4, momentum=0.9), self.config)


def make_config(experiment, **changes):
    config = toy.get_config()
    config.experiment = f"tests.learners.composition_test.{experiment}"
    changes = {"steps": 8, "log_every_steps": 1, "eval_every_steps": 4, **changes}
    config.update_from_flattened_dict(changes)
    return config.lock()


def train(directory, config, code=0):
    assert loop.run(config, str(directory), "") == code
    return checkpoint.flatten(rows.final_state(directory, config))


def check_equal(states):
    plain, composed = states
    assert plain.keys() == composed.keys()
    harness.assert_equal(plain, composed)


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_plain_transformation_trains_to_the_same_bits(tmp_path, variant):
    changes = VARIANTS[variant]
    states = []
    for name in ("Plain", "Composed"):
        states.append(train(tmp_path / name, make_config(name, **changes)))
    check_equal(states)
    logged = rows.same_bits(tmp_path / "Plain")
    assert logged == rows.same_bits(tmp_path / "Composed")
    skipped = np.sum(rows.read(tmp_path / "Plain")[-2]["skipped"])
    assert (skipped > 0) == ("overflow_above" in changes)


@pytest.mark.parametrize("variant", ["dynamic", "shards"])
def test_several_steps_of_optax_train_to_the_same_bits(tmp_path, variant):
    states = []
    for name in ("PlainSteps", "ComposedSteps"):
        states.append(train(tmp_path / name, make_config(name, **VARIANTS[variant])))
    check_equal(states)
    assert "opt_state/optax_optimizer/mini_step" in states[0]


@pytest.mark.parametrize("variant", ["groups", "shards"])
def test_a_plain_transformation_resumes_as_the_composed_rule(tmp_path, variant):
    """Also the one from a work directory of the other."""
    changes = VARIANTS[variant]
    whole = train(tmp_path / "whole", make_config("Composed", **changes))
    train(tmp_path / "parts", make_config("Plain", **changes, steps=5))
    resumed = train(tmp_path / "parts", make_config("Plain", **changes))
    check_equal([resumed, whole])


@pytest.mark.parametrize("changes", [DYNAMIC, FIXED], ids=["dynamic", "fixed"])
def test_two_learners_each_have_a_rule_of_their_own(tmp_path, changes):
    states = []
    for name in ("PlainTurns", "ComposedTurns"):
        in_float32 = changes | {"precision": toy.get_config().precision}
        config = make_config(name, **in_float32)
        states.append(train(tmp_path / name, config))
    check_equal(states)
    scales = [path for path in states[0] if path.endswith("/current_loss_scale")]
    assert len(scales) == 2 * (changes is DYNAMIC)


def test_a_learner_takes_what_its_function_may_return():
    config = make_config("Plain")
    mesh = xshard.make_mesh(devices=jax.devices()[:1])

    def names(given):
        learner = xshard.Learner(lambda x: hk.Linear(1)(x), given, config)
        with run_context.run_on(mesh):
            state = learner.init(jax.random.key(0), np.ones((2, 3), np.float32))
        return jax.tree.structure(state.opt_state)

    for rule in (optax.sgd(0.1), optax.MultiSteps(optax.sgd(0.1), 2)):
        assert names(rule) == names(lambda rule=rule: rule)
    for wrong in (lambda: optax.MultiSteps, lambda: optax.sgd):
        with pytest.raises(errors.UserError, match="must return an optax transf"):
            names(wrong)


def test_without_a_loss_scale_there_is_no_state_of_one():
    config = make_config("Plain")
    made = experiment_lib.of_config(config)
    mesh = xshard.make_mesh(devices=jax.devices()[:1])
    state = state_lib.abstract_state(made, mesh, 0, made.train_data())
    assert state.experiment.opt_state.keys() == {"optax_optimizer"}


def test_a_loss_scale_with_a_kind_alone_has_the_defaults(tmp_path):
    states = []
    for loss_scale in ({"kind": "dynamic"}, config_lib.default().loss_scale):
        config = make_config("Plain", steps=2).copy_and_resolve_references()
        config.loss_scale = loss_scale
        config.loss_scale.kind = "dynamic"
        states.append(train(tmp_path / str(len(states)), config.lock()))
    check_equal(states)


@pytest.mark.parametrize(
    "key, value, match",
    [
        (
            "initial_loss_scale",
            0.0,
            "initial_loss_scale must be a number of at least 1",
        ),
        ("increment_period", 0, "increment_period must be an integer of at least 1"),
        ("multiplier", 1.0, "multiplier must be above 1"),
        ("loss_scale_value", 0.5, "loss_scale_value must be a number of at least 1"),
    ],
)
def test_an_invalid_value_is_refused_before_the_run(tmp_path, key, value, match):
    kind = "fixed" if key == "loss_scale_value" else "dynamic"
    changes = {"loss_scale.kind": kind, f"loss_scale.{key}": value}
    with pytest.raises(errors.UserError, match=match):
        loop.Run(make_config("Plain", **changes), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_what_was_trained_is_loaded_and_predicts(tmp_path):
    batch = {"x": np.ones((4, 3), np.float32), "y": np.zeros(4, np.float32)}
    outputs = []
    for name in ("Plain", "Composed"):
        train(tmp_path / name, make_config(name, **DYNAMIC))
        outputs.append(xshard.load(str(tmp_path / name)).predict(batch))
    np.testing.assert_array_equal(*outputs)
