"""Tests that a run ends in the same bits, whether resumed, stopped or killed.

They are in this process and in separate ones.
"""

import collections
import functools
import json
import signal
import time
from typing import ClassVar

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import forks, pace, programs, rows, toy, winged
from tests.base import timed
from tests.checkpoint import harness as system
from tests.optimizers import harness
from xshard import checkpoint, loop
from xshard.base import clock
from xshard.checkpoint import saver, writer
from xshard.files import workdir
from xshard.optimizers import trees
from xshard.pod import request
from xshard.run import schedule as schedule_lib


def make_config(**changes):
    config = toy.get_config()
    config.update(changes)
    return config.lock()


def final_state(directory, config=None):
    return rows.final_state(directory, config or make_config())


def test_the_output_and_the_files_of_a_run(tmp_path, capsys):
    assert loop.run(make_config(), str(tmp_path / "run"), "again") == 0
    out = capsys.readouterr().out
    for part in (
        "step  4/12",
        "step 6  evaluation: error",
        "results:",
        "checkpoints:",
        "again --config.steps=24",
    ):
        assert part in out
    logged = rows.read(tmp_path / "run")
    assert [row["step"] for row in logged] == [4, 6, 8, 12, 12]
    assert {"loss", "error", "loss_scale", "global_step", "skipped"} <= logged[0].keys()
    # A batch has 16 of the 50 examples.
    assert [row.get("epoch") for row in logged] == [1.28, None, 2.56, 3.84, None]
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["step"] == 12 and results["eval"]["error"] < logged[0]["error"]
    assert logged[-1]["eval/error"] == results["eval"]["error"]
    # The same command again trains nothing and keeps the results.
    assert loop.run(make_config(), str(tmp_path / "run"), "again") == 0
    assert "all 12 steps have been made" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/results.json").read_text()) == results
    assert rows.read(tmp_path / "run") == logged


class Columns(toy.Wide):
    """Has outputs that are sharded along 'model'."""

    def forward(self, batch, *, is_training):
        return hk.nets.MLP([8, 4], name="mlp")(batch["x"])

    def loss(self, outputs, batch):
        return jnp.mean(outputs**2), {}

    def evaluate(self, outputs, batch):
        return {"error": jnp.mean(outputs**2, axis=-1)}

    def sharding_rules(self):
        return (("linear_1/w$", jax.P(None, "model")), ("linear_1/b$", jax.P("model")))

    def samples(self, predict, key):
        return str(
            predict(
                {"x": np.ones((2, 3), np.float32), "y": np.zeros(2, np.float32)}
            ).shape
        )


