"""The state of a run: everything needed to resume it, its initialization, and its
sharding over the mesh.

With several groups the experiment's state has a leading dimension of groups, since each
group trains its own model. `PerReplica` and `PerExample` arrays have a dimension of
replicas after it, ordered slice by slice.

If a learner's rule shards its update, each slot is sharded over `replica` along one of
its dimensions, and so is each parameter held in shards. A slot without a dimension that
the replicas divide is whole on each of them.

With `slots_memory` slots lie in the host's memory between steps. Every program takes
them to the devices with `on_devices` before anything reads them, and XLA leaves out
those that nothing reads.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xshard import config as config_lib
from xshard import errors, logical, methods
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.base import mesh_axes
from xshard.learners import run_context, validation
from xshard.learners.state import (
    LearnerMeta,
    LearnerState,
    is_learner,
    layout_of_copies,
)
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import trees
from xshard.training import group_randomness

Batch = experiment_lib.Batch

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


def _flatten_with_keys(state: TrainState) -> tuple[list[Any], Any]:
    children, structure = experiment_lib.children(state.experiment, "experiment")
    step = (jax.tree_util.GetAttrKey("step"), state.step)
    rng = (jax.tree_util.GetAttrKey("rng"), state.rng)
    return [step, rng, *children], structure


def _flatten(state: TrainState) -> tuple[list[Any], Any]:
    # Each call of a step flattens its state so. Without keys it takes a third of the
    # time.
    children, structure = experiment_lib.unnamed_children(state.experiment)
    return [state.step, state.rng, *children], structure


def _unflatten(structure: Any, children: Any) -> TrainState:
    step, rng, *rest = children
    experiment = jax.tree.unflatten(structure, rest)
    return TrainState(step=step, experiment=experiment, rng=rng)


jax.tree_util.register_pytree_with_keys(
    TrainState, _flatten_with_keys, _unflatten, _flatten
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
        run of one group whose key is folded from the seed and g. That number is also
        folded into each key of a rule's state that would be alike in all groups.
      example: a few examples; only their names, dtypes and the shapes of one example
        matter.

    With the experiment that `Supervised` shows, and two groups:

    >>> mesh = xshard.make_mesh([[0, 1], [2, 3]], devices=jax.devices()[:4])
    >>> state = xshard.init(line, mesh, 0, line.train_data())
    >>> learner = state.experiment
    >>> print(learner.params['linear']['w'].shape, learner.global_step, state.step)
    (2, 1, 1) [0 0] 0
    """
    alike, _ = random_alike(experiment, mesh, seed, example)
    numbers = _group_numbers(experiment, mesh)

    def create() -> TrainState:
        state = _create(experiment, mesh, seed, example, numbers)
        if not alike:
            return state
        return jax.tree_util.tree_map_with_path(
            lambda path, x: (
                group_randomness.fold(x, numbers)
                if trees.path_name(path) in alike
                else x
            ),
            state,
        )

    shardings = _shardings(experiment, mesh, jax.eval_shape(create))
    options = None
    if mesh.devices.flat[0].platform == "cpu":
        # The program runs once. At this level XLA for CPUs compiles it in less than
        # half the time, to the same bits.
        options = {"xla_backend_optimization_level": 1}
    return jax.jit(create, out_shardings=shardings, compiler_options=options)()


def abstract_state(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    seed: int,
    example: Batch,
) -> TrainState:
    """Returns the shapes, dtypes and shardings of the state that `init` returns for the
    same arguments.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      seed: the seed of all randomness.
      example: a few examples.
    """
    numbers = _group_numbers(experiment, mesh)
    create = functools.partial(_create, experiment, mesh, seed, example, numbers)
    shapes = jax.eval_shape(create)
    return jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        shapes,
        _shardings(experiment, mesh, shapes),
    )


