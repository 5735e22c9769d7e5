"""Tests of the digits experiment at a small width, and of its config files."""

import json

import jax
import numpy as np
import pytest

from configs import digits, digits_groups
from experiments.digits import experiment, images
from experiments.digits import images as digit_images
from xshard import loop


@pytest.fixture(autouse=True)
def standard_promotion():
    # Haiku's dropout multiplies by booleans, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        yield


def small(get_config, **changes):
    config = get_config()
    config.model.update({"channels": 4, "hidden": 8})
    config.update_from_flattened_dict({"steps": 6, "log_every_steps": 3, **changes})
    return config.lock()


def test_the_split_is_fixed_and_contains_each_image_once():
    train, test = images.split()
    assert (len(train["label"]), len(test["label"])) == (1437, 360)
    assert train["image"].shape == (1437, 8, 8, 1) and train["image"].max() == 1.0
    together = np.concatenate([train["image"], test["image"]])
    assert len(np.unique(together.reshape(1797, -1), axis=0)) == 1797


def test_shifts_move_whole_images():
    images = np.zeros((64, 8, 8, 1), np.float32)
    images[:, 4, 4] = 1
    moved = np.asarray(digit_images.shift(jax.random.key(0), images, 1))
    places = {tuple(np.argwhere(image[..., 0])[0]) for image in moved}
    assert places == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}
    assert moved.sum() == 64
    assert digit_images.shift(None, images, 0) is images


@pytest.mark.sample(1)
@pytest.mark.parametrize("get_config", [digits.get_config, digits_groups.get_config])
def test_a_few_steps_of_each_config(tmp_path, get_config):
    config = small(get_config)
    assert loop.run(config, str(tmp_path), "") == 0
    results = json.loads((tmp_path / "results.json").read_text())["eval"]
    rows = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows[-2]["step"] == rows[-1]["step"] == 6 and "accuracy" in rows[-2]
    assert rows[-1]["eval/accuracy"] == results["accuracy"]
    if config.group_assignment:
        assert len(results["accuracy"]) == 2 and 0 <= results["ensemble/accuracy"] <= 1
    else:
        assert 0 <= results["accuracy"] <= 1


def test_moving_averages_are_evaluated_too(tmp_path):
    config = small(digits.get_config, **{"optimizer.average_decay": 0.9})
    assert loop.run(config, str(tmp_path), "") == 0
    results = json.loads((tmp_path / "results.json").read_text())["eval"]
    assert results.keys() == {
        f"{on}{name}" for on in ("", "raw/") for name in ("loss", "accuracy")
    }
    assert results["raw/loss"] != results["loss"]


@pytest.mark.parametrize(
    "key,value",
    [
        ("max_shift", -1),
        ("model.channels", 0),
        ("model.hidden", 0),
        ("model.dropout", 1.0),
        ("optimizer.warmup_fraction", 1.0),
        ("optimizer.average_decay", 1.0),
    ],
)
def test_values_out_of_range_are_refused(key, value):
    config = digits.get_config()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=f"^{key}={value} must be "):
        experiment.Digits(config)


def test_convolutions_are_computed_in_float16():
    config = small(digits.get_config)
    run = loop.Run(config, "/nonexistent")
    text = run.train_step.lower(run.target, next(run.batches)).as_text()
    assert "stablehlo.convolution" in text
    convolutions = [
        line for line in text.splitlines() if "stablehlo.convolution" in line
    ]
    assert all("xf16>" in line and "xf32>" not in line for line in convolutions)


def test_an_ensemble_averages_probabilities():
    logits = np.random.default_rng(0).normal(size=(2, 5, 10)).astype(np.float32)
    mean = jax.nn.softmax(logits).mean(axis=0)
    combined = experiment.Digits(digits.get_config()).ensemble(logits)
    # The argument of the exponential is rounded once in float32.
    np.testing.assert_allclose(np.exp(combined), mean, rtol=1e-5)
