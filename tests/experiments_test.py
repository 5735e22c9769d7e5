"""Tests that other experiments keep the same promises as the digits experiment."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

import xshard
from configs import digits, gan, lm_tiny, rl_host, ssl
from configs import rl as rl_config
from experiments.rl import experiment as rl
from experiments.rl import host
from tests import matrix, rows, winged
from tests.optimizers import harness
from xshard import data, errors, loop, mesh
from xshard import experiment as experiment_lib
from xshard.data import batches
from xshard.dryrun import collectives
from xshard.training import state as state_lib
from xshard.training import step

CONFIGS = {
    "digits": digits,
    "gan": gan,
    "lm_tiny": lm_tiny,
    "rl": rl_config,
    "rl_host": rl_host,
    "ssl": ssl,
}
VARIANTS = {
    "groups": {
        "group_assignment": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "reduction.shard_update": True,
        "micro_batches": 2,
    },
    "slices": {"slices": 2, "reduction.shard_update": True},
    "held": {"reduction.shard_params": True},
    # The iterator acts right after the checkpoint of step 2, or the checkpoint falls
    # between two calls of `act`.
    "acts next": {"acts_every_steps": 2},
    "serves": {"acts_every_steps": 4, "slices": 2, "micro_batches": 2},
}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Allows the standard dtype promotion, since experiments are user code."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def make_config(name, **changes):
    config = CONFIGS[name].get_config()
    config.update(
        {"steps": 6, "log_every_steps": 1, "writers": ("jsonl",), "eval_every_steps": 3}
    )
    config.checkpoint.update({"every_steps": 2, "keep_last": 10})
    if name == "ssl":
        # At full size, its convolutions took most of the time of this file's tests.
        config.update({"batch_size": 64})
        config.model.channels = 4
    config.update_from_flattened_dict(changes)
    return config.lock()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("gan", "groups"),
        ("rl", "slices"),
        ("rl", "groups"),
        ("ssl", "groups"),
        ("rl_host", "acts next"),
        ("rl_host", "serves"),
    ],
)
def test_an_interrupted_run_resumes_to_the_same_bits(
    tmp_path, monkeypatch, name, variant
):
    config = make_config(name, **VARIANTS[variant])
    assert winged.run(config, str(tmp_path / "whole"), "") == 0
    with monkeypatch.context() as patch:
        evaluate = loop.Run._evaluate_and_log

        def evaluate_and_end(*args):
            evaluate(*args)
            raise rows.Killed

        patch.setattr(loop.Run, "_evaluate_and_log", evaluate_and_end)
        with pytest.raises(rows.Killed):
            winged.run(config, str(tmp_path / "ended"), "")
    assert winged.run(config, str(tmp_path / "ended"), "") == 0
    whole, ended = (
        rows.final_state(tmp_path / which, config) for which in ("whole", "ended")
    )
    harness.assert_equal(ended, whole)
    assert rows.same_bits(tmp_path / "ended") == rows.same_bits(tmp_path / "whole")
    results = [rows.results(tmp_path / which) for which in ("whole", "ended")]
    assert results[0] == results[1] and results[0]["finite"]


@pytest.mark.sample(0.4)
@pytest.mark.parametrize(
    ("config", "cell"),
    [
        ("configs/rl_host.py", "killed, 2 x 4"),
        ("tests/quantized.py", "killed, 1 x 8"),
        ("tests/carried.py", "1 -> 8 -> 4 devices"),
    ],
)
def test_some_cells_of_the_matrix_of_promises_work(tmp_path, config, cell):
    assert matrix.attempt(config, cell, tmp_path) == "works"


@pytest.mark.sample(1, of="learners")
def test_games_resume_with_another_number_of_replicas(tmp_path):
    config = make_config("rl", batch_size=16)
    assert winged.run(config, str(tmp_path), "") == 0
    games = rows.final_state(tmp_path, config).experiment.games.value
    assert games.paddle.shape == (16,)
    fewer = make_config("rl", batch_size=16, steps=8, model_parallel=2)
    before = winged.Run(fewer, str(tmp_path)).resume_or_init().state
    assert len(before.experiment.games.value.paddle.sharding.device_set) == 8
    np.testing.assert_array_equal(before.experiment.games.value.paddle, games.paddle)
    assert winged.run(fewer, str(tmp_path), "") == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *itertools.product(
            ("digits", "gan", "lm_tiny", "rl", "ssl"), ("groups", "slices", "model")
        ),
        *(("rl", "held"), ("rl_host", "held"), ("ssl", "held")),
    ],
)
def test_valid_configs_pass_the_checks_before_a_run(tmp_path, name, variant):
    model = {"group_assignment": ((0, 1), (2, 3)), "model_parallel": 2}
    variants = {**VARIANTS, "model": {**model, "reduction.shard_update": True}}
    winged.Run(make_config(name, **variants[variant]), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def make(name, devices=8, **changes):
    config = make_config(name, **changes)
    experiment = experiment_lib.load(config.experiment)(config)
    return experiment, mesh.make_mesh(
        config.group_assignment or None, devices=jax.devices()[:devices]
    )


def trained(name, **changes):
    """Returns the state after three steps, as checkpoints store it, and the metrics."""
    experiment, the_mesh = make(name, **changes)
    sizes = {"batch_size": experiment.config.batch_size, "seed": 0}
    train = batches.TrainBatches(
        experiment.train_batches,
        the_mesh,
        micro_batches=experiment.config.micro_batches,
        **sizes,
    )
    state = state_lib.init(experiment, the_mesh, 0, train.example)
    apply = jax.jit(step.make_train_step(experiment, the_mesh), donate_argnums=0)
    for _ in range(3):
        state, metrics = apply(state, next(train))
    return jax.device_get((dataclasses.replace(state, rng=None), metrics))


@pytest.mark.sample(1, of="learners")
def test_two_learners_train_alike_with_parameters_in_shards():
    changes = {
        "micro_batches": 2,
        "group_assignment": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "precision": "params=float64,compute=float64,output=float64",
    }
    with jax.enable_x64(True):
        (held, its_metrics), (whole, metrics) = (
            trained("gan", **changes, **{"reduction.shard_params": held})
            for held in (True, False)
        )
    harness.assert_close({"state": held}, {"state": whole}, rtol=1e-8, atol=1e-8)
    # Metrics are float32.
    harness.assert_close(its_metrics, metrics, rtol=1e-5, atol=1e-8)


@pytest.mark.sample(1, of="learners")
def test_an_overflow_skips_only_the_learner_that_overflowed():
    experiment, the_mesh = make("gan")
    train = batches.TrainBatches(
        experiment.train_batches, the_mesh, batch_size=128, seed=0
    )
    state = state_lib.init(experiment, the_mesh, 0, train.example)
    # With this loss scale, the gradients of the discriminator overflow.
    learner = state.experiment["discriminator"]
    scale = {**learner.opt_state["dynamic_loss_scale"]}
    scale["current_loss_scale"] = scale["current_loss_scale"] * 2.0**100
    learner = learner.replace(
        opt_state={**learner.opt_state, "dynamic_loss_scale": scale}
    )
    state = dataclasses.replace(
        state, experiment={**state.experiment, "discriminator": learner}
    )
    after, metrics, observed, *_ = jax.jit(
        step.make_watched_step(experiment, the_mesh)
    )(state, next(train))
    assert (metrics["discriminator/skipped"], metrics["generator/skipped"]) == (1, 0)
    assert (observed["discriminator"].verdict, observed["generator"].verdict) == (0, 0)
    for name, same in (("discriminator", True), ("generator", False)):
        old, new = (
            x.experiment[name].params["mlp/~/linear_0"]["w"] for x in (state, after)
        )
        assert np.array_equal(old, new) == same


def test_a_step_has_one_reduction_for_each_learner():
    for name, count in (("gan", 2), ("rl", 1)):
        experiment, the_mesh = make(name)
        batch_size = experiment.config.batch_size
        train = batches.TrainBatches(
            experiment.train_batches, the_mesh, batch_size=batch_size, seed=0
        )
        state = state_lib.abstract_state(experiment, the_mesh, 0, train.example)
        apply = jax.jit(step.make_watched_step(experiment, the_mesh))
        in_step = collectives.of(apply.lower(state, next(train)).compile())
        assert len(in_step) <= count, in_step


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "steps", "metric", "good"),
    [
        ("rl", 150, "reward", lambda x: x > 0.5),
        ("rl_host", 150, "reward", lambda x: x > 0.5),
        ("ssl", 120, "test/accuracy", lambda x: x > 0.7),
        ("gan", 300, "distance", lambda x: x < 12),
    ],
)
def test_each_experiment_learns(tmp_path, name, steps, metric, good):
    often = {
        "eval_every_steps": steps,
        "log_every_steps": 100,
        "checkpoint.every_steps": steps,
    }
    config = make_config(name, steps=steps, **often)
    assert winged.run(config, str(tmp_path), "") == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert good(results["eval"][metric]), results


class Unmarked(rl.Catch):
    """Does not mark its games as state of each replica."""

    def init(self, key, batch):
        state = super().init(key, batch)
        return state._replace(games=state.games.value)

    def train_step(self, state, batch, key):
        marked = state._replace(games=xshard.PerExample(state.games))
        new, metrics = super().train_step(marked, batch, key)
        return new._replace(games=new.games.value), metrics


def test_unmarked_state_of_each_replica_is_refused(tmp_path):
    config = make_config(
        "rl", experiment="tests.experiments_test.Unmarked", batch_size=16
    )
    with pytest.raises(errors.UserError, match="leaves the state 'games/ball_column'"):
        winged.Run(config, str(tmp_path))


class Blind(host.HostCatch):
    """Acts on the model without a predict method."""

    predict = experiment_lib.Experiment.predict


class Misled(host.HostCatch):
    """Predicts from an array that its games do not provide."""

    def predict(self, state, batch):
        return super().predict(state, {"board": batch["boards"]})


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        (
            Blind,
            errors.UserError,
            r"acts_every_steps.* Blind makes no predictions: define predict",
        ),
        (Misled, KeyError, "boards"),
    ],
)
def test_an_iterator_that_cannot_act_is_refused_before_the_run(
    tmp_path, kind, error, match
):
    config = make_config(
        "rl_host", experiment=f"tests.experiments_test.{kind.__name__}"
    )
    with pytest.raises(error, match=match):
        winged.Run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_games_on_the_host_equal_those_on_the_device():
    """The host's and the device's games show the same boards after the same actions."""
    config = make_config("rl_host", batch_size=16)
    player = host.Player(config, data.Part(16, (np.arange(16),), seed=0))
    games = rl.Game(*(jax.numpy.asarray(x) for x in player.get_state()["games"]))
    for _ in range(8):
        asked = []

        def predict(batch, asked=asked):
            np.testing.assert_array_equal(batch["board"], rl.board(games))
            asked.append(batch)
            return np.zeros((16, 3))

        player._move(predict, 0, 0)
        action = player._played["action"][0, :, 0]
        games, reward, over = rl.move(games, jax.numpy.asarray(action))
        np.testing.assert_array_equal(player._played["reward"][0, :, 0], reward)
        assert len(asked) == 1 and not over.any()
    player._move(lambda batch: np.zeros((16, 3)), 0, 0)
    games, reward, over = rl.move(
        games, jax.numpy.asarray(player._played["action"][0, :, 0])
    )
    np.testing.assert_array_equal(player._played["reward"][0, :, 0], reward)
    assert over.all() and (player.get_state()["games"][0] == 0).all()
    assert set(np.unique(reward)) == {-1.0, 1.0}
