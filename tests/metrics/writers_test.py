"""Tests of the writers of rows.

Rows that an interrupted run wrote after its checkpoint do not stay.
"""

import contextlib
import csv
import json
import math
import os
import pathlib
import re
import resource
import types

import pytest
from tensorboard.backend.event_processing import event_accumulator

from tests import winged
from xshard.files import claim
from xshard.metrics import event_files, writers
from xshard.metrics import writer as writer_lib

ALL = ("jsonl", "csv", "tensorboard")
DONE = writer_lib.Outcome(writer_lib.DONE)


def open_part(directory, step, names=ALL):
    return writers.Writers(names, writers.Part(directory, step, {}))


def write_part(directory, step, rows, names=ALL):
    """Writes a part of a run.

    The part may end or be killed: the files are the same, since no writer buffers rows.
    """
    opened = open_part(directory, step, names)
    for row in rows:
        opened.write(row)
    opened.close(DONE)


def training(step, again=0.0):
    return {
        "step": step,
        "loss": 1.0 / step + again,
        "skipped": 0,
        "perf/seconds": step + again,
    }


def evaluation(step):
    return {"step": step, "eval/error": 0.5 * step}


def json_rows(directory):
    return [
        json.loads(line)
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]


def csv_rows(directory):
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def scalars(directory):
    """Returns the scalars that TensorBoard itself reads: {tag: [(step, value)]}."""
    result = event_accumulator.EventAccumulator(
        str(directory / "tensorboard"), {"scalars": 0}
    )
    result.Reload()
    tags = result.Tags()["scalars"]
    return {
        tag: [(event.step, event.value) for event in result.Scalars(tag)]
        for tag in tags
    }


def test_every_format_has_every_number(tmp_path):
    rows = [
        training(1),
        {**training(2), "loss": [0.5, 0.25]},
        {**evaluation(2), "perf/time": 9.0},
    ]
    write_part(tmp_path, 0, rows)
    assert json_rows(tmp_path) == rows
    table = csv_rows(tmp_path)
    assert list(table[0]) == [
        "step",
        "loss",
        "skipped",
        "perf/seconds",
        "loss/0",
        "loss/1",
        "eval/error",
        "perf/time",
    ]
    assert [row["step"] for row in table] == ["1", "2", "2"]
    assert [row["loss"] for row in table] == ["1.0", "", ""]
    assert [row["loss/1"] for row in table] == ["", "0.25", ""]
    assert [row["eval/error"] for row in table] == ["", "", "1.0"]
    assert scalars(tmp_path) == {
        "loss": [(1, 1.0)],
        "loss/0": [(2, 0.5)],
        "loss/1": [(2, 0.25)],
        "skipped": [(1, 0.0), (2, 0.0)],
        "perf/seconds": [(1, 1.0), (2, 2.0)],
        "eval/error": [(2, 1.0)],
    }


def test_repeated_steps_are_written_once(tmp_path):
    write_part(
        tmp_path, 0, [training(1), training(2), evaluation(2), training(3), training(4)]
    )
    # The run was killed after step 4; its last checkpoint is from step 2.
    write_part(tmp_path, 2, [training(3, again=10.0), evaluation(3)])
    # It was soon killed again, and resumes from the same checkpoint.
    write_part(
        tmp_path, 2, [training(3, again=20.0), training(4, again=20.0), training(5)]
    )
    expected = [
        training(1),
        training(2),
        evaluation(2),
        training(3, 20.0),
        training(4, 20.0),
        training(5),
    ]
    assert json_rows(tmp_path) == expected
    assert [(row["step"], row["perf/seconds"]) for row in csv_rows(tmp_path)] == [
        (str(row["step"]), str(row["perf/seconds"]) if "loss" in row else "")
        for row in expected
    ]
    result = scalars(tmp_path)
    assert result["perf/seconds"] == [
        (1, 1.0),
        (2, 2.0),
        (3, 23.0),
        (4, 24.0),
        (5, 5.0),
    ]
    assert result["eval/error"] == [(2, 1.0)]


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [1_700_000_000.0]
    monkeypatch.setattr(event_files.time, "time", lambda: now[0])
    return now


