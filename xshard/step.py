"""The training, evaluation and prediction steps: pure functions, not jitted.

A step runs on every device under `jax.shard_map` over the axes `group`, `slice` and
`replica`, so an experiment's methods see one replica of one group. If a rule shards its
update, `jax.vmap` maps a training step over these axes instead, so that XLA can
partition the update: see `xshard.optimizers.replica_map`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xshard import errors, logical, validation
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.learners import learner as learner_lib
from xshard.learners import run_context
from xshard.learners.state import Observed as ObservedUpdate
from xshard.learners.state import Outcome
from xshard.optimizers import replica_map, trees
from xshard.stored import fingerprint, sharded_params

Batch = experiment_lib.Batch
TrainState = state_lib.TrainState
Observed = dict[str, ObservedUpdate]

# The number folded into the root key for evaluations. No step and no initialization
# uses it.
_EVALUATION = 2**32 - 2


class Stepped(NamedTuple):
    """The results of a training step of a run.

    Attributes:
      state: the new state.
      metrics: the values to log, by name.
      observed: the observations of each learner, by its name.
      fingerprints_before: the fingerprints of the state that the step received; None if the run
        computes none.
    """

    state: TrainState
    metrics: dict[str, jax.Array]
    observed: Observed
    fingerprints_before: fingerprint.Fingerprints | None


def make_train_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the function that takes a state and a batch to the next state and
    metrics.

    Jit it with `donate_argnums=0`. Shard the batch along ('group', 'slice', 'replica').

    Metrics are float32 scalars, averaged over the replicas, and int32 scalars, equal on
    all of them; with several groups, arrays of one per group. They are the experiment's
    own and each learner's, prefixed with the learner's name unless its state is the
    whole of the experiment's. A learner logs 'loss', 'skipped' (1 if the step was not
    applied), 'global_step', 'loss_scale' (after the step) if the rule scales losses,
    'gradient_norm', 'parameter_norm', and the scalars that its loss returns.

    The norms are global L2 norms: of the group's gradients, reduced and unscaled, as
    the rules receive them; and of the parameters after the step. In a step skipped
    because gradients are not finite, the gradient norm is not finite. The norms need no
    collective of their own: where the update is sharded, each replica's sum of squares
    is reduced together with the other metrics. For arrays sharded along 'model', XLA
    adds a sum over 'model'.

    With the experiment that `Supervised` shows:

    >>> mesh, batch = xshard.make_mesh(devices=jax.devices()[:4]), line.train_data()
    >>> state = xshard.init(line, mesh, 0, batch)
    >>> train_step = jax.jit(xshard.make_train_step(line, mesh), donate_argnums=0)
    >>> for _ in range(50):
    ...     state, metrics = train_step(state, batch)
    >>> print(int(state.step), metrics['loss'] < 1e-3, state.experiment.params['linear']['w'].round(1))
    50 True [[3.]]
    """
    watched_step = make_watched_step(experiment, mesh)
    return lambda state, batch: watched_step(state, batch)[:2]


def make_watched_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], Stepped]:
    """Returns the function of `make_train_step` that also returns the observations and
    fingerprints a run checks.
    """
    mapped = on_replicas(experiment, mesh)
    on_whole_arrays = make_analyzed_step(experiment, mesh)

    # The name of this function appears in profiles and in the compilation cache.
    def train_step(state: TrainState, batch: Batch) -> Stepped:
        if not updates_in_shards(mesh, state):
            return on_whole_arrays(state, batch)
        fingerprints_before = None
        every = experiment.config.get("fingerprint_every_steps", 0)
        if every:
            fingerprints_before = fingerprint.program(
                experiment, mesh, every_steps=every
            )(state)
        of_replica = mapped(state, batch)
        state_specs = state_lib.mapped_specs(experiment, mesh, state)
        on_all = replica_map.vmap_replicas(
            of_replica.function,
            mesh,
            in_specs=(state_specs, jax.P(mesh_lib.BATCH)),
            out_specs=of_replica.out_specs._replace(state=state_specs),
            axis_names=mesh_lib.BATCH,
        )
        return on_all(state, batch)._replace(fingerprints_before=fingerprints_before)

    return train_step


