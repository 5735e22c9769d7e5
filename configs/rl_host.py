"""The actor-critic that plays catch, with its 64 simultaneous games on the host.

Command: python -m xshard.main --config=configs/rl_host.py --workdir=runs/rl_host
--cpu_devices=8
"""

import ml_collections

from configs import rl


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of `rl` with the interval at which the agent plays."""
    config = rl.get_config()
    config.experiment = "experiments.rl.host.HostCatch"
    # Every so many steps the agent plays one batch for each of the steps that follow.
    config.acts_every_steps = 4
    return config
