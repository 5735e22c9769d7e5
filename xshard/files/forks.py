"""What a forked child of a run must not keep, such as the run's handlers of signals and its locks.

A fork copies the handlers and the descriptors of a process. So a signal to a worker of
a pool would reach the run, and a worker that outlives a killed run would hold its locks.
"""

import itertools
import os
from collections.abc import Callable

_undo: dict[int, Callable[[], object]] = {}
_numbers = itertools.count()


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


def _undo_all() -> None:
    for undo in _undo.values():
        undo()
    _undo.clear()


os.register_at_fork(after_in_child=_undo_all)
