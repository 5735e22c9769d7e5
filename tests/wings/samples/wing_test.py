"""Tests of the samples of runs: their files, those of a killed run, and where they are
shown.
"""

import json

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing import (
    event_accumulator,
    plugin_event_accumulator,
)

import xshard
from tests import rows, toy, winged
from tests.report import samples as directories
from xshard import errors, hooks, loop, samples
from xshard.metrics import writer
from xshard.pod import request
from xshard.report import page, runs
from xshard.wings.samples import wing

pytestmark = pytest.mark.usefixtures("shared_programs")

ALL_OF_EACH = dict.fromkeys(("scalars", "images", "histograms", "tensors"), 0)


class Showing(toy.Toy):
    """Shows one sample of each kind."""

    def samples(self, predict, key):
        del key
        outputs = predict(
            {"x": np.eye(3, dtype=np.float32), "y": np.zeros(3, np.float32)}
        )
        pixels = np.outer(outputs, outputs)
        said = f"predicted {outputs[0]:.6f} < 9"
        return {
            "said": said,
            "pixels": xshard.Image(pixels),
            "out": xshard.Histogram(outputs),
        }


class Huge(toy.Toy):
    """Shows more than a line of the samples file may hold."""

    def samples(self, predict, key):
        del predict, key
        noise = np.random.default_rng(0).integers(0, 255, (1200, 1200, 3), np.uint8)
        return {"noise": xshard.Image(noise), "small": "a"}


class Wrong(toy.Toy):
    """Returns an array, which is no valid sample."""

    def samples(self, predict, key):
        del predict, key
        return {"pixels": np.zeros((2, 2))}


def make_config(name="Showing", **changes):
    config = toy.get_config()
    config.experiment = f"tests.wings.samples.wing_test.{name}"
    config.update({"steps": 6, "eval_every_steps": 3, "samples_every_steps": 2})
    config.update(
        {"log_every_steps": 1, "writers": ("jsonl", "tensorboard"), **changes}
    )
    config.checkpoint.every_steps = 4
    return config.lock()


def lines(directory):
    return (directory / "samples.jsonl").read_text().splitlines()


def test_invalid_samples_fail_before_a_run_and_large_ones_when_shown(tmp_path):
    with pytest.raises(
        errors.UserError, match="Wrong.samples .* returned ndarray called 'pixels'"
    ):
        winged.Run(make_config("Wrong"), str(tmp_path / "run"))
    with pytest.raises(
        errors.UserError,
        match="samples_every_steps=-1 must be an integer of at least 0",
    ):
        winged.Run(make_config(samples_every_steps=-1), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(
        errors.UserError, match="below 4,194,304 bytes .*largest is 'noise'"
    ):
        winged.run(make_config("Huge", steps=1), str(tmp_path / "run"), "")
    assert json.loads((tmp_path / "run/results.json").read_text())["samples"] == ""


def dies(method, at, *, after):
    """Wraps a method so that one of its calls kills the run, before or after it."""
    calls = []

    def call(*args, **kwargs):
        calls.append(None)
        if len(calls) == at and not after:
            raise rows.Killed
        returned = method(*args, **kwargs)
        if len(calls) == at:
            raise rows.Killed
        return returned

    return call


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    assert winged.run(make_config(), str(directory), "") == 0
    return directory


INSTANTS = [
    # The row of samples is made just before it is written, their text just after.
    (samples, "text", 1, False),
    # The calls come after steps 2, 4 and 6. Step 6 is the last; its checkpoint exists
    # when the third call comes.
    (samples, "row", 3, True),
    (samples, "text", 3, False),
    (wing.Samples, "_sample", 2, False),
    (loop.Run, "_save", 1, True),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("instant", INSTANTS, ids=str)
def test_a_run_that_was_killed_shows_the_same_samples(
    tmp_path, whole, instant, monkeypatch
):
    owner, name, at, after = instant
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies(getattr(owner, name), at, after=after))
        with pytest.raises(rows.Killed):
            winged.run(make_config(), str(tmp_path), "")
    assert winged.run(make_config(), str(tmp_path), "") == 0
    assert lines(tmp_path) == lines(whole)
    assert [json.loads(line)["step"] for line in lines(whole)] == [2, 4, 6]


class Stop:
    """A watch that stops a run after a step with both a save and samples."""

    def __init__(self):
        self.step = 0

    def poll(self):
        if self.step == 4:
            return request.Request(request.STOP, "asked", 42)
        return None

    def set_phase(self, phase, step=0, **more):
        self.step = step or self.step

    def publish(self):
        pass

    def in_each_tick(self, action):
        pass


def test_samples_that_a_stop_cuts_off_are_shown_after_the_resume(tmp_path, whole):
    assert winged.run(make_config(), str(tmp_path), "", watch=Stop()) == 42
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [2]
    assert winged.run(make_config(), str(tmp_path), "") == 0
    assert lines(tmp_path) == lines(whole)


def test_tensorboard_reads_the_samples_of_the_json_lines(whole, tmp_path):
    # The second start of this run writes its event file anew.
    assert winged.run(make_config(steps=7), str(tmp_path), "") == 0
    assert (
        winged.run(make_config(steps=8, samples_every_steps=4), str(tmp_path), "") == 0
    )
    for directory, steps in ((whole, [2, 4, 6]), (tmp_path, [2, 4, 6, 7, 8])):
        kept = [json.loads(line)["samples"] for line in lines(directory)]
        path = str(directory / "tensorboard")
        accumulator = event_accumulator.EventAccumulator(path, ALL_OF_EACH)
        # TensorBoard's own program uses this accumulator. Only this one also drops the
        # texts from before a restart.
        plugin_accumulator = plugin_event_accumulator.EventAccumulator(
            path, {"tensors": 0}
        )
        accumulator.Reload()
        plugin_accumulator.Reload()
        images = accumulator.Images("pixels")
        histograms = accumulator.Histograms("out")
        texts = plugin_accumulator.Tensors("said")
        for events in (images, histograms, texts, plugin_accumulator.Tensors("pixels")):
            assert [event.step for event in events] == steps
        for row, image, histogram, text in zip(
            kept, images, histograms, texts, strict=True
        ):
            assert image.encoded_image_string == samples.png(row["pixels"])
            assert (image.height, image.width) == (3, 3)
            assert list(histogram.histogram_value.bucket) == row["out"]["counts"]
            assert (
                text.tensor_proto.string_val[0].decode().strip() == row["said"]["text"]
            )
        plugin = plugin_accumulator.SummaryMetadata("said").plugin_data.plugin_name
        assert plugin == "text" and accumulator.Scalars("loss")


def test_the_results_and_the_report_show_the_samples(whole, tmp_path):
    said = json.loads((whole / "results.json").read_text())["samples"]
    last = json.loads(lines(whole)[-1])["samples"]
    assert said == (
        f"said:\n{last['said']['text']}\npixels: an image of 3x3 pixels\nout: a "
        "histogram of 3 values"
    )
    shown = page.build(runs.read([str(whole)]))
    for line in lines(whole):
        row = json.loads(line)["samples"]
        assert f"data:image/png;base64,{row['pixels']['png']}" in shown
        assert row["said"]["text"].replace("<", "&lt;") in shown
    assert shown.count("<svg width=") == 3
    assert shown.count("<summary>2 before</summary>") == 3
    # Forged samples reach the page as escaped text only.
    evil = "<script>alert(1)</script>"
    image = {"kind": "image", "png": f'"{evil}', "height": 1, "width": 1, "channels": 1}
    rows = [
        {
            "step": 1,
            "samples": {evil: {"kind": "text", "text": evil}, "x": image, "y": 5},
        }
    ]
    path = directories.write(tmp_path / "forged", directories.rows(steps=30))
    directories.write_rows(path / "samples.jsonl", [*rows, {"step": 2, "samples": []}])
    shown = page.build(runs.read([str(path)]))
    assert evil not in shown
    assert "&lt;script&gt;alert(1)" in shown
    assert '<img src="data' not in shown


@pytest.mark.parametrize("groups", [(), ((0, 2, 4, 6), (1, 3, 5, 7))])
def test_the_samples_of_the_trained_network(tmp_path, capsys, groups):
    config = toy.get_config()
    config.update({"experiment": "tests.toy.Talking", "steps": 2})
    config.group_assignment = groups
    config = config.lock()
    assert winged.run(config, str(tmp_path), "") == 0
    samples_text = json.loads((tmp_path / "results.json").read_text())["samples"]
    assert f"samples:\n{samples_text}\n" in capsys.readouterr().out
    linear = rows.final_state(tmp_path, config).experiment.params["linear"]
    w = np.asarray(linear["w"])
    b = np.asarray(linear["b"])
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 3)))
    # The prediction is the mean over the groups, one or two. The samples print six
    # decimals.
    outputs = np.mean((x @ w + b[..., None, :])[..., 0].reshape(-1, 2), axis=0)
    np.testing.assert_allclose(
        [float(samples_text.split()[1]), float(samples_text.split()[3])],
        outputs,
        atol=2e-6,
    )