def _create(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    seed: int,
    example: Batch,
    numbers: Any,
) -> TrainState:
    """Creates the first state of all groups, given the number of each."""
    root = jax.random.key(seed)
    init_key = jax.random.fold_in(root, _INIT)
    groups = mesh_lib.num_groups(mesh)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(init_key, numbers)
    # A single group has no dimension. There `jax.vmap` only binds the name of the axis.
    group_dim = 0 if groups > 1 else None
    init_groups = jax.vmap(
        functools.partial(
            _init_group, experiment, logical.mesh_of(experiment.config, mesh), example
        ),
        in_axes=group_dim,
        out_axes=group_dim,
        axis_name=mesh_lib.GROUP,
        axis_size=groups,
    )
    inner = init_groups(keys if groups > 1 else keys[0])
    # A Python number is weakly typed, and a restored one is not: without `strong` the
    # compiled programs would differ.
    inner = jax.tree.map(trees.strong, inner)
    state = TrainState(step=jnp.int32(0), experiment=inner, rng=root)
    _check_even(experiment, mesh, state)
    return state


def _group_numbers(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> np.ndarray:
    """Returns the number that each group's first state is derived from."""
    numbers = np.arange(mesh_lib.num_groups(mesh))
    if config_lib.separates_slices(experiment.config):
        # Slices of one model begin with the same parameters, and their rules with the
        # same keys, as the replicas of one model do.
        return np.zeros_like(numbers)
    return numbers


def random_alike(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    seed: int,
    example: Batch,
) -> tuple[frozenset[str], list[str]]:
    """Finds the random arrays that the experiment creates alike for all groups.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      seed: the seed of all randomness.
      example: a few examples.

    Returns:
      `(keys, others)`: the paths of the random keys that rules keep, into which `init`
      folds the group, and the paths of all others, which it leaves alike. Both are
      empty unless there are several models.
    """
    keys: set[str] = set()
    others: list[str] = []
    if experiment_lib.num_models(experiment.config, mesh) == 1:
        return frozenset(keys), others
    numbers = _group_numbers(experiment, mesh)
    create = functools.partial(_create, experiment, mesh, seed, example)
    of_rules = tuple(
        f"{trees.join(name, 'opt_state')}/"
        for name in learners(jax.eval_shape(create, numbers))
    )
    for path, is_key, is_certain in group_randomness.find(create, numbers):
        if path == "rng":
            # The root key is not of a group.
            continue
        is_of_rule = path.startswith(of_rules)
        if is_key and is_of_rule:
            keys.add(path)
        elif is_certain or is_of_rule:
            others.append(path)
    return frozenset(keys), others


def _init_group(
    experiment: experiment_lib.Experiment,
    mesh: mesh_lib.AnyMesh,
    example: Batch,
    key: jax.Array,
) -> Any:
    """Creates the first state of a group.

    An array that is equal on all replicas is created once, and any other for each of
    them.
    """
    replicas = mesh_lib.num_replicas(mesh)
    if config_lib.separates_slices(experiment.config):
        replicas *= mesh_lib.num_groups(mesh)
    rows = max(1, experiment.config.batch_size // replicas)
    batch = {}
    for name, array in example.items():
        row = jnp.asarray(array[:1])
        batch[name] = jnp.broadcast_to(row, (rows, *array.shape[1:]))
    init = _jitted_init(experiment, mesh)

    def init_replicas(out_axes: Any) -> Any:
        mapped = lambda key: init(key, batch)
        for axis in reversed(mesh_lib.REPLICAS):
            mapped = jax.vmap(
                mapped,
                in_axes=None,
                out_axes=out_axes,
                axis_name=axis,
                axis_size=mesh.shape[axis],
            )
        return mapped(key)

    # The shapes show which nodes of the state are marked as a replica's own. Those get
    # dimensions of slices and replicas, which `joined` merges.
    is_marked = experiment_lib.is_marked
    shapes = jax.eval_shape(lambda: init_replicas(0))
    for path, x in jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_marked):
        if isinstance(x, experiment_lib.PerExample):
            methods.per_example(
                experiment.init, trees.path_name(path), jax.tree.leaves(x), rows
            )
    marks = jax.tree.map(is_marked, shapes, is_leaf=is_marked)
    try:
        inner = init_replicas(jax.tree.map(lambda mark: 0 if mark else None, marks))
    except ValueError as e:
        if "out_axes is None" not in str(e):
            raise
        raise errors.UserError(
            f"{validation.describe_method(experiment.init)} makes a state that depends "
            "on the replica's number (jax.lax.axis_index) and is not marked as such: "
            "wrap it in xshard.PerReplica or xshard.PerExample."
        ) from e
    return jax.tree.map(lambda mark, x: x.joined() if mark else x, marks, inner)


@functools.lru_cache(maxsize=4)
def _jitted_init(
    experiment: experiment_lib.Experiment, mesh: Any
) -> Callable[..., Any]:
    """Returns `experiment.init` on a replica, jitted.

    Computing shapes, shardings and the state then traces it only once.
    """

    @jax.jit
    def init(key: jax.Array, batch: Batch) -> Any:
        with run_context.run_on(mesh, experiment.sharding_rules()):
            return experiment.init(key, batch)

    return init


def _check_even(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, state: TrainState
) -> None:
    """Raises UserError if replicas have state of their own that devices cannot divide
    evenly.
    """
    state_specs = specs(experiment, mesh, state)
    local = []
    for path, spec in jax.tree_util.tree_leaves_with_path(state_specs):
        if mesh_lib.REPLICA in mesh_axes.axes_of(spec):
            local.append(trees.path_name(path))
    where = validation.describe_method(experiment.init)
    logical.check_even(experiment.config, mesh, where, local)


def learners(state: TrainState) -> dict[str, LearnerState]:
    """Returns the learners' states by path in the experiment's state.

    The path is '' if one learner is the whole state.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state.experiment, is_leaf=is_learner)
    return {trees.path_name(path): x for path, x in leaves if is_learner(x)}


def params(state: TrainState) -> dict[str, Any]:
    """Returns the parameters of all learners by path.

    Each path begins with the learner's path.
    """
    by_path = {}
    for name, learner in learners(state).items():
        for path, leaf in trees.leaves_by_path(learner.params).items():
            by_path[trees.join(name, path)] = leaf
    return by_path


def map_learners(
    f: Callable[[str, LearnerState], LearnerState], state: TrainState
) -> TrainState:
    """Returns the state with each learner's state replaced by `f(path, state)`."""
    old = learners(state)
    new = {name: f(name, learner) for name, learner in old.items()}
    # A state of which nothing changes stays the same object.
    if all(new[name] is learner for name, learner in old.items()):
        return state

    def replace(path: Any, x: Any) -> Any:
        if not is_learner(x):
            return x
        return new[trees.path_name(path)]

    inner = jax.tree_util.tree_map_with_path(
        replace, state.experiment, is_leaf=is_learner
    )
    return dataclasses.replace(state, experiment=inner)


def metas(state: TrainState) -> dict[str, LearnerMeta]:
    """Returns the metadata of all learners by path."""
    return {name: learner.meta for name, learner in learners(state).items()}


def with_metas(state: TrainState, metas: Mapping[str, LearnerMeta]) -> TrainState:
    """Returns the state with other metadata of learners, given by path."""
    return map_learners(
        lambda name, learner: learner.replace(meta=metas.get(name, learner.meta)),
        state,
    )


def shards_update(state: TrainState) -> bool:
    """Returns whether the rule of any learner shards its update."""
    return any(learner.meta.shards_update for learner in learners(state).values())


def sharded_layouts(state: TrainState) -> dict[str, layouts_lib.Layout]:
    """Returns the layouts of parameters that are held in shards, and of their copies.

    They are by path in the experiment's state.
    """
    layouts: dict[str, layouts_lib.Layout] = {}
    for name, learner in learners(state).items():
        for path, layout in learner.meta.param_layouts.items():
            if layout.shards_param:
                layouts[trees.join(name, "params", path)] = layout
    layout_of_copy = layout_of_copies(learners(state).values())
    leaves = jax.tree_util.tree_leaves_with_path(state.experiment, is_leaf=_is_marked)
    for key_path, x in leaves:
        if _is_marked(x):
            continue
        path = trees.path_name(key_path)
        copied = layout_of_copy(path, x)
        if copied is not None:
            layouts[path] = copied
    return layouts


def _is_marked(x: Any) -> bool:
    """Returns whether a node of an experiment's state says by itself how it lies."""
    return is_learner(x) or experiment_lib.is_marked(x)


def specs(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, state: TrainState
) -> TrainState:
    """Returns the spec of each leaf as it is stored on the devices between steps.

    `on_replica`, `with_whole_slots` and `whole` are views of it, for `jax.shard_map`.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      state: the state, or its shapes.
    """
    group_axes = mesh_lib.group_axes(mesh)
    by_rules = functools.partial(_specs_by_rules, mesh, experiment.sharding_rules())

    def of_node(path: Any, x: Any) -> Any:
        if is_learner(x):
            return x.replace(
                params=by_rules(x.params),
                net_state=by_rules(x.net_state, slots=True),
                opt_state=by_rules(x.opt_state, slots=True),
                global_step=jax.P(*group_axes),
                gradient_noise=jax.tree.map(
                    lambda _: jax.P(*group_axes), x.gradient_noise
                ),
            )
        if experiment_lib.is_marked(x):
            counts = isinstance(x, experiment_lib.PerReplica)
            spec_of = functools.partial(
                logical.per_replica_spec, experiment.config, mesh, counts
            )
            return jax.tree.map(spec_of, x)
        # An array beside the learners is equal on all replicas.
        name = trees.path_name(path)
        return by_rules({name: x}, slots=True)[name]

    inner = jax.tree_util.tree_map_with_path(
        of_node, state.experiment, is_leaf=_is_marked
    )
    layouts = sharded_layouts(state) | _slot_layouts(experiment, mesh, state)

    def in_shards(path: Any, spec: jax.P) -> jax.P:
        layout = layouts.get(trees.path_name(path))
        if layout is None:
            return spec
        return jax.P(*group_axes, *layout.spec(mesh_lib.REPLICA))

    inner = jax.tree_util.tree_map_with_path(in_shards, inner)
    return TrainState(step=jax.P(), experiment=inner, rng=jax.P())


def on_replica(specs: TrainState) -> TrainState:
    """Returns `specs` without the axes that are left to XLA: a replica has its shards.

    Args:
      specs: what the function of this name returns.
    """
    return _without(specs, (mesh_lib.MODEL,))


def whole(specs: TrainState) -> TrainState:
    """Returns, for each leaf, the axes along which its values are of groups, of slices
    or of replicas.

    Shards, which lie along `replica` too, do not count: they are parts of global
    arrays, which a replica has whole.

    Args:
      specs: as for `on_replica`.
    """
    # What is a replica's own lies along all of `mesh_lib.REPLICAS` in one dimension.
    return _without(specs, (mesh_lib.MODEL, mesh_lib.REPLICA))


def with_whole_slots(specs: TrainState) -> TrainState:
    """Returns `on_replica(specs)`, but each replica has the slots of rules whole.

    Args:
      specs: as for `on_replica`.
    """
    of_whole = learners(whole(specs))
    return map_learners(
        lambda name, learner: learner.replace(opt_state=of_whole[name].opt_state),
        on_replica(specs),
    )


def _without(specs: TrainState, axes: tuple[str, ...]) -> TrainState:
    """Returns specs without entries of some axes."""

    def without(spec: jax.P) -> jax.P:
        return jax.P(*(None if entry in axes else entry for entry in spec))

    return jax.tree.map(without, specs)


def _slot_layouts(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, state: TrainState
) -> dict[str, layouts_lib.Layout]:
    """Returns the layouts of slots in shards, by path in the experiment's state.

    The arguments are those of `specs`.
    """
    skip = len(mesh_lib.group_axes(mesh))
    layouts: dict[str, layouts_lib.Layout] = {}
    for learner_name, learner in learners(state).items():
        if not learner.meta.shards_update:
            continue
        # With parameters in shards, their slots lie as they do. Otherwise slots alone
        # are in shards, each along the dimension that suits it best.
        param_layouts = learner.meta.param_layouts
        if not param_layouts:
            param_layouts = layouts_lib.of_params(
                jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape[skip:], x.dtype),
                    learner.params,
                ),
                mesh.shape[mesh_lib.REPLICA],
                experiment.sharding_rules(),
            )
        for module, arrays in learner.opt_state.items():
            for name, x in arrays.items():
                layout = layouts_lib.of_slot(param_layouts, name, x.shape[skip:])
                if layout is not None:
                    path = trees.join(learner_name, "opt_state", module, name)
                    layouts[path] = layout
    return layouts


