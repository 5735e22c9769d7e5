"""Experiments whose runs cannot be repeated or resumed, each because of a different
mistake, and some without one.
"""

import time

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

import xshard


class Line(xshard.Supervised):
    """Fits a line, without a mistake."""

    def train_data(self):
        x = np.arange(32, dtype=np.float32) / 32
        return {"x": x, "y": 2 * x}

    def eval_data(self):
        return self.train_data()

    def forward(self, batch, *, is_training):
        return hk.Linear(1)(batch["x"][:, None])[:, 0]

    def loss(self, outputs, batch):
        return jnp.mean((outputs - batch["y"]) ** 2), {}

    def optimizer(self):
        return xshard.CrossShardOptimizer(optax.sgd(0.1), slice_axis_name="slice")

    def evaluate(self, outputs, batch):
        return {"error": (outputs - batch["y"]) ** 2}


class Clock(Line):
    """Uses the time of day in its loss."""

    def loss(self, outputs, batch):
        error, scalars = super().loss(outputs, batch)
        return error * (1 + time.time() % 1), scalars


class HashOrder(Line):
    """Numbers its words in the order of a set, which differs between processes."""

    def train_data(self):
        words = {f"word {i}" for i in range(32)}
        x = np.array([int(word.split()[1]) for word in words], np.float32) / 32
        return {"x": x, "y": 2 * x}


class Counting(Line):
    """Counts its batches in an attribute, which no checkpoint stores, and adds the
    count to each batch.
    """

    def train_batches(self, part):
        return _Counted(super().train_batches(part))


class _Counted:
    """Batches to which their count is added, which is not in the iterator's state."""

    state_is_shared = True

    def __init__(self, batches):
        self._batches = batches
        self._count = 0
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def __next__(self):
        batch = next(self._batches)
        self._count += 1
        return {**batch, "x": batch["x"] + np.float32(self._count)}


class Remembering(Line):
    """Counts, on the host, the losses that it has computed, and multiplies the loss by
    the count.
    """

    _calls = 0

    def loss(self, outputs, batch):
        error, scalars = super().loss(outputs, batch)
        count = jax.pure_callback(self._count, jax.ShapeDtypeStruct((), jnp.float32))
        return count * error, scalars

    def _count(self):
        self._calls += 1
        return np.float32(self._calls)


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of a run of `Line`, which has no mistake."""
    config = xshard.config.default()
    config.experiment = "tests.impure.Line"
    config.batch_size = 8
    config.eval_batch_size = 8
    return config
