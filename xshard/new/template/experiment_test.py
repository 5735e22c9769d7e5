"""What should hold of the experiment however long it trains: `python -m pytest` runs it."""

import config as config_file
import experiment
import jax
import numpy as np

import xshard


def test_the_points_to_judge_it_on_are_others():
    spirals = experiment.Spirals(config_file.get_config())
    train, test = spirals.train_data(), spirals.eval_data()
    points = np.concatenate([train["point"], test["point"]])
    assert len(np.unique(points, axis=0)) == len(points) == 2 * (97 + 96)
    assert train["label"].mean() == test["label"].mean() == 0.5


def test_it_learns():
    config = config_file.get_config()
    spirals, mesh = experiment.Spirals(config.lock()), xshard.make_mesh(devices=jax.devices()[:1])
    batch = spirals.train_data()
    state = xshard.init(spirals, mesh, config.seed, batch)
    train_step = jax.jit(xshard.make_train_step(spirals, mesh), donate_argnums=0)
    losses = []
    for _ in range(100):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    # It starts at about log(2), as good as a guess.
    assert losses[0] > 0.5 and losses[-1] < 0.9 * losses[0]
