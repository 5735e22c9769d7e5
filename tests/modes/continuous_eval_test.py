"""Tests of the job that evaluates the checkpoints of a run, beside it or after it."""

import functools
import json
import pathlib
import shutil

import pytest

from tests import forks, rows, toy
from tests.checkpoint import harness
from xshard import checkpoint, loop
from xshard.checkpoint import __main__ as tool
from xshard.files import workdir
from xshard.metrics import terminal, writers
from xshard.modes import continuous_eval
from xshard.pod import exit_codes, request
from xshard.run import evaluation

pytestmark = pytest.mark.usefixtures("shared_programs")


def make_config(**options):
    config = toy.get_config()
    config.checkpoint.update(
        {"every_steps": 3, "keep_last": 2, "keep_best": 1, **options}
    )
    return config.lock()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    assert loop.run(make_config(keep_last=10), str(directory), "") == 0
    return directory


@pytest.fixture
def run(finished, tmp_path):
    """A finished run with four checkpoints; the last is the best."""
    return pathlib.Path(shutil.copytree(finished, tmp_path / "run"))


def logged_errors(directory):
    """Returns the errors that the job logged, by step."""
    return {row["step"]: row["eval/error"] for row in rows.read(directory / "eval")}


def added(directory):
    """Returns the errors that the checkpoints have, by step."""
    entries = checkpoint.read_catalog(directory / "checkpoints").entries
    return {entry.step: entry.metrics["error"] for entry in entries if entry.metrics}


def test_the_job_ends_with_a_run_that_is_not_finite(tmp_path, capsys):
    config = toy.get_config()
    config.update({"experiment": "tests.toy.Poisoned", "poisoned": ((0, 5),)})
    config.checkpoint.every_steps = 2
    assert loop.run(config.lock(), str(tmp_path), "") == exit_codes.NONFINITE
    assert continuous_eval.run(config, str(tmp_path), "", None) == 0
    assert list(logged_errors(tmp_path)) == [2, 4]
    out = capsys.readouterr().out
    assert "the run has ended, since it is not finite: step 5" in out


def test_the_job_computes_the_same_error_as_the_run(tmp_path, capsys):
    config = make_config(keep_last=10)
    assert loop.run(config, str(tmp_path), "") == 0
    assert continuous_eval.run(config, str(tmp_path), "", None) == 0
    errors = logged_errors(tmp_path)
    assert list(errors) == [3, 6, 9, 12]
    assert len((tmp_path / "eval/metrics.csv").read_text().splitlines()) == 5
    results = json.loads((tmp_path / "results.json").read_text())
    assert errors[12] == results["eval"]["error"]
    assert added(tmp_path) == errors
    # A second job evaluates nothing again.
    capsys.readouterr()
    assert continuous_eval.run(config, str(tmp_path), "", None) == 0
    assert "evaluation" not in capsys.readouterr().out
    assert logged_errors(tmp_path) == errors


def test_the_job_waits_for_a_run_and_continues_with_it(tmp_path, capsys):
    ends = iter([None, 6, 12])

    def sleep(seconds):
        end = next(ends)
        if end is not None:
            config = make_config()
            with config.unlocked():
                config.steps = end
            assert loop.run(config, str(tmp_path), "") == 0

    job = continuous_eval.ContinuousEvaluator(make_config(), str(tmp_path), sleep=sleep)
    assert job.follow() is None
    out = capsys.readouterr().out
    assert out.count("waiting for a run in") == 1
    told = "the run ends at step 6, which is evaluated; waiting for step 12"
    assert out.count(told) == 1
    errors = logged_errors(tmp_path)
    assert list(errors) == [3, 6, 9, 12]
    assert added(tmp_path)[12] == errors[12]


