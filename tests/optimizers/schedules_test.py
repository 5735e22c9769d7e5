"""Tests that the rows of a run log the scheduled values that each update used.

Whatever wraps the rule.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests import rows, toy
from xshard import errors, loop
from xshard.dryrun import collectives
from xshard.optimizers import inspection
from xshard.run import preflight


def rate(count):
    """Returns a rate that is different for each count."""
    return 0.1 / (1.0 + count)


class Scheduled(toy.Wide):
    """Declares its schedules inside all wrappers; some of its steps are skipped."""

    def optimizer(self):
        opt = xshard.OptaxOptimizer(
            optax.adam(rate), name="adam", schedules=self.schedules()
        )
        if self.config.outermost == "average":
            opt = xshard.CrossShardOptimizer(
                opt, slice_axis_name="slice", **self.config.reduction
            )
            opt = xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
            return xshard.MovingAverageOptimizer(opt, 0.5)
        opt = xshard.MixedPrecisionLossScaleOptimizer(
            xshard.MovingAverageOptimizer(opt), "dynamic"
        )
        return xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )

    def schedules(self):
        return {"learning_rate": rate, "decay": lambda count: 2 * count}


class Silent(Scheduled):
    """Uses the same schedule without declaring it."""

    def schedules(self):
        return {}


class Injected(toy.Wide):
    """Keeps its hyperparameters in its state."""

    def optimizer(self):
        adam = optax.inject_hyperparams(optax.adam)(rate, b1=0.8)
        return xshard.CrossShardOptimizer(
            optax.chain(optax.clip(1.0), adam), **self.config.reduction
        )


class Slow(toy.Wide):
    """Updates every second step.

    One of its schedules has the name of a metric of the loss.
    """

    def optimizer(self):
        steps = optax.MultiSteps(optax.sgd(rate), 2)
        schedules = {"learning_rate": rate, "error": rate}
        return xshard.CrossShardOptimizer(
            xshard.OptaxOptimizer(steps, name="sgd", schedules=schedules)
        )


class Forbidden(toy.Wide):
    """Declares a schedule with a name that every run logs."""

    def optimizer(self):
        opt = xshard.OptaxOptimizer(optax.sgd(rate), schedules={"step": rate})
        return xshard.CrossShardOptimizer(opt)


def make_config(name, **changes):
    config = toy.get_config()
    config.experiment = f"tests.optimizers.schedules_test.{name}"
    config.outermost = changes.pop("outermost", "average")
    config.reduction.shard_update = changes.pop("shard_update", False)
    config.update({"steps": 6, "log_every_steps": 1, "writers": ("jsonl",), **changes})
    return config.lock()


def training(directory, name, **changes):
    assert loop.run(make_config(name, **changes), str(directory), "") == 0
    return [row for row in rows.read(directory) if "loss" in row]


HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"outermost": "reduction"},
        {"shard_update": True, "slices": 2},
        {"micro_batches": 2, "group_assignment": HALVES, "shard_update": True},
    ],
    ids=str,
)
def test_rows_log_the_values_that_each_update_used(tmp_path, changes):
    logged = training(tmp_path, "Scheduled", overflow_above=1.9, **changes)
    before = 0
    skips = 0
    for row in logged:
        # A schedule counts the updates before the step, and a skipped step is no
        # update.
        expected = 0.1 / (1.0 + np.asarray(before))
        # A quotient is rounded to float32 once.
        np.testing.assert_allclose(row["learning_rate"], expected, rtol=1e-6)
        np.testing.assert_array_equal(row["decay"], 2 * np.asarray(before))
        skips += np.sum(row["global_step"] == np.asarray(before))
        before = row["global_step"]
    assert skips


@pytest.mark.sample(0.4)
def test_schedules_add_no_state_and_no_collective(tmp_path):
    programs = []
    states = []
    for name in ("Scheduled", "Silent"):
        run = loop.Run(make_config(name), str(tmp_path / name))
        step = preflight.jitted_step(run.experiment, run.mesh)
        compiled = step.lower(run.target, run.batches.shapes()).compile()
        programs.append(len(collectives.of(compiled)))
        states.append(jax.tree.structure(run.target))
    assert programs[0] == programs[1] and states[0] == states[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard_update", [False, True])
def test_hyperparameters_in_the_state_of_optax_are_logged(tmp_path, shard_update):
    logged = training(tmp_path, "Injected", shard_update=shard_update)
    rates = [row["learning_rate"] for row in logged]
    np.testing.assert_allclose(rates, [rate(count) for count in range(6)], rtol=1e-6)
    assert {row["b1"] for row in logged} == {np.float32(0.8)}


def test_a_schedule_uses_the_inner_count_and_hides_no_loss_metric(tmp_path):
    logged = training(tmp_path, "Slow")
    rates = [rate(step // 2) for step in range(6)]
    np.testing.assert_allclose(
        [row["learning_rate"] for row in logged], rates, rtol=1e-6
    )
    assert logged[0]["error"] == logged[0]["loss"]


def test_invalid_schedules_are_refused_before_a_run(tmp_path):
    with pytest.raises(
        errors.UserError, match="Forbidden.optimizer .*'step', which every run logs"
    ):
        loop.Run(make_config("Forbidden"), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(errors.UserError, match="must be functions of a count by name"):
        make = lambda: xshard.OptaxOptimizer(
            optax.sgd(0.1), schedules={"learning_rate": 0.1}
        )
        hk.transform(make).apply({}, None)


def test_two_rules_and_two_transformations_get_distinct_names():
    def make():
        inject = optax.inject_hyperparams
        two = optax.chain(
            inject(optax.clip)(1.0), inject(optax.sgd)(0.1), inject(optax.sgd)(0.2)
        )
        return xshard.OptaxOptimizer(two, name="two", schedules={"a": rate, "b": rate})

    def step(params):
        both = _Both(make(), xshard.OptaxOptimizer(optax.sgd(rate), "one", {"a": rate}))
        both.apply_gradients(params, params)
        return inspection.schedules(both, jnp.int32(3)), inspection.hyperparameters(
            both, params
        )

    params = {"hyperparams": {"w": jnp.ones(())}}
    transformed = hk.transform_with_state(step)
    _, state = transformed.init(None, params)
    (scheduled, kept), _ = transformed.apply({}, state, None, params)
    # The first rule keeps three counts, and the second rule keeps one.
    assert scheduled.keys() == {"two/a", "b", "one/a"}
    assert kept.keys() == {"max_delta", "two/1/learning_rate", "two/2/learning_rate"}


class _Both(xshard.OptimizerWrapper):
    """Applies one rule after the other."""

    def __init__(self, first, second):
        super().__init__()
        self.opt = first
        self.second = second

    def update(self, grads, params):
        return self.second.update(grads, self.opt.update(grads, params))
