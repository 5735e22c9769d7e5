"""Experiments with one slow process: in its data, its evaluation or its disk."""

import time

import jax

from tests import toy
from xshard.checkpoint import writer

_SECONDS = 0.1


class Data(toy.Toy):
    """Has slow data on process 1."""

    def train_batches(self, part):
        batches = super().train_batches(part)
        if jax.process_index() == 1:
            return _Slow(batches)
        return batches


class Evaluation(toy.Toy):
    """Evaluates slowly on process 1."""

    def summarize(self, sums, count):
        if jax.process_index() == 1:
            time.sleep(5 * _SECONDS)
        return super().summarize(sums, count)


class Write(toy.Toy):
    """Stands in for a run with a slow disk on process 1."""

    def optimizer(self):
        if jax.process_index() == 1:
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
