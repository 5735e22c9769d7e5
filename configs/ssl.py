"""Features of handwritten digits, learned without labels.

Command: python -m xshard.main --config=configs/ssl.py --workdir=runs/ssl
--cpu_devices=8
"""

import ml_collections

import xshard


def get_config() -> ml_collections.ConfigDict:
    """Returns the defaults with this run's changes."""
    config = xshard.config.default()
    config.experiment = "experiments.ssl.experiment.Byol"
    config.steps = 600
    config.batch_size = 256
    config.eval_batch_size = 360
    config.precision = "params=float32,compute=bfloat16,output=float32"
    config.model = {"channels": 16, "features": 64, "hidden": 128, "projection": 32}
    config.optimizer = {"learning_rate": 1.0}
    config.target_decay = 0.99
    # With 0 only the classifier learns, on features at their initialization.
    config.distance_weight = 1.0
    config.noise = 0.1
    config.eval_every_steps = 200
    config.checkpoint.update(
        {"every_steps": 200, "best_metric": "test/accuracy", "best_mode": "max"}
    )
    return config