def _specs_by_rules(
    mesh: mesh_lib.AnyMesh,
    sharding_rules: mesh_lib.ShardingRules,
    tree: Any,
    slots: bool = False,
) -> Any:
    shardings = mesh_lib.tree_shardings(mesh, tree, sharding_rules, slots=slots)
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def _shardings(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, state: TrainState
) -> TrainState:
    """Returns the sharding of each leaf, and with it the memory that it lies in."""
    shardings = jax.tree.map(
        lambda spec: mesh_lib.sharding(mesh, *spec), specs(experiment, mesh, state)
    )
    kind = _slots_memory(experiment, mesh)
    if kind == config_lib.DEVICE:
        return shardings
    return _map_slots(mesh, lambda _, x: x.with_memory_kind(kind), state, shardings)


def on_devices(state: TrainState) -> TrainState:
    """Returns a traced state with all arrays in the devices' memory."""
    is_on_host = lambda x: jax.typeof(x).memory_space == jax.memory.Space.Host
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x,
        state,
    )


def as_stored(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, state: TrainState
) -> TrainState:
    """Returns a traced state with its slots in the memory of the run's config."""
    if _slots_memory(experiment, mesh) == config_lib.DEVICE:
        return state
    return _map_slots(
        mesh, lambda x, _: jax.device_put(x, jax.memory.Space.Host), state, state
    )