@pytest.mark.parametrize("change", [0.0, -3600.0, 3600.0, 9e9])
def test_a_changed_clock_duplicates_no_point(tmp_path, clock, change):
    write_part(tmp_path, 0, [training(step) for step in range(1, 5)])
    if change > 1e9:
        # The clock of the earlier start was ahead by centuries.
        (old,) = (tmp_path / "tensorboard").iterdir()
        old.rename(old.with_name(old.name.replace("1700000000", "9999999000")))
    else:
        clock[0] += change
    write_part(tmp_path, 2, [training(3, again=10.0)])
    write_part(tmp_path, 3, [training(4, again=20.0)])
    assert scalars(tmp_path)["perf/seconds"] == [
        (1, 1.0),
        (2, 2.0),
        (3, 13.0),
        (4, 24.0),
    ]


def test_a_reader_that_was_open_before_a_restart_continues(tmp_path):
    write_part(tmp_path, 0, [training(1), training(2), training(3)])
    reader = event_accumulator.EventAccumulator(
        str(tmp_path / "tensorboard"), {"scalars": 0}
    )
    for start in range(1, 5):
        reader.Reload()
        opened = open_part(tmp_path, 2)
        reader.Reload()
        assert [event.step for event in reader.Scalars("loss")] == [1, 2]
        opened.write(training(3, again=start))
        reader.Reload()
        result = [(event.step, event.value) for event in reader.Scalars("perf/seconds")]
        assert result == [(1, 1.0), (2, 2.0), (3, 3.0 + start)]
        opened.close(DONE)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 5


def test_files_of_others_are_neither_deleted_nor_written_to(tmp_path):
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    other = tmp_path / "other"
    other.write_text("somebody's")
    names = (
        "events.out.tfevents.1600000000.host.123.456789",
        "events.out.tfevents.1600000000.host.123.0.v2",
        "events.out.tfevents.1600000000.host",
    )
    for name in names:
        (folder / name).write_bytes(b"")
    (folder / "events.out.tfevents.1600000001.host.xshard").symlink_to(other)
    (folder / ".events.new").symlink_to(other)
    for _ in range(3):
        write_part(tmp_path, 0, [training(1)])
    assert other.read_text() == "somebody's"
    result = sorted(path.name for path in folder.iterdir())
    assert set(names) < set(result)
    assert "events.out.tfevents.1600000001.host.xshard" in result
    assert len(result) == len(names) + 1 + 3


def test_a_file_that_cannot_be_begun_leaves_the_earlier_ones(tmp_path, monkeypatch):
    for _ in range(2):
        write_part(tmp_path, 0, [training(1)])
    folder = tmp_path / "tensorboard"
    before = contents(folder)

    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(
        ValueError, match="tensorboard/.* could not be written: Input/output error"
    ):
        open_part(tmp_path, 1)
    assert before.items() <= contents(folder).items()
    assert scalars(tmp_path)["loss"] == [(1, 1.0)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_sync_covers_the_file_and_its_folder_even_after_close(tmp_path, monkeypatch):
    # The folder may be on another disk than the holder's of the work directory.
    owner = types.SimpleNamespace(check=lambda: None, replacing=None)
    writer = event_files.EventFiles(writers.Part(tmp_path, 0, {}, owner))
    writer.write(training(1))
    synced = []
    fsync = os.fsync

    def record_sync(descriptor):
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_sync)
    (file,) = (tmp_path / "tensorboard").iterdir()
    writer.sync()
    writer.close()
    writer.sync()
    assert synced == [str(file), str(file.parent)] * 2


def test_a_row_that_a_killed_process_wrote_to_one_file_alone_is_in_all(tmp_path):
    write_part(tmp_path, 0, [training(1), training(2)])
    write_part(tmp_path, 2, [evaluation(2)], ["jsonl"])
    write_part(tmp_path, 2, [training(3)])
    result = scalars(tmp_path)
    assert result["eval/error"] == [(2, 1.0)]
    assert result["loss"] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]


