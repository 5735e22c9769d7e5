"""A generative adversarial network for handwritten digits: two learners that train in
turn.

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
        rule = lambda name: functools.partial(self._rule, config.optimizer[name])
        self.generator = xshard.Learner(self._generate, rule("generator"), self.config)
        self.discriminator = xshard.Learner(
            self._judge, rule("discriminator"), self.config
        )

    def train_data(self):
        return images.split()[0]

    def eval_data(self):
        return images.split()[1]

    def _generate(self, noise):
        return jax.nn.sigmoid(hk.nets.MLP([*self.config.model.generator, 64])(noise))

    def _judge(self, pixels):
        return hk.nets.MLP(
            [*self.config.model.discriminator, 1], activation=jax.nn.leaky_relu
        )(pixels)[:, 0]

    def _rule(self, options):
        opt = xshard.OptaxOptimizer(optax.adam(**options), name="adam")
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        scale = xshard.DynamicLossScale(**self.config.loss_scale)
        return xshard.MixedPrecisionLossScaleOptimizer(opt, scale)

    def init(self, key, batch):
        of_generator, of_discriminator = jax.random.split(key)
        real = _pixels(batch)
        return {
            "generator": self.generator.init(of_generator, self._noise(key, len(real))),
            "discriminator": self.discriminator.init(of_discriminator, real),
        }

    def train_step(self, state, batch, key):
        first, second = jax.random.split(key)
        loss = functools.partial(self._discriminator_loss, state["generator"])
        discriminator, judged = self.discriminator.update(
            state["discriminator"], loss, batch, first
        )
        loss = functools.partial(self._generator_loss, discriminator)
        generator, generated = self.generator.update(
            state["generator"], loss, batch, second
        )
        new = {"generator": generator, "discriminator": discriminator}
        return new, {"generator": generated, "discriminator": judged}

    def _discriminator_loss(self, generator, state, batch, key):
        real = _pixels(batch)
        fake, _ = self.generator.apply(generator, None, self._noise(key, len(real)))
        logits, net_state = self.discriminator.apply(
            state, None, jnp.concatenate([real, fake])
        )
        is_real = jnp.repeat(jnp.array([1.0, 0.0]), len(real))
        losses = optax.sigmoid_binary_cross_entropy(logits, is_real)
        accuracy = jnp.mean((logits > 0) == (is_real > 0.5))
        return jnp.mean(losses), net_state, {"accuracy": accuracy}

    def _generator_loss(self, discriminator, state, batch, key):
        fake, net_state = self.generator.apply(
            state, None, self._noise(key, len(batch["image"]))
        )
        logits, _ = self.discriminator.apply(discriminator, None, fake)
        return jnp.mean(jax.nn.softplus(-logits)), net_state, {}

    def eval_step(self, state, batch, key):
        """Returns the first two moments of real images and of equally many generated
        ones.
        """
        real = _pixels(batch)
        fake, _ = self.generator.apply(
            state["generator"], None, self._noise(key, len(real))
        )
        square = lambda x: x[:, :, None] * x[:, None, :]
        return {
            "real": real,
            "fake": fake,
            "real_2": square(real),
            "fake_2": square(fake),
        }

    def summarize(self, sums, count):
        """Returns the Fréchet distance of two normal distributions with these moments,
        in pixel space.
        """
        (real, real_cov), (fake, fake_cov) = (
            _moments(sums[name] / count, sums[f"{name}_2"] / count)
            for name in ("real", "fake")
        )
        if not np.isfinite(real_cov + fake_cov).all():
            return {"distance": np.nan}
        roots = np.sqrt(np.maximum(np.linalg.eigvals(real_cov @ fake_cov).real, 0))
        spread = np.trace(real_cov) + np.trace(fake_cov) - 2 * roots.sum()
        return {"distance": np.sum((real - fake) ** 2) + spread}

    def predict(self, state, batch):
        """Returns images of shape (batch, 8, 8) generated from noise; with several
        groups, the first group's.
        """
        fake, _ = self.generator.apply(state["generator"], None, batch["noise"])
        return jax.lax.all_gather(fake.reshape(-1, 8, 8), "group")[0]

    def samples(self, predict, key):
        """Returns an image of four rows of eight generated digits, and a histogram of
        their brightness.
        """
        made = np.asarray(
            predict({"noise": np.asarray(self._noise(key, 32))}), np.float32
        )
        rows = np.concatenate(made.reshape(4, 8, 8, 8), axis=1)
        return {
            "digits": xshard.Image(np.concatenate(rows, axis=1)),
            "brightness": xshard.Histogram(made.ravel()),
        }

    def _noise(self, key, count):
        return jax.random.normal(key, (count, self.config.model.noise))


def _pixels(batch):
    return batch["image"].reshape(len(batch["image"]), 64)


def _moments(mean, square):
    return mean, square - np.outer(mean, mean)
