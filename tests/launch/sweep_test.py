"""Sweeps here: a job for each point, a table, and only what is missing when it is started again."""

import json
import signal

import pytest

from launch import engine, sweep
from tests import pace
from tests.launch import harness


def points_file(tmp_path, points):
    path = tmp_path / "sweep.py"
    path.write_text(f"def get_sweep():\n    return {points!r}\n")
    return path


def start(tmp_path, points, *options, parallel=2, flags=(), **variables):
    path = points_file(tmp_path, points)
    flags = [
        *flags,
        f"--sweep={path}",
        f"--parallel={parallel}",
        "--cpu_devices=2",
        "--max_failures=1",
    ]
    command = [*harness.TOY, f"--workdir={tmp_path / 'runs'}", *options]
    return harness.launch(*flags, command=command, env=harness.environment(**variables))


def test_a_sweep_runs_each_point_once_and_shows_what_came_out(tmp_path):
    points = [
        {"optimizer.learning_rate": rate, "precision": "p=f32,c=f16,o=f32"} for rate in (0.1, 0.01)
    ]
    code, output = harness.finish(start(tmp_path, points))
    assert code == 0, output
    lines = output.strip().splitlines()[-3:]
    assert lines[0].split()[:4] == ["run", "optimizer.learning_rate", "precision", "doing"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["000", "0.1", "p=f32,c=f16,o=f32", "done"], ["001", "0.01", "p=f32,c=f16,o=f32", "done"],
    ]  # fmt: skip
    config = json.loads((tmp_path / "runs" / "001" / "config.json").read_bytes())
    assert config["optimizer"]["learning_rate"] == 0.01
    code, again = harness.finish(start(tmp_path, points))
    assert code == 0 and "2 of 2 jobs are done" in again and "started" not in again
    assert again.strip().splitlines()[-3:] == lines
    shown = harness.finish(harness.launch("status", tmp_path / "runs"))[1]
    assert shown.strip().splitlines() == lines


def test_a_point_that_is_not_finite_has_ended_and_is_not_done(tmp_path):
    points = [{"poisoned": "((0,3),)"}, {"poisoned": "()"}]
    option = "--config.experiment=tests.toy.Poisoned"
    code, output = harness.finish(start(tmp_path, points, option))
    assert code == 3, output
    failed, done = output.strip().splitlines()[-2:]
    assert failed.split()[0] == "000" and "exit code 3" in failed
    assert done.split()[0] == "001" and "done" in done
    code, again = harness.finish(start(tmp_path, points, option))
    assert code == 3 and "1 of 2 jobs are done" in again and "started" not in again
    assert "not finite, and not run again while their results.json are there: " in again
    assert "failed: not finite" in again.strip().splitlines()[-2], again


def test_a_point_that_fails_does_not_stop_the_others(tmp_path):
    code, output = harness.finish(start(tmp_path, [{"batch_size": 7}, {"seed": 1}], parallel=1))
    assert code == 1
    lines = output.splitlines()
    assert "runs-000: ended with exit code 1" in output and "done" in lines[-1]
    assert lines[-2].split()[:4] == ["000", "7", "exit", "code"]
    assert "batch_size=7" in (tmp_path / "runs" / "000" / "launch.log").read_text()


def test_a_sweep_that_is_stopped_goes_on(tmp_path):
    points = [{"seed": 0}, {"seed": 1}]
    log = tmp_path / "runs" / "000" / "launch.log"
    with pace.slow(tmp_path / "slow", 8) as variables:
        process = start(tmp_path, points, "--config.steps=100", parallel=1, **variables)
        harness.wait_until(lambda: log.exists() and "step   8/100" in log.read_text())
        process.send_signal(signal.SIGTERM)
        code, output = harness.finish(process)
    assert code == 42 and not (tmp_path / "runs" / "001").exists(), output
    code, output = harness.finish(start(tmp_path, points, "--config.steps=100", parallel=2))
    assert code == 0 and "resumed from the checkpoint" in log.read_text(), output


def test_another_sweep_does_not_take_the_directory(tmp_path):
    for _ in range(2):
        sweep.claim(tmp_path / "runs", [{"seed": 0}, {"seed": 1}])
    with pytest.raises(engine.LaunchError, match="holds another sweep"):
        sweep.claim(tmp_path / "runs", [{"seed": 0}, {"seed": 2}])


def test_a_dry_run_of_a_sweep_leaves_nothing(tmp_path):
    process = start(tmp_path, [{"seed": 0}, {"seed": 1}], flags=["--dry_run"])
    code, output = harness.finish(process)
    assert code == 0 and "--config.seed=1" in output and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("points", [[], {}, [1], [{}], [{1: 2}], None])
def test_what_is_no_list_of_overrides_is_refused(tmp_path, points):
    with pytest.raises(engine.LaunchError, match="must return a list of overrides"):
        sweep.read(points_file(tmp_path, points))


def test_a_file_that_raises(tmp_path):
    (tmp_path / "sweep.py").write_text("1 / 0")
    with pytest.raises(engine.LaunchError, match="raised ZeroDivisionError"):
        sweep.read(tmp_path / "sweep.py")
