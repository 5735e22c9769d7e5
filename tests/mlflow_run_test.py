"""Tests of the rows that MLflow stores, by its own client and server."""

import contextlib
import importlib.util
import subprocess
import sys
import urllib.request

import pytest

from tests import toy
from tests.launch import harness
from xshard import errors, loop
from xshard.metrics import writers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="MLflow is not installed"
)


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


@pytest.mark.long
def test_all_parts_of_a_run_are_one_run_of_mlflow(tmp_path, monkeypatch, capsys):
    import mlflow

    # The client gives up after one try.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    port = harness.free_port()
    run = str(tmp_path / "run")
    with server(tmp_path / "server", port) as url:
        mlflow.set_tracking_uri(url)
        assert loop.run(make_config(), run, "") == 0
    # Without the server, the run says how to go on, before it trains.
    with pytest.raises(errors.UserError, match=f"cannot start at {url}"):
        loop.run(make_config(steps=16), run, "")
    with server(tmp_path / "server", port):
        assert loop.run(make_config(steps=16), run, "") == 0
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


@pytest.mark.long
def test_rows_that_were_not_stored_are_sent_by_the_next_part(
    tmp_path, monkeypatch, capsys
):
    import mlflow

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    port = harness.free_port()
    rows = [{"step": step, "loss": float(step)} for step in range(1, 4)]

    def part(count):
        return writers.Part(tmp_path / "run", count, {}, lambda: iter(rows[:count]))

    with server(tmp_path / "server", port) as url:
        mlflow.set_tracking_uri(url)
        (writer,) = writers.open_all(["mlflow"], part(0))
        writer.write(rows[0])
        writer._operations[0].wait()
    # The server is gone while the run trains on.
    writer.write(rows[1])
    writer.close()
    assert "MLflow has not stored all rows" in capsys.readouterr().err
    with server(tmp_path / "server", port):
        (writer,) = writers.open_all(["mlflow"], part(2))
        writer.write(rows[2])
        writer.close()
        client = mlflow.MlflowClient()
        (found,) = mlflow.search_runs(output_format="list")
        history = client.get_metric_history(found.info.run_id, "loss")
    assert {(x.step, x.value) for x in history} == {(1, 1.0), (2, 2.0), (3, 3.0)}


def test_without_a_server_s_address_the_run_says_so(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(mlflow, "is_tracking_uri_set", lambda: False)
    with pytest.raises(errors.UserError, match="set MLFLOW_TRACKING_URI"):
        loop.run(make_config(), str(tmp_path / "run"), "")
