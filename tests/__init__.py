"""Tests of the project."""

import os

from jaxlib import version

# The XLA flags of all tests. Without optimization, programs compile in a third of the
# time, and programs whose results a test compares bit by bit are compiled alike. The
# timeout is longer than XLA's 40 s, after which XLA ends the process: eight devices
# that share two busy cores may reach a collective later than that. The scheduler is off
# because the cache that tests share does not store its order: a program loaded from
# there could deadlock in its collectives.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    " --xla_cpu_enable_concurrency_optimized_scheduler=false"
)
# XLA's other emitters compile in two thirds of the time. From jaxlib 0.11.1 on it has
# the fusion emitters only, and ends a process that is given the flag. The flags are
# needed before XLA could be asked, so the version decides.
if version.__version_info__ < (0, 11, 1):
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"

# Draws the rows of a table that a run of the tests without --all tries. Any other text
# draws others.
SAMPLE_SEED = os.environ.get("XSHARD_SAMPLE_SEED", "2")
