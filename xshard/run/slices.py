"""The state of slices that train apart, restored on another number of slices.

A checkpoint holds the state of each slice. Another number of slices goes on from what
all of them have in common: the parameters of the last exchange. Each slice takes the
slots of the inner rule and the network state of the first one.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from xshard import checkpoint, errors
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard.learners.state import LearnerState, is_learner
from xshard.optimizers import outer, trees
from xshard.training import state as state_lib


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


def exchanged_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the names of the parameters' values at the last exchange of slices.

    Args:
      names: the names of a checkpoint's arrays.

    Returns:
      The name of the value, by the name of its parameter; empty if the run has no outer
      rule.
    """
    slot = re.compile(f"((?:.*?/)?)opt_state/[^/]+/{outer.EXCHANGED}/(.+)")
    found = {}
    for name in names:
        matched = slot.fullmatch(name)
        if matched:
            found[f"{matched[1]}params/{matched[2]}"] = name
    return found


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
            if name.startswith(f"{outer.RESIDUAL}/"):
                slots[name] = jnp.zeros_like(x)
        return learner.replace(
            params=outer.exchanged(slots, learner.params),
            opt_state={**learner.opt_state, module: slots},
        )

    shardings = jax.tree.map(lambda x: x.sharding, state)
    of_state = functools.partial(state_lib.map_learners, of_learner)
    return jax.jit(of_state, out_shardings=shardings, donate_argnums=0)(state)


def describe(before: int, now: int, step: int, options: Any) -> str:
    """Describes what a run continues from with another number of slices.

    Args:
      before: the number of slices that saved the state.
      now: the number of slices of the run.
      step: the step of the restored state.
      options: `config.outer` of the run.
    """
    lost = ""
    since = last_sent(step, options)
    if min(since) < step:
        lost = (
            f" What the slices trained since step {_alternatives(since)} is lost, but "
            "for the slots of the first one."
        )
    return (
        f"The checkpoint of step {step} is of {before} slice(s), and there are now "
        f"{now}: all of them go on from the parameters of the last exchange.{lost}"
    )


def describe_read(before: int, now: int) -> str:
    """Describes what a reader gets of a checkpoint of another number of slices.

    Args:
      before: the number of slices that saved the checkpoint.
      now: the number of slices of the reader.
    """
    return (
        f"Checkpoints of {before} slice(s) are read as {now}: with the parameters of "
        "the last exchange, also as those that train, and the network's state of the "
        "first slice."
    )


def check_exchanges(
    experiment: experiment_lib.Experiment, target: state_lib.TrainState
) -> None:
    """Raises UserError if slices train apart and would never exchange what they train.

    Args:
      experiment: the run's experiment.
      target: the shapes of the run's state.
    """
    if not config_lib.separates_slices(experiment.config):
        return
    setting = f"outer.every_steps={experiment.config.outer.every_steps}"
    learners = state_lib.learners(target)
    if not learners:
        raise errors.UserError(
            f"{setting} has no effect on {type(experiment).__name__}, whose state has "
            "no learner: its slices would train apart and never exchange anything. "
            "Train by an xshard.Learner, or set outer.every_steps=0."
        )
    for name, learner in learners.items():
        if learner.meta.outer_module is None:
            whose = f" {name!r}" if name else ""
            raise errors.UserError(
                f"{setting} has no effect on the learner{whose} of "
                f"{type(experiment).__name__}, which was given another config: its "
                "slices would train apart and never exchange anything. Give it the "
                "run's, as in xshard.Learner(network, optimizer, self.config)."
            )


def notes(config: ml_collections.ConfigDict, num_slices: int) -> Iterator[str]:
    """Yields lines about what the exchanges of a run leave out, if they do.

    Args:
      config: the run's config.
      num_slices: the number of slices of the run.
    """
    if not config_lib.separates_slices(config):
        return
    every = config.outer.every_steps
    if num_slices == 1:
        yield (
            f"warning: outer.every_steps={every} and one slice: it exchanges nothing "
            "with others, and the outer rule moves what it alone has trained, as a "
            "Lookahead does. Set slices, or outer.every_steps=0."
        )
    sent = last_sent(config.steps, config.outer)
    if not all(sent):
        which = "the" if not any(sent) else "some"
        yield (
            f"warning: outer.every_steps={every} and steps={config.steps}: {which} "
            "parameters are not exchanged by then. Those of the last exchange, which "
            "are evaluated and exported, are as they were at first. Set a smaller "
            "outer.every_steps, or train further."
        )
    elif min(sent) < config.steps:
        yield (
            f"at the end, after step {config.steps}, the parameters of the last "
            f"exchange are of what slices trained up to step {_alternatives(sent)}"
        )


def last_sent(step: int, options: Any) -> list[int]:
    """Returns the steps whose parameters slices last sent of each fragment.

    Args:
      step: the number of steps that they have made.
      options: `config.outer` of the run.
    """
    return outer.last_sent(
        step,
        every_steps=options.every_steps,
        fragments=options.fragments,
        delay_steps=options.delay_steps,
    )


def _alternatives(steps: list[int]) -> str:
    """Returns steps as a text, such as '15 or 20 (by fragment)'."""
    numbers = [str(step) for step in sorted(set(steps))]
    if len(numbers) == 1:
        return numbers[0]
    return f"{', '.join(numbers[:-1])} or {numbers[-1]} (by fragment)"
