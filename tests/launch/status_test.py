"""Tests of `launch status`: runs in progress, ended runs and lost runs, their attempts,
and the comparison of two.
"""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from launch import status
from tests import toy
from tests.launch import harness
from tests.report import samples
from xshard import checkpoint, errors, loop
from xshard.pod import attempts, watchdog
from xshard.pod import status as status_lib


def write(directory, *rows, ago=0.0):
    """Writes a status that is `ago` seconds old."""
    base = {
        "doing": "training",
        "step": 50,
        "steps": 100,
        "rate": 10.0,
        "host": "h0",
        "pid": 1,
        "begun": time.time() - ago,
        "first": 0,
        "trained": 0,
        "seconds": {},
    }
    directory.mkdir(exist_ok=True)
    rows = [{**base, "time": time.time() - ago, **row} for row in rows]
    (directory / "status.json").write_text(json.dumps(rows))


RESULTS = {"finite": True}
NOT_FINITE = {"finite": False}


@pytest.mark.parametrize(
    "phases, ago, results, name, doing",
    [
        ([], 0, {}, "unknown", "not known: there is no status.json"),
        ([], 0, RESULTS, "done", "done"),
        ([], 0, NOT_FINITE, "failed", "failed: not finite"),
        (["done", "done"], 1000, RESULTS, "done", "done"),
        (["done"], 1000, NOT_FINITE, "failed", "failed: not finite"),
        (["stopped"], 1000, {}, "stopped", "stopped"),
        (["stopped"], 1000, NOT_FINITE, "stopped", "stopped"),
        (["done", "failed: no data"], 1000, {}, "failed", "failed: no data"),
        (["training", "failed: no data"], 0, {}, "failed", "failed: no data"),
        (["evaluating"], 0, {}, "running", "evaluating"),
        # The results are from before the run was resumed with more steps.
        (["training"], 0, RESULTS, "running", "training"),
        (["training"], 600, {}, "silent", "gone, or silent for 10 min; was training"),
    ],
)
def test_the_state_of_a_run(phases, ago, results, name, doing):
    rows = [{"doing": phase, "time": time.time() - ago} for phase in phases]
    assert status_lib.run_state(rows, results) == (name, doing)


def test_status_of_a_run_in_progress(tmp_path, capsys):
    write(tmp_path, {}, {"host": "h1", "doing": "evaluating"})
    assert status.show([str(tmp_path)], False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "process",
        "host",
        "doing",
        "step",
        "steps/s",
        "left",
        "heard",
    ]
    assert lines[1].split()[:6] == ["0", "h0", "training", "50/100", "10.0", "0:05"]
    assert (
        lines[2].split()[:3] == ["1", "h1", "evaluating"]
        and lines[3] == "no checkpoint yet"
    )


