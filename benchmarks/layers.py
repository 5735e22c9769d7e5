"""The experiment of the dry run's benchmark: eight layers of 2048 x 2048 in bfloat16,
AdamW, a dynamic loss scale.

python -m xshard.dryrun --config=benchmarks/layers.py --topology=v5e:16x16 python -m
xshard.dryrun --config=benchmarks/layers.py --topology=v5e:16x16
--config.reduction.shard_update=True
"""

import haiku as hk
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

import xshard
from configs import digits


class Layers(xshard.Supervised):
    """Square layers without biases, with made-up data."""

    def train_data(self):
        """Returns a few rows; a dry run uses only their shape."""
        return {"x": np.ones((8, self.config.width), np.float32)}

    def eval_data(self):
        """Returns the training data."""
        return self.train_data()

    def forward(self, batch, *, is_training):
        """Returns the outputs of the last layer."""
        del is_training
        x = batch["x"]
        for i in range(self.config.layers):
            x = jnp.tanh(
                hk.Linear(self.config.width, with_bias=False, name=f"layer_{i}")(x)
            )
        return x

    def loss(self, outputs, batch):
        """Returns the mean square of the outputs, and no metrics."""
        del batch
        return jnp.mean(outputs**2), {}

    def optimizer(self):
        """Returns AdamW."""
        return optax.adamw(1e-3)

    def evaluate(self, outputs, batch):
        """Returns the mean square of each row."""
        del batch
        return {"loss": jnp.mean(outputs**2, axis=-1)}


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of digits, changed for this network."""
    config = digits.get_config()
    config.experiment = "benchmarks.layers.Layers"
    config.precision = "params=float32,compute=bfloat16,output=float32"
    config.batch_size = 4096
    del config["model"], config["optimizer"], config["max_shift"]
    config.layers = 8
    config.width = 2048
    config.loss_scale = {"kind": "dynamic"}
    return config