@pytest.mark.wing("samples")
def test_predictions_are_whole_on_each_process(tmp_path, monkeypatch):
    seen = []
    fetch = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: seen.append(x) or fetch(x))
    config = make_config(
        experiment="tests.loop_test.Columns", steps=1, model_parallel=2
    )
    assert winged.run(config, str(tmp_path), "") == 0
    outputs = [x for x in seen if getattr(x, "shape", ()) == (2, 4)]
    assert outputs and all(x.is_fully_replicated for x in outputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("groups", [(), ((0, 2, 4, 6), (1, 3, 5, 7))])
def test_a_run_in_parts_ends_in_the_same_bits(tmp_path, groups):
    config = {"group_assignment": groups, "overflow_above": 2.0}
    for name, parts in (("whole", [12]), ("parts", [5, 7, 12])):
        for steps in parts:
            assert (
                loop.run(make_config(steps=steps, **config), str(tmp_path / name), "")
                == 0
            )
    whole, parts = (
        final_state(tmp_path / n, make_config(**config)) for n in ("whole", "parts")
    )
    harness.assert_equal(parts, whole)
    assert np.any(np.asarray(whole.experiment.global_step) < 12)
    if groups:
        w = np.asarray(whole.experiment.params["linear"]["w"])
        assert w.shape[0] == 2 and not np.array_equal(w[0], w[1])
        ensemble = json.loads((tmp_path / "whole/results.json").read_text())["eval"]
        assert len(ensemble["error"]) == 2
        assert ensemble["ensemble/error"] < max(ensemble["error"])


class Counting(toy.Talking):
    """Counts how often its methods are traced."""

    traced: ClassVar = collections.Counter()

    def loss(self, outputs, batch):
        self.traced["loss"] += 1
        return super().loss(outputs, batch)

    def evaluate(self, outputs, batch):
        self.traced["evaluate"] += 1
        return super().evaluate(outputs, batch)

    def forward(self, batch, *, is_training):
        self.traced["forward"] += 1
        return super().forward(batch, is_training=is_training)


@pytest.mark.wing("samples")
@pytest.mark.parametrize("groups", [(), ((0, 2, 4, 6), (1, 3, 5, 7))])
def test_programs_traced_before_a_run_are_not_traced_again(tmp_path, groups):
    config = make_config(experiment="tests.loop_test.Counting", group_assignment=groups)
    run = winged.Run(config, str(tmp_path))
    state = run.resume_or_init().state
    before = Counting.traced.copy()
    assert before["evaluate"] and before["loss"]
    state = run.dispatch_step(1, state).stepped.state
    assert run._evaluation(state)
    predict = functools.partial(run.predict, state)
    assert run.experiment.samples(predict, jax.random.key(0))
    assert Counting.traced == before


def test_rows_are_in_the_file_before_their_checkpoint_counts(tmp_path, monkeypatch):
    config = make_config(log_every_steps=1)
    for name in ("whole", "killed"):
        with monkeypatch.context() as patch:
            if name == "killed":
                real = loop.Run._save

                def save(self, *args, **options):
                    real(self, *args, **options)
                    raise rows.Killed

                patch.setattr(loop.Run, "_save", save)
                with pytest.raises(rows.Killed):
                    loop.run(config, str(tmp_path / name), "")
        assert loop.run(config, str(tmp_path / name), "") == 0
    assert rows.same_bits(tmp_path / "whole") == rows.same_bits(tmp_path / "killed")


def test_checkpoints_are_saved_by_the_clock(tmp_path):
    config = make_config(steps=3, steps_per_dispatch=1)
    with config.unlocked():
        config.checkpoint.update(
            {"every_steps": 100, "every_minutes": 1e-9, "keep_last": 5}
        )
    assert loop.run(config, str(tmp_path), "") == 0
    assert loop.Run(config, str(tmp_path)).checkpoints.manager.all_steps() == [1, 2, 3]


def with_checkpoint(config, **options):
    with config.unlocked():
        config.checkpoint.update(options)
    return config


def test_the_best_checkpoints_by_a_metric_are_kept(tmp_path):
    config = make_config(eval_every_steps=3, steps=12)
    with_checkpoint(config, every_steps=100, keep_last=1, keep_best=2)
    assert loop.run(config, str(tmp_path), "") == 0
    logged = rows.read(tmp_path)
    errors = {row["step"]: row["eval/error"] for row in logged if "eval/error" in row}
    assert sorted(errors) == [3, 6, 9, 12]
    best = sorted(errors, key=errors.get)[:2]
    manager = loop.Run(config, str(tmp_path)).checkpoints.manager
    assert manager.all_steps() == sorted({*best, 12})


def test_a_step_that_is_due_for_two_reasons_is_saved_once(tmp_path, monkeypatch):
    config = with_checkpoint(
        make_config(eval_every_steps=6), every_steps=6, keep_best=1
    )
    run = loop.Run(config, str(tmp_path))
    saved = []
    monkeypatch.setattr(
        run.checkpoints.manager, "save", lambda made, *_, **__: saved.append(made)
    )
    with run.workdir.opened(config):
        run.train()
    assert saved == [6, 12]


def test_an_unknown_best_metric_is_refused_before_the_run(tmp_path):
    config = with_checkpoint(make_config(), keep_best=1, best_metric="accuracy")
    with pytest.raises(
        ValueError, match="best_metric='accuracy' must be a metric .*: error"
    ):
        loop.Run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("on_failure", ["stop", "go_on"])
def test_a_full_disk_stops_the_run_or_is_reported(
    tmp_path, capfd, on_failure, monkeypatch
):
    real = writer.write_part
    full = [False]

    def write_part(attempt, *args):
        # Errors that the system itself raises are tested in tests/checkpoint.
        if attempt.step == 6:
            full[0] = True
            raise OSError(28, "No space left on device")
        return real(attempt, *args)

    monkeypatch.setattr(writer, "write_part", write_part)
    config = with_checkpoint(
        make_config(), every_steps=3, on_failure=on_failure, keep_last=9
    )
    if on_failure == "stop":
        with pytest.raises(
            ValueError, match="Step 6 could not be saved in .*No space left"
        ):
            loop.run(config, str(tmp_path), "")
        # The run learns of the failure at some step up to 9. By then the save of step 9
        # may have begun.
        allowed = [[3], [3, 9]]
    else:
        assert loop.run(config, str(tmp_path), "") == 0
        assert "NOT SAVED: Step 6 could not be saved" in capfd.readouterr().err
        allowed = [[3, 9, 12]]
    assert full[0]
    assert loop.Run(config, str(tmp_path)).checkpoints.manager.all_steps() in allowed


def test_the_last_save_must_succeed_whatever_on_failure_is(tmp_path, monkeypatch):
    def checksums(attempt):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver, "_checksums", checksums)
    config = with_checkpoint(make_config(), every_steps=100, on_failure="go_on")
    with pytest.raises(ValueError, match="Step 12 could not be saved"):
        loop.run(config, str(tmp_path), "")


