"""The wings of this installation, which `xshard.main` gives to every run.

The run's hooks act in the order of the list.
"""

from xshard import hooks
from xshard.wings.loss_jumps import wing as loss_jumps
from xshard.wings.mlflow import wing as mlflow
from xshard.wings.profiles import wing as profiles
from xshard.wings.prometheus import wing as prometheus
from xshard.wings.roll_backs import wing as roll_backs
from xshard.wings.samples import wing as samples
from xshard.wings.utilisation import wing as utilisation
from xshard.wings.wandb import wing as wandb

WINGS: tuple[type[hooks.Wing], ...] = (
    loss_jumps.LossJumps,
    samples.Samples,
    roll_backs.RollBacks,
    profiles.Profiles,
    utilisation.Utilisation,
    wandb.Wandb,
    mlflow.Mlflow,
    prometheus.Prometheus,
)
