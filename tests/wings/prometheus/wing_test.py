"""Tests of the numbers that Prometheus scrapes."""

import json
import math
import shutil
import subprocess
import urllib.request

import pytest
from prometheus_client import parser

from tests import toy, winged
from tests.launch import harness
from xshard import errors
from xshard.metrics import writers
from xshard.wings.prometheus import wing


@pytest.fixture
def port():
    return harness.free_port()


def scraped(port):
    """Returns the values of the endpoint by name and labels, as Prometheus reads it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        text = reply.read().decode()
    values = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            values[sample.name, labels["run"], labels["group"]] = sample.value
    return values


def opened(directory, port):
    part = writers.Part(directory, 1, {"prometheus": {"port": port}})
    return wing.Endpoint(part)


def test_the_newest_numbers_are_shown(tmp_path, port):
    history = [{"step": 1, "loss": 3.0}, {"step": 1, "eval/error": 4.0}]
    directory = tmp_path / "run"
    directory.mkdir()
    lines = [json.dumps(row) + "\n" for row in history]
    (directory / "metrics.jsonl").write_text("".join(lines))
    endpoint = opened(directory, port)
    first = {
        ("xshard_step", "run", ""): 1,
        ("xshard_loss", "run", ""): 3,
        ("xshard_eval_error", "run", ""): 4,
    }
    assert scraped(port) == first
    endpoint.write({"step": 2, "loss": [1.0, None], "a/b": 5, "a_b": 6})
    values = scraped(port)
    assert math.isnan(values.pop(("xshard_loss", "run", "1")))
    assert values == first | {
        ("xshard_step", "run", ""): 2,
        ("xshard_loss", "run", "0"): 1,
        ("xshard_a_b", "run", ""): 5,
        ("xshard_a_b_2", "run", ""): 6,
    }
    endpoint.close()
    # The port is free again.
    opened(tmp_path, port).close()


def test_a_port_that_is_taken_is_refused_before_training(tmp_path, port):
    config = toy.get_config()
    config.writers = ("jsonl", "prometheus")
    config.prometheus.port = port
    other = opened(tmp_path / "other", port)
    with pytest.raises(errors.UserError, match=f"port {port} cannot be opened"):
        winged.run(config.lock(), str(tmp_path / "run"), "")
    other.close()
    assert winged.run(config.lock(), str(tmp_path / "run"), "") == 0


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed"
)
def test_a_server_scrapes_them(tmp_path, port):
    """Needs a process: the real server."""
    server_port = harness.free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        "- job_name: xshard\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n"
    )
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{server_port}",
    ]
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=log)
    endpoint = opened(tmp_path / "run", port)
    endpoint.write({"step": 7, "loss": 0.25})

    def result():
        url = f"http://127.0.0.1:{server_port}/api/v1/query?query=xshard_loss"
        try:
            with urllib.request.urlopen(url) as reply:
                return json.load(reply)["data"]["result"]
        except OSError:
            return None

    try:
        (found,) = harness.wait_until(result)
    finally:
        server.kill()
        server.wait()
        endpoint.close()
        log.close()
    assert found["metric"]["run"] == "run"
    assert found["value"][1] == "0.25"
