"""The state of a run: everything needed to resume it, its initialization, and its
sharding over the mesh.

With several groups the experiment's state has a leading dimension of groups, since each
group trains its own model. `PerReplica` and `PerExample` arrays have a dimension of
replicas after it, ordered slice by slice.

If a learner's rule shards its update, each slot is sharded over `replica` along one of
its dimensions, and so is each parameter held in shards. A slot without a dimension that
the replicas divide is whole on each of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xshard import errors, logical, validation
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.learners import run_context
from xshard.learners.state import LearnerState, is_learner, layout_of_copies
from xshard.optimizers import gathering, trees
from xshard.optimizers import layouts as layouts_lib

Batch = experiment_lib.Batch
Layouts = Mapping[str, layouts_lib.Layouts]

# The number folded into the root key for initialization; no step has this number.
_INIT = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a run needs to resume; anything else is lost.

    As a pytree its children are `step`, `rng`, and the children of `experiment` under
    their own names. Checkpoints use the same names.

    Attributes:
      step: the number of completed steps, an int32 scalar.
      experiment: the state that `Experiment.init` creates and each step advances.
      rng: the root key. The keys of a step are folded from it and the step's number.
    """

    step: Any
    experiment: Any
    rng: Any


def _flatten(state: TrainState) -> tuple[list[Any], Any]:
    children, inner = experiment_lib.children(state.experiment, "experiment")
    key = jax.tree_util.GetAttrKey
    return [(key("step"), state.step), (key("rng"), state.rng), *children], inner


def _flatten_unnamed(state: TrainState) -> tuple[list[Any], Any]:
    children, inner = experiment_lib.unnamed_children(state.experiment)
    return [state.step, state.rng, *children], inner


def _unflatten(inner: Any, children: Any) -> TrainState:
    step, rng, *rest = children
    return TrainState(step, jax.tree.unflatten(inner, rest), rng)


jax.tree_util.register_pytree_with_keys(
    TrainState, _flatten, _unflatten, _flatten_unnamed
)


def init(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    seed: int,
    example: Batch,
) -> TrainState:
    """Creates a run's first state, already sharded: no device holds more than its part.

    Args:
      experiment: the experiment.
      mesh: a mesh from `xshard.mesh.make_mesh`.
      seed: the seed of all randomness. Group g of several groups is initialized like a
        run of one group whose key is folded from the seed and g.
      example: a few examples; only their names, dtypes and the shapes of one example
        matter.

    With the experiment that `Supervised` shows, and two groups:

    >>> mesh = xshard.make_mesh([[0, 1], [2, 3]], devices=jax.devices()[:4])
    >>> state = xshard.init(line, mesh, 0, line.train_data())
    >>> print(state.experiment.params['linear']['w'].shape, state.experiment.global_step, state.step)
    (2, 1, 1) [0 0] 0
    """
    build = functools.partial(_build, experiment, mesh, seed, example)
    shardings = shardings_of(experiment, mesh, jax.eval_shape(build))
    # The program runs once. At this level XLA for CPUs compiles it in less than half
    # the time, to the same bits.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 1} if on_cpu else None
    return jax.jit(build, out_shardings=shardings, compiler_options=options)()


def abstract_state(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    seed: int,
    example: Batch,
    *,
    all_slots: bool = False,
) -> TrainState:
    """Returns the shapes, dtypes and shardings of the state that `init` returns for the
    same first arguments.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      seed: the seed of all randomness.
      example: a few examples.
      all_slots: whether frozen parameters have slots too, as in checkpoints of older
        versions.
    """
    build = functools.partial(
        _build, experiment, mesh, seed, example, all_slots=all_slots
    )
    shapes = jax.eval_shape(build)
    return placed(shapes, shardings_of(experiment, mesh, shapes))


def placed(shapes: TrainState, shardings: TrainState) -> TrainState:
    """Returns the shapes of a state with shardings attached."""
    return jax.tree.map(
        lambda leaf, there: leaf.update(sharding=there), shapes, shardings
    )


def learners(state: TrainState) -> dict[str, LearnerState]:
    """Returns the learners' states by path in the experiment's state; the path is '' if
    one learner is the whole state.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state.experiment, is_leaf=is_learner)
    return {trees.path_name(path): x for path, x in leaves if is_learner(x)}


def params(state: TrainState) -> dict[str, Any]:
    """Returns the parameters of all learners by path; each path begins with the
    learner's path.
    """
    by_path = {}
    for name, of_learner in learners(state).items():
        for path, leaf in trees.leaves_by_path(of_learner.params).items():
            by_path[trees.join(name, path)] = leaf
    return by_path


def map_learners(
    f: Callable[[str, LearnerState], LearnerState], state: TrainState
) -> TrainState:
    """Returns the state with each learner's state replaced by `f(path, state)`."""
    old = learners(state)
    new = {name: f(name, x) for name, x in old.items()}
    if all(new[name] is x for name, x in old.items()):
        return state
    replace = lambda path, x: new.get(trees.path_name(path), x) if is_learner(x) else x
    mapped = jax.tree_util.tree_map_with_path(
        replace, state.experiment, is_leaf=is_learner
    )
    return dataclasses.replace(state, experiment=mapped)


