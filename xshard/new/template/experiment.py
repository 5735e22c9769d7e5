"""To tell the points of two spirals, each of which goes round three times, from one another.

The problem: Lang and Witbrock, "Learning to Tell Two Spirals Apart", 1988.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import xshard


class Spirals(xshard.Supervised):
    """A small network that says on which spiral a point is."""

    # Yours: the examples, as arrays of one leading dimension, or any source of single ones, as grain's.
    def train_data(self):
        """The 97 points of each spiral."""
        return _spirals(np.arange(97))

    def eval_data(self):
        """The 96 points of each that are half way between them."""
        return _spirals(np.arange(96) + 0.5)

    # Yours: the network, a Haiku function. It sees one replica's part of a batch, already in the compute
    # type of config.precision. While is_training it may draw keys with hk.next_rng_key(), for dropout or noise.
    def forward(self, batch, *, is_training):
        """Logits of shape (batch, 2)."""
        network = hk.nets.MLP([*self.config.model.hidden, 2], activation=jax.nn.silu)
        return network(batch["point"])

    # Yours: what is minimised, and scalars to log beside it: means over the batch.
    def loss(self, outputs, batch):
        """The cross entropy, and the accuracy."""
        accuracy = jnp.mean(_hits(outputs, batch))
        return jnp.mean(_cross_entropy(outputs, batch)), {"accuracy": accuracy}

    # Yours: the rule, any of optax. The two wrappers are what a run on many replicas, and in float16, needs.
    def optimizer(self):
        """Adam, its rate falling along a cosine."""
        rate = optax.cosine_decay_schedule(self.config.optimizer.learning_rate, self.config.steps)
        opt = xshard.OptaxOptimizer(optax.adam(rate), name="adam")
        opt = xshard.CrossShardOptimizer(opt, slice_axis_name="slice", **self.config.reduction)
        scale = xshard.DynamicLossScale(**self.config.loss_scale)
        return xshard.MixedPrecisionLossScaleOptimizer(opt, scale)

    # Yours: what the network is judged by, a value for each example. Their means are reported.
    def evaluate(self, outputs, batch):
        """The cross entropy and whether the answer is right, of shape (batch,)."""
        return {"loss": _cross_entropy(outputs, batch), "accuracy": _hits(outputs, batch)}


def _spirals(position):
    """Points at these positions along the two spirals, 16 of them to half a turn, and whose they are."""
    angle, radius = position * np.pi / 16, 6.5 * (104 - position) / 104
    one = np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=-1)
    points = np.concatenate([one, -one]).astype(np.float32)
    return {"point": points, "label": np.repeat(np.arange(2, dtype=np.int32), len(one))}


def _cross_entropy(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"])


def _hits(outputs, batch):
    return jnp.argmax(outputs, axis=-1) == batch["label"]
