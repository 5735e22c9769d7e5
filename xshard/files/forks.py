"""What a forked child of a run must not keep: handlers of signals, locks and the like.

A fork copies the handlers and the descriptors of a process. So a signal to a worker of
a pool would reach the run, and a worker that outlives a killed run would hold its
locks.
"""

import itertools
import os
import signal
import threading
from collections.abc import Callable

# By the number of the call that registered it.
_undo: dict[int, Callable[[], object]] = {}
_numbers = itertools.count()
# Each thread that forks keeps the signals that it had blocked before.
_thread = threading.local()


def undo_in_children(undo: Callable[[], object]) -> Callable[[], None]:
    """Makes each child that is forked from now on call a function first.

    Args:
      undo: the function. It may close descriptors and set handlers of signals.

    Returns:
      A function that ends this: children that are forked later do not call `undo`.
    """
    number = next(_numbers)
    _undo[number] = undo

    def end() -> None:
        _undo.pop(number, None)

    return end


def _block_signals() -> None:
    """Keeps signals from a child until it has undone what it must not keep."""
    _thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _unblock_signals() -> None:
    """Restores the signals that the forking thread had blocked before."""
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread.mask)


def _undo_all() -> None:
    """Calls all functions in a child, and then lets signals reach it."""
    for undo in _undo.values():
        undo()
    _undo.clear()
    _unblock_signals()


os.register_at_fork(
    before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_undo_all
)
