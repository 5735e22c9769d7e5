"""The set-up of all tests: eight devices, strict dtype promotion, Haiku's check of JAX usage, no ignored signals."""

import gc
import os
import signal

import haiku as hk
import jax
import pytest

import tests
from tests import programs
from xshard.checkpoint import metadata_files

os.environ.setdefault("XLA_FLAGS", tests.XLA_FLAGS)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
hk.config.set(check_jax_usage=True)
# Tracing creates many objects. With the default thresholds, garbage collection took a sixth of the tests' time.
gc.set_threshold(200_000, 50, 100)
# Damage that a test causes does not heal, so the wait before a second read is left out.
metadata_files.READ_AGAIN_SECONDS = (0.0, 0.0)

# A process under nohup or in a shell's background ignores some signals, and all processes that it starts inherit that.
# A test that sends such a signal would wait forever for the process to end. A signal with a handler is reset by exec.
for number in signal.valid_signals():
    if (
        number not in (signal.SIGPIPE, signal.SIGXFSZ)
        and signal.getsignal(number) == signal.SIG_IGN
    ):
        signal.signal(number, lambda *_: None)


@pytest.fixture(scope="module")
def shared_programs():
    """Lets runs of one config share their programs, for tests of other things; otherwise each run traces them again."""
    with programs.shared():
        yield