def make_analyzed_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], Stepped]:
    """Returns the function of `make_watched_step` as one `jax.shard_map`, for an
    analysis of its program.

    It differs from that if a rule shards its update: here, each replica updates whole
    arrays.
    """
    mapped = on_replicas(experiment, mesh)

    def train_step(state: TrainState, batch: Batch) -> Stepped:
        return mapped(state, batch).on(mesh)(state, batch)

    return train_step


def updates_in_shards(mesh: jax.sharding.Mesh, state: TrainState) -> bool:
    """Returns whether each replica updates its shards of global arrays in a step."""
    return mesh_lib.num_replicas(mesh) > 1 and state_lib.shards_update(state)


def on_replicas(
    experiment: experiment_lib.Experiment, mesh: Any
) -> Callable[[TrainState, Batch], logical.Mapped]:
    """Returns one replica's computation in a step of `make_watched_step`, given the
    step's arguments.
    """
    grouped = mesh_lib.num_groups(mesh) > 1
    every = experiment.config.get("fingerprint_every_steps", 0)

    def local_step(shapes: TrainState, state: TrainState, batch: Batch) -> Stepped:
        old = _local(state, grouped)
        fingerprints_before = None
        if every and not updates_in_shards(mesh, shapes):
            # Computed inside the step so that XLA merges its collective with the step's
            # own reductions.
            is_due = fingerprint.is_due(state.step, every)
            fingerprints_before = fingerprint.of_replica(
                experiment, mesh, shapes, state, is_due
            )
            if mesh_lib.num_replicas(mesh) == 1:
                # One replica reduces nothing that would order this read before the
                # update: XLA would copy the old state.
                batch = trees.after(fingerprints_before.table, batch)
        key = _group_key(jax.random.fold_in(old.rng, old.step))
        args = old.experiment, batch, _key_of_replica(key)
        with run_context.equal_keys(key):
            returned = sharded_params.call(
                experiment.train_step, mesh, experiment, shapes, *args
            )
        made, logged = validation.step(experiment.train_step, returned)
        _check_structure(experiment, old.experiment, made)
        metrics, observed = _metrics(experiment, logged)
        _check_observed(experiment, old.experiment, made, observed)
        made = jax.tree.map(trees.strong, made)
        new = _stored(TrainState(old.step + 1, made, old.rng), grouped)
        return Stepped(
            new, *_of_group((metrics, observed, fingerprints_before), grouped)
        )

    def mapped(state: TrainState, batch: Batch) -> logical.Mapped:
        del batch
        how = {"manual": True, "whole": True, "params_whole": True}
        state_spec = state_lib.specs(experiment, mesh, state, **how)
        per_group: Any = jax.P(*mesh_lib.group_axes(mesh))
        return logical.Mapped(
            functools.partial(local_step, state),
            in_specs=(state_spec, jax.P(mesh_lib.BATCH)),
            out_specs=Stepped(state_spec, per_group, per_group, per_group),
        )

    return mapped


def make_eval_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[..., dict[str, jax.Array]]:
    """Returns the function that takes a state, a batch and the batch's number to sums
    over the batch's examples.

    Shard the batch along ('slice', 'replica'); all groups get the same rows. Rows with
    '_mask' False do not count. The result has the sum of each value of
    `Experiment.eval_step`, and 'count'. With several groups each has a leading
    dimension of groups, except 'ensemble/...', which is equal in all groups.

    With the experiment that `Supervised` shows, untrained:

    >>> mesh, examples = xshard.make_mesh(devices=jax.devices()[:4]), line.eval_data()
    >>> state = xshard.init(line, mesh, 0, examples)
    >>> mask = np.arange(64) < 60
    >>> sums = jax.jit(xshard.make_eval_step(line, mesh))(state, {**examples, '_mask': mask})
    >>> print(sums['count'], sums['error'] > 10)
    60.0 True
    """
    mapped = evaluation_on_replicas(experiment, mesh)

    def eval_step(
        state: TrainState, batch: Batch, number: Any = 0
    ) -> dict[str, jax.Array]:
        return mapped(state, batch, number).on(mesh)(state, batch, number)

    return eval_step


