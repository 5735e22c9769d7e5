"""Experiments whose runs cannot be repeated or resumed, each because of a different
mistake, and some without one.
"""

import random
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


class Rough(Line):
    """Has no mistake, but the sums of its numbers are rounded."""

    def train_data(self):
        x = np.sin(np.arange(32)).astype(np.float32)
        return {"x": x, "y": x**3}

    def forward(self, batch, *, is_training):
        return hk.nets.MLP([16, 1])(batch["x"][:, None])[:, 0]


class Drawing(Line):
    """Adds noise of each replica's own key, as dropout does."""

    def forward(self, batch, *, is_training):
        noise = (
            jax.random.normal(hk.next_rng_key(), batch["x"].shape)
            if is_training
            else 0.0
        )
        return super().forward({"x": batch["x"] + noise}, is_training=is_training)


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


class Changed(Line):
    """A base class whose `change` modifies the batches of its iterator."""

    def train_batches(self, part):
        return _Changed(super().train_batches(part), self.change)

    def change(self, batch):
        """Returns the modified batch."""
        raise NotImplementedError


class _Changed:
    """Batches that a function modifies. The iterator's state does not contain what the
    function uses.
    """

    state_is_shared = True

    def __init__(self, batches, change):
        self._batches, self._change = batches, change
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def __next__(self):
        return self._change(dict(next(self._batches)))


class Augmented(Changed):
    """Adds noise from Python's random numbers, which have no seed here."""

    def change(self, batch):
        return {**batch, "x": batch["x"] + np.float32(random.random())}


class Counting(Changed):
    """Counts its batches in an attribute, which no checkpoint stores, and adds the
    count to each batch.
    """

    count = 0

    def change(self, batch):
        self.count += 1
        return {**batch, "x": batch["x"] + np.float32(self.count)}


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
