"""The actor-critic of the game of catch with its games on the host, 64 at a time.

Command: python -m xshard.main --config=configs/rl_host.py --workdir=runs/rl_host --cpu_devices=8
"""

import ml_collections

from configs import rl


def get_config() -> ml_collections.ConfigDict:
    """The config of `rl`, and how often the agent plays."""
    config = rl.get_config()
    config.experiment = "experiments.rl.host.HostCatch"
    # It plays a batch for each of these steps before the first of them.
    config.acts_every_steps = 4
    return config
