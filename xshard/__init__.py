"""xshard trains Haiku models on accelerator pods: all replicas reduce gradients, and apply or skip each update, together."""

from xshard import config as config
from xshard.callbacks import early_stopping
from xshard.errors import UserError
from xshard.experiment import Experiment, PerExample, PerReplica
from xshard.learners.learner import Learner
from xshard.learners.state import LearnerState
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
from xshard.optimizers.varying import equal_on_replicas
from xshard.samples import Histogram, Image
from xshard.state import TrainState, abstract_state, init
from xshard.step import make_eval_step, make_train_step
from xshard.supervised import Supervised
from xshard.trained import Trained, load

__all__ = [
    "AggregationMethod",
    "CrossShardOptimizer",
    "DynamicLossScale",
    "Experiment",
    "FixedLossScale",
    "Histogram",
    "Image",
    "Learner",
    "LearnerState",
    "LossScale",
    "MicroBatches",
    "MixedPrecisionLossScaleOptimizer",
    "MovingAverageOptimizer",
    "OptaxOptimizer",
    "Optimizer",
    "OptimizerWrapper",
    "PerExample",
    "PerReplica",
    "Reduction",
    "StateSharding",
    "Supervised",
    "TrainState",
    "Trained",
    "UserError",
    "abstract_state",
    "early_stopping",
    "equal_on_replicas",
    "init",
    "load",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
]
