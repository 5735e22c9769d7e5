"""An actor-critic that plays catch, 64 games at a time.

Command: python -m xshard.main --config=configs/rl.py --workdir=runs/rl --cpu_devices=8
"""

import ml_collections

import xshard


def get_config() -> ml_collections.ConfigDict:
    """Returns the defaults with this run's changes."""
    config = xshard.config.default()
    config.experiment = "experiments.rl.experiment.Catch"
    config.steps = 600
    # The number of simultaneous games, over all replicas.
    config.batch_size = 64
    config.eval_batch_size = 64
    config.eval_games = 256
    config.unroll = 9
    config.entropy_cost = 0.01
    config.model = {"hidden": (64,)}
    config.optimizer = {"learning_rate": 3e-3}
    config.eval_every_steps = 200
    config.checkpoint.update(
        {"every_steps": 200, "best_metric": "reward", "best_mode": "max"}
    )
    return config
