"""States as earlier versions saved them: without averages of the networks' state, which
rules with averages of the parameters now keep beside these.
"""

from typing import Any

import jax

from xshard.learners.state import LearnerState
from xshard.optimizers import moving_average, trees
from xshard.training import replica_state
from xshard.training import state as state_lib


def lacks_statistics(state: state_lib.TrainState, target: state_lib.TrainState) -> bool:
    """Returns whether a state lacks averages of networks' state that a target has."""
    structure: Any = jax.tree.structure(state)
    return structure != jax.tree.structure(target)


def without_unsaved(
    target: state_lib.TrainState, stored: replica_state.Shapes
) -> state_lib.TrainState:
    """Returns a target without averages of a network's state, if none are stored.

    Args:
      target: the shapes of a run's state.
      stored: the shapes of the checkpoint's arrays, by path.
    """

    def without(name: str, learner: LearnerState) -> LearnerState:
        module = learner.meta.statistics_module
        if module is None:
            return learner
        beginning = trees.join(name, f"opt_state/{module}/")
        names = moving_average.statistics_of(learner.opt_state[module])
        if not names or any(beginning + x in stored for x in names):
            return learner
        slots = dict(learner.opt_state[module])
        for x in names:
            del slots[x]
        return learner.replace(opt_state={**learner.opt_state, module: slots})

    return state_lib.map_learners(without, target)