class Silent(toy.Toy):
    """Has a bug in its samples, on which no other result depends."""

    def samples(self, predict, key):
        predict({"x": np.ones((2, 3), np.float32)})
        raise AttributeError("no such thing")


def test_results_are_written_even_if_samples_fail(tmp_path):
    config = make_config("Silent", steps=2)
    with pytest.raises(AttributeError, match="no such thing"):
        winged.run(config, str(tmp_path), "")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["step"] == 2
    assert results["eval"]["error"] > 0
    assert results["samples"] == ""


def test_the_steps_at_which_samples_are_due(tmp_path):
    shown = wing.Samples(winged.Run(make_config(samples_every_steps=4), str(tmp_path)))
    # The samples of the last step, the sixth, belong to the results.
    assert [shown.next_due(step) for step in range(6)] == [4] * 4 + [hooks.NEVER] * 2
    never = wing.Samples(winged.Run(make_config(samples_every_steps=0), str(tmp_path)))
    assert never.next_due(0) == hooks.NEVER


def test_a_run_without_the_wing_says_that_samples_are_never_made(tmp_path, capsys):
    assert loop.run(make_config(samples_every_steps=0), str(tmp_path), "") == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "never called" in x]
    assert line.startswith("warning: Showing.samples ") and "wing samples" in line
    assert rows.results(tmp_path)["samples"] == ""
    with pytest.raises(errors.UserError, match="samples_every_steps=2 needs the wing"):
        loop.Run(make_config(), str(tmp_path / "run"))


def test_a_custom_writer_may_take_samples(tmp_path):
    assert (
        winged.run(
            make_config(steps=2, writers=("jsonl", f"{__name__}.Mine")),
            str(tmp_path),
            "",
        )
        == 0
    )
    assert Mine.taken == [json.loads(line) for line in lines(tmp_path)]


class Mine(writer.Writer):
    """A custom writer that keeps the samples that it receives."""

    taken: list = []  # noqa: RUF012

    def __init__(self, part):
        assert isinstance(part.config, dict) and not list(part.everything())

    def write(self, row):
        if row["kind"] == "samples":
            self.taken.append(row)
