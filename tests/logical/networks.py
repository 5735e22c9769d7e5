"""Networks drawn at random, and a program that trains them on one device and on
several.

    python -m tests.logical.networks FIRST COUNT

It prints the numbers of the networks, from FIRST on, whose states do not have the same
bits on both.
"""

import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import xshard
from xshard import experiment as experiment_lib
from xshard.base import hashing
from xshard.pod import origin
from xshard.run import preflight
from xshard.training import state as state_lib

_MOST_DEVICES = 3
_REPLICAS = 6
_STEPS = 2
_SIZES = (1, 3, 8, 16, 17, 40, 64, 128, 130, 256)
_LAYERS = (
    "linear",
    "convolution",
    "norm",
    "attention",
    "recurrent",
    "pool",
    "transpose",
)
_LOSSES = ("square", "labels", "one_hot", "cosine", "huber")
_RULES = ("sgd", "adam", "clipped", "lamb")


class Drawn(xshard.Supervised):
    """A network of layers, sizes, a loss and a rule that the config's `network` draws;
    its inputs are sequences.
    """

    def _draw(self) -> np.random.Generator:
        return np.random.default_rng(self.config.network)

    def _shape(self) -> tuple[int, int, int]:
        draw = self._draw()
        return (
            int(draw.choice(_SIZES[2:6])),
            int(draw.choice(_SIZES)),
            int(draw.choice(_SIZES[1:])),
        )

    def train_data(self):
        length, width, classes = self._shape()
        generator = np.random.default_rng(1)
        count = 4 * _REPLICAS
        return {
            "x": generator.normal(size=(count, length, width)).astype(np.float32),
            "label": generator.integers(0, classes, (count, length)).astype(np.int32),
        }

    def eval_data(self):
        return self.train_data()

    def forward(self, batch, *, is_training):
        draw = self._draw()
        x = batch["x"]
        for _ in range(draw.integers(1, 4)):
            x = self._layer(
                str(draw.choice(_LAYERS)), int(draw.choice(_SIZES)), draw, x
            )
        return hk.Linear(self._shape()[2])(x)

    def _layer(self, kind, size, draw, x):
        if kind == "linear":
            activation = draw.choice(
                [jax.nn.relu, jnp.tanh, jax.nn.gelu, jax.nn.softmax]
            )
            return activation(hk.Linear(size)(x))
        if kind == "convolution":
            return jax.nn.silu(hk.Conv1D(size, int(draw.integers(1, 4)))(x))
        if kind == "norm":
            return hk.LayerNorm(-1, True, True)(x)
        if kind == "attention":
            attend = hk.MultiHeadAttention(
                2, 8, w_init=hk.initializers.VarianceScaling(1.0)
            )
            return attend(x, x, x)
        if kind == "recurrent":
            core = hk.GRU(min(size, 64))
            first = core.initial_state(x.shape[0])
            outputs, _ = hk.dynamic_unroll(core, jnp.swapaxes(x, 0, 1), first)
            return jnp.swapaxes(outputs, 0, 1)
        if kind == "pool":
            return (
                x
                - jnp.mean(x, axis=1, keepdims=True)
                + jax.nn.logsumexp(x, -1, keepdims=True)
            )
        # A layer in time-major order, as recurrent networks have it.
        return jnp.swapaxes(hk.Linear(size)(jnp.swapaxes(x, 0, 1)), 0, 1)

    def loss(self, outputs, batch):
        kind = str(np.random.default_rng([self.config.network, 1]).choice(_LOSSES))
        one_hot = jax.nn.one_hot(batch["label"], outputs.shape[-1])
        if kind == "square":
            return jnp.mean(jnp.square(outputs - one_hot)), {}
        if kind == "labels":
            losses = optax.softmax_cross_entropy_with_integer_labels(
                outputs, batch["label"]
            )
            return jnp.mean(losses), {}
        if kind == "one_hot":
            return jnp.mean(
                -jnp.sum(one_hot * jax.nn.log_softmax(outputs), axis=-1)
            ), {}
        if kind == "cosine":
            return jnp.mean(optax.cosine_distance(outputs, one_hot, epsilon=1e-3)), {}
        return jnp.mean(optax.huber_loss(outputs, one_hot)), {}

    def evaluate(self, outputs, batch):
        return {"loss": jnp.mean(outputs, axis=(1, 2))}

    def optimizer(self):
        kind = str(np.random.default_rng([self.config.network, 2]).choice(_RULES))
        rules = {
            "sgd": optax.sgd(0.1, momentum=0.9),
            "adam": optax.adam(1e-2),
            "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
            "lamb": optax.lamb(1e-2),
        }
        return xshard.CrossShardOptimizer(
            rules[kind], slice_axis_name="slice", **self.config.reduction
        )


def make_config(network):
    """Returns the config of a run of the network drawn with this number, with exact
    sums.
    """
    config = xshard.config.default()
    config.experiment = "tests.logical.networks.Drawn"
    config.network = network
    config.update({"steps": _STEPS, "batch_size": 2 * _REPLICAS, "eval_batch_size": 2})
    config.logical_replicas = _REPLICAS
    config.reduction.arithmetic = "exact"
    config.fingerprint_every_steps = 1
    return config.lock()


def fingerprint(config, devices):
    """Returns the fingerprints of the state after some steps on this many devices."""
    experiment = experiment_lib.load(config.experiment)(config)
    mesh = experiment_lib.mesh_of(config, jax.devices()[:devices])
    batches = preflight.train_batches(experiment, mesh)
    step = preflight.jitted_step(experiment, mesh)
    state = state_lib.init(experiment, mesh, config.seed, batches.example)
    for _ in range(_STEPS + 1):
        stepped = step(state, next(batches))
        state = stepped.state
        before = stepped.fingerprints_before
    return {kind: hashing.text(value) for kind, value in before.values.items()}


def main(first, count):
    """Trains the networks from number `first` on, and prints the numbers of those that
    differ between devices.
    """
    origin.set_up_backends(make_config(first), _MOST_DEVICES)
    for network in range(first, first + count):
        config = make_config(network)
        several = 2 + network % (_MOST_DEVICES - 1)
        if fingerprint(config, 1) != fingerprint(config, several):
            print(network, flush=True)
    print("done")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
