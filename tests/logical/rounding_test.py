"""Tests that on CPUs the rounding of a run with exact sums depends on neither its other
operations nor its threads.
"""

import json
import pathlib
import platform
import subprocess
import sys

import pytest

from tests.checkpoint import harness

FUSED = """
import json, sys
from xshard.pod import origin

origin.set_up_backends(json.loads(sys.argv[1]), 2)

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
a, b, c = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)
result = np.asarray(jax.jit(lambda a, b, c: a * b + c)(a, b, c))
print(len(jax.devices()), np.sum(result != a * b + c))
"""
PRODUCT = """
import json, sys, zlib
from xshard.pod import origin

origin.set_up_backends(json.loads(sys.argv[1]), int(sys.argv[2]))

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
generator = np.random.default_rng(0)
a, b = (generator.normal(size=(8, width)).astype(np.float32) for width in (2048, 128))
print(zlib.crc32(np.asarray(jax.jit(lambda a, b: a.T @ b)(a, b))))
"""
EXACT = {"logical_replicas": 2, "reduction": {"arithmetic": "exact"}}


def output(program, config, *arguments, **environment):
    """Returns what a program prints, as a list of words."""
    command = [sys.executable, "-c", program, json.dumps(config), *arguments]
    environment = harness.environment(**environment)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def devices_and_fused(config, flags=""):
    """Returns the number of devices, and how many results differ from sums of rounded
    products.
    """
    return tuple(map(int, output(FUSED, config, XLA_FLAGS=flags)))


@pytest.mark.sample(0.4)
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="XLA has this flag only on x86",
)
def test_products_and_sums_are_rounded_separately():
    assert devices_and_fused(EXACT) == (2, 0)
    # A user's own value of the flag is also accepted. SSE4.2 has no fused multiply-add
    # either.
    assert devices_and_fused(EXACT, "--xla_cpu_max_isa=SSE4_2") == (2, 0)
    devices, fused = devices_and_fused({"logical_replicas": 2, "reduction": {}})
    assert devices == 2
    # Without exact sums, XLA fuses some of the operations if the CPU has a fused
    # multiply-add.
    assert fused > 0 or " fma " not in pathlib.Path("/proc/cpuinfo").read_text()


@pytest.mark.sample(1)
@pytest.mark.parametrize("groups", [(), ((0, 1, 2, 3), (4, 5, 6, 7))])
def test_a_large_product_does_not_depend_on_the_number_of_devices(groups):
    # XLA has at least one thread for each device, and divides this product among its
    # threads.
    config = EXACT | {
        "logical_replicas": 4 if groups else 8,
        "group_assignment": groups,
    }
    many = output(PRODUCT, config, "8")
    assert (
        output(PRODUCT, config, "1") == output(PRODUCT, config, "1", NPROC="3") == many
    )
