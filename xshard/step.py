"""The state of a run and the step that advances it: pure functions, not jitted.

A step runs on every device under `jax.shard_map` over the axes `group`, `slice` and `replica`: the
replica's gradients are computed from its part of the batch, reduced over its group and voted on by the
experiment's optimizer. With several groups all state but `step` and `rng` has a leading dimension of
groups, since groups go separate ways.

Where the optimizer shards its update, a slot lies along `replica` in the dimension that is cut. A slot
that has none is stored flattened and filled up, which depends on the number of replicas; `to_whole` gives
it the shape that a checkpoint has, and `from_whole` takes it back.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import model as model_lib
from xshard.optimizers import shards

Batch = model_lib.Batch

# The position in the root key's stream that belongs to initialisation; no step has this number.
_INIT = 2**32 - 1


class TrainState(NamedTuple):
    """All that a run needs to go on; what is not here is not resumed.

    Attributes:
      step: the number of steps made, an int32 scalar. It is also the position in the data.
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
    """
    model = model_lib.Model(experiment, mesh)
    build = lambda: _store(model, mesh, _build(model, mesh, seed, example))
    shardings = _shardings(model, mesh, jax.eval_shape(build))
    return jax.jit(build, out_shardings=shardings)()


def abstract_state(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    seed: int,
    example: Batch,
    *,
    whole: bool = False,
) -> TrainState:
    """Shapes, types and shardings of what `init` returns; or of `to_whole` of it, as checkpoints have it."""
    model = model_lib.Model(experiment, mesh)
    store = (lambda state: state) if whole else functools.partial(_store, model, mesh)
    shapes = jax.eval_shape(lambda: store(_build(model, mesh, seed, example)))
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        _shardings(model, mesh, shapes, whole=whole),
    )


def to_whole(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, state: TrainState
) -> TrainState:
    """The state in the shapes of a checkpoint, which do not depend on the number of replicas."""
    model = model_lib.Model(experiment, mesh)
    return _reshaped(functools.partial(_unstore, model, mesh), model, mesh, state, whole=True)


def from_whole(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, state: TrainState
) -> TrainState:
    """The inverse of `to_whole`: the state as a step takes it."""
    model = model_lib.Model(experiment, mesh)
    return _reshaped(functools.partial(_store, model, mesh), model, mesh, state, whole=False)


def make_train_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The function that takes a state and a batch to the next state and metrics.

    Jit it with `donate_argnums=0`. The batch lies along ('group', 'slice', 'replica'). Metrics are float32 and
    int32 scalars, means over the replicas, or one for each of several groups: 'loss', 'skipped' (1 if
    the step was not applied), 'global_step', 'loss_scale' (as the step leaves it) if the optimizer
    scales losses, and the experiment's own.
    """
    grouped = mesh_lib.num_groups(mesh) > 1
    model = model_lib.Model(experiment, mesh)

    def local_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        old = _one_group(state) if grouped else state
        (params, net_state, global_step, metrics, agreed), opt_state = model.update(
            old.params, old.net_state, old.opt_state, old.global_step, _step_key(old), batch
        )
        applied = global_step != old.global_step
        net_state, metrics = _mean_over_replicas((net_state, metrics))
        net_state = jax.tree.map(functools.partial(jnp.where, applied), net_state, old.net_state)
        metrics |= {**agreed, "skipped": jnp.int32(~applied), "global_step": global_step}
        new = TrainState(old.step + 1, global_step, params, net_state, opt_state, old.rng)
        return (_with_group(new), _add_dim(metrics)) if grouped else (new, metrics)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        state_spec = _specs(model, mesh, state, manual=True)
        mapped = _map(
            local_step,
            mesh,
            in_specs=(state_spec, jax.P((mesh_lib.GROUP, *mesh_lib.REPLICAS))),
            out_specs=(state_spec, jax.P(mesh_lib.GROUP) if grouped else jax.P()),
        )
        return mapped(state, batch)

    return train_step