def test_checkpoints_of_two_runs_in_one_place_are_refused(tmp_path):
    config = with_checkpoint(make_config(), directory=str(tmp_path / "shared"))
    first = loop.Run(config, str(tmp_path / "a"))
    in_use = pytest.raises(ValueError, match="shared is in use by another process")
    with first.checkpoints.opened(), in_use:
        loop.run(config, str(tmp_path / "b"), "")
    assert loop.run(config, str(tmp_path / "a"), "") == 0
    assert first.checkpoints.manager.latest_step() == 12


def test_a_run_refuses_another_number_of_examples(tmp_path, monkeypatch):
    assert loop.run(make_config(steps=5), str(tmp_path), "") == 0
    all_examples = toy.Toy.train_data
    fewer = lambda self: {name: array[1:] for name, array in all_examples(self).items()}
    monkeypatch.setattr(toy.Toy, "train_data", fewer)
    with pytest.raises(
        ValueError, match="other training data: 50 examples, .* 49 examples, CRC-32"
    ):
        loop.run(make_config(), str(tmp_path), "")
    # The checksum of the data was lost, as with the disk of a host.
    (tmp_path / "origin.json").unlink()
    with pytest.raises(
        ValueError, match="written with 50 training examples, but there are now 49"
    ):
        loop.run(make_config(), str(tmp_path), "")


def origin(directory):
    return json.loads((directory / "origin.json").read_text())


def test_a_run_refuses_changed_training_data(tmp_path, monkeypatch):
    assert loop.run(make_config(steps=5), str(tmp_path / "run"), "") == 0
    manager = loop.Run(make_config(), str(tmp_path / "run")).checkpoints.manager
    kept = manager.restore(
        loop.Run(make_config(), str(tmp_path / "run")).target
    ).metadata["origin"]
    assert kept == origin(tmp_path / "run")
    assert kept["training"].startswith("50 examples, CRC-32 ")
    train_data = toy.Toy.train_data

    def changed(self):
        examples = train_data(self)
        # The number of examples stays. One value changes by one bit, in an example that
        # the evaluation does not use.
        examples["x"][31, 1] = np.nextafter(examples["x"][31, 1], np.float32(9))
        return examples

    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(toy.Toy, "train_data", changed)
        with pytest.raises(
            ValueError, match="restore that data, or start .* --init_from="
        ):
            loop.run(make_config(), str(tmp_path / "run"), "")
        assert before == {
            p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()
        }
        # The new run that the message proposes works.
        source = checkpoint.Source(str(tmp_path / "run"))
        assert loop.run(make_config(steps=5), str(tmp_path / "other"), "", source) == 0
    assert origin(tmp_path / "other")["training"] != kept["training"]
    # A run whose origin.json was lost resumes, and writes the file again.
    (tmp_path / "run/origin.json").unlink()
    assert loop.run(make_config(steps=6), str(tmp_path / "run"), "") == 0
    assert origin(tmp_path / "run") == kept


def test_evaluation_data_and_code_may_change_and_are_reported(
    tmp_path, monkeypatch, capsys
):
    assert loop.run(make_config(steps=5), str(tmp_path), "") == 0
    eval_data = toy.Toy.eval_data
    fewer = lambda self: {name: array[1:] for name, array in eval_data(self).items()}
    monkeypatch.setattr(toy.Toy, "eval_data", fewer)
    monkeypatch.setattr(loop.origin_lib, "commit", lambda file: "0123")
    (tmp_path / "origin.json").write_text(
        json.dumps(origin(tmp_path) | {"commit": "4567-dirty"})
    )
    capsys.readouterr()
    assert loop.run(make_config(steps=6), str(tmp_path), "") == 0
    out = capsys.readouterr().out
    assert "changed since the run was started: evaluation data: 10 examples, " in out
    assert "changed since the run was started: commit: 4567-dirty -> 0123" in out
    assert origin(tmp_path)["commit"] == "0123"


