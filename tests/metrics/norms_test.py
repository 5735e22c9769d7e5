"""The norms of parameters: their rows, the writers of them, and their maps."""

import csv
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from tests import toy
from xshard import errors, loop
from xshard.files import jsonfile
from xshard.learners import state as learner_state
from xshard.metrics import norms
from xshard.metrics import rows as rows_lib
from xshard.report import __main__ as report
from xshard.report import runs


def of_arrays(paths, groups=()):
    """Returns the norms of arrays, which count up from 1."""
    shape = (*groups, 3, len(paths))
    values = jnp.arange(1, np.prod(shape) + 1, dtype=jnp.float32).reshape(shape)
    return learner_state.ArrayNorms(tuple(paths), values)


def row_of(step, paths, scale=1.0):
    lists = {kind: [scale] * len(paths) for kind in norms.KINDS}
    return {"step": step, "norms": {"": {"paths": list(paths), **lists}}}


def write(path, all_rows):
    path.write_text("".join(jsonfile.dumps(row) + "\n" for row in all_rows))


def test_a_row_holds_the_paths_once_and_the_numbers_of_all_groups():
    row = norms.row(7, {"a": of_arrays(["x/w", "y/w"], groups=(2,))})
    assert row["norms"]["a"] == {
        "paths": ["x/w", "y/w"],
        "gradient": [[1, 7], [2, 8]],
        "parameter": [[3, 9], [4, 10]],
        "update": [[5, 11], [6, 12]],
    }
    by_name = norms.by_name(row)
    assert by_name["norms/gradient/a/x/w"] == [1, 7]
    assert by_name["norms/ratio/a/y/w"] == [6 / 4, 12 / 10]


def test_what_is_not_finite_is_null_and_has_no_ratio():
    values = jnp.array([[jnp.inf], [0.0], [0.0]])
    row = norms.row(1, {"": learner_state.ArrayNorms(("w",), values)})
    read = json.loads(jsonfile.dumps(row))
    assert read["norms"][""]["gradient"] == [None]
    (parameter,) = norms.parameters(read)
    assert np.isnan(parameter.values["gradient"] + parameter.values["ratio"]).all()


@pytest.mark.parametrize(
    "damaged",
    [
        {"": []},
        {"": {"paths": ["w"], "gradient": [1.0], "parameter": [1.0]}},
        {"": {**row_of(1, ["w"])["norms"][""], "paths": [3]}},
        {"": {**row_of(1, ["w"])["norms"][""], "update": ["x"]}},
        {"": {**row_of(1, ["w"])["norms"][""], "update": [[1.0, 2.0]]}},
        {"": {**row_of(1, ["w"])["norms"][""], "update": [[]]}},
    ],
)
def test_damaged_entries_are_left_out(tmp_path, damaged):
    row = {"step": 1, "norms": damaged}
    assert norms.by_name(row) == {"step": 1}
    write(tmp_path / "norms.jsonl", [row, row_of(2, ["w"]), {"step": 3}])
    (shown,) = runs.read_norms(tmp_path / "norms.jsonl", [])
    assert list(shown.values["ratio"]) == [2]


def test_a_row_that_no_reader_would_read_is_refused():
    paths = [f"module_{number}/w" for number in range(150_000)]
    with pytest.raises(errors.UserError, match="set log_norms_every_steps to 0"):
        norms.row(1, {"": of_arrays(paths)})


def test_the_writers_of_a_run(tmp_path, shared_programs):
    config = toy.get_config()
    config.update(log_norms_every_steps=5, steps=12, log_every_steps=4)
    config.writers = ("jsonl", "csv", "tensorboard")
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    written = list(rows_lib.read(tmp_path / "norms.jsonl"))
    assert [row["step"] for row in written] == [5, 10]
    assert {rows_lib.kind(row) for row in written} == {rows_lib.NORMS}
    expected = {}
    for row in written:
        for name, value in norms.by_name(row).items():
            expected[row["step"], name] = value
    # The events are as precise as float32.
    shown = {}
    (file,) = (tmp_path / "tensorboard").iterdir()
    content = file.read_bytes()
    while content:
        length = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]
        for value in event.summary.value:
            if value.tag.startswith("norms/"):
                shown[event.step, value.tag] = value.simple_value
    assert len(shown) == 2 * 4 * 2
    for place, value in shown.items():
        np.testing.assert_allclose(value, expected[place], rtol=1e-6)
    # Neither the table nor the other rows have norms by array.
    with (tmp_path / "metrics.csv").open() as file:
        assert not any(name.startswith("norms") for name in next(csv.reader(file)))
    assert all(map(rows_lib.has_numbers, rows_lib.read(tmp_path / "metrics.jsonl")))
    output = tmp_path / "report.html"
    assert report.main([str(tmp_path), f"--output={output}"]) == 0
    page = output.read_text()
    assert "<h2>Norms of parameters</h2>" in page
    names = set()
    for source in re.findall(r'<script type="application/json">(.*?)</script>', page):
        for trace in json.loads(source)["data"]:
            if trace["type"] == "heatmap":
                names |= set(trace["y"])
    assert "linear/w" in names


def test_a_map_has_few_columns_and_rows(tmp_path):
    paths = [f"block_{n}/{part}" for n in range(60) for part in ("w", "b")]
    write(tmp_path / "norms.jsonl", [row_of(step, paths) for step in range(1, 1001)])
    (shown,) = runs.read_norms(tmp_path / "norms.jsonl", [])
    gradient = shown.values["gradient"]
    assert 100 <= gradient.shape[1] <= 200 and gradient.columns[0] == 1
    # The norm of a module is that of its two arrays together.
    assert list(gradient.index) == [f"block_{n}" for n in range(60)]
    np.testing.assert_allclose(gradient, np.sqrt(2), rtol=1e-12)
    np.testing.assert_allclose(shown.values["ratio"], 1, rtol=1e-12)
    row = row_of(1, paths)
    row["norms"][""]["gradient"][1] = None
    write(tmp_path / "norms.jsonl", [row])
    (shown,) = runs.read_norms(tmp_path / "norms.jsonl", [])
    assert shown.values["gradient"][1].isna().tolist() == [True] + 59 * [False]


def test_a_map_is_of_one_learner_and_group(tmp_path):
    two_groups = {name: of_arrays(["w"], groups=(2,)) for name in ("a", "b")}
    write(tmp_path / "norms.jsonl", [norms.row(5, two_groups)])
    names = [shown.name for shown in runs.read_norms(tmp_path / "norms.jsonl", [])]
    assert names == ["a, group 0", "a, group 1", "b, group 0", "b, group 1"]
