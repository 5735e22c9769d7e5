"""A generative adversarial network for handwritten digits: two learners in turn.

Source: Goodfellow et al., "Generative Adversarial Networks", 2014, with the
non-saturating generator loss.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import xshard
from experiments.digits import images


class Gan(xshard.Experiment):
    """A generator of 8x8 images, and a discriminator that tells them from real ones."""

    def __init__(self, config):
        super().__init__(config)
        self.generator = xshard.Learner(
            self._generate,
            functools.partial(self._rule, config.optimizer.generator),
            self.config,
        )
        self.discriminator = xshard.Learner(
            self._discriminate,
            functools.partial(self._rule, config.optimizer.discriminator),
            self.config,
        )

    def train_data(self):
        return images.split()[0]

    def eval_data(self):
        return images.split()[1]

    def _generate(self, noise):
        network = hk.nets.MLP([*self.config.model.generator, 64])
        return jax.nn.sigmoid(network(noise))

    def _discriminate(self, pixels):
        sizes = [*self.config.model.discriminator, 1]
        network = hk.nets.MLP(sizes, activation=jax.nn.leaky_relu)
        return network(pixels)[:, 0]

    def _rule(self, options):
        opt = xshard.OptaxOptimizer(optax.adam(**options), name="adam")
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        scale = xshard.DynamicLossScale(**self.config.loss_scale)
        return xshard.MixedPrecisionLossScaleOptimizer(opt, scale)

    def init(self, key, batch):
        generator_key, discriminator_key = jax.random.split(key)
        real = _pixels(batch)
        noise = self._noise(key, len(real))
        return {
            "generator": self.generator.init(generator_key, noise),
            "discriminator": self.discriminator.init(discriminator_key, real),
        }

    def train_step(self, state, batch, key):
        discriminator_key, generator_key = jax.random.split(key)
        discriminator, discriminator_metrics = self.discriminator.update(
            state["discriminator"],
            functools.partial(self._discriminator_loss, state["generator"]),
            batch,
            discriminator_key,
        )
        generator, generator_metrics = self.generator.update(
            state["generator"],
            functools.partial(self._generator_loss, discriminator),
            batch,
            generator_key,
        )
        new_state = {"generator": generator, "discriminator": discriminator}
        metrics = {
            "generator": generator_metrics,
            "discriminator": discriminator_metrics,
        }
        return new_state, metrics

    def _discriminator_loss(self, generator, state, batch, key):
        real = _pixels(batch)
        fake, _ = self.generator.apply(generator, None, self._noise(key, len(real)))
        pixels = jnp.concatenate([real, fake])
        logits, net_state = self.discriminator.apply(state, None, pixels)
        is_real = jnp.repeat(jnp.array([1.0, 0.0]), len(real))
        losses = optax.sigmoid_binary_cross_entropy(logits, is_real)
        accuracy = jnp.mean((logits > 0) == (is_real > 0.5))
        return jnp.mean(losses), net_state, {"accuracy": accuracy}

    def _generator_loss(self, discriminator, state, batch, key):
        noise = self._noise(key, len(batch["image"]))
        fake, net_state = self.generator.apply(state, None, noise)
        logits, _ = self.discriminator.apply(discriminator, None, fake)
        return jnp.mean(jax.nn.softplus(-logits)), net_state, {}

    def eval_step(self, state, batch, key):
        """Returns the first two moments of real images and as many generated ones."""
        real = _pixels(batch)
        noise = self._noise(key, len(real))
        fake, _ = self.generator.apply(state["generator"], None, noise)
        return {
            "real": real,
            "fake": fake,
            "real_2": real[:, :, None] * real[:, None, :],
            "fake_2": fake[:, :, None] * fake[:, None, :],
        }

    def summarize(self, sums, count):
        """Returns the Fréchet distance of normal distributions with these moments.

        It is one in pixel space.
        """
        real = sums["real"] / count
        fake = sums["fake"] / count
        real_cov = sums["real_2"] / count - np.outer(real, real)
        fake_cov = sums["fake_2"] / count - np.outer(fake, fake)
        if not np.isfinite(real_cov + fake_cov).all():
            return {"distance": np.nan}
        roots = np.sqrt(np.maximum(np.linalg.eigvals(real_cov @ fake_cov).real, 0))
        spread = np.trace(real_cov) + np.trace(fake_cov) - 2 * roots.sum()
        return {"distance": np.sum((real - fake) ** 2) + spread}

    def predict(self, state, batch):
        """Returns images of shape (batch, 8, 8) generated from noise.

        With several groups, the images are the first group's.
        """
        fake, _ = self.generator.apply(state["generator"], None, batch["noise"])
        return jax.lax.all_gather(fake.reshape(-1, 8, 8), "group")[0]

    def samples(self, predict, key):
        """Returns an image of 32 generated digits, and a histogram of their pixels."""
        noise = np.asarray(self._noise(key, 32))
        fake = np.asarray(predict({"noise": noise}), np.float32)
        # Four rows of eight digits.
        rows = np.concatenate(fake.reshape(4, 8, 8, 8), axis=1)
        return {
            "digits": xshard.Image(np.concatenate(rows, axis=1)),
            "brightness": xshard.Histogram(fake.ravel()),
        }

    def _noise(self, key, count):
        return jax.random.normal(key, (count, self.config.model.noise))


def _pixels(batch):
    return batch["image"].reshape(len(batch["image"]), 64)
