"""A recurrent network that carries its state from batch to batch, and its config: an
experiment for tests.
"""

import haiku as hk
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

import xshard
from xshard import data

LETTERS = np.frombuffer(b"she sells sea shells by the sea shore; ", np.uint8) - ord(" ")
KINDS = 96


class Passages:
    """Batches in which each row continues where the same row of the previous batch
    ended.
    """

    state_is_shared = True

    def __init__(self, part, length):
        rows = np.concatenate(part.rows)
        self._begins = rows * len(LETTERS) // part.batch_size
        self._length, self._batches = length, 0

    def __next__(self):
        first = self._begins + self._batches * self._length
        self._batches += 1
        places = first[:, None] + np.arange(self._length + 1)
        return {"text": LETTERS[places % len(LETTERS)].astype(np.int32)}

    def get_state(self):
        return self._batches

    def set_state(self, state):
        self._batches = state


class Carried(xshard.Experiment):
    """Learns to predict one fixed sentence, a few letters at a time."""

    def __init__(self, config):
        super().__init__(config)
        self.learner = xshard.Learner(self._network, self._rule, self.config)

    def train_batches(self, part):
        return Passages(part, self.config.length)

    def eval_data(self):
        part = data.Part(8, (np.arange(8),), seed=0)
        return next(Passages(part, len(LETTERS)))

    def _network(self, text, hidden):
        core = hk.GRU(self.config.hidden)
        letters = hk.Embed(KINDS, self.config.hidden)(text)
        outputs, hidden = hk.dynamic_unroll(core, letters, hidden, time_major=False)
        return hk.Linear(KINDS)(outputs), hidden

    def _rule(self):
        opt = xshard.OptaxOptimizer(
            optax.adam(self.config.optimizer.learning_rate), name="adam"
        )
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        return xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic")

    def _silence(self, text):
        return jnp.zeros((len(text), self.config.hidden))

    def init(self, key, batch):
        text = batch["text"][:, :-1]
        hidden = self._silence(text)
        return {
            "rnn": self.learner.init(key, text, hidden),
            "hidden": xshard.PerExample(hidden),
        }

    def train_step(self, state, batch, key):
        inputs = {**batch, "hidden": state["hidden"].value}
        rnn, outcome = self.learner.update(state["rnn"], self._loss, inputs, key)
        return {"rnn": rnn, "hidden": xshard.PerExample(outcome.aux)}, {"rnn": outcome}

    def _loss(self, state, inputs, key):
        text = inputs["text"]
        (logits, hidden), net_state = self.learner.apply(
            state, key, text[:, :-1], inputs["hidden"]
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
        return jnp.mean(loss), net_state, {}, hidden

    def eval_step(self, state, batch, key):
        text = batch["text"]
        logits = self.predict(state, batch)
        return {"hits": jnp.mean(jnp.argmax(logits, axis=-1) == text[:, 1:], axis=-1)}

    def predict(self, state, batch):
        text = batch["text"][:, :-1]
        (logits, _), _ = self.learner.apply(
            state["rnn"], None, text, self._silence(text)
        )
        return logits


def get_config() -> ml_collections.ConfigDict:
    """Returns the defaults with this experiment's settings."""
    config = xshard.config.default()
    config.experiment = "tests.carried.Carried"
    config.steps = 300
    config.batch_size = 16
    config.eval_batch_size = 8
    config.length = 5
    config.hidden = 32
    config.optimizer = {"learning_rate": 1e-2}
    config.eval_every_steps = 100
    config.checkpoint.update(
        {"every_steps": 100, "best_metric": "hits", "best_mode": "max"}
    )
    return config
