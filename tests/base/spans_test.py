"""Tests of the parts of a process's time, and of the file of its long spans."""

import json
import threading
import types

import pytest

from xshard.base import clock, spans


@pytest.fixture
def now(monkeypatch):
    """The time in seconds, which only tests move."""
    time = types.SimpleNamespace(now=1000.0)
    time.monotonic = lambda: time.now
    monkeypatch.setattr(spans, "time", time)
    monkeypatch.setattr(spans, "_TRACKS", {})
    monkeypatch.setattr(spans, "_THREAD", spans._Thread())
    monkeypatch.setattr(spans, "_TO_TIME_OF_DAY", 0.0)
    spans._NEW.clear()
    return time


def spend(time, name, seconds):
    with spans.Span(name):
        time.now += seconds


def make_file(directory, said=None, parts=dict):
    say = said.append if said is not None else pytest.fail
    return spans.File(directory, 1, "h0", parts, say)


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
    return [event["args"]["name"] for event in events]


def test_a_part_does_not_contain_the_parts_inside_it(now):
    with spans.Span(spans.CHECKPOINT):
        now.now += 1
        with spans.Span(spans.SAVE):
            now.now += 2
            spend(now, spans.AGREE, 4)
        now.now += 8
    now.now += 16
    track = spans.current_track()
    spent = {name: seconds for name, seconds in track.seconds.items() if seconds}
    assert spent == {"checkpoint": 9, "save": 2, "agree": 4}
    assert track.covered == 15


def test_an_error_ends_a_part(now):
    with pytest.raises(KeyError), spans.Span(spans.EVALUATION):
        now.now += 1
        raise KeyError
    spend(now, spans.STEP, 2)
    assert spans.current_track().covered == 3


def test_long_spans_of_all_threads_are_written(now, tmp_path):
    path = tmp_path / "spans" / "process_1.json"
    file = make_file(tmp_path)
    spend(now, spans.STEP, 1)
    with file.opened():
        spend(now, spans.STEP, 0.001)
        spend(now, spans.DATA, 0.5)
        file.flush()
        assert [event["name"] for event in read(path)] == ["data"]
        for _ in range(2):
            # One thread after another writes checkpoints.
            thread = threading.Thread(
                target=spend, args=(now, spans.WRITE, 2), name=spans.BACKGROUND
            )
            thread.start()
            thread.join()
    spend(now, spans.STEP, 1)
    first, *others = read(path)
    assert (first["ph"], first["ts"], first["dur"]) == ("X", 1001_001_000, 500_000)
    assert [event["name"] for event in others] == ["write"] * 2
    assert {event["tid"] for event in others} == {first["tid"] + 1}
    assert names(path) == ["process 1 on h0", "MainThread", "checkpoint"]
    assert spans.background_seconds() == 4


def test_the_shares_of_short_parts_are_written(now, tmp_path):
    parts = {}
    file = make_file(tmp_path, parts=lambda: dict(parts))
    with file.opened():
        for second in range(25):
            now.now += 1
            parts.update(step=0.75 * second, data=0.25 * second)
            file.flush()
    first, last = read(tmp_path / "spans" / "process_1.json")
    assert first["ph"] == "C" and first["args"] == {"step": 0.75, "data": 0.25}
    # The end of a run does not wait for ten seconds to pass.
    assert last["ts"] - first["ts"] == 5_000_000
    assert last["args"] == pytest.approx({"step": 0.6, "data": 0.2}, abs=0.2)


def test_a_file_is_bounded_and_the_one_before_is_kept(now, tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "_MOST_BYTES", 2000)
    file = make_file(tmp_path)
    with file.opened():
        for _ in range(200):
            spend(now, spans.DATA, 1)
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
        file = make_file(tmp_path)
        with file.opened():
            spend(now, spans.DATA, 1)
        with path.open("a") as damaged:
            damaged.write('{"name":"da')
    with make_file(tmp_path).opened():
        spend(now, spans.STEP, 1)
    assert [event["name"] for event in read(path)] == ["data", "data", "step"]


def test_a_disk_that_fails_is_named_once(now, tmp_path):
    said = []
    (tmp_path / "spans").write_text("a file")
    file = make_file(tmp_path, said)
    with file.opened():
        for _ in range(3):
            spend(now, spans.DATA, 1)
            file.flush()
    (line,) = said
    assert line.startswith(f"spans are lost: {tmp_path / 'spans' / 'process_1.json'}: ")


class Result:
    """A stand-in for an array that is ready at a time."""

    def __init__(self, time, ready):
        self._time, self._ready = time, ready

    def is_ready(self):
        return self._time.now >= self._ready

    def block_until_ready(self):
        self._time.now = max(self._time.now, self._ready)


def run(now, steps, *, data=0.0, other=0.0, device=0.0):
    """Makes steps whose parts take the given seconds; returns the parts of the time."""
    counted = clock.Clock(now.now, now.monotonic)
    counted.started()
    newest = None
    for _ in range(steps):
        with counted.waiting(newest):
            now.now += data
        # A step begins when the one before has ended.
        begin = now.now
        if newest is not None:
            begin = max(begin, newest._ready)
        before = newest
        newest = Result(now, begin + device)
        now.now += other
        if before is not None:
            with spans.Span(spans.STEP):
                before.block_until_ready()
    return {name: seconds for name, seconds in counted.parts().items() if seconds}


@pytest.mark.parametrize(
    "seconds, share",
    [
        # What the devices compute meanwhile delays nothing.
        ({"data": 0.001, "device": 0.1}, {"step": 1.0}),
        ({"data": 0.9, "other": 0.1, "device": 0.01}, {"data": 0.9, "other": 0.1}),
        ({"other": 0.05, "device": 0.1}, {"step": 1.0}),
        ({"other": 0.9, "device": 0.1}, {"other": 1.0}),
    ],
)
def test_only_what_delays_the_devices_is_a_process_s_own(now, seconds, share):
    begin = now.now
    parts = run(now, 200, **seconds)
    spent = now.now - begin
    assert sum(parts.values()) == pytest.approx(spent)
    shares = {name: parts.get(name, 0.0) / spent for name in ("step", "data", "other")}
    expected = {"step": 0.0, "data": 0.0, "other": 0.0, **share}
    # The first steps find the devices idle, and nothing to compare with.
    assert shares == pytest.approx(expected, abs=0.03)


def test_there_are_no_parts_before_the_first_step(now):
    assert clock.Clock(now.now, now.monotonic).parts() == {}
