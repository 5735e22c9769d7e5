"""Features of handwritten digits, learned without labels, and a linear classifier on
them.

Source: Grill et al., "Bootstrap Your Own Latent", 2020. A network learns to predict the
projection that a moving average of itself computes from another view of the same image.
Batch norm averages over all replicas; the update rule is LARS.
"""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import xshard
from experiments.digits import images


class State(NamedTuple):
    """The trained network (online), and the target: a moving average of its parameters,
    with its batch statistics.
    """

    online: xshard.LearnerState
    target: Any


class Byol(xshard.Experiment):
    """An encoder with a projector and a predictor. A linear classifier measures the
    quality of its features.
    """

    def __init__(self, config):
        super().__init__(config)
        self.online = xshard.Learner(self._network, self._rule, self.config)

    def train_data(self):
        return images.split()[0]

    def eval_data(self):
        train, test = images.split()
        return {"train": train, "test": test}

    def _network(self, pixels, *, is_training):
        norm = lambda x, name: hk.BatchNorm(
            True, True, 0.9, cross_replica_axis=("slice", "replica"), name=name
        )(x, is_training)
        size = self.config.model
        x = jax.nn.relu(
            norm(hk.Conv2D(size.channels, 3, name="conv_0")(pixels), "norm_0")
        )
        x = hk.Conv2D(2 * size.channels, 3, stride=2, name="conv_1")(x)
        x = hk.Flatten()(jax.nn.relu(norm(x, "norm_1")))
        features = hk.Linear(size.features, name="features")(x)
        hidden = jax.nn.relu(
            norm(hk.Linear(size.hidden, name="projector")(features), "norm_2")
        )
        projection = hk.Linear(size.projection, name="projection")(hidden)
        hidden = jax.nn.relu(
            norm(hk.Linear(size.hidden, name="predictor")(projection), "norm_3")
        )
        return {
            "projection": projection,
            "prediction": hk.Linear(size.projection, name="prediction")(hidden),
            # The classifier learns from the labels; the features get no gradient from
            # it.
            "logits": hk.Linear(10, name="classifier")(jax.lax.stop_gradient(features)),
        }

    def _rule(self):
        rate = optax.warmup_cosine_decay_schedule(
            0.0,
            self.config.optimizer.learning_rate,
            self.config.steps // 10,
            self.config.steps,
        )
        opt = xshard.OptaxOptimizer(
            optax.lars(rate, trust_coefficient=0.01), name="lars"
        )
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        return xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic")

    def init(self, key, batch):
        online = self.online.init(key, batch["image"], is_training=True)
        return State(online, (online.params, online.net_state))

    def train_step(self, state, batch, key):
        params, net_state = state.target
        target = state.online.replace(params=params, net_state=net_state)
        loss = lambda online, batch, key: self._loss(online, target, batch, key)
        online, outcome = self.online.update(state.online, loss, batch, key)
        decay = self.config.target_decay
        move = lambda old, new: decay * old + (1 - decay) * new
        # A skipped step must leave the target unchanged too.
        is_applied = online.global_step > state.online.global_step
        moved = jax.tree.map(move, params, online.params)
        params = jax.tree.map(
            lambda new, old: jnp.where(is_applied, new, old), moved, params
        )
        return State(online, (params, online.net_state)), {"online": outcome}

    def _loss(self, online, target, batch, key):
        views = [self._view(k, batch["image"]) for k in jax.random.split(key)]
        both, swapped = jnp.concatenate(views), jnp.concatenate(views[::-1])
        outputs, net_state = self.online.apply(online, None, both, is_training=True)
        wanted, _ = self.online.apply(target, None, swapped, is_training=True)
        distance = -optax.cosine_similarity(
            outputs["prediction"],
            jax.lax.stop_gradient(wanted["projection"]),
            epsilon=1e-6,
        )
        labels = jnp.concatenate([batch["label"]] * 2)
        of_classifier = optax.softmax_cross_entropy_with_integer_labels(
            outputs["logits"], labels
        )
        distance, of_classifier = jnp.mean(distance), jnp.mean(of_classifier)
        loss = self.config.distance_weight * distance + of_classifier
        return loss, net_state, {"similarity": -distance}

    def _view(self, key, pixels):
        """Returns the images shifted by up to a pixel, with noise."""
        shift_key, noise_key = jax.random.split(key)
        moved = images.shift(shift_key, pixels, 1)
        return moved + self.config.noise * jax.random.normal(noise_key, moved.shape)

    def eval_step(self, state, batch, key):
        """Returns the accuracy of the classifier, 1 or 0 for each example."""
        outputs, _ = self.online.apply(
            state.online, None, batch["image"], is_training=False
        )
        hit = jnp.argmax(outputs["logits"], axis=-1) == batch["label"]
        return {"accuracy": hit.astype(jnp.float32)}
