"""The update rule that a run makes of a plain optax transformation."""

from typing import Any

import ml_collections

from xshard import config as config_lib
from xshard import mesh as mesh_lib
from xshard.optimizers import base, cross_shard, loss_scale
from xshard.optimizers import optax as optax_optimizer

# The loss scales by kind, and the keys of `config.loss_scale` that are their arguments.
LOSS_SCALES: dict[str, type[loss_scale.LossScale]] = {
    config_lib.DYNAMIC: loss_scale.DynamicLossScale,
    config_lib.FIXED: loss_scale.FixedLossScale,
}
_ARGUMENTS = {
    config_lib.DYNAMIC: ("initial_loss_scale", "increment_period", "multiplier"),
    config_lib.FIXED: ("loss_scale_value",),
}


def rule_of(transformation: Any, config: ml_collections.ConfigDict) -> base.Optimizer:
    """Returns a transformation within the rules that a run's config describes.

    It is called inside `hk.transform_with_state`, as the constructors of rules are.

    Args:
      transformation: an optax transformation.
      config: the run's config, of which `reduction` and `loss_scale` are read.

    Raises:
      ValueError: for an invalid value of either.
    """
    opt: base.Optimizer = optax_optimizer.OptaxOptimizer(transformation)
    opt = cross_shard.CrossShardOptimizer(
        opt, slice_axis_name=mesh_lib.SLICE, **config.reduction
    )
    kind = config_lib.loss_scale_kind(config)
    if kind == config_lib.NONE:
        return opt
    defaults = config_lib.default().loss_scale
    arguments = {}
    for name in _ARGUMENTS[kind]:
        arguments[name] = config.loss_scale.get(name, defaults[name])
    scale = LOSS_SCALES[kind](**arguments)
    return loss_scale.MixedPrecisionLossScaleOptimizer(opt, scale)