@pytest.mark.sample(0.4)
def test_a_new_run_is_initialized_from_the_network_of_another(tmp_path, capsys):
    assert loop.run(make_config(), str(tmp_path / "first"), "") == 0
    first = final_state(tmp_path / "first")
    init = checkpoint.Source(str(tmp_path / "first"))
    run = loop.Run(make_config(steps=24), str(tmp_path / "second"), init)
    state = run.resume_or_init().state
    harness.assert_equal(
        (state.experiment.params, state.experiment.net_state),
        (first.experiment.params, first.experiment.net_state),
    )
    harness.assert_equal(
        state.experiment.opt_state,
        run.checkpoints.init_state(run.batches.example).experiment.opt_state,
    )
    assert "initialized 4 arrays from" in capsys.readouterr().out
    # Moving averages start at the restored parameters, however the update is sharded.
    averaged = make_config(experiment="tests.toy.Averaged", hidden=20)
    with averaged.unlocked():
        averaged.reduction.shard_update = True
    wide = make_config(experiment="tests.toy.Wide", hidden=20)
    assert loop.run(wide, str(tmp_path / "wide"), "") == 0
    source = checkpoint.Source(str(tmp_path / "wide"))
    begun = loop.Run(averaged, str(tmp_path / "averaged"), source)
    state = begun.resume_or_init().state
    for path, param in trees.leaves_by_path(state.experiment.params).items():
        np.testing.assert_array_equal(
            state.experiment.opt_state["MovingAverageOptimizer"][f"average/{path}"],
            param,
        )
    values = begun.evaluate(state)
    assert values["raw/error"] == pytest.approx(values["error"], rel=1e-6)
    # Once the new run has its own checkpoint, it resumes from that one.
    with_checkpoint(run.config, every_steps=3)
    assert loop.run(run.config, str(tmp_path / "second"), "", init) == 0
    assert loop.run(run.config, str(tmp_path / "second"), "", init) == 0
    assert (
        "is for a new run; this run resumes from its own checkpoint"
        in capsys.readouterr().err
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("first,then", [(1, 2), (2, 1)])
def test_a_run_may_resume_with_another_model_axis(tmp_path, first, then, capsys):
    for steps, model in ((5, first), (12, then)):
        config = make_config(
            steps=steps, model_parallel=model, group_assignment=((0, 1), (2, 3))
        )
        devices = {1: 4, 2: 8}[model]
        mesh_of = loop.experiment_lib.mesh_of
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                loop.experiment_lib,
                "mesh_of",
                lambda config, n=devices: mesh_of(config, jax.devices()[:n]),
            )
            assert loop.run(config, str(tmp_path), "") == 0
    assert f"model_parallel: {first} -> {then}" in capsys.readouterr().out


@pytest.mark.parametrize("key,fatal", [("steps", False), ("steps_of_its_own", True)])
def test_only_exact_names_of_keys_may_change(tmp_path, key, fatal):
    place = workdir.Workdir(tmp_path / "run")
    with place.opened(make_config(**{key: 20})):
        pass
    changed = make_config(**{key: 30})
    if fatal:
        with pytest.raises(ValueError, match=f"{key}: 20 -> 30"):
            place.check(changed)
    else:
        assert place.check(changed) == [f"{key}: 20 -> 30"]


def test_a_directory_taken_by_another_run_after_the_check_is_refused(tmp_path):
    mine = make_config(seed=1)
    other = make_config(seed=2)
    place = workdir.Workdir(tmp_path / "run")
    assert place.check(mine) == []
    with place.opened(other):
        pass
    before = (tmp_path / "run/config.json").read_bytes()
    with pytest.raises(ValueError, match="seed: 2 -> 1"), place.opened(mine):
        pass
    assert (tmp_path / "run/config.json").read_bytes() == before


