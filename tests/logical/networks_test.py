"""Tests that networks drawn at random have the same bits on one device and on several.

They need processes of their own: other tests compile without optimizations, and users
with.
"""

import subprocess
import sys

import pytest

from tests.checkpoint import harness


@pytest.mark.sample(1)
@pytest.mark.parametrize("network", range(200))
def test_a_network_has_the_same_bits_on_any_number_of_devices(network):
    command = [sys.executable, "-m", "tests.logical.networks", str(network), "1"]
    environment = harness.environment(XLA_FLAGS="")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
