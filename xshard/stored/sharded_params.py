"""Calls of an experiment's methods where each replica holds shards of parameters.

A method sees whole arrays, so that any use of them is right. An array that it does not
use costs nothing. Where a learner applies a network to such an array, its shard is
gathered as the network asks for it, a layer at a time.
"""

from collections.abc import Callable
from typing import Any

import jax

from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.learners import run_context
from xshard.learners.state import is_learner, layout_of_copies
from xshard.optimizers import gathering, layouts, trees


def call(
    method: Callable[..., Any],
    mesh: Any,
    experiment: experiment_lib.Experiment,
    shapes: state_lib.TrainState,
    state: Any,
    *args: Any,
) -> Any:
    """Calls a method of an experiment, and returns its result.

    Args:
      method: the method, which takes the experiment's state as its first argument.
      mesh: the run's mesh.
      experiment: the experiment.
      shapes: the shapes of the run's state.
      state: the experiment's state, in which parameters may be a replica's shards.
      *args: the method's other arguments.
    """
    layouts_of = _layouts_of(shapes)
    with run_context.run_on(mesh, experiment.sharding_rules()):
        gatherer = gathering.Gatherer(mesh, layouts_of)
        held = gatherer.select_shards(state)
        if not held:
            return method(state, *args)
        whole = gatherer.gather(held)
        of = lambda path, x: whole.get(trees.path_name(path), x)
        state = jax.tree_util.tree_map_with_path(of, state)
        with run_context.with_shards(whole, held):
            return method(state, *args)


def _layouts_of(state: state_lib.TrainState) -> dict[str, layouts.Layout]:
    """Returns the layouts of sharded parameters and of their copies, by path in the
    experiment's state.
    """
    held: dict[str, layouts.Layout] = {}
    layout: layouts.Layout | None
    learners = state_lib.learners(state)
    for name, learner in learners.items():
        for path, layout in learner.rules.sharding.items():
            if layout.shards_param:
                held[f"{name}/params/{path}".removeprefix("/")] = layout
    copied = layout_of_copies(learners.values())
    node = lambda x: is_learner(x) or experiment_lib.is_own(x)
    for place, x in jax.tree_util.tree_leaves_with_path(state.experiment, is_leaf=node):
        path = trees.path_name(place)
        layout = None if node(x) else copied(path, x)
        if layout is not None:
            held[path] = layout
    return held
