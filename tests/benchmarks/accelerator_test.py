"""Tests of the one command for accelerators, on the CPU, and of the results that are
kept.
"""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from benchmarks import accelerator, processes
from tests import forks
from xshard import config
from xshard.replay import __main__ as replay

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": forks.python_path()}
README = processes.ROOT / "README.md"
PLACE = accelerator.Place(True, processes.ROOT)


def command(*arguments):
    """Starts the command in an interpreter of its own, as a user does: it starts
    others, and is interrupted.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.accelerator", *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=processes.ROOT,
        env=ENVIRONMENT,
    )


def outcomes(results):
    return [(result.part, result.outcome) for result in results]


def part(name, *module, limit_seconds=60, needs="", what="it holds"):
    run = lambda place: list(module)
    return accelerator.Part(name, what, limit_seconds, run, needs)


def test_interrupted_it_writes_the_rows_until_then(tmp_path):
    with command("--only=skips,exact,step", f"--output={tmp_path}") as process:
        said = ""
        while "exact ..." not in said:
            said += process.stderr.read(1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    assert process.returncode == 130
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_bytes())
    (row,) = content["rows"]
    assert (row["part"], row["outcome"]) == ("skips", "PASS")
    assert "4 devices hold the same bits" in row["detail"]
    assert "interrupted: the other parts did not run" in content["notes"]
    text = path.with_suffix(".md").read_text()
    assert text == accelerator.text(content) and text in out
    assert content["chip"] and content["machine"]["backend"] == "cpu"


def test_a_part_that_fails_does_not_end_the_others(capfd):
    bug = "raise ValueError('the first line\\n  the second')"
    parts = [
        part("fails", "timeit", "-n1", "-r1", bug),
        part("is missing", "benchmarks.nothing"),
        part("needs", "this", needs="fails"),
        part("passes", "this"),
    ]
    results = list(accelerator.results_of(parts, PLACE, 600))
    assert outcomes(results) == [
        ("fails", "FAIL"),
        ("is missing", "FAIL"),
        ("needs", "not measured"),
        ("passes", "PASS"),
    ]
    assert results[0].detail == "exit code 1: ValueError: the first line"
    assert (
        results[1].detail == "exit code 1: python: No module named benchmarks.nothing"
    )
    assert results[2].detail == "fails did not pass"
    assert "Traceback" in capfd.readouterr().err


def test_what_does_not_fit_into_the_time_is_reported(tmp_path):
    # It takes whatever arguments it is given, and ends only when it is ended.
    program = tmp_path / "endless.py"
    program.write_text("import signal\nwhile True:\n    signal.pause()\n")
    endless = ("cProfile", str(program))
    late = part("late", *endless, limit_seconds=0.1)
    (result,) = accelerator.results_of([late], PLACE, 600)
    assert (result.outcome, result.detail) == ("FAIL", "not done after 0 s")
    slow = part("slow", *endless, limit_seconds=0.1, what="")
    (result,) = accelerator.results_of([slow], PLACE, 600)
    assert (result.outcome, result.detail) == ("not measured", "not done after 0 s")
    parts = [part("cut off", *endless), part("left", *endless)]
    first, second = accelerator.results_of(parts, PLACE, 0.1)
    assert first.outcome == second.outcome == "not measured"
    assert first.detail == "no time left: it had 0 s"
    assert second.detail == "no time left"


def test_a_message_has_no_folder_of_this_machine(tmp_path):
    place = accelerator.Place(True, tmp_path)
    message = f"{tmp_path}/run is not {processes.ROOT}/configs/digits.py"
    shown = accelerator._without_paths(message, place)
    assert shown == "DIR/run is not configs/digits.py"


@pytest.mark.parametrize(
    ("said", "first"),
    [
        ("error: no.\nhint: more.\n", "error: no."),
        ("", "it said nothing"),
        (
            "Traceback (most recent call last):\n  File\nKeyError: 1\n\nDuring:\n"
            "Traceback (most recent call last):\n  File\nAssertionError: a\nb\n",
            "AssertionError: a",
        ),
    ],
)
def test_the_first_line_of_an_error_is_found(said, first):
    assert processes.first_line(said) == first


@pytest.mark.parametrize("is_cpu", [True, False], ids=["CPU", "accelerator"])
def test_the_programs_have_the_flags_that_the_parts_give_them(is_cpu, tmp_path):
    place = accelerator.Place(is_cpu, tmp_path)
    for each in accelerator.PARTS:
        module, *arguments = each.command(place)
        given = {argument[2:].partition("=")[0] for argument in arguments[1:]}
        if module == "xshard.replay":
            options, arguments = replay.parse(arguments)
            if options.verify_resume is None:
                continue
            module = "xshard.main"
            given = {argument[2:].partition("=")[0] for argument in arguments}
        path = processes.ROOT / f"{module.replace('.', '/')}.py"
        source = path.read_text()
        # Several of them define flags of one name, so they cannot be imported together.
        defined = set(re.findall(r"""DEFINE_\w+\(\s*"(\w+)\"""", source)) | {"config"}
        keys = {name[len("config.") :] for name in given if name.startswith("config.")}
        assert {name for name in given if "." not in name} <= defined, each.name
        assert keys <= {key.name for key in config.KEYS}


@pytest.mark.long
def test_all_parts_run_on_this_cpu(tmp_path):
    with command("--minutes=60", f"--output={tmp_path}") as process:
        _, said = process.communicate()
    assert process.returncode == 0, said
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_bytes())["rows"]
    assert {row["part"] for row in rows} == {each.name for each in accelerator.PARTS}
    for row in rows:
        # A CPU reports no peak of its memory.
        is_missing = row["outcome"] == "not measured"
        assert is_missing == row["part"].startswith("peak_") or "keras" in row["detail"]


RESULTS = sorted(accelerator.RESULTS.glob("*.json"))


def test_results_are_kept():
    assert RESULTS


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_kept_results_are_as_they_were_written(path):
    content = json.loads(path.read_bytes())
    assert path.stem == accelerator.name_of(content)
    assert path.with_suffix(".md").read_text() == accelerator.text(content)


def test_the_readme_lists_the_kept_results():
    header = (
        "| chip | software | date | checks passed | figures |\n|---|---|---|---|---|"
    )
    contents = [json.loads(path.read_bytes()) for path in RESULTS]
    table = "\n".join([header, *map(accelerator.summary, contents)])
    shown = re.search(rf"{re.escape(header)}(\n\|.*)*", README.read_text())
    assert shown and shown[0] == table, f"README's table must be\n{table}"