def evaluation_on_replicas(
    experiment: experiment_lib.Experiment, mesh: Any
) -> Callable[..., logical.Mapped]:
    """Returns one replica's computation in an evaluation of `make_eval_step`, given its
    arguments.
    """
    grouped = mesh_lib.num_groups(mesh) > 1

    def local_eval(
        shapes: TrainState, state: TrainState, batch: Batch, number: Any
    ) -> tuple[Any, Any]:
        batch = dict(batch)
        mask = batch.pop("_mask")
        local = _local(state, grouped)
        key = _replica_key(
            jax.random.fold_in(jax.random.fold_in(local.rng, _EVALUATION), number)
        )
        args = local.experiment, batch, key
        values = sharded_params.call(
            experiment.eval_step, mesh, experiment, shapes, *args
        )
        arrays = experiment_lib.overrides(experiment, "summarize")
        values = validation.evaluation(
            experiment.eval_step, values, len(mask), arrays=arrays
        )
        sums = _masked_sums({**values, "count": mask}, mask)
        if not grouped:
            return sums, {}
        ensemble = {
            name: sums.pop(name) for name in list(sums) if name.startswith("ensemble/")
        }
        return _of_group(sums, grouped), ensemble

    per_group = jax.P(*mesh_lib.group_axes(mesh))

    def mapped(state: TrainState, batch: Batch, number: Any) -> logical.Mapped:
        del batch, number
        state_spec = state_lib.specs(experiment, mesh, state, manual=True, whole=True)
        in_specs = state_spec, jax.P(mesh_lib.REPLICAS), jax.P()
        join = lambda sums: {**sums[0], **sums[1]}
        local = functools.partial(local_eval, state)
        return logical.Mapped(local, in_specs, (per_group, jax.P()), join)

    return mapped


