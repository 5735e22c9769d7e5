"""Tests of the project."""

# XLA's flags: programs compile in a third of the time, and what is compared bit by bit is compiled alike.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false"
)
