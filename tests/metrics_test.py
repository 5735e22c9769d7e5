"""Tests of metrics: their way to the host, their JSON and text, and their files."""

import json

import jax.numpy as jnp
import pytest

from xshard.base import formatting
from xshard.files import disk, jsonfile
from xshard.metrics import deferred as deferred_lib
from xshard.metrics import log
from xshard.metrics import rows as rows_lib


def test_every_step_is_due_some_steps_later():
    queue = deferred_lib.Queue()
    assert [queue.push(step) for step in range(1, 6)] == [[], [], [1], [2], [3]]
    assert queue.flush() == [4, 5]
    assert queue.flush() == [] and queue.push(6) == []


def test_arrays_become_numbers_of_a_row():
    values = {"loss": jnp.float32(1), "n": jnp.arange(2)}
    deferred_lib.to_host(values.values())
    row = {name: rows_lib.to_number(value) for name, value in values.items()}
    assert row == {"loss": 1.0, "n": [0, 1]} and type(row["loss"]) is float


def test_a_write_into_a_removed_directory_promises_nothing_that_was_saved_there(
    tmp_path,
):
    with pytest.raises(
        ValueError, match="run does not exist: create it, or restore it"
    ) as caught:
        jsonfile.write(tmp_path / "run/status.json", {})
    assert "saved so far" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"global_step": 4, "skipped": 0}, {"skipped": 1}),
        ({"a/global_step": [5, 3], "a/skipped": [0, 0]}, {"a/skipped": [0, 2]}),
        (
            {"a/global_step": 14, "a/skipped": 0, "a/updates_per_step": 3},
            {"a/skipped": 1},
        ),
        # The step makes several updates, and returns the outcome of one.
        ({"a/global_step": 14, "a/skipped": 0}, {}),
    ],
)
def test_a_row_has_the_skips_so_far(values, expected):
    row = log.with_skips({"step": 5, **values})
    assert {name: x for name, x in row.items() if name.endswith("skipped")} == expected


def test_nonfinite_numbers_become_null_in_json():
    row = {
        "step": 1,
        "loss": float("inf"),
        "of groups": [1.5, float("nan")],
        "nested": {"a": 2.0},
    }
    expected = {"step": 1, "loss": None, "of groups": [1.5, None], "nested": {"a": 2.0}}
    assert json.loads(jsonfile.dumps(row)) == expected


def test_nested_rows_are_flattened_to_one_name_per_number():
    row = {"step": 1, "loss": [0.5, [1, 2]], "nested": {"a": 2.0}, "none": []}
    assert rows_lib.flat(row) == {
        "step": 1, "loss/0": 0.5, "loss/1/0": 1, "loss/1/1": 2, "nested/a": 2.0
    }  # fmt: skip


def test_long_lists_of_lines_are_cut_in_the_middle():
    lines = [str(i) for i in range(10)]
    assert formatting.shortened(lines, 10) == lines
    cut = ["0", "1", "... 6 more; --verbose shows all", "8", "9"]
    assert formatting.shortened(lines, 5) == cut


@pytest.mark.parametrize(
    "seconds,text",
    [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (float("nan"), "?")],
)
def test_durations_as_text(seconds, text):
    assert formatting.duration(seconds) == text


def test_replacing_a_file_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "a"
    for content in (b"one", b"two"):
        disk.replace(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
