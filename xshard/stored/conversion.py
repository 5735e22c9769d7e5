"""Conversions of a run's state between the layout of a checkpoint and the layout of a step.

In a checkpoint every array has its logical shape. A step stores some slots flattened and padded.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.learners.state import LearnerState
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import moving_average, trees


def as_stored(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, whole: state_lib.TrainState
) -> state_lib.TrainState:
    """Returns the shapes, types and shardings of `init`'s result, from those of `abstract_state(..., whole=True)`."""
    store = functools.partial(state_lib.map_rules_state, layouts_lib.stored, experiment, mesh)
    shapes = jax.eval_shape(store, whole)
    return state_lib.placed(shapes, state_lib.shardings_of(experiment, mesh, shapes))


def to_whole(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, state: state_lib.TrainState
) -> state_lib.TrainState:
    """Converts the optimizer state to whole arrays, in a trace. Arrays that are not used cost nothing."""
    return state_lib.map_rules_state(layouts_lib.whole, experiment, mesh, state)


def gathered(
    experiment: experiment_lib.Experiment,
    mesh: mesh_lib.AnyMesh,
    shapes: state_lib.TrainState,
    local: state_lib.TrainState,
) -> state_lib.TrainState:
    """Gathers the optimizer state in a logical replica's part of a state. Arrays that are not used cost nothing.

    Args:
      experiment: the experiment.
      mesh: the mesh of the replicas.
      shapes: the shapes of the state.
      local: the replica's part of the state.
    """
    stored = state_lib.learners(shapes)

    def gather(layout: layouts_lib.Layout, x: jax.Array) -> jax.Array:
        return layout.whole(lax.all_gather(x, mesh_lib.REPLICAS, axis=layout.dim, tiled=True))

    def of_learner(name: str, x: LearnerState) -> LearnerState:
        layouts = state_lib.layouts_of(experiment, mesh, stored[name])
        return x.replace(opt_state=state_lib.map_sharded(gather, layouts, mesh, x.opt_state))

    return state_lib.map_learners(of_learner, local)


class StateConverter:
    """Converts a run's state to the shapes of a checkpoint, which do not depend on the number of replicas, and back."""

    def __init__(self, experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh):
        self._experiment = experiment
        self._mesh = mesh
        # Layouts and compiled conversions are cached, since the shapes of a run never change.
        self._layouts: dict[str, state_lib.Layouts] = {}
        self._jitted: dict[tuple[str, bool], Any] = {}

    def to_whole(self, state: state_lib.TrainState) -> state_lib.TrainState:
        """Converts a step's state to the layout of a checkpoint. Call it on every process."""
        return state_lib.map_learners(functools.partial(self._convert, whole=True), state)

    def from_whole(self, state: state_lib.TrainState) -> state_lib.TrainState:
        """Converts a state to the layout of a step; arrays in that layout are unchanged. Call it on every process."""
        return state_lib.map_learners(functools.partial(self._convert, whole=False), state)

    def begin_averages(
        self, state: state_lib.TrainState, before: state_lib.TrainState
    ) -> state_lib.TrainState:
        """Restarts averages of parameters at the parameters' values, after parameters were taken from elsewhere.

        Args:
          state: the state, in the layout of a checkpoint.
          before: the state before some of its arrays were replaced. Averages that were replaced, too, are kept.
        """
        old = state_lib.learners(before)
        return state_lib.map_learners(lambda name, state: _begin_averages(state, old[name]), state)

    def _convert(self, name: str, state: LearnerState, *, whole: bool) -> LearnerState:
        if name not in self._layouts:
            self._layouts[name] = state_lib.layouts_of(self._experiment, self._mesh, state)
        layouts = self._layouts[name]
        # The layouts differ only in flattened slots. `pending` collects the slots that are not in the wanted layout yet.
        pending: dict[str, dict[str, jax.Array]] = {}
        for module, arrays in state.opt_state.items():
            for slot, x in arrays.items():
                layout = layouts.get(module, {}).get(slot)
                if layout is None or not layout.flat:
                    continue
                is_whole = x.shape[-len(layout.shape) :] == layout.shape
                if is_whole != whole:
                    pending.setdefault(module, {})[slot] = x
        if not pending:
            return state
        key = name, whole
        if key not in self._jitted:
            change = layouts_lib.whole if whole else layouts_lib.stored
            reshape = functools.partial(state_lib.map_sharded, change, layouts, self._mesh)
            shapes = jax.eval_shape(reshape, pending)
            args = self._experiment, self._mesh, layouts, shapes
            specs = state_lib.opt_specs(*args, whole=whole)
            places = jax.tree.map(lambda spec: mesh_lib.sharding(self._mesh, *spec), specs)
            self._jitted[key] = jax.jit(reshape, out_shardings=places)
        opt_state = dict(state.opt_state)
        for module, arrays in self._jitted[key](pending).items():
            opt_state[module] = {**opt_state[module], **arrays}
        return state.replace(opt_state=opt_state)


def _begin_averages(state: LearnerState, before: LearnerState) -> LearnerState:
    name = state.rules.averages_module
    if name is None:
        return state
    slots, old = dict(state.opt_state[name]), before.opt_state[name]
    for path, param in trees.leaves_by_path(state.params).items():
        key = f"{moving_average.SLOT}/{path}"
        if key in slots and slots[key] is old[key]:
            # The average is a copy, because a step that donates the state may not get one buffer twice.
            copy = lambda x, dtype=old[key].dtype: jnp.array(x, dtype, copy=True)
            slots[key] = jax.jit(copy, out_shardings=old[key].sharding)(param)
    return state.replace(opt_state={**state.opt_state, name: slots})
