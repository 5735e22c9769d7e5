"""Tests of the program as users run it: bad input gives one message."""

import json
import os
import shlex
import subprocess
import sys

import numpy as np
import pytest

import xshard
from launch import engine
from launch import status as launch_status
from tests import forks
from tests.checkpoint import harness
from xshard import checkpoint
from xshard.checkpoint import place
from xshard.export import __main__ as export_main
from xshard.files import inputs, workdir
from xshard.new import __main__ as new_main
from xshard.optimizers import trees
from xshard.report import __main__ as report_main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns a function that runs the program.

    It returns (exit code, standard output, standard error).
    """
    directory = tmp_path_factory.mktemp("output")
    output = [directory / "out", directory / "err"]

    def run_once(*arguments):
        program = forks.program(
            "xshard.main", *arguments, env=harness.environment(), output=output
        )
        return program.wait(harness.FOREVER), *(path.read_text() for path in output)

    return run_once


def contents(directory):
    return {p: p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, run):
    directory = tmp_path_factory.mktemp("finished") / "run"
    code, out, err = run(
        "--config=tests/toy.py", f"--workdir={directory}", "--cpu_devices=4"
    )
    assert code == 0, out + err
    assert err == ""
    return directory


# The flags after --config=tests/toy.py for the directory of a finished run, and parts
# of the message.
BAD = {
    "misspelt key": (["--config.stepz=3"], ["--config.stepz", "did you mean steps"]),
    "misspelt nested key": (
        ["--config.optimizer.learning_rat=1"],
        ["--config.optimizer.learning_rat", "did you mean optimizer.learning_rate"],
    ),
    "empty": (["--workdir="], ["--workdir= is empty", "give a directory"]),
    "not UTF-8": (["--workdir=bad\udcff"], ["bad\\udcff'", "must be UTF-8"]),
    # UTF-8, as Python decodes it in a locale of ASCII.
    "UTF-8": (
        ["--workdir=\udcc3\udcbc", "--quiet", "--verbose"],
        ["exclude each other"],
    ),
    "misspelt flag": (["--worrkdir=x"], ["worrkdir", "workdir"]),
    "wrong type": (["--config.steps=many"], ["--config.steps=many", "int"]),
    "no flag": (["digits"], ["digits", "begin with '--'"]),
    "batch": (["--config.batch_size=10"], ["batch_size=10", "replicas", "8 or 12"]),
    "negative": (["--config.steps=-1"], ["steps=-1", "at least 1"]),
    "precision": (
        ["--config.precision=params=int7"],
        ["precision='params=int7'", "params=float32"],
    ),
    "groups": (
        ["--config.group_assignment=((0,1),(2,3),(4,5))"],
        [
            "group_assignment=[[0, 1], [2, 3], [4, 5]]",
            "4 replicas",
            "as [[0, 1], [2, 3]]",
        ],
    ),
    "experiment": (
        ["--config.experiment=tests.toy.Tiger"],
        ["tests.toy.Tiger", "Tiger"],
    ),
    "another experiment": (
        ["--config.experiment=tests.toy.Drifting"],
        ["tests.toy.Toy", "tests.toy.Drifting", "another directory"],
    ),
    "no groups": (
        ["--config.group_assignment=None"],
        ["group_assignment=None must be a tuple as Python writes it", "Leave the flag"],
    ),
    "another config": (
        ["--config.optimizer.learning_rate=0.5", "--config.seed=3"],
        ["optimizer.learning_rate: 0.1 -> 0.5", "seed: 0 -> 3", "new directory"],
    ),
    "clock": (
        ["--config.checkpoint.every_minutes=-1"],
        ["checkpoint.every_minutes=-1", "at least 0"],
    ),
    "checkpoints": (
        ["--config.checkpoint.keep_last=0"],
        ["checkpoint.keep_last=0", "at least 1"],
    ),
    "best": (
        ["--config.checkpoint.keep_best=1", "--config.checkpoint.best_metric=bleu"],
        ["checkpoint.best_metric='bleu'", "error"],
    ),
    "failure": (
        ["--config.checkpoint.on_failure=ignore"],
        ["on_failure='ignore'", "'go_on'"],
    ),
    "budget": (["--config.checkpoint.budget_gb=0.0"], ["budget_gb=0.0", "above 0"]),
    "writers": (
        ["--config.writers=('csv',)"],
        ["writers=('csv',)", "must have 'jsonl'"],
    ),
    "writer": (
        ["--config.writers=('jsonl','tsv')"],
        ["'tsv'", "jsonl, csv, tensorboard, wandb, mlflow, prometheus"],
    ),
    "stop": (["--stop_after=nan"], ["--stop_after=nan", "a finite number of minutes"]),
    "devices": (["--cpu_devices=100000"], ["--cpu_devices=100000", "[0, 1024]"]),
    "quiet and verbose": (["--quiet", "--verbose"], ["exclude each other"]),
    "place": (
        ["--config.checkpoint.directory=gs://bucket"],
        ["'gs://bucket'", "gs://BUCKET/FOLDER"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_message_and_changes_nothing(finished, run, case):
    flags, parts = BAD[case]
    before = contents(finished)
    code, out, err = run(
        "--config=tests/toy.py", f"--workdir={finished}", "--cpu_devices=4", *flags
    )
    assert code == 1, out + err
    assert err.startswith("error: ") and "Traceback" not in out + err
    for part in parts:
        assert part in err, err
    assert contents(finished) == before


INIT = {
    "nothing": (["--init_from={0}/nothing"], ["There is no checkpoint in", "nothing"]),
    "step": (["--init_from={0}@7"], ["no checkpoint of step 7", "[10, 12]"]),
    "pattern": (
        ["--init_from={0}", "--init_select=^weights/"],
        ["'^weights/' matches none", "params/"],
    ),
    "the steps made": (
        ["--init_from={0}", "--init_select=."],
        ["--init_select='.' takes 'step'", "--init_select='^(?!step$)'"],
    ),
    "group": (["--init_from={0}", "--init_group=-1"], ["init_group", "-1"]),
    "renaming": (
        ["--init_from={0}", "--init_rename=params/lineer=params/linear"],
        ["no path in", "begins with 'params/lineer' (near it: params/linear"],
    ),
    "no source": (["--init_rename=a=b"], ["--init_rename is for --init_from"]),
    "file": (["--init_from={0}/a.safetensors"], ["a.safetensors cannot be read"]),
}


@pytest.mark.parametrize("case", INIT)
def test_bad_initialization_flags_are_refused_before_the_run_starts(
    finished, tmp_path, run, case
):
    flags, parts = INIT[case]
    flags = [flag.format(finished) for flag in flags]
    code, out, err = run(
        "--config=tests/toy.py", f"--workdir={tmp_path}/run", "--cpu_devices=4", *flags
    )
    assert code == 1 and "Traceback" not in out + err
    for part in parts:
        assert part in err, err
    assert not (tmp_path / "run").exists()


def test_a_new_run_starts_from_another_run_s_parameters(finished, tmp_path, run):
    code, out, err = run(
        "--config=tests/toy.py",
        f"--workdir={tmp_path}/run",
        "--cpu_devices=4",
        f"--init_from={finished}",
    )
    assert code == 0 and "initialized 4 arrays from" in out, out + err


def test_a_new_run_with_another_rate_starts_from_another_run_s_slots(
    finished, tmp_path, run
):
    code, out, err = run(
        "--config=tests/toy.py",
        f"--workdir={tmp_path}/run",
        "--cpu_devices=4",
        "--config.optimizer.learning_rate=0.0",
        "--config.checkpoint.every_steps=1",
        "--config.steps=1",
        f"--init_from={finished}",
        "--init_select=^(params|net_state|opt_state)/",
    )
    assert code == 0, out + err
    before, after = (
        trees.leaves_by_path(xshard.load(directory).state.experiment)
        for directory in (finished, tmp_path / "run")
    )
    for path, array in before.items():
        if path.startswith("opt_state/") and path.endswith("/count"):
            # The updates of the other run, and one of this one.
            assert array > 1 and after[path] == array + 1
        if path.startswith("params/"):
            np.testing.assert_array_equal(after[path], array)


def write(path, text):
    path.write_text(text)
    return path


CONFIG_FILES = [
    "raises",
    "missing",
    "missing, with a space",
    "folder",
    "incomplete",
    "no config",
]


@pytest.mark.parametrize("case", [*CONFIG_FILES, "syntax"])
def test_bad_config_files_are_refused(tmp_path, run, case):
    texts = {
        "raises": "def get_config():\n  raise RuntimeError('of its own')\n",
        "incomplete": (
            "import ml_collections\ndef get_config():\n  return "
            "ml_collections.ConfigDict()\n"
        ),
        "syntax": "def get_config(:\n",
    }
    path = (
        write(tmp_path / "c.py", texts[case])
        if case in texts
        else tmp_path / "nothing.py"
    )
    flags = [f"--config={path.parent if case == 'folder' else path}"]
    flags = {"no config": [], "missing, with a space": ["--config", str(path)]}.get(
        case, flags
    )
    code, out, err = run(*flags, f"--workdir={tmp_path}/run")
    assert code == 1 and "Traceback" not in out + err
    expected = {
        "raises": ["c.py", "of its own"],
        "missing": ["nothing.py", "no such file"],
        "missing, with a space": ["nothing.py", "no such file"],
        "folder": [f"--config={tmp_path}:", "no such file"],
        "incomplete": ["lacks experiment", "xshard.config.default()"],
        "no config": ["--config", "--workdir"],
        "syntax": ["c.py", "SyntaxError"],
    }
    for part in expected[case]:
        assert part in err, err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "case", ["a file", "below a file", "somebody's", "config", "checkpoints"]
)
def test_bad_work_directories_are_refused(tmp_path, run, case):
    write(tmp_path / "file", "mine")
    (tmp_path / "other/checkpoints").mkdir(parents=True)
    for name in ("config", "checkpoints"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "metrics.jsonl", '{"step": 3}\n')
    write(tmp_path / "config/config.json", "[]")
    write(tmp_path / "checkpoints/checkpoints", "a file")
    directory = {
        "a file": "file",
        "below a file": "file/run",
        "somebody's": "other",
    }.get(case, case)
    before = contents(tmp_path)
    code, out, err = run(
        "--config=tests/toy.py", f"--workdir={tmp_path / directory}", "--cpu_devices=4"
    )
    assert code == 1 and "Traceback" not in out + err
    expected = {
        "a file": "is a file; give a directory",
        "below a file": "is below {file}, which is a file; give a directory",
        "somebody's": "no config.json",
        "config": "it is not an object. It must hold the run's config",
        "checkpoints": "is a file; move it away",
    }
    assert expected[case].format(file=tmp_path / "file") in err, err
    assert contents(tmp_path) == before


def test_help_lists_the_flags(run):
    code, out, err = run("--help")
    assert code == 0 and err == ""
    for part in ("--config", "--workdir", "--[no]debug", "--cpu_devices", "42"):
        assert part in out


def test_debug_prints_the_traceback(tmp_path, run):
    flags = [
        "--config=tests/toy.py",
        f"--workdir={tmp_path}/run",
        "--config.batch_size=3",
        "--debug",
    ]
    code, _, err = run(*flags, "--cpu_devices=2")
    assert code == 1 and "Traceback" in err and "error: batch_size=3" in err


def test_a_bug_keeps_its_traceback(tmp_path, run):
    code = "from tests import toy\nget_config = toy.get_config\n"
    config = write(tmp_path / "c.py", code)
    flags = [f"--config={config}", f"--workdir={tmp_path}/run", "--cpu_devices=2"]
    code, _, err = run(*flags, "--config.experiment=tests.main_test.Buggy")
    assert code == 1 and "Traceback" in err and "ZeroDivisionError" in err


def test_quiet_prints_only_the_results(tmp_path, run):
    flags = [
        "--config=tests/toy.py",
        f"--workdir={tmp_path}/run",
        "--cpu_devices=4",
        "--quiet",
    ]
    code, out, err = run(*flags)
    assert (code, err) == (0, "") and out.startswith("\nresults:\n  error")
    # A run may resume with other writers.
    code, out, err = run(*flags, "--config.writers=('jsonl',)", "--config.steps=3")
    assert (code, err) == (0, "") and out.startswith("\nresults:")


def test_steps_can_be_added_to_a_finished_run(finished, run):
    flags = [
        "--config=tests/toy.py",
        f"--workdir={finished}",
        "--cpu_devices=4",
        "--config.steps=14",
    ]
    code, out, err = run(*flags)
    assert code == 0, err
    assert "resumed from the checkpoint of step 12" in out
    assert "steps: 12 -> 14" in out
    assert json.loads((finished / "results.json").read_text())["step"] == 14
    # With fewer steps than the run has made, nothing is lost, and the message suggests
    # a number that trains on.
    code, out, err = run(*flags[:-1], "--config.steps=3")
    assert code == 0, err
    assert "nothing to train: steps=3, and the run has already made 14" in out
    assert "--config.steps=28" in out


def test_whatever_takes_a_path_takes_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (tmp_path / "a.txt").write_text("text")
    assert workdir.Workdir("~/run").path == tmp_path / "run"
    assert checkpoint.Store("~/run").path == tmp_path / "run"
    (tmp_path / "run@7").mkdir()
    assert place.split("~/run@7") == (f"{tmp_path}/run@7", None)
    assert place.split("~/run@8") == (f"{tmp_path}/run", 8)
    assert inputs.find("~/*.txt") == [f"{tmp_path}/a.txt"]
    assert inputs.read("~/a.txt")[0] == b"text"
    assert inputs.missing(["~/a.txt", "~/b.txt"]) == [f"{tmp_path}/b.txt"]
    job = engine.Job("job", ("program", "--workdir=~/run"))
    assert job.workdir == tmp_path / "run"
    assert new_main.main(["~/project"]) == 0 and (tmp_path / "project").is_dir()
    assert not os.listdir(here)


def test_a_tilde_is_the_home_directory_for_every_program(tmp_path, monkeypatch, run):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.py").write_text(
        "from tests import toy\n"
        "def get_config():\n"
        "    config = toy.get_config()\n"
        "    config.checkpoint.directory = '~/kept'\n"
        "    return config\n"
    )
    (tmp_path / "flags.txt").write_text("--workdir=~/runs/first\n--cpu_devices=4\n")
    flags = ["--config=~/config.py", "--flagfile=~/flags.txt", "--quiet"]
    code, out, err = run(*flags)
    assert code == 0, err
    first = tmp_path / "runs" / "first"
    assert f"in {first}/results.json" in out and f"checkpoints: {tmp_path}/kept" in out
    for index, source in enumerate(("~/runs/first", "~/kept@12")):
        other = [
            f"--workdir=~/{index}",
            f"--config.checkpoint.directory=~/{index}/kept",
        ]
        code, _, err = run(*flags, f"--init_from={source}", *other)
        assert code == 0, err
        assert (tmp_path / f"{index}" / "kept").is_dir()
    assert int(xshard.load("~/runs/first").state.step) == 12
    assert export_main.main(["~/runs/first", "--to=~/a.safetensors"]) == 0
    assert report_main.main(["~/runs/first", "--output=~/report.html"]) == 0
    assert launch_status.show(["~/runs/first"], False) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert {"a.safetensors", "report.html"} <= written
    assert not os.path.exists("~")
    # A run that is moved aside takes its checkpoints with it.
    run_id = json.loads((first / "config.json").read_text())["_run"]["id"]
    code, out, err = run(*flags, f"--restart_from_scratch={run_id}")
    assert code == 0, err
    assert (tmp_path / f"kept.{run_id}").is_dir()


def test_the_printed_command_trains_a_run_further_whose_keys_refer_to_steps(
    tmp_path, run
):
    file = tmp_path / "config.py"
    file.write_text(
        "from tests import toy\n"
        "def get_config(last=''):\n"
        "    config = toy.get_config()\n"
        "    config.eval_every_steps = config.get_ref('steps') // 3\n"
        "    config.optimizer.warmup = config.get_ref('steps') // 4\n"
        "    config.optimizer.decay = config.get_ref('steps').to_float() / 2\n"
        "    config.cooldown = config.optimizer.get_ref('warmup') - 1\n"
        "    if last == 'same':\n"
        "        config.last = config.get_ref('steps')\n"
        "    if last == 'half':\n"
        "        config.last = config.get_ref('steps') * 0.3\n"
        "    return config\n"
    )
    workdir = tmp_path / "a run"
    code, out, err = run(
        f"--config={file}", f"--workdir={workdir}", "--cpu_devices=4", "--quiet"
    )
    assert code == 0, err
    command = shlex.split(out.partition("to train further: ")[2])
    assert {word for word in command if word.startswith("--config.")} == {
        "--config.steps=24",
        "--config.cooldown=2",
        "--config.optimizer.decay=6.0",
        "--config.optimizer.warmup=3",
    }
    code, out, err = run(*command[3:])
    assert code == 0, err
    assert json.loads((workdir / "results.json").read_text())["step"] == 24
    # The command that this one prints has the same values.
    again = shlex.split(out.partition("to train further: ")[2])
    assert {word.replace("=24", "=48") for word in command} == set(again)
    # No flag changes the steps alone, and none gives a reference to integers a float.
    for last in ("same", "half"):
        code, out, err = run(
            f"--config={file}:{last}", f"--workdir={tmp_path}/{last}", "--cpu_devices=4"
        )
        assert code == 0, err
        line = out.partition("to train further: ")[2]
        assert line.endswith(" in the config file values that do not refer to steps\n")
        names = {"optimizer.warmup", "optimizer.decay", "cooldown", "last"}
        assert set(line.split(" in ")[0].removeprefix("give ").split(", ")) == names


def __getattr__(name):
    # Only test_a_bug_keeps_its_traceback needs the class; its program imports it by its
    # path.
    if name != "Buggy":
        raise AttributeError(name)
    from tests import toy

    class Buggy(toy.Toy):
        """An experiment with a bug."""

        def train_data(self):
            return 1 / 0

    return Buggy


def test_show_config_prints_the_config_and_runs_nothing(run, tmp_path):
    code, out, err = run("--config=tests/toy.py", "--config.steps=7", "--show_config")
    assert (code, err) == (0, "") and not list(tmp_path.iterdir())
    lines = out.splitlines()
    assert lines[lines.index("steps = 7") - 1] == "# The number of steps to train."
    assert {"checkpoint.keep_last = 2", "optimizer.learning_rate = 0.1"} < set(lines)


def test_a_flag_for_a_value_of_none_is_refused_with_the_cure(tmp_path, run):
    config = tmp_path / "config.py"
    config.write_text(
        "from tests import toy\n\n\ndef get_config():\n    config = toy.get_config()\n"
        "    config.plain = None\n    return config\n"
    )
    code, _, err = run(
        f"--config={config}", f"--workdir={tmp_path}/run", "--config.plain=1.0"
    )
    assert code == 1
    assert err.startswith("error: --config.plain: the config file sets this key to")
    assert "ml_collections.config_dict.placeholder(float)" in err


def test_a_signal_during_the_imports_is_a_stop(tmp_path):
    """Only a new interpreter imports. The signal comes when it imports Haiku."""
    (tmp_path / "haiku.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), "
        "signal.SIGTERM)\ntime.sleep(600)\n"
    )
    environment = harness.environment()
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    command = [sys.executable, "-m", "xshard.main", "--config=tests/toy.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 42
    assert done.stderr.endswith(
        "SIGTERM: stopped before the run began; there was nothing to save.\n"
    )
