"""The steps that advance and judge a state: pure functions, not jitted.

A step runs on every device under `jax.shard_map` over the axes `group`, `slice` and `replica`: an experiment's
methods see one replica of one group.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xshard import contract, errors, logical
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.learners import learner as learner_lib
from xshard.learners import within
from xshard.learners.state import Observed as ObservedUpdate
from xshard.learners.state import Outcome
from xshard.optimizers import trees
from xshard.stored import fingerprint, storage

Batch = experiment_lib.Batch
TrainState = state_lib.TrainState
Observed = dict[str, ObservedUpdate]

# The position in the root key's stream that belongs to evaluations.
_EVALUATION = 2**32 - 2


class Stepped(NamedTuple):
    """The results of a step, as a run has it.

    Attributes:
      state: the new state.
      metrics: what is logged, by name.
      observed: what is observed of each learner, by its name.
      begun: the fingerprints of the state that the step was given; None if the run has none.
    """

    state: TrainState
    metrics: dict[str, jax.Array]
    observed: Observed
    begun: fingerprint.Fingerprints | None


def make_train_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The function that takes a state and a batch to the next state and metrics.

    Jit it with `donate_argnums=0`. The batch lies along ('group', 'slice', 'replica'). Metrics are float32 and
    int32 scalars, means over the replicas, or one for each of several groups: those of each learner, after
    its name where it is not the whole of the experiment's state, and the experiment's own. A learner's are
    'loss', 'skipped' (1 if the step was not applied), 'global_step', 'loss_scale' (as the step leaves it) if
    the rule scales losses, 'gradient_norm', 'parameter_norm', and what its loss returns.

    The norms are the square roots of the sums of the squares of all elements: of the group's gradients,
    reduced and unscaled, as the rules' update is given them; and of the parameters that the step leaves.
    In a step that was skipped for gradients that are not finite the first is not finite. Where all replicas
    have these arrays whole, no collective is for the norms. Where the update is sharded, each replica's share
    of their squares goes with the other metrics. For what lies along 'model' XLA adds sums over that.

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
    """Makes what `make_train_step` does; the function also returns what a run watches."""
    mapped = on_replicas(experiment, mesh)

    # Profiles, and what is kept of compiled programs, have its name.
    def train_step(state: TrainState, batch: Batch) -> Stepped:
        return mapped(state, batch).on(mesh)(state, batch)

    return train_step


def on_replicas(
    experiment: experiment_lib.Experiment, mesh: Any
) -> Callable[[TrainState, Batch], logical.Mapped]:
    """The share of each replica of a mesh in a step of `make_watched_step`, given the step's arguments."""
    grouped = mesh_lib.num_groups(mesh) > 1
    rules = experiment.sharding_rules()
    every = experiment.config.get("fingerprint_every_steps", 0)

    def local_step(shapes: TrainState, state: TrainState, batch: Batch) -> Stepped:
        old = _local(state, grouped)
        begun = None
        if every:
            # It goes with what the step reduces anyway: XLA makes one collective of them.
            is_due = every == 1 or (state.step + 1) % every == 0
            begun = fingerprint.of_replica(experiment, mesh, shapes, state, is_due)
            if mesh_lib.num_replicas(mesh) == 1:
                # With no reduction between them, XLA would copy the old state, which is read here, before the update writes over it.
                batch = trees.after(begun.table, batch)
        with within.run_on(mesh, rules):
            returned = experiment.train_step(old.experiment, batch, _step_key(old))
        made, logged = contract.step(experiment.train_step, returned)
        _check_structure(experiment, old.experiment, made)
        metrics, observed = _metrics(experiment, logged)
        _check_observed(experiment, old.experiment, made, observed)
        made = jax.tree.map(state_lib.strong, made)
        new = _stored(TrainState(old.step + 1, made, old.rng), grouped)
        watched = metrics, observed, begun
        return Stepped(new, *(_add_dim(watched) if grouped else watched))

    def mapped(state: TrainState, batch: Batch) -> logical.Mapped:
        del batch
        state_spec = state_lib.specs(experiment, mesh, state, manual=True)
        per_group: Any = jax.P(mesh_lib.GROUP) if grouped else jax.P()
        return logical.Mapped(
            functools.partial(local_step, state),
            in_specs=(state_spec, jax.P(mesh_lib.BATCH)),
            out_specs=Stepped(state_spec, per_group, per_group, per_group),
        )

    return mapped


