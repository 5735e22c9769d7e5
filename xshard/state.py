"""The state of a run: all that it needs to go on, how it is made, and how it lies on the mesh.

With several groups all state but `step` and `rng` has a leading dimension of groups, since groups go
separate ways.

Where the optimizer shards its update, a slot lies along `replica` in the dimension that is sharded. A slot
that has none is stored flattened and padded, which depends on the number of replicas; `Storage` gives
it the shape that a checkpoint has, and takes it back.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import model as model_lib
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import moving_average, trees

Batch = model_lib.Batch
_Layouts = Mapping[str, layouts_lib.Layouts]
# Stands for what is not sharded.
_WHOLE = layouts_lib.layout("", (), 1)

# The position in the root key's stream that belongs to initialisation; no step has this number.
_INIT = 2**32 - 1


class TrainState(NamedTuple):
    """All that a run needs to go on; what is not here is not resumed.

    Attributes:
      step: the number of steps made, an int32 scalar.
      global_step: the number of updates applied, int32: a skipped step does not advance it.
      params: the network's parameters.
      net_state: the network's Haiku state.
      opt_state: the state of the update rules: slots, counts, loss scale.
      rng: the root key. The keys of a step are folded from it and the step's number.
    """

    step: Any
    global_step: Any
    params: Any
    net_state: Any
    opt_state: Any
    rng: Any


def init(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, seed: int, example: Batch
) -> TrainState:
    """A run's first state, made where it belongs: no device holds more than its part.

    Args:
      experiment: the experiment.
      mesh: a mesh of `xshard.mesh.make_mesh`.
      seed: the seed of all randomness. Group g of several is initialised as a run of one group is with
        the key that is folded from the seed and g.
      example: a few examples, of which only names, types and the shapes of one count.

    With the experiment that `Experiment` shows, and two groups:

    >>> mesh = xshard.make_mesh([[0, 1], [2, 3]], devices=jax.devices()[:4])
    >>> state = xshard.init(line, mesh, 0, line.train_data())
    >>> print(state.params['linear']['w'].shape, state.global_step, state.step)
    (2, 1, 1) [0 0] 0
    """
    model = model_lib.Model(experiment, mesh)
    build = lambda: _build(model, mesh, seed, example, whole=False)
    shardings = _shardings(model, mesh, jax.eval_shape(build))
    return jax.jit(build, out_shardings=shardings)()


def abstract_state(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    seed: int,
    example: Batch,
    *,
    whole: bool = False,
    all_slots: bool = False,
) -> TrainState:
    """Shapes, types and shardings of what `init` returns.

    Args:
      experiment: the experiment.
      mesh: of the run.
      seed: the seed of all randomness.
      example: a few examples.
      whole: as checkpoints have it: `Storage.to_whole`.
      all_slots: with slots for what is not trained, which checkpoints had once.
    """
    model = model_lib.Model(experiment, mesh)
    build = functools.partial(_build, model, mesh, seed, example, whole=whole, all_slots=all_slots)
    shapes = jax.eval_shape(build)
    return _placed(shapes, _shardings(model, mesh, shapes, whole=whole))


def _placed(shapes: TrainState, shardings: TrainState) -> TrainState:
    place = lambda leaf, there: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there)
    return jax.tree.map(place, shapes, shardings)


def as_stored(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, whole: TrainState
) -> TrainState:
    """Shapes, types and shardings of what `init` returns, from those of `abstract_state(..., whole=True)`."""
    model = model_lib.Model(experiment, mesh)
    layouts = _layouts(model, mesh, whole)
    store = lambda opt_state: _reshape(layouts, mesh, opt_state, whole=False)
    shapes = whole._replace(opt_state=jax.eval_shape(store, whole.opt_state))
    return _placed(shapes, _shardings(model, mesh, shapes))


def averaged(model: model_lib.Model, mesh: jax.sharding.Mesh, state: TrainState) -> Any | None:
    """The averages of the parameters, whole as these are; None if the rules keep none.

    Args:
      model: of the run.
      mesh: of the run.
      state: as a step has it, or as a checkpoint.
    """
    name = model.averages_module()
    if name is None:
        return None
    layouts = {name: _layouts(model, mesh, state).get(name, {})}
    kept = _reshape(layouts, mesh, {name: state.opt_state[name]}, whole=True)
    return model.averaged(state.params, kept)


class Storage:
    """Takes a run's state to the shapes of a checkpoint, which no number of replicas shows in, and back."""

    def __init__(self, experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh):
        self._model = model_lib.Model(experiment, mesh)
        self._mesh = mesh
        # What a save need not find anew: the shapes of a run stay.
        self._layouts_of_state: _Layouts | None = None
        self._jitted: dict[bool, Any] = {}

    def to_whole(self, state: TrainState) -> TrainState:
        """The state as a checkpoint has it. Every process calls it alike."""
        return self._convert(state, whole=True)

    def from_whole(self, state: TrainState) -> TrainState:
        """The state as a step takes it; one that is so already stays. Every process calls it alike."""
        return self._convert(state, whole=False)

    def begin_averages(self, state: TrainState, before: TrainState) -> TrainState:
        """Begins averages of parameters anew, as they are where parameters were taken from elsewhere.

        Args:
          state: as a checkpoint has it.
          before: what it was before some of its arrays were replaced: averages that were, too, stay.
        """
        name = self._model.averages_module()
        if name is None:
            return state
        slots, old = dict(state.opt_state[name]), before.opt_state[name]
        for path, param in trees.leaves_by_path(state.params).items():
            key = f"{moving_average.SLOT}/{path}"
            if key in slots and slots[key] is old[key]:
                # A copy: what holds both may be donated.
                copy = lambda x, dtype=old[key].dtype: jnp.array(x, dtype, copy=True)
                slots[key] = jax.jit(copy, out_shardings=old[key].sharding)(param)
        return state._replace(opt_state={**state.opt_state, name: slots})

    def _convert(self, state: TrainState, whole: bool) -> TrainState:
        if self._layouts_of_state is None:
            self._layouts_of_state = _layouts(self._model, self._mesh, state)
        layouts = self._layouts_of_state
        is_due = lambda layout, x: (
            layout.flat and (x.shape[-len(layout.shape) :] == layout.shape) != whole
        )
        due = {
            module: {
                name: x
                for name, x in arrays.items()
                if is_due(layouts[module].get(name, _WHOLE), x)
            }
            for module, arrays in state.opt_state.items()
            if module in layouts
        }
        if not any(due.values()):
            return state
        if whole not in self._jitted:
            reshape = functools.partial(_reshape, layouts, self._mesh, whole=whole)
            specs = _opt_specs(
                self._model, self._mesh, layouts, jax.eval_shape(reshape, due), whole=whole
            )
            places = jax.tree.map(lambda spec: mesh_lib.sharding(self._mesh, *spec), specs)
            self._jitted[whole] = jax.jit(reshape, out_shardings=places)
        done = self._jitted[whole](due)
        opt_state = {
            module: {**arrays, **done.get(module, {})} for module, arrays in state.opt_state.items()
        }
        return state._replace(opt_state=opt_state)


