"""xshard trains Haiku models on accelerator pods: update rules that reduce, vote and skip as one."""

from xshard import config as config
from xshard.errors import UserError
from xshard.experiment import Experiment
from xshard.mesh import make_mesh
from xshard.optimizers.base import Optimizer, OptimizerWrapper
from xshard.optimizers.cross_shard import CrossShardOptimizer, Reduction
from xshard.optimizers.gradients import AggregationMethod, MicroBatches
from xshard.optimizers.layouts import StateSharding
from xshard.optimizers.loss_scale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    MixedPrecisionLossScaleOptimizer,
)
from xshard.optimizers.moving_average import MovingAverageOptimizer
from xshard.optimizers.optax import OptaxOptimizer
from xshard.state import TrainState, abstract_state, init
from xshard.step import make_eval_step, make_train_step

__all__ = [
    "AggregationMethod",
    "CrossShardOptimizer",
    "DynamicLossScale",
    "Experiment",
    "FixedLossScale",
    "LossScale",
    "MicroBatches",
    "MixedPrecisionLossScaleOptimizer",
    "MovingAverageOptimizer",
    "OptaxOptimizer",
    "Optimizer",
    "OptimizerWrapper",
    "Reduction",
    "StateSharding",
    "TrainState",
    "UserError",
    "abstract_state",
    "init",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
]
