"""Tests of local sweeps: a job for each point, a table, and restarts that run only the
points that have not ended.
"""

import json
import shutil
import signal

import pytest

from launch import engine, sweep
from tests import pace
from tests.launch import harness

# ml_collections emits this warning when it reads the config of a job.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


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


def test_a_sweep_runs_each_point_once_and_shows_the_results(tmp_path):
    points = [
        {"optimizer.learning_rate": rate, "precision": "p=f32,c=f16,o=f32"}
        for rate in (0.1, 0.01)
    ]
    code, output = harness.finish(start(tmp_path, points))
    assert code == 0, output
    lines = output.strip().splitlines()[-3:]
    assert lines[0].split()[:4] == [
        "run",
        "optimizer.learning_rate",
        "precision",
        "doing",
    ]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["000", "0.1", "p=f32,c=f16,o=f32", "done"],
        ["001", "0.01", "p=f32,c=f16,o=f32", "done"],
    ]
    config = json.loads((tmp_path / "runs" / "001" / "config.json").read_bytes())
    assert config["optimizer"]["learning_rate"] == 0.01
    overrides = json.loads((tmp_path / "runs" / "001.json").read_bytes())
    assert overrides == points[1]
    code, again = harness.finish(start(tmp_path, points))
    assert code == 0 and "2 of 2 jobs are done" in again and "started" not in again
    assert again.strip().splitlines()[-3:] == lines
    shown = harness.finish(harness.launch("status", tmp_path / "runs"))[1]
    assert shown.strip().splitlines() == lines


def test_a_point_that_is_not_finite_has_ended_but_is_not_done(tmp_path):
    points = [{"poisoned": ((0, 3),)}, {"poisoned": ()}]
    option = "--config.experiment=tests.toy.Poisoned"
    code, output = harness.finish(start(tmp_path, points, option))
    assert code == 3, output
    failed, done = output.strip().splitlines()[-2:]
    assert failed.split()[0] == "000" and "exit code 3" in failed
    assert done.split()[0] == "001" and "done" in done
    code, again = harness.finish(start(tmp_path, points, option))
    assert code == 3 and "1 of 2 jobs are done" in again and "started" not in again
    assert "not finite, and not run again while their results.json exist: " in again
    assert "failed: not finite" in again.strip().splitlines()[-2], again


def test_a_point_that_fails_does_not_stop_the_others(tmp_path):
    code, output = harness.finish(
        start(tmp_path, [{"batch_size": 7}, {"seed": 1}], parallel=1)
    )
    assert code == 1
    lines = output.splitlines()
    assert "runs-000: it ended with exit code 1: error: batch_size=7" in output
    assert "done" in lines[-1]
    table = {row["run"]: row["doing"] for row in sweep.rows(tmp_path / "runs")}
    assert table == {"000": "no run yet: see 000/launch.log", "001": "done"}
    assert lines[-2].split()[:4] == ["000", "7", "exit", "code"]
    assert "batch_size=7" in (tmp_path / "runs" / "000" / "launch.log").read_text()


@pytest.mark.sample(0.4)
def test_a_stopped_sweep_resumes(tmp_path):
    points = [{"seed": 0}, {"seed": 1}]
    log = tmp_path / "runs" / "000" / "launch.log"
    with pace.slow(tmp_path / "slow", 8) as variables:
        process = start(tmp_path, points, "--config.steps=100", parallel=1, **variables)
        harness.wait_until(lambda: log.exists() and "step   8/100" in log.read_text())
        process.send_signal(signal.SIGTERM)
        code, output = harness.finish(process)
    assert code == 42 and not (tmp_path / "runs" / "001").exists(), output
    assert output.strip().splitlines()[-1].split() == ["001", "1", "not", "started"]
    code, output = harness.finish(
        start(tmp_path, points, "--config.steps=100", parallel=2)
    )
    assert code == 0 and "resumed from the checkpoint" in log.read_text(), output


def test_another_sweep_cannot_use_the_directory(tmp_path):
    files(tmp_path / "runs", [{"seed": 0}, {"seed": 1}])
    sweep.check(tmp_path / "runs", [{"seed": 0}, {"seed": 1}])
    for other in ([{"seed": 0}, {"seed": 2}], [{"seed": 0}], [{"seed": 0.0}]):
        with pytest.raises(engine.LaunchError, match="holds another sweep, which diff"):
            sweep.check(tmp_path / "runs", other)


def files(directory, points):
    """Writes the files of a sweep; returns its jobs."""
    command = (*harness.TOY, f"--workdir={directory}")
    jobs = sweep.jobs(engine.Job("s", command), points)
    engine.Plan([], sweep.files(directory, jobs)).write()
    return jobs


