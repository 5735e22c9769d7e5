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
    begun = json.loads((tmp_path / "runs" / "sweep_runs.json").read_bytes())
    assert begun.keys() == {"000", "001"} and begun["001"] == config["_run"]["id"]
    code, again = harness.finish(start(tmp_path, points))
    assert code == 0 and "2 of 2 jobs are done" in again and "started" not in again
    assert again.strip().splitlines()[-3:] == lines
    shown = harness.finish(harness.launch("status", tmp_path / "runs"))[1]
    assert shown.strip().splitlines() == lines


def test_a_point_that_is_not_finite_has_ended_but_is_not_done(tmp_path):
    points = [{"poisoned": "((0,3),)"}, {"poisoned": "()"}]
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


def test_another_sweep_cannot_claim_the_directory(tmp_path):
    for _ in range(2):
        sweep.claim(tmp_path / "runs", [{"seed": 0}, {"seed": 1}], [])
    with pytest.raises(engine.LaunchError, match="holds another sweep"):
        sweep.claim(tmp_path / "runs", [{"seed": 0}, {"seed": 2}], [])


POINTS = [{"seed": 0}, {"seed": 1}]


class Sweep:
    """A sweep without processes. Its runs exist only as the files that an ended run
    leaves.
    """

    def __init__(self, directory):
        self.directory = directory
        command = (*harness.TOY, f"--workdir={directory}")
        self.jobs = sweep.jobs(engine.Job("s", command), POINTS)

    def claim(self):
        sweep.claim(self.directory, POINTS, self.jobs)

    def end(self, index, run, **changed):
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
        results = {"step": 12, "finite": True, "eval": {"error": 0.5}, "run": run}
        (job.workdir / "results.json").write_text(json.dumps(results))

    def doing(self):
        return [row["doing"] for row in sweep.rows(self.directory)]

    def recorded(self):
        return json.loads((self.directory / "sweep_runs.json").read_bytes())


@pytest.fixture
def ended(tmp_path):
    """A sweep that started the runs 'a' and 'b', both of which have ended."""
    ended = Sweep(tmp_path / "runs")
    ended.claim()
    for index, run in enumerate("ab"):
        ended.end(index, run)
        sweep._record_run(ended.jobs[index])
    return ended


def test_a_run_started_anew_is_adopted_if_its_config_is_the_requested_one(
    ended, capsys
):
    assert ended.recorded() == {"000": "a", "001": "b"} and ended.doing() == [
        "done",
        "done",
    ]
    ended.end(1, "c")
    # Until the sweep is started again, it does not know the new run.
    assert ended.doing() == [
        "done",
        "not known: it holds run c, but the sweep started run b",
    ]
    ended.claim()
    printed = capsys.readouterr().out
    assert (
        "s-001: adopts run c, which this sweep did not start (it started run b)"
        in printed
    )
    assert "s-000" not in printed
    assert ended.recorded() == {"000": "a", "001": "c"} and ended.doing() == [
        "done",
        "done",
    ]
    ended.claim()
    assert capsys.readouterr().out == ""


def test_another_run_with_another_config_is_refused_by_name(ended):
    ended.end(1, "c", seed=7, steps=3)
    with pytest.raises(engine.LaunchError) as e:
        ended.claim()
    assert "runs/001 holds run c, which this sweep did not start (it started" in str(
        e.value
    )
    assert "(seed: 7 instead of 1; steps: 3 instead of 12)" in str(e.value)
    assert ended.recorded() == {"000": "a", "001": "b"}
    assert ended.doing() == [
        "done",
        "not known: it holds run c, but the sweep started run b",
    ]


def test_the_sweeps_own_run_may_resume_with_another_config(ended, capsys):
    ended.end(1, "b", steps=3)
    ended.claim()
    assert capsys.readouterr().out == "" and not sweep.has_ended(ended.jobs[1])


