"""Tests that on CPUs a run with exact sums rounds each operation separately, whatever else its programs compute."""

import json
import pathlib
import platform
import subprocess
import sys

import pytest

from tests.checkpoint import harness

PROGRAM = """
import json, sys
from xshard.pod import origin

origin.set_up_cpu(json.loads(sys.argv[1]), 2)

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
a, b, c = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)
result = np.asarray(jax.jit(lambda a, b, c: a * b + c)(a, b, c))
print(len(jax.devices()), np.sum(result != a * b + c))
"""
EXACT = {"logical_replicas": 2, "reduction": {"arithmetic": "exact"}}


def devices_and_fused(config, flags=""):
    """Returns the number of devices, and how many results differ from sums of rounded products."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(config)]
    environment = harness.environment(XLA_FLAGS=flags)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="XLA has this flag only on x86"
)
def test_products_and_sums_are_rounded_separately():
    assert devices_and_fused(EXACT) == (2, 0)
    # A user's own value of the flag is also accepted. SSE4.2 has no fused multiply-add either.
    assert devices_and_fused(EXACT, "--xla_cpu_max_isa=SSE4_2") == (2, 0)
    devices, fused = devices_and_fused({"logical_replicas": 2, "reduction": {}})
    assert devices == 2
    # Without exact sums, XLA fuses some of the operations if the CPU has a fused multiply-add.
    assert fused > 0 or " fma " not in pathlib.Path("/proc/cpuinfo").read_text()
