"""Tests that the rows of metrics.jsonl are read as columns, and that damaged rows are
skipped.
"""

import json
import types

import numpy as np

from tests.report import samples
from xshard.report import runs


def read_rows(path):
    """Returns the columns of a file, and the notes on it."""
    notes = []
    training, evaluation = runs.read_rows(path, notes)
    return types.SimpleNamespace(training=training, evaluation=evaluation, notes=notes)


def test_rows_are_read_as_columns(tmp_path):
    logged = [
        {"step": 2, "loss": 0.5, "n": 3},
        {"step": 4, "loss": float("nan"), "n": 4},
    ]
    logged.insert(1, {"step": 3, "eval/error": [0.1, 0.2], "eval/ensemble/error": 0.05})
    samples.write_rows(tmp_path / "metrics.jsonl", logged)
    read = read_rows(tmp_path / "metrics.jsonl")
    assert read.notes == []
    np.testing.assert_array_equal(read.training["loss"].index, [2, 4])
    np.testing.assert_array_equal(read.training["loss"].values, [[0.5], [np.nan]])
    np.testing.assert_array_equal(read.training["n"].values, [[3], [4]])
    np.testing.assert_array_equal(read.evaluation["error"].values, [[0.1, 0.2]])
    assert list(read.evaluation) == ["error", "ensemble/error"]


def test_fingerprints_are_no_damage(tmp_path):
    samples.write_rows(
        tmp_path / "m", [{"step": 10, "loss": 0.5, "fingerprint/params": "96a70f47"}]
    )
    read = read_rows(tmp_path / "m")
    assert list(read.training) == ["loss"] and read.notes == []


def test_a_missing_file_has_no_rows(tmp_path):
    assert not any(vars(read_rows(tmp_path / "metrics.jsonl")).values())


def test_slices_whose_number_changes_are_shown_as_their_mean(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 1, "loss": [1.0, 3.0], "rate": 0.5},
        {"step": 2, "loss": [2.0, None], "rate": 0.25},
        {"step": 3, "loss": 4.0, "rate": 0.125},
        {"step": 4, "loss": [1.0, 2.0, 6.0], "rate": []},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = read_rows(path)
    loss = read.training["loss"]
    assert list(loss.index) == [1, 2, 3, 4]
    np.testing.assert_array_equal(loss.values, [[2.0], [np.nan], [4.0], [3.0]])
    assert list(read.training["rate"].index) == [1, 2, 3]
    of_rate, of_loss = read.notes
    assert "skipped 1 value(s) of 'rate' that are not numbers" in of_rate
    assert "the number of slices has changed, so their mean is shown" in of_loss


def test_damaged_lines_are_skipped_with_a_note(tmp_path):
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    texts = [json.dumps(line) for line in lines]
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "\n".join(
            [texts[0], "nonsense", "[1]", '{"step": 1e99}', texts[1], texts[1][:9]]
        )
    )
    read = read_rows(path)
    np.testing.assert_array_equal(read.training["loss"].index, [1, 2])
    cut, damaged = read.notes
    assert "last line of metrics.jsonl is incomplete" in cut
    assert damaged.endswith("skipped 3 invalid line(s): 2, 3, 4.")
    # A last row that only lacks its newline is read, whatever precedes it.
    path.write_text(f"{texts[0]}\nnonsense\n{texts[1]}")
    read = read_rows(path)
    np.testing.assert_array_equal(read.training["loss"].index, [1, 2])
    assert read.notes == ["metrics.jsonl: skipped 1 invalid line(s): 2."]
    # An incomplete last line that ends with a newline is damaged: it is not still being
    # written.
    path.write_text(f"{texts[0]}\n{texts[1][:9]}\n")
    (note,) = read_rows(path).notes
    assert "skipped 1 invalid line(s)" in note


def test_the_last_row_of_a_repeated_step_counts(tmp_path):
    logged = [
        {"step": s, "loss": v}
        for s, v in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (4, 4.0))
    ]
    samples.write_rows(tmp_path / "m", logged)
    column = read_rows(tmp_path / "m").training["loss"]
    np.testing.assert_array_equal(column.index, [1, 2, 3, 4])
    assert column[0].tolist() == [1, 20, 3, 4]


def test_values_that_are_not_numbers_are_left_out_with_a_note(tmp_path):
    values = ["a", 1.0, ["a", 2.0], True, 10**400, None]
    path = tmp_path / "m"
    path.write_text(
        "".join(
            json.dumps({"step": i, "x": v, "y": "b", "z\x00\x1b": 1}) + "\n"
            for i, v in enumerate(values)
        )
    )
    read = read_rows(path)
    np.testing.assert_array_equal(read.training["x"].index, [1, 5])
    np.testing.assert_array_equal(read.training["x"][0], [1, np.nan])
    assert "y" not in read.training and "z\ufffd\ufffd" in read.training
    assert any("4 value(s) of 'x'" in note for note in read.notes)
    assert any("6 value(s) of 'y'" in note for note in read.notes)


def test_rows_may_differ_in_their_names(tmp_path):
    logged = [
        {"step": 1, "a": 1.0, "b": 1},
        {"step": 2, "a": 2.0},
        {"step": 3, "b": 3, "a": None, "c": [1.0, None]},
        {"step": 2, "a": 5.0, "b": 2},
        {"step": 4, "c": "text"},
    ]
    samples.write_rows(tmp_path / "m", logged)
    read = read_rows(tmp_path / "m")
    assert list(read.training) == ["a", "b", "c"]
    a, b, c = read.training.values()
    assert a.index.tolist() == b.index.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(a[0], [1.0, 5.0, np.nan])
    assert b[0].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(c, [[1.0, np.nan]])
    assert read.notes == ["m: skipped 1 value(s) of 'c' that are not numbers."]


def test_a_number_too_large_for_a_float_is_not_finite(tmp_path):
    (tmp_path / "m").write_text('{"step": 1, "x": 1e999}\n{"step": 2, "x": [1e999]}\n')
    (x,) = read_rows(tmp_path / "m").training.values()
    assert x[0].isna().tolist() == [True, True]
