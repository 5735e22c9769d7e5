"""An experiment with one slow process: in its data, its evaluation or its disk."""

import time

import jax

from tests import toy
from xshard.checkpoint import writer

_SECONDS = 0.1


class Slow(toy.Toy):
    """Is slow on process 1, in the part that the config names as `slow`."""

    def _is_slow(self, part):
        return self.config.slow == part and jax.process_index() == 1

    def train_batches(self, part):
        batches = super().train_batches(part)
        return _Slow(batches) if self._is_slow("data") else batches

    def summarize(self, sums, count):
        if self._is_slow("evaluation"):
            time.sleep(5 * _SECONDS)
        return super().summarize(sums, count)

    def optimizer(self):
        if self._is_slow("write"):
            # Stands in for a slow disk.
            writer.write_part = _slow_write
        return super().optimizer()


def _slow_write(*args):
    time.sleep(5 * _SECONDS)
    return _write_part(*args)


_write_part = writer.write_part


class _Slow:
    """Batches that come late."""

    state_is_shared = True

    def __init__(self, batches):
        self._batches = batches
        self.summary = batches.summary
        self.epoch_examples = batches.epoch_examples
        self.get_state = batches.get_state
        self.set_state = batches.set_state

    def __next__(self):
        time.sleep(_SECONDS)
        return next(self._batches)