def _build(
    model: model_lib.Model,
    mesh: jax.sharding.Mesh,
    seed: int,
    example: Batch,
    *,
    whole: bool,
    all_slots: bool = False,
) -> TrainState:
    """The first state."""
    init = functools.partial(model.init, all_slots=all_slots)
    example = {name: jnp.asarray(array[:1]) for name, array in example.items()}
    root = jax.random.key(seed)
    init_key = jax.random.fold_in(root, _INIT)
    groups = mesh_lib.num_groups(mesh)
    keys = jax.vmap(lambda group: jax.random.fold_in(init_key, group))(jnp.arange(groups))
    if groups > 1:
        trees = jax.vmap(lambda key: init(key, example))(keys)
        global_step = jnp.zeros((groups,), jnp.int32)
    else:
        trees, global_step = init(keys[0], example), jnp.int32(0)
    state = TrainState(jnp.int32(0), global_step, *trees, root)
    layouts = _layouts(model, mesh, state)
    # What differs from slice to slice is made for one.
    change = layouts_lib.for_each_slice if whole else layouts_lib.stored
    return state._replace(opt_state=_map_sharded(change, layouts, mesh, state.opt_state))


def _reshape(layouts: _Layouts, mesh: jax.sharding.Mesh, opt_state: Any, *, whole: bool) -> Any:
    """The rules' state with its arrays whole, or as they are stored."""
    change = layouts_lib.whole if whole else layouts_lib.stored
    return _map_sharded(change, layouts, mesh, opt_state)


