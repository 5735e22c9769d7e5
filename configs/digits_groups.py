"""An ensemble of two: the digits run with two groups of four replicas.

Each group trains its own model, from its own initialization and on its own order of the
data. Evaluations report each model, and the ensemble: the mean of their probabilities.

Cost: less than a minute on 2 CPU cores. Expected: test accuracies of 99.4 and 99.7 %,
and 100 % for the ensemble (seed 0).

Command: python -m xshard.main --config=configs/digits_groups.py
--workdir=runs/digits_groups --cpu_devices=8
"""

import ml_collections

from configs import digits


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of `digits` with two groups."""
    config = digits.get_config()
    config.group_assignment = ((0, 1, 2, 3), (4, 5, 6, 7))
    return config
