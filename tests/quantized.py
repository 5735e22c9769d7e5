"""An experiment for tests: an autoencoder whose codebook is a moving average over the
batches of all replicas.

Source: van den Oord et al., "Neural Discrete Representation Learning", 2017. The
codebook is Haiku's.
"""

import haiku as hk
import jax.numpy as jnp
import ml_collections
import optax

import xshard
from experiments.digits import images


class Quantized(xshard.Supervised):
    """Encodes each part of a handwritten digit as one of a few codes, and decodes the
    digit again.
    """

    def train_data(self):
        return images.split()[0]

    def eval_data(self):
        return images.split()[1]

    def forward(self, batch, *, is_training):
        norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis=("slice", "replica"))
        codebook = hk.nets.VectorQuantizerEMA(
            4, self.config.codes, 0.25, 0.9, cross_replica_axis=("slice", "replica")
        )
        flat = hk.Flatten()(batch["image"])
        hidden = norm(hk.Linear(self.config.hidden, name="encode")(flat), is_training)
        coded = codebook(hidden.reshape(len(hidden), -1, 4), is_training)
        quantized = coded["quantize"].reshape(hidden.shape)
        decoded = hk.nets.MLP([self.config.hidden, flat.shape[1]], name="decode")(
            quantized
        )
        error = jnp.mean((decoded - flat) ** 2, axis=-1)
        return {
            "error": error,
            "codebook": coded["loss"],
            "perplexity": coded["perplexity"],
        }

    def loss(self, outputs, batch):
        loss = jnp.mean(outputs["error"]) + outputs["codebook"]
        return loss, {"perplexity": outputs["perplexity"]}

    def optimizer(self):
        opt = xshard.OptaxOptimizer(
            optax.adam(self.config.optimizer.learning_rate), name="adam"
        )
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        return xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic")

    def evaluate(self, outputs, batch):
        return {"error": outputs["error"]}


def get_config() -> ml_collections.ConfigDict:
    """Returns `xshard.config.default()` with the values for this experiment."""
    config = xshard.config.default()
    config.experiment = "tests.quantized.Quantized"
    config.steps = 300
    config.batch_size = 64
    config.eval_batch_size = 64
    config.codes = 32
    config.hidden = 64
    config.optimizer = {"learning_rate": 3e-3}
    config.eval_every_steps = 100
    config.checkpoint.update(
        {"every_steps": 100, "best_metric": "error", "best_mode": "min"}
    )
    return config