def make_eval_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], dict[str, jax.Array]]:
    """The function that takes a state and a batch to sums over the batch's examples.

    The batch lies along ('slice', 'replica'), equal for all groups; its rows where '_mask' is False do not count.
    The result has the sum of each value of `experiment.evaluate`, and 'count'; with several groups
    there is one of each per group, and for the outputs of `experiment.ensemble` 'ensemble/<name>'.
    """
    grouped = mesh_lib.num_groups(mesh) > 1
    model = model_lib.Model(experiment, mesh)

    def local_eval(nets: Any, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        params, net_state = jax.tree.map(lambda x: x[0], nets) if grouped else nets
        batch = dict(batch)
        mask = batch.pop("_mask")
        outputs, _ = model.forward(params, net_state, None, batch, False)
        sums = _masked_sums({**experiment.evaluate(outputs, batch), "count": mask}, mask)
        if not grouped:
            return sums, {}
        together = experiment.ensemble(lax.all_gather(outputs, mesh_lib.GROUP))
        ensemble = _masked_sums(experiment.evaluate(together, batch), mask)
        return _add_dim(sums), {f"ensemble/{name}": value for name, value in ensemble.items()}

    per_group = jax.P(mesh_lib.GROUP) if grouped else jax.P()
    mapped = _map(
        local_eval,
        mesh,
        in_specs=(per_group, jax.P(mesh_lib.REPLICAS)),
        out_specs=(per_group, jax.P()),
    )

    def eval_step(state: TrainState, batch: Batch) -> dict[str, jax.Array]:
        sums, ensemble = mapped((state.params, state.net_state), batch)
        return {**sums, **ensemble}

    return eval_step


def _map(f: Callable[..., Any], mesh: jax.sharding.Mesh, **specs: Any) -> Callable[..., Any]:
    # Values that differ between groups are returned with a dimension of groups: nothing for the
    # check of varying values to find, and it knows no sums over groups.
    manual = {mesh_lib.GROUP, *mesh_lib.REPLICAS}
    return jax.shard_map(f, mesh=mesh, axis_names=manual, check_vma=False, **specs)


def _build(
    model: model_lib.Model, mesh: jax.sharding.Mesh, seed: int, example: Batch
) -> TrainState:
    """The first state, whole."""
    example = {name: jnp.asarray(array[:1]) for name, array in example.items()}
    root = jax.random.key(seed)
    init_key = jax.random.fold_in(root, _INIT)
    groups = mesh_lib.num_groups(mesh)
    keys = jax.vmap(lambda group: jax.random.fold_in(init_key, group))(jnp.arange(groups))
    if groups > 1:
        trees = jax.vmap(lambda key: model.init(key, example))(keys)
        global_step = jnp.zeros((groups,), jnp.int32)
    else:
        trees, global_step = model.init(keys[0], example), jnp.int32(0)
    state = TrainState(jnp.int32(0), global_step, *trees, root)
    # What differs from slice to slice is made for one.
    return _map_cut(
        lambda layout, x: jnp.repeat(x, layout.copies, axis=0) if layout.copies else x,
        model,
        mesh,
        state,
    )


def _store(model: model_lib.Model, mesh: jax.sharding.Mesh, state: TrainState) -> TrainState:
    store = lambda layout: jax.vmap(layout.store) if layout.copies else layout.store
    return _map_cut(lambda layout, x: store(layout)(x), model, mesh, state)


def _unstore(model: model_lib.Model, mesh: jax.sharding.Mesh, state: TrainState) -> TrainState:
    whole = lambda layout: jax.vmap(layout.whole) if layout.copies else layout.whole
    return _map_cut(lambda layout, x: whole(layout)(x), model, mesh, state)


def _map_cut(
    f: Callable[..., Any], model: model_lib.Model, mesh: jax.sharding.Mesh, state: TrainState
) -> TrainState:
    """Applies `f(layout, array)` to what of the rules' state is cut, in each group."""
    grouped = mesh_lib.num_groups(mesh) > 1

    def one(layout: shards.Layout | None, x: Any) -> Any:
        if layout is None:
            return x
        in_group = functools.partial(f, layout)
        return jax.vmap(in_group)(x) if grouped else in_group(x)

    layouts = _layouts(model, mesh, state)
    return state._replace(opt_state=shards.map_state(one, layouts, state.opt_state))


def _layouts(
    model: model_lib.Model, mesh: jax.sharding.Mesh, state: TrainState
) -> Mapping[str, shards.Layouts]:
    skip = 1 if mesh_lib.num_groups(mesh) > 1 else 0
    shape = lambda x: jax.ShapeDtypeStruct(x.shape[skip:], x.dtype)
    return model.layouts(jax.tree.map(shape, state.params))


def _reshaped(
    f: Callable[[TrainState], TrainState],
    model: model_lib.Model,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    *,
    whole: bool,
) -> TrainState:
    layouts = _layouts(model, mesh, state)
    if not any(layout.flat for arrays in layouts.values() for layout in arrays.values()):
        return state
    shardings = _shardings(model, mesh, jax.eval_shape(f, state), whole=whole)
    return jax.jit(f, out_shardings=shardings)(state)


def _specs(
    model: model_lib.Model,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    *,
    manual: bool = False,
    whole: bool = False,
) -> TrainState:
    """The axes that each leaf lies along; with `manual` without those that XLA sees to."""
    grouped = mesh_lib.num_groups(mesh) > 1
    group = (mesh_lib.GROUP,) if grouped else ()
    rules = () if manual else model.experiment.sharding_rules()
    place = lambda tree, slots=False: jax.tree.map(
        lambda sharding: sharding.spec, mesh_lib.tree_shardings(mesh, tree, rules, slots=slots)
    )

    def cut(layout: shards.Layout | None, spec: jax.P) -> jax.P:
        if layout is None:
            return spec
        if layout.flat and whole:
            # Not all shapes divide: whole on each replica while it is written or read.
            layout = dataclasses.replace(layout, dim=None)
        return jax.P(*group, *layout.spec(mesh_lib.REPLICA, mesh_lib.SLICE, manual=manual))

    layouts = _layouts(model, mesh, state)
    return TrainState(
        jax.P(),
        jax.P(*group),
        place(state.params),
        place(state.net_state, slots=True),
        shards.map_state(cut, layouts, place(state.opt_state, slots=True)),
        jax.P(),
    )


def _shardings(
    model: model_lib.Model, mesh: jax.sharding.Mesh, state: TrainState, *, whole: bool = False
) -> TrainState:
    specs = _specs(model, mesh, state, whole=whole)
    return jax.tree.map(lambda spec: mesh_lib.sharding(mesh, *spec), specs)


def _mean_over_replicas(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: lax.pmean(x, mesh_lib.REPLICAS) if jnp.issubdtype(x.dtype, jnp.inexact) else x,
        tree,
    )


def _masked_sums(values: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    wide = {name: value.astype(jnp.float32) for name, value in values.items()}
    sums = {name: jnp.sum(jnp.where(mask, value, 0)) for name, value in wide.items()}
    return lax.psum(sums, mesh_lib.REPLICAS)


def _step_key(state: TrainState) -> jax.Array:
    key = jax.random.fold_in(state.rng, state.step)
    for axis in (mesh_lib.GROUP, mesh_lib.REPLICAS):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return key


def _one_group(state: TrainState) -> TrainState:
    return _map_groups(lambda x: x[0], state)


def _with_group(state: TrainState) -> TrainState:
    return _map_groups(lambda x: x[None], state)


def _map_groups(f: Callable[[Any], Any], state: TrainState) -> TrainState:
    mapped = jax.tree.map(f, state._replace(step=None, rng=None))
    return mapped._replace(step=state.step, rng=state.rng)


def _add_dim(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