def make_eval_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[..., dict[str, jax.Array]]:
    """The function that takes a state, a batch and the batch's number to sums over the batch's examples.

    The batch lies along ('slice', 'replica'), equal for all groups; its rows where '_mask' is False do not count.
    The result has the sum of each value of `Experiment.eval_step`, and 'count'; with several groups there is one of
    each per group, but for what is called 'ensemble/...', which is equal in all of them.

    With the experiment that `Supervised` shows, not trained:

    >>> mesh, examples = xshard.make_mesh(devices=jax.devices()[:4]), line.eval_data()
    >>> state = xshard.init(line, mesh, 0, examples)
    >>> mask = np.arange(64) < 60
    >>> sums = jax.jit(xshard.make_eval_step(line, mesh))(state, {**examples, '_mask': mask})
    >>> print(sums['count'], sums['error'] > 10)
    60.0 True
    """
    mapped = evaluation_on_replicas(experiment, mesh, whole=True)

    def eval_step(state: TrainState, batch: Batch, number: Any = 0) -> dict[str, jax.Array]:
        whole = storage.to_whole(experiment, mesh, state)
        return mapped(whole, batch, number).on(mesh)(whole, batch, number)

    return eval_step


def evaluation_on_replicas(
    experiment: experiment_lib.Experiment, mesh: Any, *, whole: bool = False
) -> Callable[..., logical.Mapped]:
    """The share of each replica of a mesh in an evaluation of `make_eval_step`, given its arguments, with a whole state or not."""
    grouped = mesh_lib.num_groups(mesh) > 1

    def local_eval(shapes: Any, state: TrainState, batch: Batch, number: Any) -> tuple[Any, Any]:
        if not whole:
            state = storage.gathered(experiment, mesh, shapes, state)
        batch = dict(batch)
        mask = batch.pop("_mask")
        local = _local(state, grouped)
        key = _replica_key(jax.random.fold_in(jax.random.fold_in(local.rng, _EVALUATION), number))
        with within.run_on(mesh, experiment.sharding_rules(), whole=True):
            values = experiment.eval_step(local.experiment, batch, key)
        arrays = experiment_lib.summarizes(experiment)
        values = contract.evaluation(experiment.eval_step, values, len(mask), arrays=arrays)
        sums = _masked_sums({**values, "count": mask}, mask)
        if not grouped:
            return sums, {}
        ensemble = {name: sums.pop(name) for name in list(sums) if name.startswith("ensemble/")}
        return _add_dim(sums), ensemble

    per_group = jax.P(mesh_lib.GROUP) if grouped else jax.P()

    def mapped(state: TrainState, batch: Batch, number: Any) -> logical.Mapped:
        del batch, number
        specs = _whole_specs if whole else functools.partial(state_lib.specs, manual=True)
        return logical.Mapped(
            functools.partial(local_eval, state),
            in_specs=(specs(experiment, mesh, state), jax.P(mesh_lib.REPLICAS), jax.P()),
            out_specs=(per_group, jax.P()),
            finish=lambda sums: {**sums[0], **sums[1]},
        )

    return mapped


def make_predict(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], Any]:
    """The function that takes a state and a batch to the outputs of `Experiment.predict`, equal on all devices.

    The batch is equal on all devices, too.
    """
    grouped = mesh_lib.num_groups(mesh) > 1

    def local_predict(state: TrainState, batch: Batch) -> Any:
        with within.run_on(mesh, experiment.sharding_rules(), whole=True):
            return experiment.predict(_local(state, grouped).experiment, batch)

    def predict(state: TrainState, batch: Batch) -> Any:
        whole = storage.to_whole(experiment, mesh, state)
        in_specs = (_whole_specs(experiment, mesh, whole), jax.P())
        return logical.Mapped(local_predict, in_specs, jax.P()).on(mesh)(whole, batch)

    return predict


def _whole_specs(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, state: TrainState
) -> TrainState:
    """As a step has it, but with the rules' state whole on each replica."""
    per_group = jax.P(mesh_lib.GROUP) if mesh_lib.num_groups(mesh) > 1 else jax.P()
    found = state_lib.specs(experiment, mesh, state, manual=True)
    whole = lambda tree: jax.tree.map(lambda _: per_group, tree)
    return state_lib.map_learners(lambda _, x: x.replace(opt_state=whole(x.opt_state)), found)


