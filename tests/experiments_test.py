"""The experiments that are more than a classifier: what holds for digits holds for each of them."""

import dataclasses
import importlib
import itertools
import json

import jax
import numpy as np
import pytest

import xshard
from experiments.rl import experiment as rl
from experiments.rl import host
from tests import matrix, rows
from tests.optimizers import harness
from xshard import data, errors, loop, mesh, step
from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.data import batches
from xshard.dryrun import collectives
from xshard.stored import storage

VARIANTS = {
    "groups": {
        "group_assignment": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "reduction.shard_update": True,
        "micro_batches": 2,
    },
    "slices": {"slices": 2, "reduction.shard_update": True},
    "held": {"reduction.shard_params": True},
    # What is saved at step 2 is what acts next, or what has acted and serves yet.
    "acts next": {"acts_every_steps": 2},
    "serves": {"acts_every_steps": 4, "slices": 2, "micro_batches": 2},
}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Experiments are a user's, who need not be as strict as these tests are."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def make_config(name, **changes):
    config = importlib.import_module(f"configs.{name}").get_config()
    config.update({"steps": 6, "log_every_steps": 1, "writers": ("jsonl",), "eval_every_steps": 3})
    config.checkpoint.update({"every_steps": 2, "keep_last": 10})
    if name == "ssl":
        # Its convolutions were most of the time of all of these tests.
        config.update({"batch_size": 64})
        config.model.channels = 4
    config.update_from_flattened_dict(changes)
    return config.lock()


@pytest.mark.parametrize(
    ("name", "variant"),
    [("gan", "groups"), ("rl", "slices"), ("rl", "groups"), ("ssl", "groups"),
     ("rl_host", "acts next"), ("rl_host", "serves")],
)  # fmt: skip
def test_a_run_that_was_ended_and_goes_on_ends_in_the_same_bits(
    tmp_path, monkeypatch, name, variant
):
    config = make_config(name, **VARIANTS[variant])
    assert loop.run(config, str(tmp_path / "whole"), "") == 0
    with monkeypatch.context() as patch:
        evaluate = loop.Run._evaluate

        def evaluate_and_end(*args):
            evaluate(*args)
            raise rows.Killed

        patch.setattr(loop.Run, "_evaluate", evaluate_and_end)
        with pytest.raises(rows.Killed):
            loop.run(config, str(tmp_path / "ended"), "")
    assert loop.run(config, str(tmp_path / "ended"), "") == 0
    whole, ended = (rows.final_state(tmp_path / which, config) for which in ("whole", "ended"))
    harness.assert_equal(ended, whole)
    assert rows.same_bits(tmp_path / "ended") == rows.same_bits(tmp_path / "whole")
    results = [rows.results(tmp_path / which) for which in ("whole", "ended")]
    assert results[0] == results[1] and results[0]["finite"]


@pytest.mark.parametrize(
    ("config", "cell"),
    [
        ("configs/rl_host.py", "killed, 2 x 4"),
        ("tests/quantized.py", "killed, 1 x 8"),
        ("tests/carried.py", "1 -> 8 -> 4 devices"),
    ],
)
def test_of_all_promises_on_all_experiments(tmp_path, config, cell):
    assert matrix.attempt(config, cell, tmp_path) == "works"


