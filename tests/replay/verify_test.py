"""Tests that --verify_resume recognizes experiments that resume to the same bits, and
names why others do not.

The runs are real processes, one of which is killed.
"""

import importlib.util
import pathlib
import re
import shutil

import pytest

from tests import forks
from xshard import errors
from xshard.replay import __main__ as program
from xshard.replay import comparison, verify

FLAGS = ("--config=tests/impure.py", "--stop_after=0.001", "--config.steps=999")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Sets the variables that child processes need to find the same packages."""
    # A verification starts this program.
    assert importlib.util.find_spec("xshard.main")
    monkeypatch.setenv("PYTHONPATH", forks.python_path())
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def verified(capsys, *flags):
    """Verifies a resume after 6 steps; returns the exit code and what is printed."""
    code = program.main(["--verify_resume=6", *FLAGS, *flags])
    return code, capsys.readouterr().out


def line(pattern, output):
    """Returns the match of a whole line of the output; None if there is none."""
    return re.search(f"^{pattern}$", output, re.MULTILINE)


def test_a_pure_experiment_resumes_to_the_same_bits(tmp_path, capsys):
    code, output = verified(
        capsys, f"--workdir={tmp_path / 'mine'}", "--config.micro_batches", "2"
    )
    assert code == 0 and len(output.splitlines()) == 1
    assert "killed at step 4 and resumed from step 2; 9 rows, 5 arrays" in output
    assert not (tmp_path / "mine").exists()


KINDS = {
    # The loss differs in every process, so the resume is not the cause.
    "Clock": ("impure: undisturbed runs differ, too", 1),
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
    assert line(f"kind +{re.escape(kind)}.*", output), output
    assert line(rf"row of step +{step}, \w+: \S+ \| \S+", output), output
    is_resumed = step == 3
    assert ("killed at step 4 and resumed from step 2" in output) == is_resumed
    assert bool(line("array +params/linear/b", output)) == is_resumed
    has_other_batch = "has a different batch (undisturbed: examples " in output
    assert has_other_batch == (name == "Counting")
    # The runs are kept for inspection.
    folder = pathlib.Path(line(r"runs +(\S+)", output)[1])
    files = {path.name for path in folder.iterdir()}
    assert files > {"whole", "resumed", "resumed.log"}
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
    equal = comparison.Comparison(None)
    difference = comparison.Difference(*row) if row else None
    differing = comparison.Comparison(difference, array)
    monkeypatch.setattr(verify._Runs, "train", lambda *_, **__: None)
    monkeypatch.setattr(comparison, "compare", lambda *_: equal)
    runs = verify._Runs(FLAGS, 6)
    runs.folder.rmdir()
    assert runs.diagnose_resume(2, differing).startswith(kind)
    # If undisturbed runs differ, the kind is impurity instead.
    unequal = comparison.Comparison(None, "params/w")
    monkeypatch.setattr(comparison, "compare", lambda *_: unequal)
    assert runs.diagnose_resume(2, differing).startswith("impure")


def test_a_failed_run_shows_its_output(capfd):
    assert program.main(["--verify_resume=6", *FLAGS, "--config.micro_batches=3"]) == 1
    error = capfd.readouterr().err
    assert "error: batch_size=8 must be a positive multiple" in error
    assert "exited with 1; its output is above. " in error
    assert "It should have made 6 steps and exited with 0" in error
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


def test_arguments_without_a_run_exit_with_the_usage(capsys):
    unknown = ["runs/digits", "--config=tests/impure.py"]
    for arguments in ([], unknown):
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
