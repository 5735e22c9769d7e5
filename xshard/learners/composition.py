"""The update rule that a run makes of a plain optax transformation."""

from typing import Any

import ml_collections

from xshard.base import loss_scale_keys, mesh_axes
from xshard.optimizers import base, cross_shard, loss_scale
from xshard.optimizers import optax as optax_optimizer

# The loss scales by kind.
LOSS_SCALES: dict[str, type[loss_scale.LossScale]] = {
    loss_scale_keys.DYNAMIC: loss_scale.DynamicLossScale,
    loss_scale_keys.FIXED: loss_scale.FixedLossScale,
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
        opt, slice_axis_name=mesh_axes.SLICE, **config.reduction
    )
    kind = loss_scale_keys.kind(config)
    if kind == loss_scale_keys.NONE:
        return opt
    scale = LOSS_SCALES[kind](**loss_scale_keys.arguments(config))
    return loss_scale.MixedPrecisionLossScaleOptimizer(opt, scale)