def _build(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    seed: int,
    example: Batch,
    *,
    all_slots: bool = False,
) -> TrainState:
    """Creates the first state."""
    root = jax.random.key(seed)
    init_key = jax.random.fold_in(root, _INIT)
    groups = mesh_lib.num_groups(mesh)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(init_key, jnp.arange(groups))
    on = logical.mesh_of(experiment.config, mesh)
    init = functools.partial(_init_group, experiment, on, example, all_slots)
    dim = 0 if groups > 1 else None
    made = jax.vmap(init, dim, dim, mesh_lib.GROUP, groups)(
        keys if groups > 1 else keys[0]
    )
    # A Python number is weakly typed, and a restored one is not: without `strong` the
    # compiled programs would differ.
    state = TrainState(jnp.int32(0), jax.tree.map(trees.strong, made), root)
    lies = jax.tree_util.tree_leaves_with_path(specs(experiment, mesh, state))
    own = [
        trees.path_name(path)
        for path, x in lies
        if mesh_lib.REPLICA in mesh_lib.axes_of(x)
    ]
    logical.check_even(
        experiment.config, mesh, validation.describe_method(experiment.init), own
    )
    # State that differs from slice to slice was created for one slice.
    return map_rules_state(layouts_lib.for_each_slice, experiment, mesh, state)


