"""Keeps a run from being over before it is disturbed, however late its test comes to that."""

import contextlib
import os
import time

_VARIABLE = "XSHARD_TEST_SLOW"
_SECONDS = 0.5


@contextlib.contextmanager
def slow(file, after):
    """Has runs go slowly after so many steps; yields the variables of their environment.

    Args:
      file: a path that the runs can see; at the end they go on as quickly as they can.
      after: the number of steps.
    """
    file.write_text(str(after))
    try:
        yield {_VARIABLE: str(file)}
    finally:
        file.unlink()


class _Slow:
    """Batches that come slowly."""

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


def batches(of):
    """An experiment's batches, at the pace that its test asks for."""
    file = os.environ.get(_VARIABLE)
    return _Slow(of, file) if file else of
