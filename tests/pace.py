"""Slows runs down, so that they have not ended when a test interrupts them, however
late that is.
"""

import contextlib
import os
import time

_VARIABLE = "XSHARD_TEST_SLOW"
# How long a slow run waits for each batch.
_SECONDS = 0.5


@contextlib.contextmanager
def slow(file, after):
    """Makes runs slow after a number of steps; yields the environment variables that
    the runs need.

    Args:
      file: a path that the runs can read; it is deleted at the end, and the runs go on
        at full speed.
      after: the number of steps at full speed.
    """
    file.write_text(str(after))
    try:
        yield {_VARIABLE: str(file)}
    finally:
        file.unlink()


class _Slow:
    """Batches that are slow from the step that a file names."""

    state_is_shared = True

    def __init__(self, batches, file):
        self._batches = batches
        self._file = file
        self.summary = batches.summary
        self.epoch_examples = batches.epoch_examples
        self.get_state = batches.get_state
        self.set_state = batches.set_state

    def __next__(self):
        end = time.monotonic() + _SECONDS
        while self._is_slow() and time.monotonic() < end:
            time.sleep(_SECONDS / 20)
        return next(self._batches)

    def _is_slow(self):
        with contextlib.suppress(FileNotFoundError), open(self._file) as file:
            return self.get_state()["batches"] >= int(file.read())
        return False


def batches(iterator):
    """Returns an experiment's batches, slowed down if the test asks for it."""
    file = os.environ.get(_VARIABLE)
    return _Slow(iterator, file) if file else iterator
