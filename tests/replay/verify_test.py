"""Tests that --verify_resume recognizes experiments that resume to the same bits, and
names why others do not.

The runs are real processes, one of which is killed.
"""

import pathlib
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from tests import forks
from xshard import errors
from xshard.replay import __main__ as program
from xshard.replay import comparison, replayer, verify

FLAGS = ("--config=tests/impure.py", "--stop_after=0.001", "--config.steps=999")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Sets the variables that child processes need to find the same packages."""
    monkeypatch.setenv("PYTHONPATH", forks.python_path())
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def verified(capsys, *flags):
    """Verifies a resume after 6 steps; returns the exit code and the standard output."""
    code = program.main(["--verify_resume=6", *FLAGS, *flags])
    return code, capsys.readouterr().out


def test_a_pure_experiment_resumes_to_the_same_bits(tmp_path, capsys):
    code, output = verified(
        capsys, f"--workdir={tmp_path / 'mine'}", "--config.micro_batches", "2"
    )
    assert code == 0 and len(output.splitlines()) == 1
    assert "killed at step 4 and resumed from step 2; 9 rows, 5 arrays" in output
    assert not (tmp_path / "mine").exists()


@pytest.mark.sample(0.4)
def test_on_other_devices_values_agree_within_the_tolerance(capsys):
    flags = (
        "--config.experiment=tests.impure.Rough",
        "--cpu_devices=8",
        "--config.batch_size=32",
    )
    places = "--verify_devices=4", "--verify_processes=2", "--verify_tolerance=1e-5"
    code, output = verified(capsys, *flags, *places)
    assert code == 0 and len(output.splitlines()) == 1, output
    assert output.startswith(
        "the same within 1e-05: 6 undisturbed steps, and 6 killed at step 4 and"
    )
    assert (
        "from step 2 on 4 devices of 2 processes; 9 rows, 7 arrays (the largest difference in an array is"
        in output
    )
    # The bits differ.
    assert 0 < float(re.search(r"in an array is (\S+) of its", output)[1]) < 1e-5


@pytest.mark.sample(0.4)
def test_a_dependence_on_the_number_of_devices_is_named(capsys):
    flags = (
        "--config.experiment=tests.impure.Drawing",
        "--cpu_devices=8",
        "--verify_devices=2",
    )
    code, output = verified(capsys, *flags)
    assert (
        code == program.NOT_REPRODUCED
        and "not the same within 0.001: 6 undisturbed steps" in output
    )
    # The restored state is the same, so the first difference is in a value that was
    # drawn later.
    assert re.search(
        r"^row of step +3, (loss|gradient_norm): ", output, re.MULTILINE
    ), output
    assert re.search(r"^array +params/linear/b$", output, re.MULTILINE), output
    assert (
        "kind         the number of devices: an undisturbed run on 2 devices" in output
    )
    shutil.rmtree(re.search(r"^runs +(\S+)$", output, re.MULTILINE)[1])


def test_the_gap_between_arrays_is_relative_to_the_largest_value():
    x = np.array([1.0, -4.0], np.float32)
    assert (
        comparison._gap(x, x.copy()) == 0
        and comparison._gap(x, x + np.float32([0.5, 0])) == 0.125
    )
    assert comparison._gap(np.float32([np.nan]), np.float32([np.nan])) == 0
    others = (
        x.astype(int),
        x[:1],
        np.float32([1, np.nan]),
        np.float32([1, np.inf]),
        x.astype("f8"),
    )
    assert [comparison._gap(x, other) for other in others] == [np.inf] * 5
    assert comparison._gap(np.int32([1]), np.int32([2])) == np.inf
    half = jnp.bfloat16([1.0, 4.0])
    assert (
        comparison._gap(np.asarray(half), np.asarray(half + jnp.bfloat16([0.5, 0])))
        == 0.125
    )


def test_rows_are_compared_within_a_tolerance():
    row = lambda step, loss, text="ab", **more: {
        "step": step, "loss": loss, "fingerprint/params": text, "skipped": 0, **more,
    }  # fmt: skip
    first = [row(1, 2.0), row(2, 1.0), row(3, 0.5, eval=[8.0, 0.0])]
    same = lambda second, restored=1: comparison.first_row(
        *comparison._without_near(first, second, 1e-2, restored)
    )
    # Gaps are relative to the column's largest value. Step 2 begins with the restored
    # state, whose fingerprint must be equal.
    assert (
        same([row(1, 2.0), row(2, 1.01), row(3, 0.519, "cd", eval=[8.0, 0.07])]) is None
    )
    assert same([row(1, 2.0), row(2, 1.0), row(3, 0.5, eval=[8.0, 0.09])])[:2] == (
        3,
        "eval",
    )
    assert same([row(1, 2.0), row(2, 1.0), row(3, 0.53, eval=[8.0, 0.0])])[:2] == (
        3,
        "loss",
    )
    assert same([first[0], row(2, 1.0, "cd"), first[2]])[:2] == (
        2,
        "fingerprint/params",
    )
    assert same([first[0], {**first[1], "skipped": 1}, first[2]])[:2] == (2, "skipped")
    assert same([row(1, 2.01), *first[1:]])[:2] == (1, "loss")
    assert same(first[:2])[0] == 3 and same([*first, row(4, 1.0)])[0] == 4
    assert comparison._near({"a": {"b": 1.0}, "c": "x"}, {"a": {"b": 1.001}, "c": "y"}, 1e-2) == {
        "a": {"b": 1.0}, "c": "y",
    }  # fmt: skip


KINDS = {
    # The loss or the batches differ in every process, so the resume is not the cause.
    "Clock": ("impure: undisturbed runs differ, too", 1),
    "Augmented": ("impure: undisturbed runs differ, too", 1),
    "HashOrder": (
        "hash order: undisturbed runs differ, too, but not with PYTHONHASHSEED=0",
        1,
    ),
    # Step 3 is the first step after the checkpoint of step 2.
    "Counting": (
        "the data: two undisturbed runs are equal; after the resume step 3 has",
        3,
    ),
    "Remembering": ("state outside of TrainState: two undisturbed runs are equal", 3),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", KINDS)
def test_an_impure_experiment_is_named_by_its_kind(name, capsys):
    kind, step = KINDS[name]
    code, output = verified(capsys, f"--config.experiment=tests.impure.{name}")
    assert code == program.NOT_REPRODUCED
    assert re.search(rf"^kind +{re.escape(kind)}", output, re.MULTILINE), output
    assert re.search(
        rf"^row of step +{step}, \w+: \S+ \| \S+$", output, re.MULTILINE
    ), output
    assert ("killed at step 4 and resumed from step 2" in output) == (step == 3)
    assert (
        re.search(r"^array +params/linear/b$", output, re.MULTILINE) is not None
    ) == (step == 3)
    assert ("has a different batch (undisturbed: examples " in output) == (
        name == "Counting"
    )
    # The runs are kept for inspection.
    folder = pathlib.Path(re.search(r"^runs +(\S+)$", output, re.MULTILINE)[1])
    assert {path.name for path in folder.iterdir()} > {
        "whole",
        "resumed",
        "resumed.log",
    }
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("row", "array", "kind"),
    [
        (
            (3, "fingerprint/params", "ab", "cd"),
            "params/w",
            "the state: two undisturbed",
        ),
        ((4, "eval/error", 1.0, 2.0), "", "the evaluation: two undisturbed"),
        (None, "", "the evaluation: two undisturbed"),
    ],
)
def test_kinds_that_need_no_batches_are_named(row, array, kind, monkeypatch):
    equal, differing = (
        comparison.Comparison(None),
        comparison.Comparison(row and replayer.Difference(*row), array),
    )
    monkeypatch.setattr(verify._Runs, "train", lambda *_, **__: None)
    monkeypatch.setattr(comparison, "compare", lambda *_: equal)
    runs = verify._Runs(FLAGS, 6)
    runs.folder.rmdir()
    assert runs.diagnose_resume(2, differing).startswith(kind)
    # If undisturbed runs differ, the kind is impurity instead.
    monkeypatch.setattr(
        comparison, "compare", lambda *_: comparison.Comparison(None, "params/w")
    )
    assert runs.diagnose_resume(2, differing).startswith("impure")


def test_a_failed_run_shows_its_output(capfd):
    assert program.main(["--verify_resume=6", *FLAGS, "--config.micro_batches=3"]) == 1
    error = capfd.readouterr().err
    assert "error: batch_size=8 must be a positive multiple" in error
    assert (
        "exited with 1; its output is above. It should have made 6 steps and exited with 0"
        in error
    )
    shutil.rmtree(re.search(r"in (\S+)/whole exited", error)[1])


@pytest.mark.parametrize(
    ("steps", "flag", "message"),
    [
        (2, "--quiet", "--verify_resume=2 must be a number of steps from 3"),
        (
            6,
            "--num_processes=2",
            "trains in one process: leave out --coordinator_address",
        ),
        (6, "--mode=eval", "trains in one process"),
    ],
)
def test_an_impossible_verification_is_refused_before_a_run(
    steps, flag, message, monkeypatch
):
    monkeypatch.setattr(
        verify.tempfile, "mkdtemp", lambda **_: pytest.fail("created a directory")
    )
    with pytest.raises(errors.UserError, match=re.escape(message)):
        verify.verify([*FLAGS, flag], steps, print)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((0, 1, 0.1), "--verify_devices=0 must be a number of devices from 1"),
        ((3, 2, 0.1), "--verify_devices=3 must be a number of devices from 1 that --verify_processes=2 divides"),
        ((2, 1, 0.0), "--verify_tolerance=0.0 must be a number between 0 and 1"),
        ((2, 1, float("nan")), "--verify_tolerance=nan must"),
    ],
)  # fmt: skip
def test_impossible_devices_and_tolerances_are_refused(place, message, monkeypatch):
    monkeypatch.setattr(
        verify.tempfile, "mkdtemp", lambda **_: pytest.fail("created a directory")
    )
    with pytest.raises(errors.UserError, match=re.escape(message)):
        verify.verify(FLAGS, 6, print, verify.ResumeDevices(*place))
    monkeypatch.setattr(verify.jax, "default_backend", lambda: "gpu")
    with pytest.raises(
        errors.UserError, match="splits the CPU, and this is gpu: set JAX_PLATFORMS"
    ):
        verify.verify(FLAGS, 6, print, verify.ResumeDevices(2, 1, 0.1))


def test_arguments_without_a_run_exit_with_the_usage(capsys):
    devices = ["runs/digits", "--verify_devices=2"]
    processes = ["--verify_resume=6", *FLAGS, "--verify_processes=2"]
    for arguments in (
        [],
        ["runs/digits", "--config=tests/impure.py"],
        devices,
        processes,
    ):
        with pytest.raises(SystemExit, match="2"):
            program.main(arguments)
        assert "usage: python -m xshard.replay" in capsys.readouterr().err


def test_the_kill_comes_after_a_checkpoint_and_before_the_end():
    for steps in range(3, 40):
        config = {"steps": steps, "checkpoint": {"every_steps": steps // 3}}
        kills = {verify.kill({**config, "seed": seed}) for seed in range(50)}
        for step, saved in kills:
            assert saved < step < steps and saved and saved % (steps // 3) == 0
    assert len(kills) > 20


def test_the_first_difference_of_rows_is_found():
    same = {"step": 1, "loss": 2.0, "fingerprint/params": "ab"}
    row = {"step": 2, "loss": 2.0, "fingerprint/params": "cd"}
    first_row = comparison.first_row
    assert first_row([same, row], [same, dict(row)]) is None
    # A state that differs is named before the values computed from it.
    other = {**row, "loss": 3.0, "fingerprint/params": "ef"}
    assert first_row([same, row], [same, other]) == (
        2,
        "fingerprint/params",
        "cd",
        "ef",
    )
    assert first_row([same, row], [same, {**row, "loss": None}]) == (
        2,
        "loss",
        2.0,
        None,
    )
    assert first_row([same], [same, row])[:2] == (2, "fingerprint/params")
