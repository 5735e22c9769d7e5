"""Experiments that resume to the same bits, and those that do not, named by kind: real processes, one of them killed."""

import os
import pathlib
import re
import shutil
import sys

import pytest

from xshard import errors
from xshard.replay import __main__ as program
from xshard.replay import alike, past, verify

FLAGS = ("--config=tests/impure.py", "--stop_after=0.001", "--config.steps=999")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What the processes need to find the same packages."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def verified(capsys, *flags):
    """The exit code, and what was said."""
    code = program.main(["--verify_resume=6", *FLAGS, *flags])
    return code, capsys.readouterr().out


def test_a_pure_experiment_is_the_same(tmp_path, capsys):
    code, said = verified(capsys, f"--workdir={tmp_path / 'mine'}", "--config.micro_batches", "2")
    assert code == 0 and len(said.splitlines()) == 1
    assert "killed at step 4 and resumed from step 2; 9 rows, 5 arrays" in said
    assert not (tmp_path / "mine").exists()


KINDS = {
    # The loss, and the batches, of a process's own: it is not the resume.
    "Clock": ("impure: undisturbed runs differ, too", 1),
    "Augmented": ("impure: undisturbed runs differ, too", 1),
    "HashOrder": ("hash order: undisturbed runs differ, too, but not with PYTHONHASHSEED=0", 1),
    # The first step after the checkpoint of step 2.
    "Counting": ("the data: two undisturbed runs are equal, and after the resume the batch", 3),
    "Remembering": ("state outside of TrainState: two undisturbed runs are equal", 3),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_not_the_same_is_named_by_its_kind(name, capsys):
    kind, step = KINDS[name]
    code, said = verified(capsys, f"--config.experiment=tests.impure.{name}")
    assert code == program.NOT_REPRODUCED
    assert re.search(rf"^kind +{re.escape(kind)}", said, re.MULTILINE), said
    assert re.search(rf"^row of step +{step}, \w+: \S+ \| \S+$", said, re.MULTILINE), said
    assert ("killed at step 4 and resumed from step 2" in said) == (step == 3)
    assert (re.search(r"^array +params/linear/b$", said, re.MULTILINE) is not None) == (step == 3)
    # The runs are kept, to be looked at.
    folder = pathlib.Path(re.search(r"^runs +(\S+)$", said, re.MULTILINE)[1])
    assert {path.name for path in folder.iterdir()} > {"whole", "resumed", "resumed.log"}
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("row", "array", "kind"),
    [
        ((3, "fingerprint/params", "ab", "cd"), "params/w", "the state: two undisturbed"),
        ((4, "eval/error", 1.0, 2.0), "", "the evaluation: two undisturbed"),
        (None, "", "the evaluation: two undisturbed"),
    ],
)
def test_the_kinds_that_need_no_batches(row, array, kind, monkeypatch):
    equal, differing = (
        alike.Comparison(None),
        alike.Comparison(row and past.Difference(*row), array),
    )
    monkeypatch.setattr(verify._Runs, "train", lambda *_, **__: None)
    monkeypatch.setattr(alike, "compare", lambda *_: equal)
    runs = verify._Runs(FLAGS, 6)
    runs.folder.rmdir()
    assert runs.kind(2, differing).startswith(kind)
    # Where undisturbed runs differ none of these is said.
    monkeypatch.setattr(alike, "compare", lambda *_: alike.Comparison(None, "params/w"))
    assert runs.kind(2, differing).startswith("impure")


def test_a_run_that_fails_shows_what_it_said(capfd):
    assert program.main(["--verify_resume=6", *FLAGS, "--config.micro_batches=3"]) == 1
    error = capfd.readouterr().err
    assert "error: batch_size=8 must be a positive multiple" in error
    assert "left with 1, as above; it was to make 6 steps and end well" in error
    shutil.rmtree(re.search(r"in (\S+)/whole left", error)[1])


@pytest.mark.parametrize(
    ("steps", "flag", "message"),
    [
        (2, "--quiet", "--verify_resume=2 must be a number of steps from 3"),
        (6, "--num_processes=2", "trains in one process: leave out --coordinator_address"),
        (6, "--mode=eval", "trains in one process"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_a_run(steps, flag, message, monkeypatch):
    monkeypatch.setattr(verify.tempfile, "mkdtemp", lambda **_: pytest.fail("made a directory"))
    with pytest.raises(errors.UserError, match=re.escape(message)):
        verify.verify([*FLAGS, flag], steps, print)


def test_a_program_without_a_run_leaves_with_its_usage(capsys):
    for arguments in ([], ["runs/digits", "--config=tests/impure.py"]):
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


def test_the_first_difference_of_rows():
    same = {"step": 1, "loss": 2.0, "fingerprint/params": "ab"}
    row = {"step": 2, "loss": 2.0, "fingerprint/params": "cd"}
    first_row = alike.first_row
    assert first_row([same, row], [same, dict(row)]) is None
    # A state that differs is named before what has come of it.
    other = {**row, "loss": 3.0, "fingerprint/params": "ef"}
    assert first_row([same, row], [same, other]) == (2, "fingerprint/params", "cd", "ef")
    assert first_row([same, row], [same, {**row, "loss": None}]) == (2, "loss", 2.0, None)
    assert first_row([same], [same, row])[:2] == (2, "fingerprint/params")
