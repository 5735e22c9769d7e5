"""Tests of the file of a process's long spans."""

import json
import threading
import types

import pytest

from tests.base import timed
from xshard.base import clock, spans


@pytest.fixture
def now(monkeypatch):
    monkeypatch.setattr(clock, "_TO_TIME_OF_DAY", 0.0)
    monkeypatch.setattr(clock.socket, "gethostname", lambda: "h0")
    return timed.stand_in(monkeypatch)


def make_file(directory, said=None, parts=dict):
    say = said.append if said is not None else pytest.fail
    return clock.SpanFile(directory, 1, types.SimpleNamespace(parts=parts), say)


def read(path):
    """Returns the events of a file, without those that name things."""
    text = path.read_text()
    assert text.startswith("[\n") and text.endswith(",\n")
    events = json.loads(text.rstrip(",\n") + "]")
    assert {event["pid"] for event in events} == {1}
    return [event for event in events if event["ph"] != "M"]


def names(path):
    text = path.read_text().rstrip(",\n") + "]"
    events = [event for event in json.loads(text) if event["ph"] == "M"]
    return list(dict.fromkeys(event["args"]["name"] for event in events))


def test_long_spans_of_all_threads_are_written(now, tmp_path):
    path = tmp_path / "spans" / "process_1.json"
    timed.spend(now, spans.STEP, 1)
    of_run = clock.Clock()
    file = clock.SpanFile(tmp_path, 1, of_run, pytest.fail)
    timed.spend(now, spans.STEP, 0.001)
    timed.spend(now, spans.DATA, 0.5)
    file.flush()
    assert [event["name"] for event in read(path)] == ["data"]
    for _ in range(2):
        # One thread after another writes checkpoints.
        thread = threading.Thread(
            target=timed.spend, args=(now, spans.WRITE, 2), name=spans.BACKGROUND
        )
        thread.start()
        thread.join()
    file.flush(is_last=True)
    first, *others = read(path)
    assert (first["ph"], first["ts"], first["dur"]) == ("X", 1001_001_000, 500_000)
    assert [event["name"] for event in others] == ["write"] * 2
    assert {event["tid"] for event in others} == {first["tid"] + 1}
    assert names(path) == ["process 1 on h0", "MainThread", "checkpoint"]
    of_run.started()
    assert of_run.parts()["write"] == 4


def test_the_shares_of_short_parts_are_written(now, tmp_path):
    parts = {}
    file = make_file(tmp_path, parts=lambda: dict(parts))
    for second in range(25):
        now.now += 1
        parts.update(step=0.75 * second, data=0.25 * second)
        file.flush()
    file.flush(is_last=True)
    first, last = read(tmp_path / "spans" / "process_1.json")
    assert first["ph"] == "C" and first["args"] == {"step": 0.75, "data": 0.25}
    # The end of a run does not wait for ten seconds to pass.
    assert last["ts"] - first["ts"] == 5_000_000
    assert last["args"] == pytest.approx({"step": 0.6, "data": 0.2}, abs=0.2)


def test_a_file_is_bounded_and_the_one_before_is_kept(now, tmp_path, monkeypatch):
    monkeypatch.setattr(clock, "_MOST_BYTES", 2000)
    file = make_file(tmp_path)
    for _ in range(200):
        timed.spend(now, spans.DATA, 1)
        file.flush()
    paths = sorted((tmp_path / "spans").iterdir())
    assert [path.name for path in paths] == [
        "process_1.json",
        "process_1.previous.json",
    ]
    begins = []
    for path in reversed(paths):
        assert path.stat().st_size < 2200
        assert names(path) == ["process 1 on h0", "MainThread"]
        begins += [event["ts"] for event in read(path)]
    # They are the last ones, without a gap.
    assert begins[-1] == 1199_000_000
    assert begins == list(range(begins[0], begins[-1] + 1, 1_000_000))


def test_a_start_appends_after_a_line_that_a_killed_process_wrote_in_part(
    now, tmp_path
):
    path = tmp_path / "spans" / "process_1.json"
    for _ in range(2):
        timed.spend(now, spans.DATA, 1)
        make_file(tmp_path).flush()
        with path.open("a") as damaged:
            damaged.write('{"name":"da')
    timed.spend(now, spans.STEP, 1)
    make_file(tmp_path).flush()
    assert [event["name"] for event in read(path)] == ["data", "data", "step"]


def test_a_disk_that_fails_is_named_once(now, tmp_path):
    said = []
    (tmp_path / "spans").write_text("a file")
    file = make_file(tmp_path, said)
    for _ in range(3):
        timed.spend(now, spans.DATA, 1)
        file.flush()
    (line,) = said
    assert line.startswith(f"spans are lost: {tmp_path / 'spans' / 'process_1.json'}: ")
