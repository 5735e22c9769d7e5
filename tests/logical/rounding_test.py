"""On CPUs a run with exact sums rounds each operation by itself, whatever else is in its programs."""

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


def rounded_otherwise(config, flags=""):
    """The numbers of devices, and of sums that are not those of rounded products."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(config)]
    environment = harness.environment(XLA_FLAGS=flags)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="XLA has this flag for x86 alone"
)
def test_products_and_sums_are_rounded_each():
    assert rounded_otherwise(EXACT) == (2, 0)
    # What a user says counts.
    assert rounded_otherwise(EXACT, "--xla_cpu_max_isa=SSE4_2") == (2, 0)
    devices, joined = rounded_otherwise({"logical_replicas": 2, "reduction": {}})
    assert devices == 2
    assert joined > 0 or " fma " not in pathlib.Path("/proc/cpuinfo").read_text()