def test_status_of_a_run_that_goes_on_without_its_dead(tmp_path, capsys):
    standing = {"generation": 3, "members": 2, "takeovers": 1}
    write(tmp_path, standing)
    status.show([str(tmp_path)], False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "generation 3: 2 members, 1 taken over from"
    status.show([str(tmp_path)], True)
    (row,) = json.loads(capsys.readouterr().out)["processes"]
    assert row.items() >= standing.items()
    # Other runs, and those of earlier versions, say nothing of it.
    write(tmp_path, {})
    status.show([str(tmp_path)], True)
    (row,) = json.loads(capsys.readouterr().out)["processes"]
    assert not row.keys() & standing.keys()
    write(tmp_path, {"generation": "third"})
    with pytest.raises(errors.UserError, match="generation"):
        status_lib.read(tmp_path)


def test_status_of_a_lost_run_and_of_a_completed_run(tmp_path, capsys):
    write(tmp_path / "gone", {}, ago=100)
    status.show([str(tmp_path / "gone")], False)
    assert "gone, or silent; was training" in capsys.readouterr().out
    write(tmp_path / "done", {"doing": "done", "rate": None, "step": None}, ago=1000)
    status.show([str(tmp_path / "done")], True)
    (row,) = json.loads(capsys.readouterr().out)["processes"]
    assert row["doing"] == "done" and row["silent"] is None and row["left"] is None


def test_status_of_a_run_that_is_not_finite(tmp_path, capsys):
    write(tmp_path, {"doing": "failed: not finite"})
    why = "step 5: the loss is nan"
    (tmp_path / "results.json").write_text(json.dumps({"finite": False, "why": why}))
    (tmp_path / "config.json").write_text(json.dumps({"checkpoint": {"directory": ""}}))
    keep = checkpoint.Keep(1)
    manager = checkpoint.Manager(tmp_path / "checkpoints", keep, finite="w")
    manager.save(4, {"w": np.array([1.0, np.inf])}, {})
    manager.close()
    assert status.show([str(tmp_path)], False) == 0
    out = capsys.readouterr().out
    assert "failed: not finite" in out and "newest checkpoint: step 4" in out
    assert ", NOT FINITE\n" in out and f"not finite: {why}\n" in out
    status.show([str(tmp_path)], True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["checkpoint"]["finite"] is False and shown["not_finite"] == why


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("steps_per_dispatch", [1, 8])
def test_steps_are_counted_however_many_are_dispatched_at_once(
    tmp_path, steps_per_dispatch
):
    for steps in (5, 12):
        config = toy.get_config()
        config.update({"steps": steps, "steps_per_dispatch": steps_per_dispatch})
        watch = watchdog.Watchdog(tmp_path)
        with watch:
            assert loop.run(config.lock(), str(tmp_path), "", None, watch) == 0
            watch.end(status_lib.DONE)
        (row,) = status_lib.read(tmp_path)
        assert row["first"] + row["trained"] == row["step"] == steps
    for attempt in attempts.read(tmp_path):
        assert attempt.seconds[attempts.REPEATED] == 0.0
        assert attempt.seconds["training"] > 0.0


def test_steps_that_a_roll_back_made_again_are_counted_twice():
    of_process = status_lib.Status("host")
    of_process.set_phase("compiling", step=5)
    of_process.set_phase(status_lib.TRAINING, step=9)
    # It goes on from step 7.
    of_process.set_phase("compiling", step=7)
    of_process.set_phase(status_lib.TRAINING, step=11)
    row = of_process.row()
    assert (row["first"], row["step"], row["trained"]) == (5, 11, 8)


def test_status_of_several_attempts(tmp_path, capsys):
    samples.write(tmp_path / "run", attempts=samples.ATTEMPTS)
    status.show([str(tmp_path / "run")], False)
    out = capsys.readouterr().out
    assert "killed; was training" in out and "0 to 230" in out and "200 to 400" in out
    assert (
        "goodput 0.7% of 1:23:54 in 2 attempts; not running 98.6%, start 0.4%," in out
    )
    status.show([str(tmp_path / "run")], True)
    shown = json.loads(capsys.readouterr().out)
    first, second = shown["attempts"]
    assert first["seconds"]["training"] == pytest.approx(18.0)
    assert first["seconds"]["made again"] == pytest.approx(2.7)
    assert (
        first["down"] == pytest.approx(5000 - 12 - 0.11 * 230) and second["down"] == 0
    )
    total = sum(
        sum(attempt["seconds"].values()) + attempt["down"]
        for attempt in (first, second)
    )
    assert total == pytest.approx(shown["goodput"]["seconds"]) == 5000 + 12 + 0.11 * 200


def test_steps_that_a_later_attempt_repeats_do_not_count(tmp_path):
    rows = [samples.attempt(0.0, 0, 100), samples.attempt(50.0, 100, 200)]
    rows.append(samples.attempt(100.0, 40, 60))
    samples.write(tmp_path / "run", attempts=rows)
    all_attempts = attempts.read(tmp_path / "run")
    assert [x.seconds["training"] for x in all_attempts] == pytest.approx(
        [0.09 * 40, 0.0, 0.09 * 20]
    )


def test_the_time_after_a_completed_attempt_is_not_down_time(tmp_path):
    rows = [
        samples.attempt(0.0, 0, 100, "done"),
        samples.attempt(5000.0, 100, 200, "done"),
    ]
    all_attempts = attempts.read(samples.write(tmp_path / "run", attempts=rows))
    assert [x.down for x in all_attempts] == [0, 0]
    assert attempts.goodput(all_attempts).seconds == pytest.approx(2 * (12 + 11))


def test_attempts_are_kept_once_and_damaged_files_do_not_end_a_run(tmp_path):
    path = samples.write(tmp_path / "run", attempts=samples.ATTEMPTS[:1])
    for _ in range(2):
        attempts.preserve_previous(path)
        assert (
            len(attempts.read(path))
            == len((path / attempts.FILE).read_text().split("\n")) - 1
        )
    with (path / attempts.FILE).open("a") as file:
        file.write('{"begun": "noon"}\nnot JSON\n{"begun": 1, "doing": "do')
    assert len(attempts.read(path)) == 1
    (path / "status.json").write_text("[")
    attempts.preserve_previous(path)
    with pytest.raises(errors.UserError, match="status.json"):
        attempts.read(path)


@pytest.mark.sample(0.4)
def test_status_of_a_real_run_with_a_checkpoint(tmp_path):
    begin = time.time()
    process = harness.launch(
        "--cpu_devices=2",
        command=[
            *harness.TOY,
            f"--workdir={tmp_path}",
            "--config.steps=100000",
            "--config.checkpoint.every_steps=10",
            "--config.eval_every_steps=100000",
        ],
    )
    with harness.running(process):
        harness.wait_until(lambda: list(tmp_path.glob("checkpoints/*/COMMIT")))
        harness.wait_until((tmp_path / "status.json").exists)
        harness.wait_until(lambda: harness.status(tmp_path)[0]["rate"])
        code, output = harness.finish(harness.launch("status", tmp_path))
        assert (
            code == 0 and "training" in output and "newest checkpoint: step" in output
        )
        shown = harness.wait_until(lambda: status_unless_silent(tmp_path))
        assert shown["checkpoint"]["step"] >= 10
        assert 0 <= shown["checkpoint"]["age"] < time.time() - begin
        (row,) = shown["processes"]
        assert row["steps"] == 100000 and row["rate"] > 0 and row["left"] > 0
        (attempt,) = shown["attempts"]
        assert attempt["first"] == 0 and attempt["end"] in (
            "training",
            "evaluating",
            "saving",
        )
        spent = attempt["seconds"]
        assert 0 < spent["start"] < time.time() - begin and spent["made again"] == 0
        assert sum(spent.values()) == pytest.approx(
            attempt["ended"] - attempt["begun"], abs=0.1
        )


def status_unless_silent(directory):
    """Returns the status as JSON values; None if process 0 has been silent for some
    seconds.
    """
    shown = json.loads(harness.finish(harness.launch("status", directory, "--json"))[1])
    return shown if shown["processes"][0]["silent"] is None else None


def logged(directory, losses, first=0):
    """Writes the rows of a run; returns its directory. Each step subtracts its loss
    from the state, a single number.
    """
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(samples.CONFIG))
    rows = [
        {
            "step": step,
            "loss": loss,
            "fingerprint/params": first - sum(losses[: step - 1]),
        }
        for step, loss in enumerate(losses, 1)
    ]
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return str(directory)


def test_comparison_of_two_runs_that_are_equal_so_far(tmp_path, capsys):
    directories = [logged(tmp_path / "a", [3, 2, 1]), logged(tmp_path / "b", [3, 2])]
    assert status.show(directories, False) == 0
    same, ends = capsys.readouterr().out.splitlines()
    assert same.startswith("The runs are equal: the fingerprints") and same.endswith(
        "to step 2."
    )
    assert (
        ends
        == f"They have logged: {directories[0]} to step 3, {directories[1]} to step 2."
    )
    assert status.show([directories[0], directories[0]], False) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    # Equal training does not make equal evaluations.
    for name, error in (("a", 0.5), ("b", 0.25)):
        with (tmp_path / name / "metrics.jsonl").open("a") as rows:
            rows.write(json.dumps({"step": 2, "eval/error": error}) + "\n")
    assert status.show(directories, False) == 1
    evaluated = "But the evaluation after step 2 differs in eval/error"
    assert evaluated in capsys.readouterr().out
    assert status.show(directories, True) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["step"] is None and shown["evaluation"] == 2


def test_comparison_of_two_runs_that_diverge(tmp_path, capsys):
    directories = [logged(tmp_path / "a", [3, 2, 1]), logged(tmp_path / "b", [3, 7, 1])]
    assert status.show(directories, False) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "The runs diverge in step 2 (equal up to the row of step 1): it began with"
    )
    assert status.show(directories, True) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["alike"] == 1 and shown["step"] == 2 and shown["values"] == ["loss"]
    assert shown["logged"] == [3, 3]
    other = logged(tmp_path / "c", [3, 2, 1], first=1)
    assert status.show([directories[0], other], False) == 1
    assert "their first states differ in params" in capsys.readouterr().out


def test_the_launcher_starts_without_jax(tmp_path):
    """JAX takes a second to import, and its backend would take a host's devices from
    the run.
    """
    write(tmp_path, {})
    program = (
        "import sys; from launch import __main__, status\n"
        f"status.show([{str(tmp_path)!r}], False)\n"
        "sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=harness.environment())
    assert done.returncode == 0
