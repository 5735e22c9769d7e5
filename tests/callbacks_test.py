"""Tests of callbacks: what they receive, and that a run that one ends stays ended."""

import json
import math

import pytest

import xshard
from launch import engine, sweep
from tests import rows, stopping, toy
from xshard import callbacks, errors, loop
from xshard.metrics import log as log_lib
from xshard.metrics import rows as rows_lib
from xshard.metrics import writers
from xshard.modes import continuous_eval
from xshard.report import runs

pytestmark = pytest.mark.usefixtures("shared_programs")

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


class Wrong(toy.Toy):
    """Has a callback that returns True, which is not a reason."""

    def callbacks(self):
        return [lambda history: True]


class None_(toy.Toy):  # noqa: N801
    """Has a `callbacks` method that does not return a list."""

    def callbacks(self):
        return None


class Broken(toy.Toy):
    """Has a callback that reads a misspelled metric."""

    def callbacks(self):
        return [lambda history: history[-1]["eror"]]


def make_config(name="Stopping", **changes):
    config = toy.get_config()
    module = "stopping" if hasattr(stopping, name) else "callbacks_test"
    config.experiment = f"tests.{module}.{name}"
    config.metric = changes.pop("metric", "error")
    config.update({"steps": 20, "eval_every_steps": 2, "log_every_steps": 1})
    config.update({"writers": ("jsonl",), **changes})
    config.checkpoint.every_steps = 3
    return config.lock()


def history(*values, name="loss"):
    return [
        {"step": 10 * number, name: value} for number, value in enumerate(values, 1)
    ]