def _check_structure(experiment: experiment_lib.Experiment, old: Any, new: Any) -> None:
    """Raises UserError unless the state that a step returns has the structure, shapes and types of the old one."""
    where = contract.described(experiment.train_step)
    before, after = (dict(jax.tree_util.tree_leaves_with_path(x)) for x in (old, new))
    for path in [*before, *after]:
        if path not in after:
            raise errors.UserError(
                f"{where} returned a state without {trees.path_name(path)!r}, which init has made. A step returns the whole state."
            )
        if path not in before:
            raise errors.UserError(
                f"{where} returned a state with {trees.path_name(path)!r}, which init has not made: make it there, too."
            )
        x, y = before[path], jnp.asarray(after[path])
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise errors.UserError(
                f"{where} returned {trees.path_name(path)!r} as {y.dtype} of shape {y.shape}; init has made it as {x.dtype} of "
                f"shape {x.shape}. What is in the state keeps its type and shape."
            )
    structure: Any = jax.tree.structure(old)
    if jax.tree.structure(new) != structure:
        raise errors.UserError(
            f"{where} returned a state of another structure than init has made: {jax.tree.structure(new)} for "
            f"{structure}."
        )


def _metrics(
    experiment: experiment_lib.Experiment, logged: Any
) -> tuple[dict[str, jax.Array], Observed]:
    """The logged values by name, and what is observed of each learner."""
    if isinstance(logged, Outcome):
        return dict(logged.metrics), {"": logged.observed}
    where = contract.described(experiment.train_step)
    metrics: dict[str, jax.Array] = {}
    own: dict[str, jax.Array] = {}
    observed: Observed = {}
    for name, value in logged.items():
        if isinstance(value, Outcome):
            _check_outcome(where, name, value)
            metrics |= {f"{name}/{key}" if name else key: x for key, x in value.metrics.items()}
            observed[name] = value.observed
        else:
            own[name] = contract.scalar(where, name, value)
    taken = sorted(metrics.keys() & own.keys())
    if taken:
        raise errors.UserError(
            f"{where} returned a scalar called {taken[0]!r}, which a learner logs: give it another name."
        )
    return metrics | learner_lib.mean_over_replicas(own), observed


def _check_outcome(where: str, name: str, outcome: Outcome) -> None:
    """Raises UserError if an outcome is that of several updates, as a scan of updates returns them."""
    if jnp.shape(outcome.observed.verdict):
        raise errors.UserError(
            f"{where} returned the outcomes of {jnp.shape(outcome.observed.verdict)[0]} updates together as {name!r}. Return "
            "that of one, such as the last: jax.tree.map(lambda x: x[-1], outcomes)."
        )


def _check_observed(
    experiment: experiment_lib.Experiment, old: Any, new: Any, observed: Observed
) -> None:
    """Raises UserError if what a learner's update returned is not among the metrics of a step."""
    before, after = (state_lib.learners(TrainState(0, x, 0)) for x in (old, new))
    missing = []
    for name in sorted(before.keys() - observed.keys()):
        # One that is not updated, such as a teacher, is the same arrays.
        same = zip(jax.tree.leaves(before[name]), jax.tree.leaves(after[name]), strict=True)
        if not all(x is y for x, y in same):
            missing.append(name)
    if missing:
        name = missing[0]
        raise errors.UserError(
            f"{contract.described(experiment.train_step)} returned metrics without those of the learner "
            f"{name or 'whose state it is'!r}: return what its update returned under the name that its state has, as in "
            f"state, outcome = learner.update(...); return state, {f'{{{name!r}: outcome}}' if name else 'outcome'}. "
            "Whether its steps are finite is seen there."
        )


def _masked_sums(values: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    def masked_sum(value: jax.Array) -> jax.Array:
        counts = mask.reshape(-1, *(1 for _ in value.shape[1:]))
        return jnp.sum(jnp.where(counts, value.astype(jnp.float32), 0), axis=0)

    sums = {name: masked_sum(value) for name, value in values.items()}
    return lax.psum(sums, mesh_lib.REPLICAS)


def _step_key(state: TrainState) -> jax.Array:
    return _replica_key(jax.random.fold_in(state.rng, state.step))


def _replica_key(key: jax.Array) -> jax.Array:
    for axis in (mesh_lib.GROUP, mesh_lib.REPLICAS):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return key


def _local(state: TrainState, grouped: bool) -> TrainState:
    """A replica's view of its state: of its group, and what is its own."""
    inner = jax.tree.map(lambda x: x[0], state.experiment) if grouped else state.experiment
    own = lambda x: x.local() if experiment_lib.is_own(x) else x
    inner = jax.tree.map(own, inner, is_leaf=experiment_lib.is_own)
    return dataclasses.replace(state, experiment=inner)


def _stored(state: TrainState, grouped: bool) -> TrainState:
    """The inverse of `_local`."""
    own = lambda x: x.stored() if experiment_lib.is_own(x) else x
    inner = jax.tree.map(own, state.experiment, is_leaf=experiment_lib.is_own)
    return dataclasses.replace(state, experiment=_add_dim(inner) if grouped else inner)


def _add_dim(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
