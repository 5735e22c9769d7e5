"""Ends of a process that cannot wait for its main thread: at once, and in the place of an abort."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from xshard.metrics import terminal
from xshard.pod import processes

# How long a terminal, or what an abort asks of a peer, may take.
SHORT_SECONDS = 1.0
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


def leave(code: int) -> NoReturn:
    """Ends this process from any thread."""
    # The training thread may stand still in the middle of a line.
    processes.bounded(terminal.leave, SHORT_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def before_abort(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` when C++ aborts this process, in the thread that does, as JAX where it misses a peer.

    A handler of Python's would run in the main thread, for which an abort does not wait. If `action`
    returns, the process is aborted.
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
