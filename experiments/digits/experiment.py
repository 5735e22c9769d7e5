"""Handwritten digits: a classifier trained in float16 with a dynamic loss scale."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

import xshard
from experiments.digits import model

CLASSES = 10
_TEST_EXAMPLES = 360


class Digits(xshard.Experiment):
    """scikit-learn's 1,797 images of 8x8 pixels: 1,437 to train on, 360 to test."""

    def __init__(self, config):
        super().__init__(config)
        _check(config)

    def train_data(self):
        return _split()[0]

    def eval_data(self):
        return _split()[1]

    def forward(self, batch, *, is_training):
        images = batch["image"]
        if is_training:
            images = _shift(hk.next_rng_key(), images, self.config.max_shift)
        return model.ConvNet(**self.config.model, classes=CLASSES)(images, is_training=is_training)

    def loss(self, outputs, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"])
        return jnp.mean(losses), {"accuracy": jnp.mean(_is_correct(outputs, batch))}

    def optimizer(self):
        config, steps = self.config.optimizer, self.config.steps
        warmup_steps = int(config.warmup_fraction * steps)
        rate = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup_steps, steps)
        adamw = optax.adamw(rate, weight_decay=config.weight_decay)
        opt = xshard.OptaxOptimizer(adamw, name="adamw")
        if config.average_decay:
            opt = xshard.MovingAverageOptimizer(opt, config.average_decay, num_updates="count")
        opt = xshard.CrossShardOptimizer(opt, slice_axis_name="slice", **self.config.reduction)
        scale = xshard.DynamicLossScale(**self.config.loss_scale)
        return xshard.MixedPrecisionLossScaleOptimizer(opt, scale)

    def evaluate(self, outputs, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"])
        return {"loss": losses, "accuracy": _is_correct(outputs, batch)}

    def ensemble(self, outputs):
        # The mean of the probabilities, as logits.
        return jax.nn.logsumexp(jax.nn.log_softmax(outputs), axis=0) - np.log(len(outputs))


def _check(config):
    """Names what would otherwise fail deep in a library, or train nothing."""
    model, warmup = config.model, config.optimizer.warmup_fraction
    decay = config.optimizer.average_decay
    for key, value, fits, rule in (
        ("max_shift", config.max_shift, 0 <= config.max_shift < 8, "from 0 to 7"),
        ("model.channels", model.channels, model.channels >= 1, "at least 1"),
        ("model.hidden", model.hidden, model.hidden >= 1, "at least 1"),
        ("model.dropout", model.dropout, 0 <= model.dropout < 1, "from 0 to below 1"),
        ("optimizer.warmup_fraction", warmup, 0 <= warmup < 1, "from 0 to below 1"),
        ("optimizer.average_decay", decay, 0 <= decay < 1, "from 0 to below 1"),
    ):
        if not fits:
            raise xshard.UserError(f"{key}={value!r} must be {rule}.")


@functools.cache
def _split():
    """Training and test examples: a fixed permutation of the bundled images, pixels from 0 to 1."""
    digits = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    image = (digits.images / 16).astype(np.float32)[order, ..., None]
    label = digits.target.astype(np.int32)[order]
    train, test = slice(_TEST_EXAMPLES, None), slice(_TEST_EXAMPLES)
    return tuple({"image": image[part], "label": label[part]} for part in (train, test))


def _is_correct(outputs, batch):
    return (jnp.argmax(outputs, axis=-1) == batch["label"]).astype(jnp.float32)


def _shift(key, images, limit):
    """Moves each image by up to `limit` pixels in both directions, zeros coming in."""
    if not limit:
        return images
    padded = jnp.pad(images, ((0, 0), (limit, limit), (limit, limit), (0, 0)))
    corners = jax.random.randint(key, (len(images), 2), 0, 2 * limit + 1)
    crop = lambda image, corner: jax.lax.dynamic_slice(image, (*corner, 0), images.shape[1:])
    return jax.vmap(crop)(padded, corners)
