"""Eight layers of 2048 x 2048 in bfloat16, AdamW and a dynamic loss scale: what the dry run is measured with.

python -m xshard.dryrun --config=benchmarks/layers.py --topology=v5e:16x16
python -m xshard.dryrun --config=benchmarks/layers.py --topology=v5e:16x16 --config.reduction.shard_update=True
"""

from typing import Any

import haiku as hk
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

import xshard
from configs import digits


class Layers(xshard.Supervised):
    """Layers without biases, as wide as they are deep; the data is made up."""

    def train_data(self):
        """A few rows, of which a dry run takes the shape."""
        return {"x": np.ones((8, self.config.width), np.float32)}

    def eval_data(self):
        """The same."""
        return self.train_data()

    def forward(self, batch, *, is_training):
        """Outputs of the width."""
        del is_training
        x = batch["x"]
        for i in range(self.config.layers):
            x = jnp.tanh(hk.Linear(self.config.width, with_bias=False, name=f"layer_{i}")(x))
        return x

    def loss(self, outputs, batch):
        """The mean square."""
        del batch
        return jnp.mean(outputs**2), {}

    def optimizer(self):
        """AdamW, with a dynamic loss scale if the config has it."""
        opt: Any = xshard.OptaxOptimizer(optax.adamw(1e-3), name="adamw")
        opt = xshard.CrossShardOptimizer(opt, slice_axis_name="slice", **self.config.reduction)
        scale = self.config.loss_scale
        return xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic") if scale else opt

    def evaluate(self, outputs, batch):
        """The square of each row."""
        del batch
        return {"loss": jnp.mean(outputs**2, axis=-1)}


def get_config() -> ml_collections.ConfigDict:
    """The config of digits, but for the network."""
    config = digits.get_config()
    config.experiment = "benchmarks.layers.Layers"
    config.precision = "params=float32,compute=bfloat16,output=float32"
    config.batch_size = 4096
    del config["model"], config["optimizer"], config["max_shift"], config["loss_scale"]
    config.layers, config.width, config.loss_scale = 8, 2048, True
    return config
