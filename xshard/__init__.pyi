"""The names of `xshard`, and the modules that define them.

Type checkers read this file; `__init__.py` imports a module when one of its names is
first used.
"""

from . import config as config
from .callbacks import early_stopping
from .errors import UserError
from .experiment import Experiment, PerExample, PerReplica
from .learners.fp8 import fp8_dot_general
from .learners.learner import Learner
from .learners.lora import lora
from .learners.remat import remat_policy
from .learners.state import LearnerState
from .mesh import make_mesh
from .optimizers.base import Optimizer, OptimizerWrapper
from .optimizers.cross_shard import CrossShardOptimizer, Reduction
from .optimizers.gradients import AggregationMethod, MicroBatches
from .optimizers.layouts import StateSharding
from .optimizers.loss_scale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    MixedPrecisionLossScaleOptimizer,
)
from .optimizers.moving_average import MovingAverageOptimizer
from .optimizers.optax import OptaxOptimizer
from .optimizers.outer import OuterOptimizer
from .optimizers.replica_calls import equal_on_replicas
from .optimizers.replica_map import per_replica, vmap_replicas
from .samples import Histogram, Image
from .supervised import Supervised
from .trained import Trained, load
from .training.state import TrainState, abstract_state, init
from .training.step import make_eval_step, make_train_step

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
    "OuterOptimizer",
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
    "fp8_dot_general",
    "init",
    "load",
    "lora",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "per_replica",
    "remat_policy",
    "vmap_replicas",
]
