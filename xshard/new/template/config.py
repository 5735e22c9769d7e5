"""Two spirals in float16 with a dynamic loss scale: 100 % of the points between the training points, in seconds."""

import ml_collections

import xshard


def get_config() -> ml_collections.ConfigDict:
    """What differs from the defaults; `--show_config` prints every key of a run, and what it means."""
    config = xshard.config.default()
    config.experiment = "experiment.Spirals"
    # The examples of a step on all replicas together, which divide it.
    config.batch_size = 192
    config.eval_batch_size = 192
    # Matrix products in float16, parameters and what is added up in float32.
    config.precision = "params=float32,compute=float16,output=float32"
    config.log_every_steps = 200
    config.checkpoint.update({"best_metric": "accuracy", "best_mode": "max"})
    # Yours: whatever your experiment reads as self.config.NAME.
    config.model = {"hidden": (64, 64)}
    config.optimizer = {"learning_rate": 1e-2}
    # Arguments of DynamicLossScale.
    config.loss_scale = {"initial_loss_scale": 2.0**15, "increment_period": 200, "multiplier": 2.0}
    return config