def _init_group(
    experiment: experiment_lib.Experiment,
    mesh: mesh_lib.AnyMesh,
    example: Batch,
    all_slots: bool,
    key: jax.Array,
) -> Any:
    """Creates the first state of a group: arrays equal on its replicas once, the others
    for all replicas.
    """
    rows = max(1, experiment.config.batch_size // mesh_lib.num_replicas(mesh))
    batch = {
        name: jnp.broadcast_to(jnp.asarray(array[:1]), (rows, *array.shape[1:]))
        for name, array in example.items()
    }
    init = _jitted_init(experiment, mesh, all_slots)

    def on_replicas(out_axes: Any) -> Callable[[jax.Array], Any]:
        mapped = lambda key: init(key, batch)
        for axis in reversed(mesh_lib.REPLICAS):
            mapped = jax.vmap(mapped, None, out_axes, axis, mesh.shape[axis])
        return mapped

    shapes = jax.eval_shape(on_replicas(0), key)
    own = jax.tree.map(experiment_lib.is_own, shapes, is_leaf=experiment_lib.is_own)
    for path, x in jax.tree_util.tree_leaves_with_path(
        shapes, is_leaf=experiment_lib.is_own
    ):
        if isinstance(x, experiment_lib.PerExample):
            validation.per_example(
                experiment.init, trees.path_name(path), jax.tree.leaves(x), rows
            )
    try:
        made = on_replicas(jax.tree.map(lambda is_own: 0 if is_own else None, own))(key)
    except ValueError as e:
        if "out_axes is None" not in str(e):
            raise
        raise errors.UserError(
            f"{validation.describe_method(experiment.init)} makes a state that depends on the replica's number (jax.lax.axis_index) "
            "and is not marked as such: wrap it in xshard.PerReplica or xshard.PerExample."
        ) from e
    return jax.tree.map(lambda is_own, x: x.joined() if is_own else x, own, made)


@functools.lru_cache(maxsize=4)
def _jitted_init(
    experiment: experiment_lib.Experiment, mesh: Any, all_slots: bool
) -> Callable[..., Any]:
    """Returns `experiment.init` on a replica, jitted: computing shapes, shardings and
    the state then traces it only once.
    """

    @jax.jit
    def init(key: jax.Array, batch: Batch) -> Any:
        with run_context.run_on(mesh, experiment.sharding_rules(), all_slots=all_slots):
            return experiment.init(key, batch)

    return init


def map_rules_state(
    f: Callable[[layouts_lib.Layout, Any], Any],
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: TrainState,
) -> TrainState:
    """Applies `f(layout, array)`, in each group, to the sharded arrays of the state of
    all learners' rules.
    """

    def of_learner(_: str, state: LearnerState) -> LearnerState:
        layouts = layouts_of(experiment, mesh, state)
        return state.replace(opt_state=map_sharded(f, layouts, mesh, state.opt_state))

    return map_learners(of_learner, state)


def map_sharded(
    f: Callable[..., Any], layouts: Layouts, mesh: mesh_lib.AnyMesh, opt_state: Any
) -> Any:
    """Applies `f(layout, array)`, in each group, to the sharded arrays of one learner's
    rules' state.
    """
    grouped = mesh_lib.num_groups(mesh) > 1

    def map_one(layout: layouts_lib.Layout | None, x: Any) -> Any:
        if layout is None:
            return x
        in_group = functools.partial(f, layout)
        return jax.vmap(in_group)(x) if grouped else in_group(x)

    return layouts_lib.map_state(map_one, layouts, opt_state)


def layouts_of(
    experiment: experiment_lib.Experiment, mesh: mesh_lib.AnyMesh, state: LearnerState
) -> Layouts:
    """Returns how the rules' state is sharded over the (logical) replicas."""
    skip = len(mesh_lib.group_axes(mesh))
    shape = lambda x: jax.ShapeDtypeStruct(x.shape[skip:], x.dtype)
    params, opt_state = jax.tree.map(shape, (state.params, state.opt_state))
    on, rules = logical.mesh_of(experiment.config, mesh), experiment.sharding_rules()
    of_params = layouts_lib.of_params(params, on.shape[mesh_lib.REPLICA], rules)
    slices, of_params = mesh_lib.num_slices(on), dict(state.rules.sharding) or of_params
    return layouts_lib.of_state(
        of_params, opt_state, slices, slots=state.rules.shards_update
    )


def shards_update(state: TrainState) -> bool:
    """Returns whether the rule of any learner shards its update."""
    return any(x.rules.shards_update for x in learners(state).values())


def specs(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    *,
    manual: bool = False,
    whole: bool = False,
    params_whole: bool = False,
) -> TrainState:
    """Returns the spec of each leaf.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      state: the state, or its shapes.
      manual: whether to leave out the axes that are left to XLA.
      whole: whether to have each replica's slots whole.
      params_whole: whether to have each replica's parameters whole, too.
    """
    group, rules = mesh_lib.group_axes(mesh), experiment.sharding_rules()
    place = functools.partial(_tree_specs, mesh, () if manual else rules)
    copied = layout_of_copies(learners(state).values())

    def of(path: Any, x: Any) -> Any:
        if is_learner(x):
            held = gathering.specs(x.rules.sharding, group, manual=manual)
            if params_whole:
                held = {}
            return x.replace(
                params=trees.replace(place(x.params), held),
                net_state=place(x.net_state, slots=True),
                opt_state=_opt_specs(experiment, mesh, x, manual=manual, whole=whole),
                global_step=jax.P(*group),
            )
        if experiment_lib.is_own(x):
            counts = isinstance(x, experiment_lib.PerReplica)
            own = functools.partial(
                logical.per_replica_spec, experiment.config, mesh, counts
            )
            return jax.tree.map(own, x)
        name = trees.path_name(path)
        layout = copied(name, x)
        if layout is None or params_whole:
            return place({name: x}, slots=True)[name]
        return jax.P(*group, *layout.spec(mesh_lib.REPLICA, manual=manual))

    leaf = lambda x: is_learner(x) or experiment_lib.is_own(x)
    inner = jax.tree_util.tree_map_with_path(of, state.experiment, is_leaf=leaf)
    return TrainState(jax.P(), inner, jax.P())


def mapped_specs(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, state: TrainState
) -> TrainState:
    """Returns, for each leaf, the axes along which its values are of groups, of slices
    or of replicas.

    Shards, which lie along `replica` too, do not count: they are parts of global
    arrays.
    """
    found = specs(experiment, mesh, state, manual=True)
    is_own = experiment_lib.is_own

    def without_shards(x: Any) -> Any:
        if is_own(x):
            return x
        return jax.P(*(None if axis == mesh_lib.REPLICA else axis for axis in x))

    inner = jax.tree.map(without_shards, found.experiment, is_leaf=is_own)
    return dataclasses.replace(found, experiment=inner)


def _opt_specs(
    experiment: experiment_lib.Experiment,
    mesh: mesh_lib.AnyMesh,
    state: LearnerState,
    *,
    manual: bool,
    whole: bool,
) -> Any:
    """Returns the specs of a learner's rules' state; it takes the arguments of `specs`."""
    group, rules = mesh_lib.group_axes(mesh), experiment.sharding_rules()
    layouts = layouts_of(experiment, mesh, state)

    def spec_of(layout: layouts_lib.Layout | None, spec: jax.P) -> jax.P:
        if layout is None or (whole and not layout.copies):
            return spec
        return jax.P(
            *group, *layout.spec(mesh_lib.REPLICA, mesh_lib.SLICE, manual=manual)
        )

    places = _tree_specs(mesh, () if manual else rules, state.opt_state, slots=True)
    return layouts_lib.map_state(spec_of, layouts, places)


def _tree_specs(
    mesh: mesh_lib.AnyMesh, rules: mesh_lib.Rules, tree: Any, slots: bool = False
) -> Any:
    places = mesh_lib.tree_shardings(mesh, tree, rules, slots=slots)
    return jax.tree.map(lambda place: place.spec, places)


def shardings_of(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, state: TrainState
) -> TrainState:
    """Returns the sharding of each leaf."""
    place = lambda spec: mesh_lib.sharding(mesh, *spec)
    return jax.tree.map(place, specs(experiment, mesh, state))