def test_the_best_by_the_job_s_metrics_are_kept_whatever_becomes_of_one(
    tmp_path, monkeypatch
):
    def evaluate(values):
        by_batch = lambda self, state: iter([{"error": values[int(state.step)]}])
        monkeypatch.setattr(evaluation.Evaluation, "by_batch", by_batch)

    def train_and_evaluate(last_step):
        config = make_config(keep_last=1)
        with config.unlocked():
            config.steps = last_step
        # The run's own evaluation, of its last step, is worse than any of the job's.
        evaluate({last_step: 1.0})
        assert loop.run(config, str(tmp_path), "") == 0
        evaluate({3: 0.1, 6: 0.2, 9: 0.4, 12: 0.3})
        continuous_eval.run(config, str(tmp_path), "", None)

    for last_step in (3, 6, 9):
        train_and_evaluate(last_step)
    # The run deletes a checkpoint as it commits the next one.
    assert added(tmp_path) == {3: 0.1, 9: 0.4}
    assert tool.main(["rm", str(tmp_path), "3"]) == 0
    train_and_evaluate(12)
    assert added(tmp_path) == {9: 0.4, 12: 0.3}


def test_a_checkpoint_that_is_deleted_during_its_evaluation(run, monkeypatch, capsys):
    by_batch = evaluation.Evaluation.by_batch

    def deleting(self, state):
        if state.step == 6:
            assert tool.main(["rm", str(run), "6"]) == 0
        return by_batch(self, state)

    monkeypatch.setattr(evaluation.Evaluation, "by_batch", deleting)
    assert continuous_eval.run(make_config(keep_last=10), str(run), "", None) == 0
    assert list(logged_errors(run)) == [3, 6, 9, 12]
    assert list(added(run)) == [3, 9, 12]
    assert "step 6 was deleted during its evaluation; a" in capsys.readouterr().out
    # Nothing is left of it that could be taken for a save.
    assert len(list((run / "checkpoints").glob("step_*"))) == 3


def test_a_run_makes_its_own_evaluations_whatever_the_job_has_added(finished, tmp_path):
    config = make_config(keep_last=10)
    with config.unlocked():
        config.steps_per_dispatch = 1
    # It stops within the evaluation of step 6.
    watch = rows.ScriptedWatch(7, request.STOP)
    assert loop.run(config, str(tmp_path), "", None, watch) == 42
    first = loop.Run(config, str(tmp_path))
    assert not first.checkpoints.manager.metadata(6)["evaluated"]

    def die(seconds):
        raise rows.Killed

    job = continuous_eval.ContinuousEvaluator(config, str(tmp_path), sleep=die)
    with pytest.raises(rows.Killed):
        job.follow()
    assert list(added(tmp_path)) == [3, 6]
    assert loop.run(config, str(tmp_path), "") == 0
    assert rows.same_bits(tmp_path) == rows.same_bits(finished)


def test_a_job_that_is_killed_repeats_at_most_one_evaluation(run, monkeypatch):
    config = make_config(keep_last=10)

    def die(*_):
        raise rows.Killed

    # Before the first writer has the row, and before the second one has.
    for writer in (writers.JsonLines, writers.Csv):
        with monkeypatch.context() as patch:
            patch.setattr(writer, "write", die)
            with pytest.raises(rows.Killed):
                continuous_eval.run(config, str(run), "", None)
        assert 3 in added(run)
    assert list(logged_errors(run)) == [3]
    assert continuous_eval.run(config, str(run), "", None) == 0
    assert list(logged_errors(run)) == [3, 6, 9, 12]
    assert added(run) == logged_errors(run)


def test_a_quiet_job_prints_only_its_end(run, capsys):
    show = terminal.Show.QUIET
    assert continuous_eval.run(make_config(keep_last=10), str(run), "", None, show) == 0
    out = capsys.readouterr().out
    assert out.startswith("all checkpoints to step 12 are evaluated")
    assert len(logged_errors(run)) == 4


def test_the_job_reports_the_last_evaluated_step(run, capsys):
    config = make_config(keep_last=10)
    with config.unlocked():
        config.steps = 5
    assert continuous_eval.run(config, str(run), "", None) == 0
    last = max(logged_errors(run))
    assert f"all checkpoints to step {last} are evaluated" in capsys.readouterr().out
    assert last != 5