@pytest.mark.parametrize("first", [0, 5])
def test_rates_and_the_seconds_of_each_phase(tmp_path, first, capsys, monkeypatch):
    """Steps take 1 s, evaluations 10 s, saves 100 s, and the first step 1000 s more."""
    if first:
        first_part = make_config(steps=first, steps_per_dispatch=1)
        loop.run(first_part, str(tmp_path), "")
        capsys.readouterr()
    now = timed.stand_in(monkeypatch)
    began = []
    monkeypatch.setattr(clock, "age", lambda: 500.0)
    run = loop.Run(make_config(steps_per_dispatch=1), str(tmp_path))
    run.terminal._now = now.monotonic

    def taking(seconds, function):
        def called(*args, **kwargs):
            now.now += seconds if began else 1000.0
            began.append(True)
            return function(*args, **kwargs)

        return called

    begin = time.time()
    run.train_step = taking(1.0, run.train_step)
    evaluation_of_run = run._evaluation
    evaluation_of_run.by_batch = taking(10.0, evaluation_of_run.by_batch)
    run.checkpoints.save = taking(100.0, run.checkpoints.save)
    with run.opened():
        run.train()
    logged = [
        row for row in rows.read(tmp_path) if "loss" in row and row["step"] > first
    ]
    assert [row["step"] for row in logged] == [
        step for step in (4, 8, 12) if step > first
    ]
    last = logged[-1]
    # When the numbers of a row arrive, up to two further steps have been dispatched.
    assert all(0.5 <= row["perf/steps_per_second"] <= 2 for row in logged)
    for row in logged:
        assert row["perf/examples_per_second"] == pytest.approx(
            16 * row["perf/steps_per_second"]
        )
    total = 500 + 1000 + (12 - first - 1) + 10 + 100 * (2 - first // 5)
    assert last["perf/seconds"] == total and last["perf/start_seconds"] == 1500
    assert last["perf/evaluation_seconds"] == 10
    assert last["perf/checkpoint_seconds"] == 100 * (2 - first // 5)
    costs = [
        last[f"perf/{name}_seconds"]
        for name in ("start", "data", "checkpoint", "evaluation")
    ]
    # Rows contain six digits of each number.
    assert last["perf/goodput"] == pytest.approx(1 - sum(costs) / total, rel=1e-5)
    # Rows contain the time rounded to milliseconds.
    assert begin - 1e-3 <= last["perf/time"] <= time.time() + 1e-3
    lines = [line for line in capsys.readouterr().out.splitlines() if "steps/s" in line]
    assert len(lines) == len(logged)
    # The estimate of the time left includes evaluations and saves, but no compilation.
    left = [line.split()[-2] for line in lines]
    assert left == {0: ["0:08", "1:00", "0:00"], 5: ["0:19", "0:00"]}[first]


def start(directory, *arguments, **variables):
    return forks.program(
        "xshard.main",
        "--config=tests/toy.py",
        "--cpu_devices=8",
        "--config.steps=60",
        "--config.log_every_steps=1",
        "--config.overflow_above=2.0",
        f"--workdir={directory}",
        *arguments,
        env=system.environment(**variables),
    )


def read_until(process, text):
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"{text!r} was not printed; exit code {process.wait()}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    process = start(directory)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    config = make_config(steps=60, log_every_steps=1, overflow_above=2.0)
    return final_state(directory, config), directory


def assert_same_end(directory, uninterrupted):
    config = make_config(steps=60, log_every_steps=1, overflow_above=2.0)
    harness.assert_equal(final_state(directory, config), uninterrupted[0])
    assert rows.same_bits(directory) == rows.same_bits(uninterrupted[1])


def test_a_killed_run_ends_in_the_same_bits(tmp_path, uninterrupted):
    for at in (13, 41):
        with pace.slow(tmp_path / "slow", at) as variables:
            process = start(tmp_path / "run", **variables)
            read_until(process, f"step {at}/60")
            process.kill()
            process.communicate()
        assert process.returncode == -signal.SIGKILL
    process = start(tmp_path / "run")
    output = process.communicate()[0]
    assert process.returncode == 0 and "resumed from the checkpoint of step" in output
    assert_same_end(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 42)]
)
def test_a_run_that_gets_a_signal_saves_and_prints_how_to_resume(
    tmp_path, uninterrupted, number, code
):
    with pace.slow(tmp_path / "slow", 13) as variables:
        process = start(tmp_path / "run", **variables)
        read_until(process, "step 13/60")
        process.send_signal(number)
        output = process.communicate()[0]
    assert process.returncode == code, output
    assert "state saved in" in output
    assert "to resume: " in output
    assert "-m xshard.main" in output
    process = start(tmp_path / "run")
    assert process.communicate()[0] and process.returncode == 0
    assert_same_end(tmp_path / "run", uninterrupted)