def test_the_first_file_of_events_is_whole_or_absent(tmp_path, monkeypatch):
    write_part(tmp_path, 0, [training(step) for step in range(1, 100)], ["jsonl"])
    with pytest.raises(ValueError, match="could not be written"), full_disk(3000):
        event_files.EventFiles(writers.Part(tmp_path, 99, {}))
    write_part(tmp_path, 99, [])
    assert [step for step, _ in scalars(tmp_path)["loss"]] == list(range(1, 100))


def test_invalid_rows_edited_by_hand_become_no_events(tmp_path):
    lines = [
        '{"step": 1.5, "loss": 1}',
        '{"step": 1, "loss": "x", "perf/time": "noon", "a": 2}',
    ]
    lines += [f'{{"step": 2, "a": {10**400}, "b": 1e300}}', '{"step": -1e400}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    write_part(tmp_path, 5, [training(6)])
    assert scalars(tmp_path)["a"] == [(1, 2.0)]


def test_a_run_that_starts_over_removes_the_earlier_rows(tmp_path):
    write_part(tmp_path, 0, [training(1), training(2)])
    write_part(tmp_path, 0, [])
    assert json_rows(tmp_path) == [] and not (tmp_path / "metrics.csv").exists()
    assert not any(scalars(tmp_path).values())


def test_the_table_of_an_interrupted_run_is_the_same(tmp_path):
    rows = [
        training(1),
        {**training(2), "loss": float("inf")},
        evaluation(2),
        training(3),
    ]
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    write_part(tmp_path / "whole", 0, rows)
    write_part(tmp_path / "parts", 0, [*rows[:3], {**training(3), "lost": 1.0}])
    with (tmp_path / "parts" / "metrics.csv").open("a") as file:
        file.write("4,0.12")  # The process was killed in the middle of a line.
    write_part(tmp_path / "parts", 2, rows[3:])
    whole, parts = (
        (tmp_path / name / "metrics.csv").read_bytes() for name in ("whole", "parts")
    )
    assert whole == parts
    assert whole.splitlines()[2] == b"2,,0,2.0,"


def test_writers_that_are_added_later_get_the_earlier_rows(tmp_path):
    write_part(tmp_path, 0, [training(1), evaluation(1), training(2)], ["jsonl"])
    write_part(tmp_path, 1, [training(2, again=1.0)])
    assert [row["loss"] for row in csv_rows(tmp_path)] == ["1.0", "", "1.5"]
    result = scalars(tmp_path)
    assert result["loss"] == [(1, 1.0), (2, 1.5)] and result["eval/error"] == [(1, 0.5)]


def test_a_table_survives_a_disk_that_reports_it_missing(tmp_path, monkeypatch):
    opened = open_part(tmp_path, 0, ["jsonl", "csv"])
    opened.write({"step": 1, "loss": 1.0})
    # A disk on a network may report this for a moment.
    monkeypatch.setattr(pathlib.Path, "exists", lambda self: False)
    opened.write({"step": 2, "loss": 0.5, "error": 2.0})
    assert [(row["step"], row["error"]) for row in csv_rows(tmp_path)] == [
        ("1", ""),
        ("2", "2.0"),
    ]


def test_a_truncated_json_line_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_part(tmp_path, 0, [training(1), training(2), training(3)])
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    write_part(tmp_path, 2, [training(3, again=1.0)])
    assert json_rows(tmp_path) == [training(1), training(2), training(3, again=1.0)]


def test_a_row_without_a_newline_is_not_joined_with_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n{"step": 2}')
    writers.JsonLines(path, 2).write({"step": 3})
    assert [row["step"] for row in json_rows(tmp_path)] == [1, 2, 3]


def test_nonfinite_numbers_in_every_format(tmp_path):
    row = {
        "step": 1,
        "loss": float("inf"),
        "of groups": [1.5, float("nan")],
        "nested": {"a": 2.0},
    }
    write_part(tmp_path, 0, [row])
    expected = {"step": 1, "loss": None, "of groups": [1.5, None], "nested": {"a": 2.0}}
    assert json_rows(tmp_path) == [expected]
    assert csv_rows(tmp_path) == [
        {
            "step": "1",
            "loss": "",
            "of groups/0": "1.5",
            "of groups/1": "",
            "nested/a": "2.0",
        }
    ]
    # The value is NaN when it is first written, and when it is written again from the
    # JSON row, which has null.
    for _ in range(2):
        ((step, value),) = scalars(tmp_path)["loss"]
        assert step == 1 and math.isnan(value)
        write_part(tmp_path, 1, [])


@contextlib.contextmanager
def full_disk(size):
    """Makes the system refuse to let any file grow beyond this size."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("name", ALL)
def test_a_full_disk_corrupts_nothing(tmp_path, name, monkeypatch, capfd):
    write_part(tmp_path, 0, [training(step) for step in range(1, 21)])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    limit = 500 + max(path.stat().st_size for path in files)
    opened = open_part(tmp_path, 20)
    writer = opened._opened[name]
    write = writer.write

    def write_to_full_disk(row):
        with full_disk(limit):
            write(row)

    monkeypatch.setattr(writer, "write", write_to_full_disk)
    last_step = 20
    message = "(metrics|tensorboard).* could not be written: File too large"
    if name == "jsonl":
        with pytest.raises(ValueError, match=f"{message}.*the same command"):
            while last_step < 1000:
                last_step += 1
                opened.write(training(last_step))
    else:
        while not opened._failed:
            last_step += 1
            opened.write(training(last_step))
        # The others get more rows, and one line says which one does not.
        opened.write(training(last_step + 1))
        opened.sync()
        assert json_rows(tmp_path)[-1] == training(last_step + 1)
        (line,) = capfd.readouterr().err.splitlines()
        assert re.match(f"the run goes on without the writer '{name}'.*{message}", line)
    opened.close(DONE)
    # The next start resumes from an earlier checkpoint.
    assert 22 < last_step < 1000
    write_part(
        tmp_path,
        last_step - 2,
        [training(step) for step in range(last_step - 1, last_step + 5)],
    )
    wanted = list(range(1, last_step + 5))
    assert [row["step"] for row in json_rows(tmp_path)] == wanted
    assert [int(row["step"]) for row in csv_rows(tmp_path)] == wanted
    assert [step for step, _ in scalars(tmp_path)["loss"]] == wanted


def test_a_table_is_replaced_whole_or_not_at_all(tmp_path):
    write_part(tmp_path, 0, [training(step) for step in range(1, 200)])
    before = (tmp_path / "metrics.csv").read_bytes()
    old = (tmp_path / "metrics.csv").open("rb")
    with (
        pytest.raises(ValueError, match=r"metrics\.csv could not be written"),
        full_disk(1000),
    ):
        writers.Csv(writers.Part(tmp_path, 0, {}))
    assert (tmp_path / "metrics.csv").read_bytes() == before
    # A reader that has the table open still reads the old one, which is not
    # overwritten.
    with old:
        write_part(tmp_path, 100, [evaluation(100)])
        assert old.read() == before


def test_rows_are_readable_as_soon_as_they_are_written(tmp_path):
    opened = open_part(tmp_path, 0)
    opened.write(training(1))
    assert json_rows(tmp_path) == [training(1)] and len(csv_rows(tmp_path)) == 1
    assert scalars(tmp_path)["loss"] == [(1, 1.0)]
    opened.close(DONE)


class Noting(writer_lib.Writer):
    """A custom writer that notes what it is told, and fails where a test says."""

    fails_at = ""

    def __init__(self, part):
        self.told = []
        self._closed = part.directory / "closed"

    def _note(self, what):
        self.told.append(what)
        if what == self.fails_at:
            raise RuntimeError(f"no {what}")

    def write(self, row):
        self._note(f"row {row['step']}")

    def write_outcome(self, outcome):
        self._note(outcome.kind)

    def flush(self):
        self._note("flush")

    def sync(self):
        self._note("sync")

    def close(self):
        self._closed.touch()
        self._note("close")


NOTING = "tests.metrics.writers_test.Noting"


@pytest.mark.parametrize("at", ["", "row 1", "flush", "sync", "row 2", "done", "close"])
def test_a_custom_writer_that_fails_is_left_out_and_closed(
    tmp_path, at, monkeypatch, capfd
):
    monkeypatch.setattr(Noting, "fails_at", at)
    writers.check(("jsonl", NOTING))
    opened = open_part(tmp_path, 0, (NOTING, "jsonl"))
    opened.write(training(1))
    opened.flush()
    opened.sync()
    opened.write(training(2))
    opened.close(DONE)
    told = ["row 1", "flush", "sync", "row 2", "done", "close"]
    line = ""
    if at:
        told = told[: told.index(at) + 1]
        line = f"the run goes on without the writer '{NOTING}', which failed: "
        line += f"RuntimeError: no {at}\n"
        if at != "close":
            told.append("close")
    assert opened._opened[NOTING].told == told
    assert capfd.readouterr().err == line
    assert json_rows(tmp_path) == [training(1), training(2)]


def test_a_writer_of_another_s_directory_ends_the_run(tmp_path, monkeypatch):
    opened = open_part(tmp_path, 0, (NOTING, "jsonl"))

    def lose(row):
        raise claim.LostError("taken over")

    for name in (NOTING, "jsonl"):
        with monkeypatch.context() as patch:
            patch.setattr(opened._opened[name], "write", lose)
            with pytest.raises(claim.LostError):
                opened.write(training(1))
    opened.write(training(2))
    assert opened._opened[NOTING].told == ["row 2"]


def test_each_kind_of_row_goes_to_its_file_and_to_all_others(tmp_path):
    norms = {"step": 2, "kind": "norms", "norms": {}}
    shown = {"step": 2, "kind": "samples", "samples": {}}
    opened = open_part(tmp_path, 0, (*ALL, NOTING))
    for row in (training(1), training(2), norms, evaluation(2), shown):
        opened.write(row)
    assert opened._opened[NOTING].told == ["row 1"] + 4 * ["row 2"]
    assert json_rows(tmp_path) == [training(1), training(2), evaluation(2)]
    assert len(csv_rows(tmp_path)) == 3
    for row in (norms, shown):
        content = (tmp_path / f"{row['kind']}.jsonl").read_text()
        assert json.loads(content) == row
    part = writers.Part(tmp_path, 2, {})
    assert [*part.everything()] == [
        training(1),
        training(2),
        norms,
        evaluation(2),
        shown,
    ]


def Broken(part):  # noqa: N802
    """Is a custom writer that cannot be opened."""
    raise OSError(f"no room in {part.directory}")


def test_a_writer_that_cannot_be_opened_closes_those_before_it(tmp_path):
    names = ("jsonl", NOTING, "tests.metrics.writers_test.Broken")
    with pytest.raises(OSError, match="no room"):
        open_part(tmp_path, 0, names)
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize(
    "names,message",
    [
        (
            ("jsonl", "csvv"),
            "'csvv', which is none of jsonl, csv, tensorboard, wandb, mlflow, "
            "prometheus, nor the",
        ),
        (
            ("jsonl", "tests.metrics.writers_test.Yours"),
            "Yours.* can be imported from here: .*Yours",
        ),
        (("jsonl", "tests.metrics.writers_test.ALL"), "cannot be called"),
        (("csv",), "must have 'jsonl'"),
        (("jsonl", "csv", "csv"), "each once"),
        ("jsonl", "must be a list of names"),
        (3, "must be a list of names"),
        (("jsonl", 3), "3, which is none of"),
        (("jsonl", "wandb"), r"pip install 'xshard\[wandb\]'"),
    ],
)
def test_invalid_writer_names_are_refused(names, message, monkeypatch):
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        writers.check(names, winged.WINGS)