def test_games_go_on_with_other_numbers_of_replicas(tmp_path):
    config = make_config("rl", batch_size=16)
    assert loop.run(config, str(tmp_path), "") == 0
    games = rows.final_state(tmp_path, config).experiment.games.value
    assert games.paddle.shape == (16,)
    fewer = make_config("rl", batch_size=16, steps=8, model_parallel=2)
    before = loop.Run(fewer, str(tmp_path)).resume_or_init().state
    assert len(before.experiment.games.value.paddle.sharding.device_set) == 8
    np.testing.assert_array_equal(before.experiment.games.value.paddle, games.paddle)
    assert loop.run(fewer, str(tmp_path), "") == 0


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *itertools.product(
            ("digits", "gan", "lm_tiny", "rl", "ssl"), ("groups", "slices", "model")
        ),
        *(("rl", "held"), ("rl_host", "held"), ("ssl", "held")),
    ],
)
def test_nothing_right_is_refused_before_a_run(tmp_path, name, variant):
    model = {"group_assignment": ((0, 1), (2, 3)), "model_parallel": 2}
    variants = {**VARIANTS, "model": {**model, "reduction.shard_update": True}}
    loop.Run(make_config(name, **variants[variant]), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def make(name, devices=8, **changes):
    config = make_config(name, **changes)
    experiment = experiment_lib.load(config.experiment)(config)
    return experiment, mesh.make_mesh(
        config.group_assignment or None, devices=jax.devices()[:devices]
    )


def trained(name, **changes):
    """The state after three steps, as a checkpoint has it, and the last metrics."""
    experiment, the_mesh = make(name, **changes)
    sizes = {"batch_size": experiment.config.batch_size, "seed": 0}
    train = batches.TrainBatches(
        experiment.train_batches, the_mesh, micro_batches=experiment.config.micro_batches, **sizes
    )
    state = state_lib.init(experiment, the_mesh, 0, train.example)
    apply = jax.jit(step.make_train_step(experiment, the_mesh), donate_argnums=0)
    for _ in range(3):
        state, metrics = apply(state, next(train))
    whole = storage.Storage(experiment, the_mesh).to_whole(state)
    return jax.device_get((dataclasses.replace(whole, rng=None), metrics))


def test_two_learners_train_with_parameters_in_shards_as_they_do_replicated():
    changes = {
        "micro_batches": 2,
        "group_assignment": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "precision": "params=float64,compute=float64,output=float64",
    }
    with jax.enable_x64(True):
        (held, its_metrics), (whole, metrics) = (
            trained("gan", **changes, **{"reduction.shard_params": held}) for held in (True, False)
        )
    harness.assert_close({"state": held}, {"state": whole}, rtol=1e-8, atol=1e-8)
    # What is logged is float32.
    harness.assert_close(its_metrics, metrics, rtol=1e-5, atol=1e-8)


def test_the_overflow_of_one_learner_skips_that_learner():
    experiment, the_mesh = make("gan")
    train = batches.TrainBatches(experiment.train_batches, the_mesh, batch_size=128, seed=0)
    state = state_lib.init(experiment, the_mesh, 0, train.example)
    # A scale that no gradient of the discriminator survives.
    learner = state.experiment["discriminator"]
    scale = {**learner.opt_state["dynamic_loss_scale"]}
    scale["current_loss_scale"] = scale["current_loss_scale"] * 2.0**100
    learner = learner.replace(opt_state={**learner.opt_state, "dynamic_loss_scale": scale})
    state = dataclasses.replace(state, experiment={**state.experiment, "discriminator": learner})
    after, metrics, observed, _ = jax.jit(step.make_watched_step(experiment, the_mesh))(
        state, next(train)
    )
    assert (metrics["discriminator/skipped"], metrics["generator/skipped"]) == (1, 0)
    assert (observed["discriminator"].verdict, observed["generator"].verdict) == (0, 0)
    for name, same in (("discriminator", True), ("generator", False)):
        old, new = (x.experiment[name].params["mlp/~/linear_0"]["w"] for x in (state, after))
        assert np.array_equal(old, new) == same


def test_a_step_sends_one_reduction_for_each_learner():
    for name, count in (("gan", 2), ("rl", 1)):
        experiment, the_mesh = make(name)
        batch_size = experiment.config.batch_size
        train = batches.TrainBatches(
            experiment.train_batches, the_mesh, batch_size=batch_size, seed=0
        )
        state = state_lib.abstract_state(experiment, the_mesh, 0, train.example)
        apply = jax.jit(step.make_watched_step(experiment, the_mesh))
        found = collectives.of(apply.lower(state, next(train)).compile())
        assert len(found) <= count, found


@pytest.mark.parametrize(
    ("name", "steps", "metric", "good"),
    [
        ("rl", 150, "reward", lambda x: x > 0.5),
        ("rl_host", 150, "reward", lambda x: x > 0.5),
        ("ssl", 120, "test/accuracy", lambda x: x > 0.7),
        ("gan", 300, "distance", lambda x: x < 12),
    ],
)
def test_it_learns(tmp_path, name, steps, metric, good):
    often = {"eval_every_steps": steps, "log_every_steps": 100, "checkpoint.every_steps": steps}
    config = make_config(name, steps=steps, **often)
    assert loop.run(config, str(tmp_path), "") == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert good(results["eval"][metric]), results


class Unmarked(rl.Catch):
    """Forgets to say that games belong to a replica."""

    def init(self, key, batch):
        state = super().init(key, batch)
        return state._replace(games=state.games.value)

    def train_step(self, state, batch, key):
        marked = state._replace(games=xshard.PerExample(state.games))
        new, metrics = super().train_step(marked, batch, key)
        return new._replace(games=new.games.value), metrics


def test_replicas_own_state_is_not_lost(tmp_path):
    config = make_config("rl", experiment="tests.experiments_test.Unmarked", batch_size=16)
    with pytest.raises(errors.UserError, match="leaves the state 'games/ball_column'"):
        loop.Run(config, str(tmp_path))


class Blind(host.HostCatch):
    """Acts, and makes no predictions."""

    predict = experiment_lib.Experiment.predict


class Misled(host.HostCatch):
    """Its network does not take what its games show."""

    def predict(self, state, batch):
        return super().predict(state, {"board": batch["boards"]})


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        (Blind, errors.UserError, r"acts_every_steps.* Blind makes no predictions: define predict"),
        (Misled, KeyError, "boards"),
    ],
)
def test_what_cannot_act_is_told_before_the_first_step(tmp_path, kind, error, match):
    config = make_config("rl_host", experiment=f"tests.experiments_test.{kind.__name__}")
    with pytest.raises(error, match=match):
        loop.Run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_games_of_the_host_are_those_of_the_device():
    """One game of each kind, played by the same actions."""
    config = make_config("rl_host", batch_size=16)
    player = host.Player(config, data.Part(16, (np.arange(16),), seed=0))
    games = rl.Game(*(jax.numpy.asarray(x) for x in player.get_state()["games"]))
    for _ in range(8):
        seen = []

        def predict(batch, seen=seen):
            np.testing.assert_array_equal(batch["board"], rl.board(games))
            seen.append(batch)
            return np.zeros((16, 3))

        player._move(predict, 0, 0)
        action = player._played["action"][0, :, 0]
        games, reward, over = rl.move(games, jax.numpy.asarray(action))
        np.testing.assert_array_equal(player._played["reward"][0, :, 0], reward)
        assert len(seen) == 1 and not over.any()
    player._move(lambda batch: np.zeros((16, 3)), 0, 0)
    games, reward, over = rl.move(games, jax.numpy.asarray(player._played["action"][0, :, 0]))
    np.testing.assert_array_equal(player._played["reward"][0, :, 0], reward)
    assert over.all() and (player.get_state()["games"][0] == 0).all()
    assert set(np.unique(reward)) == {-1.0, 1.0}
