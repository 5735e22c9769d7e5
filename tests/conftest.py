"""A strict process: eight devices, no silent promotion of types, no leaks into Haiku's state, no signal ignored."""

import gc
import os
import signal

import haiku as hk
import jax
import pytest

import tests
from tests import programs
from xshard.checkpoint import source

os.environ.setdefault("XLA_FLAGS", tests.XLA_FLAGS)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
hk.config.set(check_jax_usage=True)
# Traces make many objects, and to look for cycles among them took a sixth of the time.
gc.set_threshold(200_000, 50, 100)
# What a test has damaged stays so, however long one waits before it is read again.
source.READ_AGAIN_SECONDS = (0.0, 0.0)

# What a process ignores, as under nohup or in a shell's background, all that it starts ignores, too, and a test
# would wait for ever for the end of what it has sent a signal. What has a handler is given back by exec.
for number in signal.valid_signals():
    if (
        number not in (signal.SIGPIPE, signal.SIGXFSZ)
        and signal.getsignal(number) == signal.SIG_IGN
    ):
        signal.signal(number, lambda *_: None)


@pytest.fixture(scope="module")
def shared_programs():
    """Runs of one config share their programs: for tests of what runs do besides, of which each would trace them anew."""
    with programs.shared():
        yield
