"""The state of slices that train apart, restored on another number of slices.

A checkpoint holds the state of each slice. Another number of slices goes on from what
all of them have in common: the parameters of the last exchange. Each slice takes the
slots of the inner rule and the network state of the first one.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xshard import checkpoint, errors
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.learners.state import LearnerState, is_learner
from xshard.optimizers import outer, trees


def differ(
    experiment: experiment_lib.Experiment,
    target: state_lib.TrainState,
    stored: Mapping[str, Any],
) -> bool:
    """Returns whether a checkpoint is of another number of slices than a run.

    It is False for a run without an outer rule.

    Args:
      experiment: the run's experiment.
      target: the shapes of the run's state.
      stored: the shapes of the checkpoint's arrays, by path.
    """
    if not config_lib.separates_slices(experiment.config):
        return False
    wanted = {path: x.shape for path, x in checkpoint.flatten(target).items()}
    return checkpoint.num_groups(stored) != checkpoint.num_groups(wanted)


def check(target: state_lib.TrainState) -> None:
    """Raises UserError if a run has state that only its own slices can continue.

    Args:
      target: the shapes of the run's state.
    """
    is_node = lambda x: is_learner(x) or experiment_lib.is_marked(x)
    leaves = jax.tree_util.tree_leaves_with_path(target.experiment, is_leaf=is_node)
    for path, x in leaves:
        if experiment_lib.is_marked(x):
            raise errors.UserError(
                f"The state {trees.path_name(path)!r} differs by replica "
                "(xshard.PerReplica, xshard.PerExample), and the checkpoint is of "
                "another number of slices: a run with an outer rule resumes such state "
                "only with the same number. Use as many slices as before."
            )


def continued(state: state_lib.TrainState) -> state_lib.TrainState:
    """Returns the state with which slices continue that each have the first one's.

    Args:
      state: a state in which all slices are equal.
    """

    def of_learner(_: str, learner: LearnerState) -> LearnerState:
        module = learner.meta.outer_module
        if module is None:
            return learner
        slots = dict(learner.opt_state[module])
        for name, x in slots.items():
            # What the first slice kept for its next exchange is about steps that no
            # longer count.
            if name.startswith(f"{outer.RESIDUAL}/") or name == outer.APPLIED:
                slots[name] = jnp.zeros_like(x)
        return learner.replace(
            params=outer.exchanged(slots, learner.params),
            opt_state={**learner.opt_state, module: slots},
        )

    shardings = jax.tree.map(lambda x: x.sharding, state)
    of_state = functools.partial(state_lib.map_learners, of_learner)
    return jax.jit(of_state, out_shardings=shardings, donate_argnums=0)(state)


def describe(before: int, now: int, state: state_lib.TrainState, every: int) -> str:
    """Describes what a run continues from with another number of slices.

    Args:
      before: the number of slices that saved the state.
      now: the number of slices of the run.
      state: the restored state.
      every: the number of steps between exchanges.
    """
    step = int(state.step)
    lost = ""
    if step % every:
        lost = (
            f" What the slices trained since step {step - step % every} is lost, but "
            "for the slots of the first one."
        )
    return (
        f"The checkpoint of step {step} is of {before} slice(s), and there are now "
        f"{now}: all of them go on from the parameters of the last exchange.{lost}"
    )
