"""Tests of the language model of tokens: segments, several sources, and a pod that
resumes as one process.
"""

import os
import signal
import subprocess
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xshard
from configs import lm_lora, lm_words
from experiments.lm import adapted, model, words
from tests import forks, rows, winged
from tests.optimizers import harness
from xshard import data, loop
from xshard.data import text

SMALL = {
    "model.layers": 2,
    "model.width": 16,
    "model.heads": 2,
    "model.feed_forward": 32,
    "text.length": 16,
    "text.held_out": 0.2,
    "text.vocabulary": 300,
    "text.streams": 2,
    "text.eval_windows": 16,
    "batch_size": 8,
    "eval_batch_size": 8,
    "sample.length": 4,
    "log_every_steps": 1,
}


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders of files with the same words, in opposite orders."""
    found = []
    for name, line in (
        ("up", "one two three four five. "),
        ("down", "five four three two one! "),
    ):
        place = tmp_path_factory.mktemp(name)
        for i in range(30):
            (place / f"{i}.txt").write_text(line * (1 + i % 5))
        found.append(str(place))
    return tuple(found)


def small(folders, **changes):
    config = lm_words.get_config()
    config.update_from_flattened_dict({**SMALL, "text.files": folders, **changes})
    return config.lock()


def transformer():
    sizes = {"layers": 2, "width": 16, "heads": 2, "feed_forward": 32}
    language_model = hk.transform(
        lambda *x: model.Transformer(**sizes, remat=True, vocabulary=99)(*x)
    )
    return hk.without_apply_rng(language_model)


def test_a_token_attends_to_its_own_segment_alone():
    language_model = transformer()
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 99)
    segments = jnp.asarray([[1] * 5 + [2] * 7] * 2)
    params = language_model.init(jax.random.key(0), tokens)
    params["transformer"]["head"] = jax.random.normal(jax.random.key(2), (16, 99))
    whole = language_model.apply(params, tokens, segments)
    # The sums are computed in another order, so they are rounded differently.
    same = {"rtol": 1e-4, "atol": 1e-5}
    parts = [
        language_model.apply(params, part) for part in (tokens[:, :5], tokens[:, 5:])
    ]
    np.testing.assert_allclose(whole, jnp.concatenate(parts, axis=1), **same)
    one_segment = language_model.apply(params, tokens, jnp.ones_like(segments))
    np.testing.assert_allclose(
        one_segment, language_model.apply(params, tokens), **same
    )
    assert np.abs(one_segment - whole).max() > 0.1


def test_which_tokens_count_in_the_loss():
    batch = {
        "text": jnp.asarray([[5, 6, 7, 8, 0, 0]]),
        "text_segment_ids": jnp.asarray([[1, 1, 2, 2, 0, 0]]),
        "bytes": jnp.asarray([[1, 2, 3, 4, 1, 1]]),
    }
    experiment = words.Words(small(("unread",)))
    found = experiment.evaluate(jnp.zeros((1, 5, 99)), batch)
    # 6 after 5 and 8 after 7 count. The first token of a file and the padding do not.
    assert (found["tokens"], found["bytes"]) == (2, 2 + 4)
    np.testing.assert_allclose(found["loss"], 2 * np.log(99), rtol=1e-6)
    value, _ = experiment.loss(jnp.zeros((1, 5, 99)), batch)
    np.testing.assert_allclose(value, np.log(99), rtol=1e-6)


def test_sources_are_mixed_by_their_weights(folders):
    experiment = words.Words(small(folders, **{"text.weights": (3, 1)}))
    iterator = experiment.train_batches(data.Part(8, (np.arange(8),), seed=0))
    tokenizer = experiment._tokenizer
    of_second = 0
    for _ in range(8):
        for row in next(iterator)["text"]:
            sentence = tokenizer.decode(row.tolist())
            # Sentences end with a period in the first source, and with an exclamation
            # mark in the second.
            assert ("." in sentence) != ("!" in sentence)
            of_second += "!" in sentence
    assert of_second == 16


def test_the_evaluation_contains_each_byte_of_the_held_out_files(folders):
    experiment = words.Words(small(folders, **{"text.eval_windows": 0}))
    rows_of = experiment.eval_data()
    held_out = [path for _, held in experiment._sources for path in held]
    size = sum(os.path.getsize(path) + 1 for path in held_out)
    assert rows_of["bytes"][rows_of["text_segment_ids"] > 0].sum() == size
    train = {path for side, _ in experiment._sources for path in side}
    assert len(held_out) > 3 and not train & set(held_out)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"text.weights": (1,)},
            r"text.weights=\(1,\) must have a number .* each of the 2 entries",
        ),
        ({"text.weights": (1, 0)}, "a number above 0"),
        ({"text.streams": 0}, "text.streams=0 must be at least 1"),
        ({"text.streams": 3}, "3 streams do not fit batch_size=8"),
        (
            {"text.streams": 4, "batch_size": 128, "text.held_out": 0.97},
            "examples for 4 streams",
        ),
        ({"text.held_out": 1e-9}, "60 files to train on and 0 held-out files"),
        ({"text.vocabulary": 256}, "must have more than 256 tokens"),
    ],
)
def test_values_out_of_range_are_refused(folders, tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        winged.Run(small(folders, **changes), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_is_read_from_a_file(folders, tmp_path):
    text.train_tokenizer(["one two three"] * 9, 265).save(
        str(tmp_path / "tokenizer.json")
    )
    place = {"text.tokenizer": str(tmp_path / "tokenizer.json")}
    assert words.Words(small(folders, **place))._tokenizer.get_vocab_size() == 265
    with pytest.raises(
        ValueError, match="vocabulary=260 must be at least the 265 tokens"
    ):
        words.Words(small(folders, **place, **{"text.vocabulary": 260})).eval_data()


def test_an_adapted_model_has_the_tokenizer_of_its_base(folders):
    up, down = folders
    config = lm_lora.get_config()
    changes = {"text.base_files": (up,), "text.base_held_out": 0.2, "lora.rank": 4}
    config.update_from_flattened_dict({**SMALL, "text.files": (down,), **changes})
    experiment = adapted.Adapted(config.lock())
    tokenizer = words.Words(small((up,)))._tokenizer
    assert experiment._tokenizer.to_str() == tokenizer.to_str()
    mesh = xshard.make_mesh(devices=jax.devices()[:1])
    state = xshard.abstract_state(experiment, mesh, 0, experiment.eval_data())
    layer = state.experiment.params["transformer/layers/layer"]
    assert layer["qkv_lora_a"].shape == (2, 16, 4)
    assert layer["qkv_lora_b"].shape == (2, 4, 48)


@pytest.mark.long
@pytest.mark.wing("samples")
def test_an_interrupted_run_ends_in_the_same_bits(folders, tmp_path):
    changes = {"text.weights": (2, 1), "steps": 7, "eval_every_steps": 7}
    for stop in (None, 3):
        directory = tmp_path / str(stop)
        if stop:
            first = small(folders, **changes, **{"checkpoint.every_steps": stop})
            with pytest.MonkeyPatch.context() as patch, pytest.raises(rows.Killed):
                patch.setattr(loop.Run, "_save", save_and_die(loop.Run._save))
                winged.run(first, str(directory), "")
        config = small(folders, **changes, **{"checkpoint.every_steps": 3})
        assert winged.run(config, str(directory), "") == 0
    assert rows.same_bits(tmp_path / "None") == rows.same_bits(tmp_path / "3")
    harness.assert_equal(
        *(rows.final_state(tmp_path / name, config) for name in ("None", "3"))
    )
    # The results contain samples, too.
    assert rows.results(tmp_path / "None")["samples"].startswith("--- 'def '\n")


def save_and_die(save):
    """Returns a `_save` that ends the run after its first save."""

    def save_and_end(run, *args, **kwargs):
        save(run, *args, **kwargs)
        run.checkpoints.wait()
        raise rows.Killed

    return save_and_end


@pytest.mark.long
def test_a_killed_pod_resumes_as_one_process(folders, tmp_path):
    program = [sys.executable, "-m", "xshard.main", "--config=configs/lm_words.py"]
    program += [f"--config.{name}={value}" for name, value in SMALL.items()]
    program += [
        "--config.experiment=tests.words.Seen",
        f"--config.text.files={folders!r}",
        "--config.steps=24",
        "--config.checkpoint.every_steps=5",
        "--config.eval_every_steps=24",
    ]
    launch = [
        sys.executable,
        "-m",
        "launch",
        "--num_processes=2",
        "--cpu_devices=1",
        "--",
    ]
    env = {**os.environ, "PYTHONPATH": forks.python_path(), "JAX_PLATFORMS": "cpu"}

    def start(command, directory):
        return subprocess.Popen(
            [*command, f"--workdir={tmp_path / directory}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            start_new_session=True,
        )

    killed = start([*launch, *program], "killed")
    for line in killed.stdout:
        if "step 12/24" in line:
            break
    # The signal kills the launcher and its processes.
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    seen = {}
    for directory in ("killed", "whole"):
        run = start([*program, "--cpu_devices=2"], directory)
        output = run.communicate()[0]
        assert run.returncode == 0, output
        assert ("resumed from the checkpoint of step" in output) == (
            directory == "killed"
        )
        seen[directory] = [
            row["seen"] for row in rows.read(tmp_path / directory) if "seen" in row
        ]
    assert seen["killed"] == seen["whole"] and len(set(seen["whole"])) == 24
