"""Tests that a damaged or forged file yields a named error or valid content.

Neither takes much memory.
"""

import contextlib
import io
import json

import hypothesis
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from hypothesis import strategies as st

import xshard
from launch import status, sweep
from tests import hostile
from tests.checkpoint import harness
from tests.report import samples
from xshard import errors
from xshard.base import formatting
from xshard.checkpoint import __main__ as tool
from xshard.checkpoint import arrays
from xshard.checkpoint import format as format_lib
from xshard.files import jsonfile, provenance, results, workdir
from xshard.metrics import event_files, writers
from xshard.metrics import rows as rows_lib
from xshard.report import page, runs


def user_error(action):
    """Returns the result of an action; None if it raises a UserError with a message."""
    try:
        return action()
    except errors.UserError as e:
        assert str(e)
        return None


def parsed(parse, content):
    """Returns the result of a function for some bytes; None if it refuses them."""
    with hostile.little_memory():
        try:
            return parse(content)
        except ValueError as e:
            assert str(e)
            return None


COMMIT = {
    "step": 1,
    "attempt": "01234567",
    "keys": 2,
    "bytes": 12,
    "time": 1.79e9,
    "nonfinite": ["params/w"],
    "sha256": {"meta.json": "0" * 64, "manifest.ocdbt": "0" * 64},
    "metrics": {"error": 0.5},
}


@hostile.settings()
@hypothesis.given(hostile.contents(COMMIT, lambda value: format_lib.seal(value)))
def test_a_damaged_commit_is_refused_or_valid(content):
    document_read = parsed(format_lib.parse_commit, content)
    if document_read is not None:
        assert document_read.step >= 0
        values = document_read.metrics.values()
        assert all(isinstance(value, int | float) for value in values)


@hostile.settings()
@hypothesis.given(
    hostile.contents({"error": 0.5}, lambda value: format_lib.seal(value))
)
def test_damaged_metrics_are_refused_or_valid(content):
    document_read = parsed(format_lib.parse_metrics, content)
    if document_read is not None:
        assert all(isinstance(value, int | float) for value in document_read.values())


ARRAY = {
    "shape": [6, 4],
    "chunk_shape": [2, 4],
    "dtype": "float32",
    "key_impl": None,
    "sharding": "P()",
}
META = {
    "version": format_lib.VERSION,
    "step": 1,
    "metadata": {"config": {}},
    "data": [None],
    "arrays": {"params/w": ARRAY, "x": ARRAY},
    "written_with": {"jax": "0.10.2"},
}


def metas(document):
    """Returns a strategy for the content of meta.json.

    Half of the time, only one array's entry is forged.
    """
    path, entry = sorted(document["arrays"].items())[-1]
    other = lambda array: document | {"arrays": document["arrays"] | {path: array}}
    arrays_only = hostile.forged(entry).map(other).map(format_lib.to_json)
    return st.one_of(arrays_only, hostile.contents(document, format_lib.to_json))


@hostile.settings()
@hypothesis.given(metas(META))
def test_a_damaged_meta_is_refused_or_valid(content):
    document_read = parsed(format_lib.parse_meta, content)
    if document_read is not None:
        for array in document_read.arrays.values():
            assert array.dtype in arrays.TYPES and str(array)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store with a checkpoint, the checkpoint's folder, and its files' content."""
    folder = tmp_path_factory.mktemp("whole")
    state = {"params": {"w": jnp.ones((3, 4))}, "s/current_loss_scale": jnp.float32(2)}
    options = {"keep_best": 1, "best_metric": "error", "best_mode": "min"}
    manager = harness.make_manager(folder)
    manager.save(
        1, state, {"config": {"checkpoint": options}}, data=[3], metrics={"error": 0.5}
    )
    manager.close()
    (step,) = folder.glob("step_*")
    files = {path: path.read_bytes() for path in step.glob("*") if path.is_file()}
    return folder, step, files


@hostile.settings(slow=True)
@hypothesis.given(st.data())
def test_the_tool_reads_or_refuses_a_damaged_checkpoint(whole, data):
    folder, step, files = whole
    names = ["meta.json"] * 4 + ["manifest.ocdbt", "COMMIT", "METRICS"]
    name = data.draw(st.sampled_from(names))
    path = step / name
    if name in ("manifest.ocdbt", "meta.json"):
        content = data.draw(hostile.damaged(files[path]))
    else:
        document = format_lib.unseal(files[step / "COMMIT"])
        document = document if name == "COMMIT" else document["metrics"]
        content = data.draw(hostile.contents(document, format_lib.seal))
    commit = format_lib.unseal(files[step / "COMMIT"])
    commit["sha256"][name] = format_lib.checksum(content)
    (step / "COMMIT").write_bytes(format_lib.seal(commit))
    path.write_bytes(content)
    try:
        for command in ("ls", "show 1", "verify"):
            word, *steps = command.split()
            run_tool([word, str(folder), *steps, "--json"])
    finally:
        (step / "METRICS").unlink(missing_ok=True)
        for path, before in files.items():
            path.write_bytes(before)


def run_tool(arguments):
    """Runs the checkpoint tool, which must print strict JSON or a message."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = tool.main(arguments)
    assert "Traceback" not in err.getvalue(), err.getvalue()
    if code == 0:
        json.loads(out.getvalue(), parse_constant=pytest.fail)