def run_with_requests(directory, config, at, kind, again=None):
    """Runs to the end, after requests that stop or save.

    Args:
      directory: the work directory.
      config: the run's config.
      at: the poll of the first start at which the request comes.
      kind: the kind of the request.
      again: the poll of the second start at which it comes again; None for none.

    Returns:
      The number of polls of the first start.
    """
    scripted = rows.ScriptedWatch(at, kind)
    code = loop.run(config, str(directory), "", None, scripted)
    assert code == (42 if at <= scripted.polls and kind == request.STOP else 0)
    if code and again:
        # If the second start makes fewer polls than `again`, it gets no request and
        # runs to the end.
        loop.run(config, str(directory), "", None, rows.ScriptedWatch(again, kind))
    if code:
        assert loop.run(config, str(directory), "") == 0
    return scripted.polls


def metrics_by_step(directory):
    """Returns the metrics by which checkpoints are ranked, for each evaluated step."""
    entries = checkpoint.read_catalog(directory / "checkpoints").entries
    return {entry.step: entry.metrics for entry in entries if entry.metrics}


@pytest.mark.sample(0.4)
@pytest.mark.parametrize("kind", [request.STOP, request.SAVE])
def test_a_stop_or_a_save_at_any_poll_does_not_change_the_end(tmp_path, kind):
    # Each evaluation has two batches, so a stop may interrupt it.
    config = make_config(
        steps=5, eval_every_steps=2, log_every_steps=1, steps_per_dispatch=1
    )
    with_checkpoint(
        config, every_steps=3, keep_best=3, best_metric="error", best_mode="min"
    )
    with programs.shared():
        polls = run_with_requests(tmp_path / "not", config, 1000, kind)
        assert polls == 5 + 2 + 2 + 2
        assert list(metrics_by_step(tmp_path / "not")) == [
            2,
            4,
            5,
        ]
        end = final_state(tmp_path / "not", config)
        for at in range(1, polls + 1) if kind == request.STOP else (1, 3, 8):
            for again in (None, 1) if kind == request.STOP else (None,):
                directory = tmp_path / f"{at} {again}"
                run_with_requests(directory, config, at, kind, again)
                harness.assert_equal(final_state(directory, config), end)
                assert rows.same_bits(directory) == rows.same_bits(tmp_path / "not"), (
                    at,
                    again,
                )
                assert metrics_by_step(directory) == metrics_by_step(
                    tmp_path / "not"
                ), (at, again)
                assert rows.results(directory) == rows.results(tmp_path / "not"), (
                    at,
                    again,
                )


def test_two_processes_do_not_share_a_directory(tmp_path):
    first = start(tmp_path / "run", "--config.steps=1000000")
    try:
        read_until(first, "step       1/1000000")
        second = start(tmp_path / "run", "--config.steps=1000000")
        assert "is in use by another process" in second.communicate()[0]
        assert second.returncode == 1
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()


def test_only_metrics_of_logged_steps_are_fetched(tmp_path, monkeypatch):
    fetched = []
    real = loop.ending.rows.to_number
    monkeypatch.setattr(
        loop.ending.rows, "to_number", lambda v: fetched.append(v) or real(v)
    )
    run = loop.Run(make_config(eval_every_steps=100), str(tmp_path))
    with run.workdir.opened(run.config):
        run.train()
    # Each of the three rows has seven numbers and four fingerprints. The other nine
    # steps fetch nothing.
    assert len(fetched) == 3 * (7 + 4)


def test_the_steps_at_which_evaluations_and_saves_are_due():
    due = schedule_lib.Schedule(
        last=7, evaluation_every=3, save_every=5, saves_evaluated=False
    )
    steps = range(1, 8)
    assert [step for step in steps if due.evaluation(step)] == [3, 6, 7]
    assert [step for step in steps if due.save(step)] == [5, 7]
    assert [due.next_evaluation(step) for step in range(7)] == [3, 3, 3, 6, 6, 6, 7]
    assert [due.next_save(step) for step in range(7)] == [5, 5, 5, 5, 5, 7, 7]
    never = due._replace(evaluation_every=0)
    assert [step for step in steps if never.evaluation(step)] == [7]
    assert [never.next_evaluation(step) for step in range(7)] == [7] * 7
    also = due._replace(saves_evaluated=True)
    assert [step for step in steps if also.save(step)] == [3, 5, 6, 7]
    assert [also.next_save(step) for step in range(7)] == [3, 3, 3, 5, 5, 6, 7]
    assert [due.scheduled_save(step) for step in steps] == [5] * 5 + [7, 7]