def _map_sharded(
    f: Callable[..., Any], layouts: _Layouts, mesh: jax.sharding.Mesh, opt_state: Any
) -> Any:
    """Applies `f(layout, array)` to what of the rules' state is sharded, in each group."""
    grouped = mesh_lib.num_groups(mesh) > 1

    def one(layout: layouts_lib.Layout | None, x: Any) -> Any:
        if layout is None:
            return x
        in_group = functools.partial(f, layout)
        return jax.vmap(in_group)(x) if grouped else in_group(x)

    return layouts_lib.map_state(one, layouts, opt_state)


def _layouts(model: model_lib.Model, mesh: jax.sharding.Mesh, state: TrainState) -> _Layouts:
    skip = 1 if mesh_lib.num_groups(mesh) > 1 else 0
    shape = lambda x: jax.ShapeDtypeStruct(x.shape[skip:], x.dtype)
    return model.layouts(*jax.tree.map(shape, (state.params, state.opt_state)))


def specs(
    model: model_lib.Model,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    *,
    manual: bool = False,
    whole: bool = False,
) -> TrainState:
    """The axes that each leaf lies along; with `manual` without those that XLA sees to."""
    rules = () if manual else model.experiment.sharding_rules()
    place = functools.partial(_tree_specs, mesh, rules)
    layouts = _layouts(model, mesh, state)
    return TrainState(
        jax.P(),
        jax.P(mesh_lib.GROUP) if mesh_lib.num_groups(mesh) > 1 else jax.P(),
        place(state.params),
        place(state.net_state, slots=True),
        _opt_specs(model, mesh, layouts, state.opt_state, manual=manual, whole=whole),
        jax.P(),
    )


def _opt_specs(
    model: model_lib.Model,
    mesh: jax.sharding.Mesh,
    layouts: _Layouts,
    opt_state: Any,
    *,
    manual: bool = False,
    whole: bool = False,
) -> Any:
    group = (mesh_lib.GROUP,) if mesh_lib.num_groups(mesh) > 1 else ()
    rules = () if manual else model.experiment.sharding_rules()

    def spec_of(layout: layouts_lib.Layout | None, spec: jax.P) -> jax.P:
        if layout is None:
            return spec
        if layout.flat and whole:
            # Its shape does not divide: whole on each replica while it is written or read.
            layout = dataclasses.replace(layout, dim=None)
        return jax.P(*group, *layout.spec(mesh_lib.REPLICA, mesh_lib.SLICE, manual=manual))

    return layouts_lib.map_state(spec_of, layouts, _tree_specs(mesh, rules, opt_state, slots=True))


def _tree_specs(
    mesh: jax.sharding.Mesh, rules: mesh_lib.Rules, tree: Any, slots: bool = False
) -> Any:
    places = mesh_lib.tree_shardings(mesh, tree, rules, slots=slots)
    return jax.tree.map(lambda place: place.spec, places)


def _shardings(
    model: model_lib.Model, mesh: jax.sharding.Mesh, state: TrainState, *, whole: bool = False
) -> TrainState:
    found = specs(model, mesh, state, whole=whole)
    return jax.tree.map(lambda spec: mesh_lib.sharding(mesh, *spec), found)
