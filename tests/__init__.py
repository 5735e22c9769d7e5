"""Tests of the project."""

# XLA's flags: programs compile in a third of the time, and what is compared bit by bit is compiled alike. Where eight
# devices share two busy cores one may come to a collective later than the 40 s after which XLA ends the process. What is
# loaded from the cache that tests share stands still where collectives are begun in the order that the scheduler would
# have them, which is not stored with them.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_collective_call_terminate_timeout_seconds=600"
    " --xla_cpu_enable_concurrency_optimized_scheduler=false"
)