def test_a_damaged_checkpoint_is_skipped(run, capsys):
    config = make_config(keep_last=10)
    (folder,) = (run / "checkpoints").glob("*6.*")
    (folder / "meta.json").write_bytes(b"{}")
    continuous_eval.run(config, str(run), "", None)
    assert list(logged_errors(run)) == [3, 9, 12]
    assert "step 6 is skipped" in capsys.readouterr().out


class Watch:
    """A watch that requests a stop at one of its polls."""

    def __init__(self, at):
        self._at = at
        self.polls = 0

    def poll(self):
        self.polls += 1
        return (
            request.Request(request.STOP, "told to", 42)
            if self.polls == self._at
            else None
        )


def test_an_evaluation_that_a_stop_interrupted_is_repeated(run):
    config = make_config(keep_last=10)
    # Each evaluation has two batches. This poll is in the middle of the second
    # evaluation.
    assert continuous_eval.run(config, str(run), "", Watch(5)) == 42
    assert list(logged_errors(run)) == [3]
    assert continuous_eval.run(config, str(run), "", None) == 0
    assert list(logged_errors(run)) == [3, 6, 9, 12]


def test_another_config_metric_or_model_is_refused(run, tmp_path):
    other = make_config()
    with other.unlocked():
        other.seed = 1
    with pytest.raises(
        ValueError, match=r"seed: 0 -> 1.* with --init_select its slots\.$"
    ):
        continuous_eval.run(other, str(run), "", None)
    # A refused config leaves nothing behind that would make the right one be refused as
    # well.
    assert not (run / "eval").exists()
    with pytest.raises(
        ValueError, match="best_metric='nothing' must be a metric of the evaluation"
    ):
        continuous_eval.run(make_config(best_metric="nothing"), str(run), "", None)
    wide = make_config(directory=str(run / "checkpoints"))
    with wide.unlocked():
        wide.experiment = "tests.toy.Wide"
    identity = workdir.Workdir(run).identity()
    with workdir.Workdir(tmp_path / "wide").opened(wide, identity):
        pass
    with pytest.raises(
        checkpoint.CheckpointError, match="saved with another model or optimizer"
    ):
        continuous_eval.run(wide, str(tmp_path / "wide"), "", None)


@pytest.mark.parametrize("is_removed", [False, True])
def test_the_job_ends_when_another_run_takes_the_place_of_its_run(run, is_removed):
    def replace(seconds):
        old = workdir.Workdir(run).identity().id
        if is_removed:
            shutil.rmtree(run)
        else:
            assert loop.run(make_config(), str(run), "", set_aside=old) == 0
        waits.append(old)

    config = make_config()
    with config.unlocked():
        # More steps than the run has, so that the job waits.
        config.steps = 24
    waits = []
    job = continuous_eval.ContinuousEvaluator(config, str(run), sleep=replace)
    with pytest.raises(checkpoint.CheckpointError, match="instead of run") as raised:
        job.follow()
    assert waits[0] in str(raised.value) and not (run / "eval").exists()


def test_the_job_follows_a_run_in_real_processes(tmp_path):
    """The job starts before the run and ends after it."""
    start = functools.partial(
        forks.program,
        "xshard.main",
        "--config=tests/toy.py",
        f"--workdir={tmp_path}",
        env=harness.environment(),
    )
    with start("--mode=eval") as job:
        first = job.stdout.readline()
        assert first == f"waiting for a run in {tmp_path}: it has no config.json yet\n"
        with start("--cpu_devices=2") as run:
            out = run.communicate()[0]
            assert run.returncode == 0, out
        out = job.communicate()[0]
        assert job.returncode == 0, out
    assert 12 in logged_errors(tmp_path)
    assert "all checkpoints to step 12 are evaluated" in out