class Sweep:
    """A sweep without processes. Its runs exist only as the files that an ended run
    leaves.
    """

    def __init__(self, directory):
        self.directory = directory
        self.jobs = files(directory, [{"seed": 0}, {"seed": 1}])

    def end(self, index, run, results=(), **changed):
        """Writes the files of an ended run into the directory of a point, in place of
        the files there.
        """
        job = self.jobs[index]
        job.workdir.mkdir(parents=True, exist_ok=True)
        config = {
            **sweep.requested_config(job),
            **changed,
            "_run": {"id": run, "fingerprint": "f"},
        }
        (job.workdir / "config.json").write_text(json.dumps(config))
        found = {"step": 12, "finite": True, "eval": {"error": 0.5}, "run": run}
        found.update(results)
        (job.workdir / "results.json").write_text(json.dumps(found))

    def doing(self):
        return [row["doing"] for row in sweep.rows(self.directory)]


@pytest.fixture
def ended(tmp_path):
    """A sweep whose runs 'a' and 'b' have ended."""
    ended = Sweep(tmp_path / "runs")
    for index, run in enumerate("ab"):
        ended.end(index, run)
    return ended


def test_a_run_has_ended_if_its_results_are_those_of_the_requested_config(ended):
    assert ended.doing() == ["done", "done"]
    assert all(map(sweep.has_ended, ended.jobs))
    for results in ({"step": 7}, {"run": "c"}):
        ended.end(1, "b", results)
        assert not sweep.has_ended(ended.jobs[1]), results
    assert ended.doing() == ["done", "not started"]
    # It was resumed with more steps, and killed before it made them.
    ended.end(1, "b", steps=20)
    assert not sweep.has_ended(ended.jobs[1])
    ended.end(1, "b", seed=7)
    assert not sweep.has_ended(ended.jobs[1])
    for results in ({"step": 7, "ended": "no better"}, {"step": 7, "finite": False}):
        ended.end(1, "b", results)
        assert sweep.has_ended(ended.jobs[1]), results


def test_a_missing_run_is_started_again(ended):
    shutil.rmtree(ended.jobs[0].workdir)
    assert ended.doing() == ["not started", "done"]
    assert not sweep.has_ended(ended.jobs[0])


def test_a_run_of_another_config_is_refused_by_the_run_itself(tmp_path):
    points = [{"seed": 0}, {"seed": 1}]
    other = [*harness.TOY, f"--workdir={tmp_path / 'runs' / '001'}", "--config.seed=5"]
    code, output = harness.finish(harness.launch(command=other))
    assert code == 0, output
    code, output = harness.finish(start(tmp_path, points))
    assert code == 1, output
    assert "runs/001 holds a run with another config (seed: 5 -> 1)" in output
    assert [row.split()[2] for row in output.strip().splitlines()[-2:]] == [
        "done",
        "exit",
    ]


def test_the_directory_of_a_run_is_not_used(tmp_path):
    config = json.dumps({"_run": {"id": "abcd", "fingerprint": ""}})
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(
        engine.LaunchError, match=f"{tmp_path} holds run abcd.*another directory"
    ):
        sweep.check(tmp_path, [{"seed": 0}])


def test_a_damaged_config_is_left_for_its_run_to_report(ended):
    (ended.jobs[1].workdir / "config.json").write_text("{")
    assert not sweep.has_ended(ended.jobs[1])
    assert (
        ended.doing()[1].startswith("not known: ")
        and "cannot be read" in ended.doing()[1]
    )


def test_a_dry_run_of_a_sweep_writes_nothing(tmp_path):
    process = start(tmp_path, [{"seed": 0}, {"seed": 1}], flags=["--dry_run"])
    code, output = harness.finish(process)
    assert code == 0 and not (tmp_path / "runs").exists()
    assert f'# {tmp_path}/runs/001.json\n{{"seed": 1}}\n' in output
    assert f"--config_overrides={tmp_path}/runs/001.json" in output


@pytest.mark.parametrize("points", [[], {}, [1], [{}], [{1: 2}], None])
def test_a_malformed_list_of_overrides_is_refused(tmp_path, points):
    with pytest.raises(engine.LaunchError, match="must return a list of overrides"):
        sweep.read(points_file(tmp_path, points))


def test_a_sweep_file_that_raises_is_reported(tmp_path):
    (tmp_path / "sweep.py").write_text("1 / 0")
    with pytest.raises(engine.LaunchError, match="raised ZeroDivisionError"):
        sweep.read(tmp_path / "sweep.py")