def make_predict(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[..., Any]:
    """Returns the function that takes a state and a batch to the outputs of
    `Experiment.predict`, both replicated.

    A third argument, a random key, is passed on to `Experiment.predict`, which then
    needs a parameter for it.
    """
    grouped = mesh_lib.num_groups(mesh) > 1

    def local_predict(
        shapes: TrainState, state: TrainState, batch: Batch, keys: tuple[jax.Array, ...]
    ) -> Any:
        args = _local(state, grouped).experiment, batch, *keys
        return sharded_params.call(experiment.predict, mesh, experiment, shapes, *args)

    def predict(state: TrainState, batch: Batch, *keys: jax.Array) -> Any:
        state_spec = state_lib.specs(experiment, mesh, state, manual=True, whole=True)
        local = functools.partial(local_predict, state)
        mapped = logical.Mapped(local, (state_spec, jax.P(), jax.P()), jax.P())
        return mapped.on(mesh)(state, batch, keys)

    return predict


def _check_structure(experiment: experiment_lib.Experiment, old: Any, new: Any) -> None:
    """Raises UserError unless the state that a step returns has the structure, shapes
    and dtypes of the old one.
    """
    where = validation.describe_method(experiment.train_step)
    before = dict(jax.tree_util.tree_leaves_with_path(old))
    after = dict(jax.tree_util.tree_leaves_with_path(new))
    for path in [*before, *after]:
        if path not in after:
            raise errors.UserError(
                f"{where} returned a state without {trees.path_name(path)!r}, which init created. A step returns the whole state."
            )
        if path not in before:
            raise errors.UserError(
                f"{where} returned a state with {trees.path_name(path)!r}, which init did not create: create it there, too."
            )
        x, y = before[path], jnp.asarray(after[path])
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise errors.UserError(
                f"{where} returned {trees.path_name(path)!r} as {y.dtype} of shape {y.shape}; init created it as {x.dtype} of "
                f"shape {x.shape}. An array of the state must keep its dtype and shape."
            )
    structure: Any = jax.tree.structure(old)
    if jax.tree.structure(new) != structure:
        raise errors.UserError(
            f"{where} returned a state whose structure differs from init's: {jax.tree.structure(new)} instead of "
            f"{structure}."
        )


def _metrics(
    experiment: experiment_lib.Experiment, logged: Any
) -> tuple[dict[str, jax.Array], Observed]:
    """Returns the values to log by name, and the observations of each learner."""
    if isinstance(logged, Outcome):
        joined = logged.joined()
        return dict(joined.metrics), {"": joined.observed}
    where = validation.describe_method(experiment.train_step)
    metrics: dict[str, jax.Array] = {}
    own: dict[str, jax.Array] = {}
    observed: Observed = {}
    for name, value in logged.items():
        if isinstance(value, Outcome):
            joined = value.joined()
            metrics |= {trees.join(name, key): x for key, x in joined.metrics.items()}
            observed[name] = joined.observed
        else:
            own[name] = validation.scalar(where, name, value, keep_integers=True)
    taken = sorted(metrics.keys() & own.keys())
    if taken:
        raise errors.UserError(
            f"{where} returned a scalar called {taken[0]!r}, which a learner logs: give it another name."
        )
    return metrics | learner_lib.mean_over_replicas(own), observed


def _check_observed(
    experiment: experiment_lib.Experiment, old: Any, new: Any, observed: Observed
) -> None:
    """Raises UserError if a step updates a learner but does not return its outcome
    among the metrics.
    """
    before = state_lib.learners(TrainState(0, old, 0))
    after = state_lib.learners(TrainState(0, new, 0))
    missing = []
    for name in sorted(before.keys() - observed.keys()):
        # A learner that the step does not update, such as a teacher, keeps the very
        # same arrays.
        same = zip(
            jax.tree.leaves(before[name]), jax.tree.leaves(after[name]), strict=True
        )
        if not all(x is y for x, y in same):
            missing.append(name)
    if missing:
        name = missing[0]
        raise errors.UserError(
            f"{validation.describe_method(experiment.train_step)} returned metrics without those of the learner "
            f"{name or 'whose state it is'!r}: return the outcome of its update under the name of its state, as in "
            f"state, outcome = learner.update(...); return state, {f'{{{name!r}: outcome}}' if name else 'outcome'}. "
            "The run reads from it whether the step is finite."
        )


def _masked_sums(
    values: Mapping[str, jax.Array], mask: jax.Array
) -> dict[str, jax.Array]:
    def masked_sum(value: jax.Array) -> jax.Array:
        counts = mask.reshape(-1, *(1 for _ in value.shape[1:]))
        # Padding is selected away: multiplied by zero, its nan would remain.
        return jnp.sum(jnp.where(counts, value.astype(jnp.float32), 0), axis=0)

    sums = {name: masked_sum(value) for name, value in values.items()}
    return lax.psum(sums, mesh_lib.REPLICAS)


def _replica_key(key: jax.Array) -> jax.Array:
    return _key_of_replica(_group_key(key))


def _group_key(key: jax.Array) -> jax.Array:
    return jax.random.fold_in(key, _index((mesh_lib.GROUP,)))


def _key_of_replica(group_key: jax.Array) -> jax.Array:
    return jax.random.fold_in(group_key, _index(mesh_lib.REPLICAS))


def _index(axes: tuple[str, ...]) -> Any:
    """The replica's index along some axes; a constant where there is only one replica,
    which needs no value of its own.
    """
    long = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
    return lax.axis_index(long) if long else 0


def _local(state: TrainState, grouped: bool) -> TrainState:
    """Returns the state as a replica's methods see it: without dimensions of groups and
    of replicas.
    """
    inner = (
        jax.tree.map(lambda x: x[0], state.experiment) if grouped else state.experiment
    )
    own = lambda x: x.local() if experiment_lib.is_own(x) else x
    inner = jax.tree.map(own, inner, is_leaf=experiment_lib.is_own)
    return dataclasses.replace(state, experiment=inner)


def _stored(state: TrainState, grouped: bool) -> TrainState:
    """The inverse of `_local`."""
    own = lambda x: x.stored() if experiment_lib.is_own(x) else x
    inner = jax.tree.map(own, state.experiment, is_leaf=experiment_lib.is_own)
    return dataclasses.replace(state, experiment=_of_group(inner, grouped))


def _of_group(tree: Any, grouped: bool) -> Any:
    """Returns a group's arrays with the dimension of groups, if there are several."""
    return jax.tree.map(lambda x: x[None], tree) if grouped else tree