@pytest.mark.parametrize(
    ("options", "values", "end"),
    [
        ({}, [3.0, 2.0, 1.0], None),
        ({}, [3.0, 2.0, 2.5], None),
        (
            {},
            [3.0, 2.0, 2.5, 2.0],
            "loss has not improved in 2 evaluations: 2 at step 20",
        ),
        ({"mode": "max"}, [3.0, 4.0, 3.5, 5.0], None),
        ({"mode": "max"}, [3.0, 2.0, 1.0], "3 at step 10"),
        # Gains count, alone or added up, only once they exceed min_delta.
        ({"min_delta": 0.5}, [3.0, 2.8, 2.6], "3 at step 10"),
        ({"min_delta": 0.5}, [3.0, 2.8, 2.4, 2.3], None),
        # A NaN is never an improvement, and the first number after it always is.
        ({}, [math.nan, 3.0, math.nan], None),
        ({}, [1.0, math.nan, math.nan], "1 at step 10"),
        ({}, [math.nan, math.nan], "nan at step 0"),
    ],
)
def test_early_stopping(options, values, end):
    reason = xshard.early_stopping("loss", patience=2, **options)(history(*values))
    assert reason == end or (end and reason.endswith(end))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"metric": ""}, "metric='' must be"),
        ({"patience": 0}, "patience=0 must be an integer of at least 1"),
        ({"mode": "least"}, "mode='least' must be 'min' or 'max'"),
        ({"min_delta": -1.0}, "min_delta=-1.0 must be"),
    ],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(
        errors.UserError, match=match.replace("metric='' must", "metric=''; it must")
    ):
        xshard.early_stopping(**{"metric": "loss", **arguments})


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        (
            "Stopping",
            {"metric": "loss"},
            r"early_stopping\('loss'\) of Stopping.callbacks .* evaluation: error",
        ),
        (
            "Stopping",
            {"group_assignment": HALVES},
            "has one for each group.*'ensemble/error'",
        ),
        (
            "None_",
            {},
            "None_.callbacks .* returned None. It must return a list of functions",
        ),
    ],
)
def test_invalid_callbacks_are_refused_before_a_run(tmp_path, name, changes, match):
    with pytest.raises(errors.UserError, match=match):
        loop.Run(make_config(name, **changes), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_wrong_return_value_and_a_bug_in_a_callback(tmp_path):
    with pytest.raises(
        errors.UserError, match="lambda.* returned True. It must return None"
    ):
        loop.run(make_config("Wrong"), str(tmp_path / "wrong"), "")
    with pytest.raises(KeyError, match="eror"):
        loop.run(make_config("Broken"), str(tmp_path / "broken"), "")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that a callback ended before its last step."""
    directory = tmp_path_factory.mktemp("whole")
    stopping.Stopping.seen.clear()
    assert loop.run(make_config(), str(directory), "again") == 0
    return directory


def evaluations(directory):
    evaluated = [row for row in rows.read(directory) if "eval/error" in row]
    return [{"step": row["step"], "error": row["eval/error"]} for row in evaluated]


def test_a_run_that_a_callback_ended_is_done(whole, capsys):
    results = rows.results(whole)
    step = results["step"]
    # Each call receives all evaluations so far: one more than the call before.
    assert stopping.Stopping.seen == [
        evaluations(whole)[:count] for count in range(1, step // 2 + 1)
    ]
    assert step < 20
    assert results["finite"]
    assert "has not improved in 2" in results["ended"]
    assert results["eval"]["error"] == evaluations(whole)[-1]["error"]
    assert loop.Run(make_config(), str(whole)).checkpoints.manager.latest_step() == step
    # The same command again reports the end and does not train, and neither does a
    # command with more steps.
    logged = rows.read(whole)
    for config in (make_config(), make_config(steps=40)):
        capsys.readouterr()
        assert loop.run(config, str(whole), "again") == 0
        out = capsys.readouterr().out
        assert (
            f"nothing to train: the run has ended at step {step}: error has not" in out
        )
        assert f"ended at step {step}: {results['ended']}" in out and "again" not in out
        assert rows.read(whole) == logged and rows.results(whole) == results
    assert loop.run(make_config(), str(whole), "again") == 0


# ml_collections reads a config file with a deprecated function.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_other_programs_treat_an_ended_run_as_done(whole, tmp_path, capsys):
    step = rows.results(whole)["step"]
    (seen,) = runs.read([str(whole)])
    assert seen.state == "done" and "has not improved" in seen.doing
    assert continuous_eval.run(make_config(), str(whole), "", None) == 0
    assert f"the run has ended at step {step}" in capsys.readouterr().out
    assert rows.read(whole / "eval")[-1]["step"] == step
    content = json.loads((whole / "config.json").read_text())
    content.pop("_run")
    (tmp_path / "config.py").write_text(
        "import json, ml_collections\n"
        f"get_config = lambda: ml_collections.ConfigDict({content!r})\n"
    )
    program = ("python", "-m", "xshard.main")
    command = (*program, f"--config={tmp_path}/config.py", f"--workdir={whole}")
    job = engine.Job("toy", command)
    assert sweep.has_ended(job)


INSTANTS = [
    # The run dies right after each of these: the row is written, the callback decides,
    # the checkpoint is saved, the results are written.
    (log_lib.Log, "write_evaluation"),
    (callbacks.Evaluations, "add"),
    (loop.Run, "_save"),
    (loop.results_lib, "write"),
]


@pytest.mark.parametrize(("owner", "name"), INSTANTS, ids=str)
def test_a_killed_run_ends_at_the_same_step(tmp_path, whole, owner, name, monkeypatch):
    last = rows.results(whole)["step"]
    real = getattr(owner, name)

    def run_and_die(self, *args, **kwargs):
        returned = real(self, *args, **kwargs)
        step = args[0]["step"] if name == "write" else args[0]
        if step == last:
            raise rows.Killed
        return returned

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, run_and_die)
        with pytest.raises(rows.Killed):
            loop.run(make_config(), str(tmp_path), "")
    assert loop.run(make_config(), str(tmp_path), "") == 0
    assert rows.same_bits(tmp_path) == rows.same_bits(whole)
    assert rows.results(tmp_path) == rows.results(whole)


def test_with_groups_a_callback_may_use_the_ensemble_metric(tmp_path):
    config = make_config(group_assignment=HALVES, metric="ensemble/error")
    stopping.Stopping.seen.clear()
    assert loop.run(config, str(tmp_path), "") == 0
    assert "ensemble/error has not improved" in rows.results(tmp_path)["ended"]
    assert all(len(row["error"]) == 2 for row in stopping.Stopping.seen[-1])


def test_the_history_read_from_rows_equals_the_live_one(tmp_path):
    """A row stores values that are not finite as NaN, so the live history shows NaN."""
    path = tmp_path / "metrics.jsonl"
    logged_metrics = [
        {"a": math.inf, "b": [1.0, -math.inf]},
        {"a": math.nan, "b": [0.1, 2.0]},
    ]
    seen = []
    method = lambda: [lambda history: seen.append(list(history))]
    live = callbacks.Evaluations(method, None, lambda decide: decide())
    lines = writers.JsonLines(path, 0)
    for step, metrics in enumerate(logged_metrics, 1):
        live.add(step, metrics)
        lines.write(log_lib.evaluation(step, metrics)[0])
    replayed = callbacks.Evaluations(method, None, lambda decide: decide())
    replayed.begin(
        lambda: [
            {k: x for k, x in row.items() if k != "time"}
            for row in rows_lib.evaluations(path, 2)
        ]
    )
    assert repr(seen[-1]) == repr(seen[-2])
    assert "nan" in repr(seen[-1])
    assert "inf" not in repr(seen[-1])
    replayed.begin(lambda: rows_lib.evaluations(path, 1))
    assert [row["step"] for row in seen[-1]] == [1]
