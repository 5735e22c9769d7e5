"""An experiment that stands still in the middle of a step, as where a device or what it waits for does."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np

from tests import toy

# A file that the first start makes: the next one comes past.
VARIABLE = "XSHARD_TEST_STANDSTILL"


class Standstill(toy.Toy):
    """Waits for ever in the batch whose examples say so."""

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
    """Batches of which the seventh is marked."""

    state_is_shared = True

    def __init__(self, batches):
        self._batches = batches
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def __next__(self):
        number = self.get_state()["batches"] + 1
        batch = next(self._batches)
        return {**batch, "wait": np.full(len(batch["x"]), float(number == 7), np.float32)}
