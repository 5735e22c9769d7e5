"""A generator and a discriminator of handwritten digits, each with its own dynamic loss
scale.

Command: python -m xshard.main --config=configs/gan.py --workdir=runs/gan
--cpu_devices=8
"""

import ml_collections

import xshard


def get_config() -> ml_collections.ConfigDict:
    """Returns the defaults with this run's changes."""
    config = xshard.config.default()
    config.experiment = "experiments.gan.experiment.Gan"
    config.steps = 3000
    config.batch_size = 128
    config.eval_batch_size = 360
    config.precision = "params=float32,compute=float16,output=float32"
    config.model = {"noise": 16, "generator": (128, 128), "discriminator": (128, 128)}
    config.optimizer = {
        "generator": {"learning_rate": 1e-3, "b1": 0.5},
        "discriminator": {"learning_rate": 5e-4, "b1": 0.5},
    }
    config.loss_scale = {"initial_loss_scale": 2.0**15, "increment_period": 200}
    config.eval_every_steps = 500
    config.samples_every_steps = 500
    config.checkpoint.update({"best_metric": "distance"})
    return config
