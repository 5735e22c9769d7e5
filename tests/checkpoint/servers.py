"""Servers of object stores that others wrote, for `tests.checkpoint.protocol`.

Each is used where its program is installed:

    localbucket      PyPI: localbucket
    testbench        Google's own test bench of clients, github.com/googleapis/
                     storage-testbench: STORAGE_TESTBENCH is its folder, and
                     STORAGE_TESTBENCH_PYTHON an interpreter with its dependencies
    fake-gcs-server  github.com/fsouza/fake-gcs-server
"""

import contextlib
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request

import pytest

from tests.checkpoint import harness
from tests.launch import harness as launch_harness


@contextlib.contextmanager
def localbucket(scratch):
    """S3's protocol; without If-Match."""
    (scratch / "bucket").mkdir()
    with _serving("localbucket", scratch, "--port", "{port}") as url:
        yield _s3(url)


@contextlib.contextmanager
def testbench(scratch):
    """GCS's protocol, as Google tests its clients with."""
    del scratch
    folder = os.environ.get("STORAGE_TESTBENCH", "")
    python = os.environ.get("STORAGE_TESTBENCH_PYTHON", "STORAGE_TESTBENCH_PYTHON")
    # Its program starts another one of its environment, `gunicorn`.
    path = os.pathsep.join([os.path.dirname(python), os.environ["PATH"]])
    command = (python, "testbench_run.py", "127.0.0.1", "{port}", 8)
    with _serving(*command, cwd=folder or None, env={"PATH": path}) as url:
        yield _gcs(url)


@contextlib.contextmanager
def fake_gcs_server(scratch):
    """GCS's protocol."""
    places = ("-scheme", "http", "-host", "127.0.0.1", "-port", "{port}")
    storage = ("-filesystem-root", scratch, "-public-host", "127.0.0.1:{port}")
    with _serving("fake-gcs-server", *places, *storage) as url:
        yield _gcs(url)


# What each server does not do, by the names in `tests.checkpoint.protocol`.
SERVERS = {
    localbucket: {"replace_if_unchanged"},
    testbench: set(),
    fake_gcs_server: set(),
}


@contextlib.contextmanager
def _serving(program, *arguments, cwd=None, env=None):
    """Runs a server at a free port; yields its address once it answers."""
    if not shutil.which(program):
        pytest.skip(f"needs {program}")
    port = str(harness.free_port())
    words = [str(word).format(port=port) for word in arguments]
    with subprocess.Popen(
        [program, *words],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as server:
        url = f"http://127.0.0.1:{port}"
        try:
            launch_harness.wait_until(lambda: _answers(url, server))
            yield url
        finally:
            # With the servers that it has started.
            os.killpg(server.pid, 9)


def _answers(url, server):
    assert server.poll() is None, "the server did not start"
    try:
        urllib.request.urlopen(url).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _s3(url):
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    return f"s3://bucket/run?endpoint={url}&region=us-east-1", keys


def _gcs(url):
    request = urllib.request.Request(
        f"{url}/storage/v1/b?project=p",
        data=json.dumps({"name": "bucket"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).close()
    return "gs://bucket/run", {"TENSORSTORE_GCS_HTTP_URL": url}