def _slots_memory(experiment: experiment_lib.Experiment, mesh: Any) -> str:
    """Returns the kind of memory in which a run's slots lie between steps.

    Raises:
      UserError: if the devices or the run do not support it.
    """
    kind = experiment.config.get("slots_memory", config_lib.DEVICE)
    if kind == config_lib.DEVICE:
        return kind
    key = f"slots_memory={kind!r}"
    if experiment.config.get("logical_replicas", 0):
        raise errors.UserError(
            f"{key} cannot be used with logical_replicas="
            f"{experiment.config.logical_replicas}: their step is several programs, "
            "which pass the slots on. Leave out one of the two."
        )
    mesh_lib.check_memory(mesh, kind, key)
    return kind


def _map_slots(
    mesh: jax.sharding.Mesh,
    f: Callable[[Any, Any], Any],
    state: TrainState,
    tree: TrainState,
) -> TrainState:
    """Returns a tree like the state with `f(array, leaf)` for each slot of a rule.

    Numbers, such as counts and loss scales, stay as they are, and so do random keys:
    they take no memory, and the forward pass may need them.

    Args:
      mesh: the run's mesh.
      f: a function of an array of the state, or its shape, and a leaf of `tree`.
      state: the state, or its shapes.
      tree: a tree of the state's structure.
    """
    group_dims = len(mesh_lib.group_axes(mesh))
    of_state = learners(state)

    def of_slot(x: Any, leaf: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
        if x.ndim == group_dims or is_key:
            return leaf
        return f(x, leaf)

    def of_learner(name: str, learner: LearnerState) -> LearnerState:
        opt_state = jax.tree.map(of_slot, of_state[name].opt_state, learner.opt_state)
        return learner.replace(opt_state=opt_state)

    return map_learners(of_learner, tree)
