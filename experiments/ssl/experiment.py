"""Features of handwritten digits, learned without labels, and a classifier on them.

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
    """The networks.

    Attributes:
      online: the trained network.
      target: a moving average of its parameters, with its batch statistics.
    """

    online: xshard.LearnerState
    target: Any


class Byol(xshard.Experiment):
    """An encoder with a projector and a predictor.

    A linear classifier measures the quality of its features.
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
        size = self.config.model

        def norm_and_relu(x, name):
            norm = hk.BatchNorm(
                create_scale=True,
                create_offset=True,
                decay_rate=0.9,
                cross_replica_axis=("slice", "replica"),
                name=name,
            )
            return jax.nn.relu(norm(x, is_training))

        x = hk.Conv2D(size.channels, 3, name="conv_0")(pixels)
        x = norm_and_relu(x, "norm_0")
        x = hk.Conv2D(2 * size.channels, 3, stride=2, name="conv_1")(x)
        x = norm_and_relu(x, "norm_1")
        features = hk.Linear(size.features, name="features")(hk.Flatten()(x))

        x = hk.Linear(size.hidden, name="projector")(features)
        x = norm_and_relu(x, "norm_2")
        projection = hk.Linear(size.projection, name="projection")(x)

        x = hk.Linear(size.hidden, name="predictor")(projection)
        x = norm_and_relu(x, "norm_3")
        prediction = hk.Linear(size.projection, name="prediction")(x)

        # The classifier learns from the labels; the features get no gradient from it.
        frozen = jax.lax.stop_gradient(features)
        logits = hk.Linear(10, name="classifier")(frozen)
        return {
            "projection": projection,
            "prediction": prediction,
            "logits": logits,
        }

    def _rule(self):
        rate = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.config.optimizer.learning_rate,
            warmup_steps=self.config.steps // 10,
            decay_steps=self.config.steps,
        )
        lars = optax.lars(rate, trust_coefficient=0.01)
        opt = xshard.OptaxOptimizer(lars, name="lars")
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

        def loss(online, batch, key):
            return self._loss(online, target, batch, key)

        online, metrics = self.online.update(state.online, loss, batch, key)
        decay = self.config.target_decay
        # A skipped step must leave the target unchanged too.
        is_applied = online.global_step > state.online.global_step

        def move(old, new):
            return jnp.where(is_applied, decay * old + (1 - decay) * new, old)

        params = jax.tree.map(move, params, online.params)
        new_state = State(online, (params, online.net_state))
        return new_state, {"online": metrics}

    def _loss(self, online, target, batch, key):
        first_key, second_key = jax.random.split(key)
        first = self._view(first_key, batch["image"])
        second = self._view(second_key, batch["image"])
        views = jnp.concatenate([first, second])
        other_views = jnp.concatenate([second, first])
        outputs, net_state = self.online.apply(online, None, views, is_training=True)
        targets, _ = self.online.apply(target, None, other_views, is_training=True)
        similarities = optax.cosine_similarity(
            outputs["prediction"],
            jax.lax.stop_gradient(targets["projection"]),
            epsilon=1e-6,
        )
        distance = jnp.mean(-similarities)
        labels = jnp.concatenate([batch["label"], batch["label"]])
        classifier_losses = optax.softmax_cross_entropy_with_integer_labels(
            outputs["logits"], labels
        )
        loss = self.config.distance_weight * distance + jnp.mean(classifier_losses)
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