PROCESS = {
    "doing": "training",
    "step": 5,
    "steps": 10,
    "rate": 1.0,
    "time": 1.79e9,
    "host": "h",
    "pid": 1,
    "begun": 1.78e9,
    "first": 0,
    "trained": 5,
    "seconds": {"training": 1.0},
}
RESULTS = {
    "step": 10,
    "eval": {"error": 0.5},
    "samples": "abc",
    "finite": False,
    "why": "nan",
}
FILES = {
    "status.json": [PROCESS, PROCESS],
    "results.json": RESULTS,
    "config.json": samples.CONFIG,
    "origin.json": {"training": "a", "evaluation": "b", "commit": "c"},
    "sweep.json": [{"seed": 0}, {"seed": 1}],
    "000/config.json": {
        "_run": {"id": "0123456789abcdef", "fingerprint": "a"},
        "seed": 0,
    },
    "000/status.json": [PROCESS],
    "000/results.json": RESULTS,
}


@pytest.fixture
def directory(tmp_path):
    """A work directory with the files of a run and of a sweep."""
    (tmp_path / "eval").mkdir()
    (tmp_path / "000").mkdir()
    for name, document in FILES.items():
        (tmp_path / name).write_text(json.dumps(document))
    samples.write_rows(tmp_path / "metrics.jsonl", samples.rows(steps=30))
    samples.write_rows(tmp_path / "eval/metrics.jsonl", [samples.evaluation(10)])
    return tmp_path


def look(directory):
    """Calls everything that reads a work directory; only UserErrors may be raised."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        user_error(lambda: sweep.rows(directory))
        user_error(lambda: jsonfile.dumps(sweep.rows(directory)))
        user_error(lambda: status.show([str(directory)], True))
        user_error(lambda: formatting.table(status.rows(directory)))
        user_error(lambda: jsonfile.dumps(status.latest_checkpoint(directory)))
        for (run,) in [user_error(lambda: runs.read([str(directory)])) or [None]]:
            assert run is None or isinstance(run.step, int | None)
        user_error(lambda: results.nonfinite_reason(directory))
        config = ml_collections.ConfigDict(samples.CONFIG)
        user_error(lambda: workdir.Workdir(directory).check(config))
        user_error(
            lambda: workdir.Workdir(directory).check_provenance(
                provenance.Provenance("a", "b", "c")
            )
        )
        evaluated = rows_lib.read(directory / "eval/metrics.jsonl")
        assert all(isinstance(row["step"], int) for row in evaluated)


@hostile.settings(slow=True)
@hypothesis.given(st.data())
def test_a_damaged_file_of_a_work_directory_is_a_user_error(directory, data):
    name = data.draw(st.sampled_from(sorted(FILES)))
    path = directory / name
    path.write_bytes(data.draw(hostile.contents(FILES[name])))
    try:
        # In a directory with a sweep, only the sweep is shown.
        if name != "sweep.json" and data.draw(st.booleans()):
            (directory / "sweep.json").unlink()
        look(directory)
    finally:
        for changed in (path, directory / "sweep.json"):
            changed.write_text(
                json.dumps(FILES[changed.relative_to(directory).as_posix()])
            )


@hostile.settings(slow=True)
@hypothesis.given(st.data())
def test_damaged_rows_are_a_user_error(directory, data):
    lines = [json.dumps(row).encode() for row in samples.rows(steps=30)]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(lines) - 1))
        lines[place] = data.draw(
            hostile.contents(json.loads(json.dumps(samples.rows(steps=30)[place % 3])))
        )
    for name in ("metrics.jsonl", "eval/metrics.jsonl"):
        (directory / name).write_bytes(b"\n".join(lines))
    look(directory)


SHOWN = {
    "a": {"kind": "text", "text": "x"},
    "b": xshard.Image(np.eye(2)).item(),
    "c": xshard.Histogram(np.arange(3)).item(),
}


@hostile.settings(slow=True)
@hypothesis.given(hostile.contents({"step": 5, "samples": SHOWN}))
def test_damaged_samples_are_shown_safely(directory, content):
    (directory / "samples.jsonl").write_bytes(content + b"\n")
    for run in user_error(lambda: runs.read([str(directory)])) or []:
        assert "<script" not in page.gallery([run])
    event_files.EventFiles(writers.Part(directory, 5, {}))


def test_a_folder_in_place_of_a_file_is_refused(directory):
    for name in (*FILES, "metrics.jsonl", "eval/metrics.jsonl"):
        path = directory / name
        content = path.read_bytes()
        path.unlink()
        path.mkdir()
        expected_type = list if isinstance(FILES.get(name), list) else dict
        with pytest.raises(
            errors.UserError, match=f"{path} cannot be read: Is a directory"
        ):
            jsonfile.read(path, expected_type)
        runs_of = user_error(lambda: runs.read([str(directory)]))
        if name in ("metrics.jsonl", "results.json", "status.json"):
            assert any(f"{path} cannot be read" in note for note in runs_of[0].notes)
        user_error(lambda: status.show([str(directory)], True))
        path.rmdir()
        path.write_bytes(content)
