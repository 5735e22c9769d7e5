"""Tests that the number of steps of a dispatch changes no bit and no row.

`tests.chunks` tries more of them, with processes and kills.
"""

import json
import pathlib

import haiku as hk
import numpy as np
import pytest

from tests import forks, rows, toy, winged
from tests.launch import harness as harness_of_processes
from tests.optimizers import harness
from xshard import errors
from xshard.files import identity
from xshard.pod import request

CHANGES = {
    "plain": {},
    "every row": {
        "log_every_steps": 1,
        "fingerprint_every_steps": 2,
        "log_norms_every_steps": 3,
        "samples_every_steps": 5,
    },
    "micro-batches": {"micro_batches": 2},
    "noise scale": {"experiment": "tests.toy.Wide", "noise_scale_steps": 4},
    "groups": {"group_assignment": ((0, 1, 2, 3), (4, 5, 6, 7))},
    "slices apart": {
        "experiment": "tests.toy.Wide",
        "slices": 2,
        "outer.every_steps": 5,
    },
    "skips": {"overflow_above": 2.0},
    "shards": {
        "experiment": "tests.toy.Wide",
        "reduction.shard_update": True,
        "reduction.shard_params": True,
    },
}


def config_of(size, **changes):
    config = toy.get_config()
    config.update_from_flattened_dict({"steps_per_dispatch": size, **changes})
    return config.lock()


def train(directory, config, **options):
    assert winged.run(config, str(directory), "", **options) == 0


