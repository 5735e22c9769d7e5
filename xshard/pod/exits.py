"""Ways to end a process that cannot wait for its main thread: immediately, or in place
of an abort.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from xshard.base import progress_line
from xshard.pod import host_collectives

# The time limit for restoring the terminal, and for the question that an abort handler
# asks of a peer.
SHORT_SECONDS = 1.0
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


def exit_now(code: int) -> NoReturn:
    """Ends this process from any thread."""
    # The training thread may be blocked while it holds the terminal, so the wait for
    # the terminal is bounded.
    host_collectives.with_timeout(progress_line.close_open, SHORT_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def ended_within(seconds: float) -> Iterator[None]:
    """Ends this process, with the stack of each thread, if it has not ended by itself a
    while after an exception of the context.
    """
    try:
        yield
    except BaseException:
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        raise


@contextlib.contextmanager
def before_abort(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` when C++ code aborts this process, as JAX does when it loses a
    peer.

    The handler is set in C and runs in the aborting thread. A Python handler would run
    in the main thread, and an abort does not wait for that. If `action` returns, the
    process is aborted.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    handler = _HANDLER(lambda number: action())
    previous = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGABRT, previous)
