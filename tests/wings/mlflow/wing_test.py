"""Tests of the rows that MLflow stores, by its own client and server, or a stand-in."""

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
import types
import urllib.request

import pytest

from tests import toy, winged
from tests.launch import harness
from xshard import errors
from xshard.metrics import writer as writer_lib
from xshard.metrics import writers
from xshard.wings.mlflow import wing

DONE = writer_lib.Outcome(writer_lib.DONE)

needs_mlflow = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="MLflow is not installed"
)


class Error(Exception):
    pass


class Service:
    """A stand-in for MLflow: what it has stored, as (name, value, time, step).

    Attributes:
      is_away: whether it refuses all requests.
      refused: is set when it has refused one.
    """

    def __init__(self):
        self.stored = []
        self.is_away = False
        self.refused = threading.Event()
        self.ended = 0

    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
        assert run_id == "an ID" and synchronous
        assert len(metrics) <= 1000
        if self.is_away:
            self.refused.set()
            raise Error("away")
        self.stored += [tuple(metric) for metric in metrics]

    def set_terminated(self, run_id):
        print("an address")
        self.ended += 1


@pytest.fixture
def service(monkeypatch):
    found = Service()
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="an ID"))
    stand_in = types.SimpleNamespace(
        is_tracking_uri_set=lambda: True,
        start_run=lambda run_id, **_: run,
        end_run=lambda status: print("an address"),
        MlflowClient=lambda: found,
        exceptions=types.SimpleNamespace(MlflowException=Error),
        entities=types.SimpleNamespace(
            Param=lambda name, value: (name, value), Metric=lambda *values: values
        ),
    )
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    return found


def part_of(directory, history=()):
    """Returns the part of a run that resumes after these rows."""
    directory.mkdir(exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in history]
    (directory / "metrics.jsonl").write_text("".join(lines))
    return writers.Part(directory, len(history), {"a": 1})


def opened(directory, history=()):
    return wing.MlflowRun(part_of(directory, history))


def row(step, time, **values):
    return {"step": step, "perf/time": time, **values}


def test_a_number_has_a_name_that_mlflow_allows(tmp_path, service, capsys):
    names = ["a@b", "a#b", "/c//d", "..", "x" * 300, "grad norm: e.f-g"]
    writer = opened(tmp_path)
    writer.write({"step": 1, "perf/time": 2.0} | dict.fromkeys(names, 1.0))
    writer.write({"step": 2, "perf/time": 3.0, "a#b": 4.0})
    writer.close()
    wanted = ["perf/time", "a_b", "a_b_2", "c/d", "__", "x" * 240, "grad norm: e.f-g"]
    assert [name for name, *_ in service.stored] == [*wanted, "perf/time", "a_b_2"]
    assert service.stored[-1] == ("a_b_2", 4.0, 3000, 2)
    assert service.ended == 1
    # A run with --quiet prints its results only.
    assert capsys.readouterr().out == ""


def test_large_rows_are_sent_in_parts(tmp_path, service):
    writer = opened(tmp_path)
    writer.write({"step": 1, "perf/time": 2.0} | {f"a{i}": i for i in range(2500)})
    writer.close()
    assert len(service.stored) == 2501


def test_a_killed_part_has_recorded_what_is_stored(tmp_path, service):
    before = [row(1, 10.0, loss=1.0), row(2, 20.0, loss=2.0)]
    writer = opened(tmp_path)
    for each in before:
        writer.write(each)
    note = tmp_path / "mlflow/xshard.json"
    harness.wait_until(lambda: json.loads(note.read_text())["sent"] == [0, 2, 1])
    # The part is not closed. The next one resumes after step 1 and repeats step 2, at
    # another time.
    writer = opened(tmp_path, before[:1])
    writer.write(row(2, 30.0, loss=2.0))
    writer.write(row(3, 40.0, loss=3.0))
    writer.close()
    losses = [(step, time) for name, _, time, step in service.stored if name == "loss"]
    assert losses == [(1, 10000), (2, 20000), (3, 40000)]


def test_a_server_that_is_away_keeps_no_run_from_going_on(tmp_path, service, capsys):
    run = writers.Writers(["jsonl", "mlflow"], part_of(tmp_path), winged.WINGS)
    service.is_away = True
    run.write(row(1, 10.0, loss=1.0))
    assert service.refused.wait(60)
    writer = run._opened["mlflow"]
    harness.wait_until(lambda: writer._failure)
    for step in (2, 3):
        run.write(row(step, 10.0 * step, loss=float(step)))
    run.close(DONE)
    # Once, although there are three reasons.
    assert capsys.readouterr().err == (
        "the run goes on without the writer 'mlflow', which failed: OSError: MLflow "
        "has not stored all rows (away); a resumed run sends them.\n"
    )
    assert service.stored == [] and service.ended == 0
    service.is_away = False
    opened(
        tmp_path, [row(step, 10.0 * step, loss=float(step)) for step in (1, 2, 3)]
    ).close()
    assert [step for name, _, _, step in service.stored if name == "loss"] == [1, 2, 3]


