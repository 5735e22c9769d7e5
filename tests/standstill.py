"""An experiment that hangs in the middle of a step, as it would if a device hung."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np

from tests import toy

# The variable that names a file. The first start creates the file and hangs; the next
# start sees it and does not.
VARIABLE = "XSHARD_TEST_STANDSTILL"


class Standstill(toy.Toy):
    """Hangs in the batch whose examples are marked."""

    def train_batches(self, part):
        return _Marked(super().train_batches(part))

    def loss(self, outputs, batch):
        loss, metrics = super().loss(outputs, batch)
        waited = jax.pure_callback(
            _wait, jax.ShapeDtypeStruct((), np.float32), jnp.max(batch["wait"])
        )
        return loss + waited, metrics

    def eval_data(self):
        return {**super().eval_data(), "wait": np.zeros(10, np.float32)}


def _wait(number):
    file = os.environ[VARIABLE]
    if number > 0 and not os.path.exists(file):
        with open(file, "w"):
            threading.Event().wait()
    return np.float32(0)


class _Marked:
    """Batches whose examples have a mark: 1 in the seventh batch, 0 in all others."""

    state_is_shared = True

    def __init__(self, batches):
        self._batches = batches
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def __next__(self):
        number = self.get_state()["batches"] + 1
        batch = next(self._batches)
        return {
            **batch,
            "wait": np.full(len(batch["x"]), float(number == 7), np.float32),
        }


class Silent(toy.Toy):
    """Has a stream of training data that yields as many batches as the config says, and
    then none.
    """

    def train_batches(self, part):
        return _Ending(super().train_batches(part), self.config.yields)


class SilentEvaluation(toy.Toy):
    """Has evaluation data that never comes."""

    def eval_data(self):
        threading.Event().wait()


class _Ending:
    """Batches up to a number, after which there is none, and no end."""

    state_is_shared = True

    def __init__(self, batches, count):
        self._batches, self._count = batches, count
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def __next__(self):
        if self._count == 0:
            threading.Event().wait()
        self._count -= 1
        return next(self._batches)