def assert_equal(directory, other, config):
    assert rows.same_bits(directory) == rows.same_bits(other)
    assert rows.results(directory) == rows.results(other)
    harness.assert_equal(
        rows.final_state(directory, config), rows.final_state(other, config)
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", winged.needing(CHANGES))
def test_the_number_of_steps_of_a_dispatch_changes_no_bit(tmp_path, name):
    for size in (1, 3, 8):
        train(tmp_path / str(size), config_of(size, **CHANGES[name]))
    config = config_of(1, **CHANGES[name])
    for size in (3, 8):
        assert_equal(tmp_path / str(size), tmp_path / "1", config)


def optimized(tmp_path, module, *arguments):
    """Runs a program in a process that compiles as users do; other tests compile
    without optimizations.
    """
    environment = harness_of_processes.environment(XLA_FLAGS="")
    process = forks.program(module, *arguments, env=environment, cwd=str(tmp_path))
    code, output = harness_of_processes.finish(process)
    assert code == 0, output
    return output


def test_optimized_programs_have_the_same_bits_for_any_number_of_steps(tmp_path):
    toy_config = pathlib.Path(toy.__file__)
    for size in (1, 2, 32):
        optimized(
            tmp_path,
            "xshard.main",
            "--cpu_devices=2",
            f"--config={toy_config}",
            f"--workdir={tmp_path / str(size)}",
            f"--config.steps_per_dispatch={size}",
            "--config.steps=20",
            "--config.eval_every_steps=20",
            "--config.checkpoint.every_steps=20",
            "--config.log_every_steps=1",
        )
    for size in (2, 32):
        assert rows.same_bits(tmp_path / str(size)) == rows.same_bits(tmp_path / "1")
    # The replay makes each step by itself.
    output = optimized(
        tmp_path,
        "xshard.replay",
        "--cpu_devices=2",
        str(tmp_path / "32"),
        "--step=15",
    )
    assert "15 rows compared: reproduced, bit for bit" in output, output


@pytest.mark.parametrize("poll", [1, 2, 4])
def test_a_stop_within_a_dispatch_s_reach_changes_no_bit(tmp_path, poll):
    changes = {"log_every_steps": 1}
    train(tmp_path / "whole", config_of(8, **changes))
    watch = rows.ScriptedWatch(poll, request.STOP)
    stopped = config_of(3, **changes)
    assert winged.run(stopped, str(tmp_path / "stopped"), "", watch=watch) == 42
    train(tmp_path / "stopped", config_of(8, **changes))
    assert_equal(tmp_path / "stopped", tmp_path / "whole", stopped)


class Ragged(toy.Toy):
    """Has batches of several lengths, in an order that a dispatch must follow."""

    def train_batches(self, part):
        return Lengths(super().train_batches(part), self.config.lengths)


class Lengths:
    """Batches in which an array has as many columns as the step's number says."""

    state_is_shared = True

    def __init__(self, batches, lengths):
        self._batches = batches
        self._lengths = lengths

    def __next__(self):
        step = self._batches.get_state()["batches"]
        batch = dict(next(self._batches))
        length = self._lengths[step % len(self._lengths)]
        batch["x"] = np.repeat(batch["x"][:, None], length, axis=1).mean(axis=1)
        batch["padding"] = np.zeros((len(batch["y"]), length), np.float32)
        return batch

    def get_state(self):
        return self._batches.get_state()

    def set_state(self, state):
        self._batches.set_state(state)


@pytest.mark.parametrize("lengths", [(2, 2, 2, 3, 3, 2), (1, 2), (4, 4, 4, 4, 4, 4, 5)])
def test_batches_of_another_shape_end_a_dispatch(tmp_path, lengths):
    changes = {
        "experiment": "tests.chunks_test.Ragged",
        "lengths": lengths,
        "log_every_steps": 1,
        "checkpoint.every_steps": 100,
    }
    config = toy.get_config()
    config.lengths = ()
    config.steps_per_dispatch = 1
    config.update_from_flattened_dict(changes)
    train(tmp_path / "1", config.copy_and_resolve_references().lock())
    config.steps_per_dispatch = 8
    config.lock()
    train(tmp_path / "8", config)
    assert rows.same_bits(tmp_path / "8") == rows.same_bits(tmp_path / "1")
    # A save while the next batch has been drawn would lose it.
    for poll in (1, 2, 3):
        watch = rows.ScriptedWatch(poll, request.STOP)
        directory = tmp_path / f"stopped {poll}"
        assert winged.run(config, str(directory), "", watch=watch) == 42
        train(directory, config)
        assert rows.same_bits(directory) == rows.same_bits(tmp_path / "1")


class Convolved(toy.Toy):
    """Has a convolution."""

    def forward(self, batch, *, is_training):
        del is_training
        features = hk.Conv1D(2, 2)(batch["x"][:, :, None])
        return hk.Linear(1)(hk.Flatten()(features))[:, 0]


class Acting(toy.Toy):
    """Has data that uses the model before each second step."""

    def train_batches(self, part):
        return Actor(super().train_batches(part))


class Actor:
    state_is_shared = True
    acts_every_steps = 2

    def __init__(self, batches):
        self._batches = batches

    def act(self, step, predict):
        del step
        predict({"x": np.zeros((8, 3), np.float32), "y": np.zeros(8, np.float32)})

    def __next__(self):
        return next(self._batches)

    def get_state(self):
        return self._batches.get_state()

    def set_state(self, state):
        self._batches.set_state(state)


HERE = "tests.chunks_test"
EXACT = {"logical_replicas": 8, "reduction.arithmetic": "exact"}


@pytest.mark.parametrize(
    ("changes", "program", "most", "why"),
    [
        ({}, "loop", 32, "a step is small"),
        ({"steps_per_dispatch": 3}, "loop", 3, "steps_per_dispatch=3"),
        ({"steps_per_dispatch": 50}, "loop", 50, "steps_per_dispatch=50"),
        ({"experiment": f"{HERE}.Convolved"}, "step", 1, "convolutions"),
        (
            {"experiment": f"{HERE}.Convolved", "steps_per_dispatch": 2},
            "loop",
            2,
            "steps_per_dispatch=2",
        ),
        ({"reduction.shard_update": True}, "step", 1, "sharded updates"),
        ({"experiment": f"{HERE}.Acting"}, "loop", 1, "may use the model"),
        ({"experiment": f"{HERE}.Failing"}, "loop", 8, "are drawn one by one"),
        (EXACT, "step", 1, "logical_replicas=8"),
        ({**EXACT, "steps_per_dispatch": 1}, "step", 1, "logical_replicas=8"),
    ],
    ids=str,
)
def test_the_program_and_the_number_follow_from_the_config(
    tmp_path, changes, program, most, why
):
    config = toy.get_config()
    config.update_from_flattened_dict(changes)
    run = winged.Run(config.lock(), str(tmp_path))
    assert (run.dispatches.program, run.dispatches.most) == (program, most)
    assert why in str(run.dispatches)


def test_large_steps_are_dispatched_one_by_one(tmp_path):
    config = toy.get_config()
    config.experiment = "tests.toy.Wide"
    config.update({"hidden": 4000, "batch_size": 4096, "examples": 4096})
    run = winged.Run(config.lock(), str(tmp_path))
    assert run.dispatches.most < 32 and "a step has" in run.dispatches.why


@pytest.mark.parametrize("changes", [EXACT, {"logical_replicas": 8}])
def test_more_than_one_step_of_logical_replicas_is_refused(tmp_path, changes):
    match = "steps_per_dispatch=2 cannot be had: with logical_replicas=8 "
    with pytest.raises(errors.UserError, match=match):
        winged.Run(config_of(2, **changes), str(tmp_path))


def test_a_run_keeps_the_program_that_it_began_with(tmp_path):
    train(tmp_path, config_of(0, steps=4))
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["_run"].pop("step_program") == identity.LOOP
    # As a run wrote it before there was a choice.
    (tmp_path / "config.json").write_text(json.dumps(content))
    run = winged.Run(config_of(0, steps=8), str(tmp_path))
    assert run.dispatches.program == identity.STEP
    assert "the run began so" in str(run.dispatches)
    with pytest.raises(errors.UserError, match="the run began so"):
        winged.Run(config_of(2, steps=8), str(tmp_path))


def test_a_run_whose_work_directory_was_lost_keeps_its_program(tmp_path):
    changes = {"experiment": f"{HERE}.Convolved"}
    kept = {"checkpoint.directory": str(tmp_path / "kept"), **changes}
    train(tmp_path / "first", config_of(3, steps=4, **kept))
    run = winged.Run(config_of(0, steps=8, **kept), str(tmp_path / "second"))
    # A convolution would choose the plain step for a new run.
    assert run.dispatches.program == identity.LOOP and run.dispatches.most == 1


@pytest.mark.parametrize("name", ["meta.json", "COMMIT"])
def test_a_lost_work_directory_and_a_damaged_checkpoint_keep_the_program(
    tmp_path, name
):
    kept = {"checkpoint.directory": str(tmp_path / "kept"), "checkpoint.every_steps": 3}
    changes = {"experiment": f"{HERE}.Convolved", **kept}
    train(tmp_path / "first", config_of(3, steps=6, **changes))
    newest = max((tmp_path / "kept").glob("step_*"))
    content = (newest / name).read_bytes()
    (newest / name).write_bytes(content[: len(content) // 2])
    config = config_of(0, steps=8, **changes)
    run = winged.Run(config, str(tmp_path / "second"))
    # A convolution would choose the plain step for a new run.
    assert run.dispatches.program == identity.LOOP
    train(tmp_path / "second", config)
    assert min(row["step"] for row in rows.read(tmp_path / "second")) == 4


def test_reading_rows_ends_no_dispatch(tmp_path, monkeypatch):
    config = config_of(8, log_every_steps=1, fingerprint_every_steps=1, steps=24)
    with config.unlocked():
        config.checkpoint.every_steps = 100
        config.eval_every_steps = 100
    run = winged.Run(config, str(tmp_path))
    counts = []
    train_step = run.train_step

    def recorded(state, batch, count):
        counts.append(int(count))
        return train_step(state, batch, count)

    monkeypatch.setattr(run, "train_step", recorded)
    with run.opened():
        run.train()
    assert counts == [8, 8, 8]
    steps = [row["step"] for row in rows.read(tmp_path)]
    assert sorted(set(steps)) == [*range(1, 25)]


def test_the_rows_of_steps_after_one_in_trouble_are_not_written(tmp_path):
    changes = {
        "experiment": "tests.toy.Poisoned",
        "poisoned": ((0, 5),),
        "log_every_steps": 1,
    }
    for size in (1, 8):
        code = winged.run(config_of(size, **changes), str(tmp_path / str(size)), "")
        assert code == 3
    assert rows.same_bits(tmp_path / "8") == rows.same_bits(tmp_path / "1")
    assert rows.read(tmp_path / "8")[-1]["step"] == 5


class PoisonedTalking(toy.Poisoned):
    """Shows predictions, of parameters that are not finite after a step."""

    samples = toy.Talking.samples


@pytest.mark.wing("samples")
def test_no_samples_are_shown_after_a_step_in_trouble(tmp_path):
    changes = {
        "experiment": f"{HERE}.PoisonedTalking",
        "poisoned": ((0, 5),),
        "samples_every_steps": 6,
        "eval_every_steps": 12,
        "checkpoint.every_steps": 12,
    }
    for size in (1, 3, 8):
        directory = tmp_path / str(size)
        assert winged.run(config_of(size, **changes), str(directory), "") == 3
        samples = directory / "samples.jsonl"
        assert not samples.exists() or not samples.read_text()
        assert rows.results(directory)["step"] == 5


def test_the_rows_of_a_dispatch_have_one_rate(tmp_path):
    config = config_of(8, log_every_steps=1, steps=20)
    with config.unlocked():
        config.checkpoint.every_steps = 100
        config.eval_every_steps = 100
    train(tmp_path, config)
    rates = {}
    for row in rows.read(tmp_path):
        if "loss" in row:
            rates[row["step"]] = row["perf/steps_per_second"]
    for steps in (range(1, 9), range(9, 17), range(17, 21)):
        assert len({rates[step] for step in steps}) == 1
    # As many as a computer can make, and not those of one row after the other.
    assert max(rates.values()) < 1e6


class Failing(toy.Toy):
    """Has data whose seventh batch cannot be read."""

    def train_batches(self, part):
        return Unreadable(super().train_batches(part))


class Unreadable:
    state_is_shared = True

    def __init__(self, batches):
        self._batches = batches

    def __next__(self):
        if self._batches.get_state()["batches"] == 6:
            raise OSError("the seventh batch cannot be read")
        return next(self._batches)

    def get_state(self):
        return self._batches.get_state()

    def set_state(self, state):
        self._batches.set_state(state)


def test_steps_before_data_that_cannot_be_read_are_made_and_logged(tmp_path):
    changes = {"experiment": f"{HERE}.Failing", "log_every_steps": 1}
    changes |= {"checkpoint.every_steps": 100, "eval_every_steps": 100}
    logged = []
    for size in (1, 8):
        directory = tmp_path / str(size)
        with pytest.raises(OSError, match="seventh batch"):
            winged.run(config_of(size, **changes), str(directory), "")
        logged.append([row["step"] for row in rows.read(directory)])
    assert logged == [[1, 2, 3, 4, 5, 6]] * 2