def test_a_server_that_does_not_answer_keeps_no_run_from_ending(
    tmp_path, service, monkeypatch
):
    monkeypatch.setattr(wing, "_LONGEST_WAIT_SECONDS", 0.1)
    answers = threading.Event()
    log_batch = service.log_batch
    writer = opened(tmp_path)

    def wait(*args, **kwargs):
        assert answers.wait(60)
        log_batch(*args, **kwargs)

    monkeypatch.setattr(service, "log_batch", wait)
    writer.write(row(1, 10.0, loss=1.0))
    with pytest.raises(OSError, match=r"no answer for 0.1 seconds.*; a resumed run"):
        writer.close()
    # The note is the next part's now, even if the server has stored the row after all.
    before = (tmp_path / "mlflow/xshard.json").read_text()
    answers.set()
    writer._thread.join()
    assert (tmp_path / "mlflow/xshard.json").read_text() == before
    assert service.ended == 0


@contextlib.contextmanager
def server(folder, port):
    """Runs MLflow's server, with its store in a folder."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1"]
    command += [f"--port={port}", f"--backend-store-uri=sqlite:///{folder}/mlflow.db"]
    command += [f"--artifacts-destination={folder}", "--workers=1"]
    log = (folder / "log").open("a")
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    url = f"http://127.0.0.1:{port}"

    def answers():
        assert process.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{url}/health").read()

    try:
        harness.wait_until(answers)
        yield url
    finally:
        process.terminate()
        process.wait()
        log.close()


def make_config(**changes):
    config = toy.get_config()
    config.writers = ("jsonl", "mlflow")
    config.update(changes)
    return config.lock()


@needs_mlflow
@pytest.mark.long
def test_all_parts_of_a_run_are_one_run_of_mlflow(tmp_path, monkeypatch, capsys):
    import mlflow

    # The client gives up after one try.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    port = harness.free_port()
    run = str(tmp_path / "run")
    with server(tmp_path / "server", port) as url:
        mlflow.set_tracking_uri(url)
        assert winged.run(make_config(), run, "") == 0
    # Without the server, the run says how to go on, before it trains.
    with pytest.raises(errors.UserError, match=f"cannot start at {url}"):
        winged.run(make_config(steps=16), run, "")
    with server(tmp_path / "server", port):
        assert winged.run(make_config(steps=16), run, "") == 0
        (found,) = mlflow.search_runs(output_format="list")
        client = mlflow.MlflowClient()
        history = client.get_metric_history(found.info.run_id, "loss")
        errors_of = client.get_metric_history(found.info.run_id, "eval/error")
    assert found.info.run_name == "run"
    assert found.info.status == "FINISHED"
    assert found.data.params["optimizer.learning_rate"] == "0.1"
    logged = [row for row in writers.rows_lib.read(tmp_path / "run/metrics.jsonl")]
    losses = [(row["step"], row["loss"]) for row in logged if "loss" in row]
    assert [(x.step, x.value) for x in sorted(history, key=lambda x: x.step)] == losses
    assert [x.step for x in errors_of] == [6, 12, 16]


@needs_mlflow
@pytest.mark.long
def test_rows_that_were_not_stored_are_sent_by_the_next_part(
    tmp_path, monkeypatch, capsys
):
    import mlflow

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    port = harness.free_port()
    # The server itself would refuse such a name.
    rows = [row(step, step, loss=float(step), **{"top@5": 1.0}) for step in (1, 2, 3)]

    with server(tmp_path / "server", port) as url:
        mlflow.set_tracking_uri(url)
        run = writers.Writers(
            ["jsonl", "mlflow"], part_of(tmp_path / "run"), winged.WINGS
        )
        run.write(rows[0])
        note = tmp_path / "run/mlflow/xshard.json"
        harness.wait_until(lambda: json.loads(note.read_text())["sent"] == [0, 1, 1])
    # The server is gone while the run trains on.
    run.write(rows[1])
    run.close(DONE)
    assert "MLflow has not stored all rows" in capsys.readouterr().err
    with server(tmp_path / "server", port):
        part = part_of(tmp_path / "run", rows[:2])
        run = writers.Writers(["jsonl", "mlflow"], part, winged.WINGS)
        run.write(rows[2])
        run.close(DONE)
        client = mlflow.MlflowClient()
        (found,) = mlflow.search_runs(output_format="list")
        history = client.get_metric_history(found.info.run_id, "loss")
        others = client.get_metric_history(found.info.run_id, "top_5")
    assert sorted((x.step, x.value) for x in history) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert sorted(x.step for x in others) == [1, 2, 3]


@needs_mlflow
def test_without_a_server_s_address_the_run_says_so(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(mlflow, "is_tracking_uri_set", lambda: False)
    with pytest.raises(errors.UserError, match="set MLFLOW_TRACKING_URI"):
        winged.run(make_config(), str(tmp_path / "run"), "")
