"""Tests of checkpoints on servers that others wrote, where they are installed."""

import subprocess
import sys

import pytest

from tests.checkpoint import harness, protocol, servers


@pytest.mark.sample(2)
@pytest.mark.parametrize("server", servers.SERVERS, ids=lambda server: server.__name__)
def test_a_server_does_what_checkpoints_need(server, tmp_path):
    with server(tmp_path) as (url, variables):
        program = [sys.executable, "-m", "tests.checkpoint.protocol", url]
        done = subprocess.run(
            [*program, "--watch_seconds=1"],
            env=harness.environment(**variables),
            capture_output=True,
            text=True,
            check=False,
        )
    verdicts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    wanted = {promise.__name__ for promise in protocol.PROMISES}
    assert verdicts.keys() == wanted, done.stderr
    broken = {name for name in wanted if not verdicts[name].startswith("PASS")}
    assert broken == servers.SERVERS[server], (done.stdout, done.stderr)
