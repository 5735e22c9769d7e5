"""Handwritten digits: a classifier trained in float16 with a dynamic loss scale."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import xshard
from experiments.digits import images, model

CLASSES = 10


class Digits(xshard.Supervised):
    """1,797 images of 8x8 pixels: 1,437 to train on, 360 to test."""

    def __init__(self, config):
        super().__init__(config)
        _check(config)

    def train_data(self):
        return images.split()[0]

    def eval_data(self):
        return images.split()[1]

    def forward(self, batch, *, is_training):
        x = batch["image"]
        if is_training:
            x = images.shift(hk.next_rng_key(), x, self.config.max_shift)
        return model.ConvNet(**self.config.model, classes=CLASSES)(
            x, is_training=is_training
        )

    def loss(self, outputs, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            outputs, batch["label"]
        )
        return jnp.mean(losses), {"accuracy": jnp.mean(_is_correct(outputs, batch))}

    def optimizer(self):
        config = self.config.optimizer
        rate = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=config.learning_rate,
            warmup_steps=int(config.warmup_fraction * self.config.steps),
            decay_steps=self.config.steps,
        )
        adamw = optax.adamw(rate, weight_decay=config.weight_decay)
        opt = xshard.OptaxOptimizer(
            adamw, name="adamw", schedules={"learning_rate": rate}
        )
        if config.average_decay:
            opt = xshard.MovingAverageOptimizer(
                opt, config.average_decay, num_updates="count"
            )
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        scale = xshard.DynamicLossScale(**self.config.loss_scale)
        return xshard.MixedPrecisionLossScaleOptimizer(opt, scale)

    def evaluate(self, outputs, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            outputs, batch["label"]
        )
        return {"loss": losses, "accuracy": _is_correct(outputs, batch)}

    def ensemble(self, outputs):
        # The log of the mean probability, which serves as logits.
        log_probabilities = jax.nn.log_softmax(outputs)
        log_sum = jax.nn.logsumexp(log_probabilities, axis=0)
        return log_sum - np.log(len(outputs))


def _check(config):
    """Raises UserError for values that fail inside a library, or train nothing."""
    model = config.model
    optimizer = config.optimizer
    _require(0 <= config.max_shift < 8, "max_shift", config.max_shift, "from 0 to 7")
    for name in ("channels", "hidden"):
        _require(model[name] >= 1, f"model.{name}", model[name], "at least 1")
    for name, value in (
        ("model.dropout", model.dropout),
        ("optimizer.warmup_fraction", optimizer.warmup_fraction),
        ("optimizer.average_decay", optimizer.average_decay),
    ):
        _require(0 <= value < 1, name, value, "from 0 to below 1")


def _require(fits, key, value, rule):
    if not fits:
        raise xshard.UserError(f"{key}={value!r} must be {rule}.")


def _is_correct(outputs, batch):
    return (jnp.argmax(outputs, axis=-1) == batch["label"]).astype(jnp.float32)