def test_a_missing_run_is_started_again(ended, capsys):
    shutil.rmtree(ended.jobs[0].workdir)
    assert ended.doing() == [
        "not known: it holds no run, but the sweep started run a",
        "done",
    ]
    ended.claim()
    assert (
        "s-000: run a, which this sweep started, no longer exists"
        in capsys.readouterr().out
    )
    assert ended.recorded() == {"001": "b"} and ended.doing() == ["not started", "done"]
    assert not sweep.has_ended(ended.jobs[0])


def test_a_run_from_before_the_sweep_is_refused_or_adopted(tmp_path, capsys):
    new = Sweep(tmp_path / "runs")
    new.end(0, "x", seed=5)
    with pytest.raises(
        engine.LaunchError,
        match=r"run x, .*\(it was there before\).*seed: 5 instead of 0",
    ):
        new.claim()
    assert not (tmp_path / "runs" / "sweep.json").exists()
    new.end(0, "x")
    new.claim()
    assert (
        "s-000: adopts run x, which this sweep did not start" in capsys.readouterr().out
    )
    assert new.recorded() == {"000": "x"}


def test_the_directory_of_a_run_is_not_claimed(tmp_path):
    toy_run = engine.Job("toy", ("python", f"--workdir={tmp_path}"))
    config = json.dumps({"_run": {"id": "abcd", "fingerprint": ""}})
    (tmp_path / "config.json").write_text(config)
    points = [{"seed": 0}]
    with pytest.raises(
        engine.LaunchError, match=f"{tmp_path} holds run abcd.*another directory"
    ):
        sweep.claim(tmp_path, points, sweep.jobs(toy_run, points))
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_run_without_a_record_belongs_to_the_sweep(ended, capsys):
    # A sweep on a cluster, or one that lost its launcher, leaves runs without a record.
    (ended.directory / "sweep_runs.json").unlink()
    ended.end(1, "b", steps=3)
    ended.claim()
    assert capsys.readouterr().out == "" and ended.recorded() == {
        "000": "a",
        "001": "b",
    }


def test_a_damaged_config_is_left_for_its_run_to_report(ended):
    (ended.jobs[1].workdir / "config.json").write_text("{")
    ended.claim()
    assert ended.recorded() == {"000": "a", "001": "b"} and not sweep.has_ended(
        ended.jobs[1]
    )
    assert (
        ended.doing()[1].startswith("not known: ")
        and "cannot be read" in ended.doing()[1]
    )


def test_a_dry_run_of_a_sweep_writes_nothing(tmp_path):
    process = start(tmp_path, [{"seed": 0}, {"seed": 1}], flags=["--dry_run"])
    code, output = harness.finish(process)
    assert (
        code == 0 and "--config.seed=1" in output and not (tmp_path / "runs").exists()
    )


@pytest.mark.parametrize("points", [[], {}, [1], [{}], [{1: 2}], None])
def test_a_malformed_list_of_overrides_is_refused(tmp_path, points):
    with pytest.raises(engine.LaunchError, match="must return a list of overrides"):
        sweep.read(points_file(tmp_path, points))


def test_a_sweep_file_that_raises_is_reported(tmp_path):
    (tmp_path / "sweep.py").write_text("1 / 0")
    with pytest.raises(engine.LaunchError, match="raised ZeroDivisionError"):
        sweep.read(tmp_path / "sweep.py")


def test_runs_that_trained_the_same_parameters_are_marked(ended):
    def log(index, *prints):
        rows = [{"step": i, "fingerprint/params": x} for i, x in enumerate(prints)]
        lines = [json.dumps(row) for row in (*rows, {"step": 9, "eval/error": 0.5})]
        # The last line may be cut off.
        text = "\n".join([*lines, '{"step": 1'])
        (ended.jobs[index].workdir / "metrics.jsonl").write_text(text)

    log(0, "a", "b")
    log(1, "a", "c")
    assert ended.doing() == ["done", "done"]
    log(1, "x", "b")
    assert ended.doing() == ["done", "done; same parameters as 000"]
    # With several groups, each has a fingerprint.
    log(0, ["a", "b"])
    log(1, ["a", "c"])
    assert ended.doing() == ["done", "done"]
    log(1, ["a", "b"])
    assert ended.doing() == ["done", "done; same parameters as 000"]
