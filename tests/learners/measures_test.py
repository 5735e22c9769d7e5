"""Tests of the measures of a learner's updates: each comes and goes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import toy
from tests.optimizers import harness
from xshard import experiment as experiment_lib
from xshard.learners import learner, measures
from xshard.training import state as state_lib
from xshard.training import step

STEPS = 3
NAMES = [kind.name for kind in learner.MEASURES]
# The metrics of each measure that a learner may lack.
METRICS = {
    "norms": {"gradient_norm", "parameter_norm"},
    "noise_scale": {"noise_scale"},
    "norms_by_array": set(),
}


class Labels(measures.Measure):
    """The mean of the replicas' largest labels, and the number of updates before."""

    def measure(self, update):
        largest = jnp.max(update.batch["y"])
        return measures.Measured(
            local={"largest": largest}, equal=update.state.global_step
        )

    def finish(self, measured, state, outcome):
        found = {"largest": measured.local["largest"], "before": measured.equal}
        return state, outcome._replace(metrics={**outcome.metrics, **found})


def trained(kind=toy.Wide, **changes):
    """Returns the last state, and the metrics and the norms of each step."""
    config = toy.get_config()
    config.reduction.shard_update = changes.pop("shard_update", False)
    config.update(changes)
    config.lock()
    experiment = kind(config)
    mesh = experiment_lib.mesh_of(config)
    examples = experiment.train_data()
    batch = {name: x[: config.batch_size] for name, x in examples.items()}
    state = state_lib.init(experiment, mesh, 0, batch)
    train = jax.jit(step.make_watched_step(experiment, mesh), donate_argnums=0)
    measured = []
    for _ in range(STEPS):
        stepped = train(state, batch)
        state = stepped.state
        measured.append(jax.device_get((stepped.metrics, stepped.norms)))
    return state, measured, batch


def without(monkeypatch, name):
    kept = tuple(kind for kind in learner.MEASURES if kind.name != name)
    monkeypatch.setattr(learner, "MEASURES", kept)


def test_a_measure_has_the_name_of_its_file():
    for kind in learner.MEASURES:
        assert kind.__module__ == f"xshard.learners.{kind.name}"
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("shard_update", [False, True])
def test_a_measure_is_added_by_a_line(monkeypatch, shard_update):
    measures = (*learner.MEASURES, Labels)
    monkeypatch.setattr(learner, "MEASURES", measures)
    _, measured, batch = trained(shard_update=shard_update)
    replicas = len(jax.devices())
    assert replicas > 1
    largest = batch["y"].reshape(replicas, -1).max(axis=1)
    for number, (metrics, _) in enumerate(measured):
        # A mean of eight numbers in float32 is rounded by the order of its sum.
        np.testing.assert_allclose(metrics["largest"], largest.mean(), rtol=1e-6)
        assert metrics["before"] == number


@pytest.mark.parametrize(
    "gone", [pytest.param(name, marks=pytest.mark.wing(name)) for name in METRICS]
)
def test_a_measure_goes_with_its_line(monkeypatch, gone):
    asked = {"noise_scale_steps": 16, "log_norms_every_steps": 1}
    whole, measured, _ = trained(**asked)
    without(monkeypatch, gone)
    rest, measured_without, _ = trained(**asked)
    harness.assert_equal(rest.experiment.params, whole.experiment.params)
    had_norms = "norms_by_array" in NAMES
    for (metrics, by_array), (kept, kept_by_array) in zip(
        measured, measured_without, strict=True
    ):
        assert metrics.keys() - kept.keys() == METRICS[gone]
        for name, value in kept.items():
            np.testing.assert_array_equal(value, metrics[name])
        assert bool(by_array) == had_norms
        assert bool(kept_by_array) == (had_norms and gone != "norms_by_array")


@pytest.mark.wing("noise_scale")
def test_only_what_a_config_asks_for_is_kept_in_the_state():
    state, measured, _ = trained()
    assert state.experiment.gradient_noise is None
    assert "noise_scale" not in measured[0][0] and not measured[0][1]
    state, _, _ = trained(noise_scale_steps=16)
    assert type(state.experiment.gradient_noise).__name__ == "GradientNoise"
