"""Tests of `launch status --slowest`: which process the others wait for, and why."""

import json

import pytest

from launch import engine, slowest, status
from tests.launch import harness

STEP = {"step": 9.0}


@pytest.mark.parametrize(
    "parts, expected",
    [
        ([STEP, STEP], None),
        ([STEP], None),
        ([STEP, {"step": 1.0, "data": 8.0}], (1, "data", 0.8)),
        ([{"evaluation": 5.0}, {"evaluation": 1.0}, STEP], (0, "evaluation", 0.45)),
        # All have the same slow data, so none waits for another.
        ([{"data": 8.0}] * 4, None),
        ([{"data": 0.1}, STEP], None),
        # Writing in the background delays only a save that waits for it.
        ([{"write": 8.0, "save": 0.1}, STEP], None),
        (
            [{"write": 8.0, "save": 7.0}, {"write": 1.0, "save": 7.0}],
            (0, "write", 0.7),
        ),
        ([{"other": 3.0}, {"agree": 3.0}], (0, "other", 0.3)),
    ],
)
def test_the_process_that_the_others_wait_for(parts, expected):
    assert slowest.find(parts, 10.0) == expected
    assert slowest.find(parts, 0.5) is None


def row(host, parts, seconds=10.0):
    return {
        "doing": "training",
        "step": 50,
        "steps": 100,
        "begun": 0.0,
        "first": 0,
        "trained": 50,
        "seconds": {},
        "rate": 1.0,
        "time": 1e12,
        "host": host,
        "pid": 1,
        "parts": parts,
        "recent_parts": parts,
        "recent_seconds": seconds,
    }


def test_what_is_printed(tmp_path, capsys):
    slow = {"step": 1.0, "data": 9.0}
    rows = [row("h0", {"step": 9.5, "data": 0.5}), row("h1", slow)]
    (tmp_path / "status.json").write_text(json.dumps(rows))
    assert status.show([str(tmp_path)], False, show_slowest=True) == 0
    head, first, second, recent, whole = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["process", "host", "data"]
    assert first.split() == ["1", "h1", "90%", "10%"]
    assert second.split() == ["0", "h0", "5%", "95%"]
    assert recent.startswith(
        "in the last 10 s: the others wait for process 1 on h1, 85% of the time: data"
    )
    assert whole.startswith("in the 10 s since the first step: the others wait for")
    status.show([str(tmp_path)], True, show_slowest=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["recent"]["slowest"] == {"process": 1, "part": "data", "share": 0.85}
    assert shown["since_first_step"]["parts"][1] == slow


def test_a_run_whose_processes_are_alike(capsys):
    text = slowest.show([row("h0", {"data": 8.0, "step": 2.0})] * 3)
    assert "no process holds the others up; beside the step, 80% is data" in text
    text = slowest.show([row("h0", STEP)])
    assert "there is one process; the time goes into the step" in text
    text = slowest.show([row("h0", STEP, seconds=0.1)] * 2)
    assert "in the last 0 s: too short to tell" in text


def test_many_processes_are_cut_to_those_that_wait_least():
    rows = [row(f"h{i}", {"step": 9.0 + i / 100}) for i in range(40)]
    text = slowest.show(rows)
    assert "... and 24 processes that wait more" in text and "h39" not in text


def test_a_status_without_parts_is_said_to_lack_them(tmp_path, capsys):
    rows = [row("h0", STEP), row("h1", {})]
    for name in ("parts", "recent_parts", "recent_seconds"):
        del rows[1][name]
    (tmp_path / "status.json").write_text(json.dumps(rows))
    status.show([str(tmp_path)], False, show_slowest=True)
    assert "process 1 has not reported" in capsys.readouterr().out
    with pytest.raises(engine.LaunchError, match="is not the work directory of a run"):
        status.show([str(tmp_path / "none")], False, show_slowest=True)
    with pytest.raises(engine.LaunchError, match="--slowest is about one run"):
        status.show(["a", "b"], False, show_slowest=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", ["data", "evaluation", "write"])
def test_one_slow_process_of_two_is_named(tmp_path, part):
    command = [
        *harness.TOY,
        f"--workdir={tmp_path}",
        f"--config.experiment=tests.slow.{part.capitalize()}",
        "--config.steps=40",
        "--config.eval_every_steps=4",
        "--config.checkpoint.every_steps=4",
    ]
    flags = ("--num_processes=2", "--cpu_devices=1")
    code, output = harness.finish(harness.launch(*flags, command=command))
    assert code == 0, output
    code, output = harness.finish(
        harness.launch("status", tmp_path, "--slowest", "--json")
    )
    found = json.loads(output)["since_first_step"]["slowest"]
    assert code == 0 and (found["process"], found["part"]) == (1, part), output
    for index in range(2):
        text = (tmp_path / "spans" / f"process_{index}.json").read_text()
        events = json.loads(text.rstrip(",\n") + "]")
        assert {event["pid"] for event in events} == {index}
        longest = max(events, key=lambda event: event.get("dur", 0))
        if index == 1 and part != "write":
            assert longest["name"] in ("step", part)
