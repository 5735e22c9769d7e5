"""The training, evaluation and prediction steps: pure functions, not jitted.

A step runs on every device under `jax.shard_map` over the axes `group`, `slice` and
`replica`, so an experiment's methods see one replica of one group. If a rule shards its
update, `jax.vmap` maps a training step over these axes instead, so that XLA can
partition the update: see `xshard.optimizers.replica_map`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xshard import config as config_lib
from xshard import errors, logical, methods
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.learners import means, run_context, validation
from xshard.learners.state import ArrayNorms, Outcome
from xshard.learners.state import Observed as ObservedUpdate
from xshard.optimizers import gathering, replica_map, trees
from xshard.training import fingerprint
from xshard.training import state as state_lib

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
      fingerprints_before: the fingerprints of the state that the step received; None if
        the run computes none.
      norms: the norms of each array, by the learner's name, of learners that compute
        them.
    """

    state: TrainState
    metrics: dict[str, jax.Array]
    observed: Observed
    fingerprints_before: fingerprint.Fingerprints | None
    norms: dict[str, ArrayNorms]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Steps that were dispatched at once.

    Attributes:
      first: the number of the first step.
      count: the number of steps.
      stepped: the last state, and the results of all steps.
      is_stacked: whether the results have a leading dimension of steps.
    """

    first: int
    count: int
    stepped: Stepped
    is_stacked: bool

    @property
    def last(self) -> int:
        """The number of the last step."""
        return self.first + self.count - 1

    @property
    def steps(self) -> range:
        """The numbers of the steps."""
        return range(self.first, self.first + self.count)

    def place(self, step: int) -> Any:
        """Returns the index of a step in arrays of results."""
        if not self.is_stacked:
            return ...
        return step - self.first


def make_train_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the function that takes a state and a batch to the next state and
    metrics.

    Jit it with `donate_argnums=0`. Shard the batch along ('group', 'slice', 'replica').
    Traced, it raises UserError for what a method of the experiment does wrong.

    Metrics are float32 scalars, averaged over the replicas, and integers, equal on all
    of them; with several groups, arrays of one per group. They are the experiment's
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

    Args:
      experiment: the experiment.
      mesh: a mesh of `xshard.make_mesh`.

    With the experiment that `Supervised` shows:

    >>> mesh, batch = xshard.make_mesh(devices=jax.devices()[:4]), line.train_data()
    >>> state = xshard.init(line, mesh, 0, batch)
    >>> train_step = jax.jit(xshard.make_train_step(line, mesh), donate_argnums=0)
    >>> for _ in range(50):
    ...     state, metrics = train_step(state, batch)
    >>> weights = state.experiment.params['linear']['w']
    >>> print(int(state.step), metrics['loss'] < 1e-3, weights.round(1))
    50 True [[3.]]
    """
    watched_step = make_watched_step(experiment, mesh)

    def train_step(
        state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        stepped = watched_step(state, batch)
        return stepped.state, stepped.metrics

    return train_step


def make_watched_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], Stepped]:
    """Returns the function of `make_train_step` that also returns the observations and
    fingerprints a run checks.
    """
    analyzed_step = make_analyzed_step(experiment, mesh)
    every_steps = experiment.config.get("fingerprint_every_steps", 0)

    # The name of this function appears in profiles and in the compilation cache.
    def train_step(state: TrainState, batch: Batch) -> Stepped:
        _check_train_rows(batch, mesh)
        if not updates_in_shards(mesh, state):
            return analyzed_step(state, batch)
        state = state_lib.on_devices(state)
        fingerprints_before = None
        if every_steps:
            # Under `jax.vmap` no replica sees the part of an array that its device
            # holds, of which its fingerprints are. So they are computed by a
            # `jax.shard_map` of their own.
            fingerprint_program = fingerprint.program(
                experiment, mesh, every_steps=every_steps
            )
            fingerprints_before = fingerprint_program(state)
        replica_step = step_of_replica(experiment, mesh, state)
        # Mapped are only groups and what is a replica's own. Shards are parts of global
        # arrays, which lie on the devices as the state that the step is given does.
        on_replicas = replica_map.vmap_replicas(
            replica_step.function,
            mesh,
            in_specs=replica_step.in_specs,
            out_specs=replica_step.out_specs,
            axis_names=mesh_lib.BATCH,
        )
        stepped = on_replicas(state, batch)
        return stepped._replace(
            state=state_lib.as_stored(experiment, mesh, stepped.state),
            fingerprints_before=fingerprints_before,
        )

    return train_step


def make_train_steps(
    train_step: Callable[[TrainState, Batch], Stepped], most: int
) -> Callable[[TrainState, Batch, Any], Stepped]:
    """Returns the function that makes up to `most` steps, one after the other, in one
    program.

    It takes a state, batches that are stacked to arrays of shape (most, ...), and the
    number of steps to make, an int32 scalar. It returns the last state; what each step
    returns beside it is stacked likewise. Neither the batches nor the results after
    that number mean anything.

    The number is an argument and not part of the program, so a dispatch of eight steps
    has the bits of eight dispatches of one: XLA compiles the body of the loop once. It
    compiles the same body for each `most` from 2 on.

    Args:
      train_step: the function of `make_watched_step`.
      most: the largest number of steps.
    """

    # The name of this function appears in profiles and in the compilation cache.
    def train_steps(state: TrainState, batches: Batch, count: Any) -> Stepped:
        at = lambda i: jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), batches
        )
        shapes: Any = jax.eval_shape(train_step, state, at(0))
        results = jax.tree.map(
            lambda x: jnp.zeros((most, *x.shape), x.dtype), shapes._replace(state=None)
        )

        def body(i: Any, carry: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
            state, results = carry
            stepped: Any = train_step(state, at(i))
            results = jax.tree.map(
                lambda all_steps, x: lax.dynamic_update_index_in_dim(
                    all_steps, x, i, 0
                ),
                results,
                stepped._replace(state=None),
            )
            return stepped.state, results

        state, results = lax.fori_loop(0, count, body, (state, results))
        return results._replace(state=state)

    return train_steps


def make_analyzed_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], Stepped]:
    """Returns the function of `make_watched_step` as one `jax.shard_map`, for an
    analysis of its program.

    It differs from that if a rule shards its update: here, each replica updates whole
    arrays.
    """

    def train_step(state: TrainState, batch: Batch) -> Stepped:
        _check_train_rows(batch, mesh)
        state = state_lib.on_devices(state)
        replica_step = step_of_replica(experiment, mesh, state)
        stepped = replica_step.on(mesh)(state, batch)
        stored = state_lib.as_stored(experiment, mesh, stepped.state)
        return stepped._replace(state=stored)

    return train_step


def _check_train_rows(batch: Batch, mesh: jax.sharding.Mesh) -> None:
    """Raises UserError unless a training batch has equally many rows per replica."""
    groups = mesh_lib.num_groups(mesh)
    replicas = groups * mesh_lib.num_replicas(mesh)
    what = f"replicas = {replicas}"
    if groups > 1:
        what = f"replicas of all groups = {replicas}"
    validation.batch_rows(batch, replicas, what)


def updates_in_shards(mesh: jax.sharding.Mesh, state: TrainState) -> bool:
    """Returns whether each replica updates its shards of global arrays in a step."""
    return mesh_lib.num_replicas(mesh) > 1 and state_lib.shards_update(state)


def step_of_replica(
    experiment: experiment_lib.Experiment, mesh: Any, state: TrainState
) -> logical.Mapped:
    """Returns a training step as one replica computes it.

    Args:
      experiment: the experiment.
      mesh: the mesh of the (logical) replicas.
      state: the state, or its shapes.

    Returns:
      A function of a replica's parts of the state and of the batch, which returns its
      part of `Stepped`.
    """
    grouped = mesh_lib.num_groups(mesh) > 1
    every_steps = experiment.config.get("fingerprint_every_steps", 0)
    computes_fingerprints = every_steps and not updates_in_shards(mesh, state)

    def local_step(stored: TrainState, batch: Batch) -> Stepped:
        old = _local(stored, grouped)
        fingerprints_before = None
        if computes_fingerprints:
            # Computed inside the step so that XLA merges its collective with the step's
            # own reductions.
            is_due = fingerprint.is_due(stored.step, every_steps)
            fingerprints_before = fingerprint.of_replica(
                experiment, mesh, state, stored, is_due
            )
            if mesh_lib.num_replicas(mesh) == 1:
                # One replica reduces nothing that would order this read before the
                # update: XLA would copy the old state.
                batch = _after(fingerprints_before.table, batch)
        group_key = _key_of_group(jax.random.fold_in(old.rng, old.step))
        key = _key_of_replica(group_key)
        with _method_context(
            experiment, mesh, state, old.experiment, equal_key=group_key
        ) as inner:
            returned = experiment.train_step(inner, batch, key)

        new, logged = methods.step(experiment.train_step, returned)
        # What is traced for a state depends on its metadata, which is that of the rules
        # and no result of a step. A teacher may be a learner's `for_evaluation`.
        new = state_lib.with_metas(
            dataclasses.replace(old, experiment=new), state_lib.metas(old)
        ).experiment
        _check_structure(experiment, old.experiment, new)
        metrics, observed, norms = _metrics(experiment, logged)
        _check_observed(experiment, old.experiment, new, observed)
        # A weak type, as of a Python number, would make jit compile the second step
        # again.
        new = jax.tree.map(trees.strong, new)
        new_state = TrainState(step=old.step + 1, experiment=new, rng=old.rng)
        return Stepped(
            state=_stored(new_state, grouped),
            metrics=_of_group(metrics, grouped),
            observed=_of_group(observed, grouped),
            fingerprints_before=_of_group(fingerprints_before, grouped),
            norms=_of_group(norms, grouped),
        )

    # A replica computes its update with whole arrays. Where the update is sharded only
    # an analysis maps the step by these specs.
    state_specs = state_lib.whole(state_lib.specs(experiment, mesh, state))
    per_group: Any = jax.P(*mesh_lib.group_axes(mesh))
    return logical.Mapped(
        local_step,
        in_specs=(state_specs, jax.P(mesh_lib.BATCH)),
        out_specs=Stepped(
            state=state_specs,
            metrics=per_group,
            observed=per_group,
            fingerprints_before=per_group,
            norms=per_group,
        ),
    )


def make_eval_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[..., dict[str, jax.Array]]:
    """Returns the function that takes a state, a batch and the batch's number to sums
    over the batch's examples.

    Shard the batch along ('slice', 'replica'); all groups get the same rows. Rows with
    '_mask' False do not count. The result has the sum of each value of
    `Experiment.eval_step`, and 'count'. With several groups each has a leading
    dimension of groups, except 'ensemble/...', which is equal in all groups.

    Args:
      experiment: the experiment.
      mesh: a mesh of `xshard.make_mesh`.

    With the experiment that `Supervised` shows, untrained:

    >>> mesh, examples = xshard.make_mesh(devices=jax.devices()[:4]), line.eval_data()
    >>> state = xshard.init(line, mesh, 0, examples)
    >>> eval_step = jax.jit(xshard.make_eval_step(line, mesh))
    >>> sums = eval_step(state, {**examples, '_mask': np.arange(64) < 60})
    >>> print(sums['count'], sums['error'] > 10)
    60.0 True
    """

    def eval_step(
        state: TrainState, batch: Batch, number: Any = 0
    ) -> dict[str, jax.Array]:
        replicas = mesh_lib.num_replicas(mesh)
        validation.batch_rows(batch, replicas, f"replicas = {replicas}")
        state = state_lib.on_devices(state)
        evaluation = evaluation_of_replica(experiment, mesh, state)
        return evaluation.on(mesh)(state, batch, number)

    return eval_step


def evaluation_of_replica(
    experiment: experiment_lib.Experiment, mesh: Any, state: TrainState
) -> logical.Mapped:
    """Returns an evaluation of a batch as one replica computes it.

    Args:
      experiment: the experiment.
      mesh: the mesh of the (logical) replicas.
      state: the state, or its shapes.

    Returns:
      A function of a replica's parts of the state and of the batch, and of the batch's
      number.
    """
    grouped = mesh_lib.num_groups(mesh) > 1

    def local_eval(
        stored: TrainState, batch: Batch, number: Any
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        local = _local(stored, grouped)
        examples = dict(batch)
        mask = examples.pop("_mask")
        key = jax.random.fold_in(local.rng, _EVALUATION)
        key = _key_of_group(jax.random.fold_in(key, number))
        key = _key_of_replica(key)
        with _method_context(experiment, mesh, state, local.experiment) as inner:
            values = experiment.eval_step(inner, examples, key)
        values = methods.evaluation(
            experiment.eval_step,
            values,
            len(mask),
            allows_arrays=experiment_lib.overrides(experiment, "summarize"),
        )
        sums = _masked_sums({**values, "count": mask}, mask)
        if not grouped:
            return sums, {}
        of_all_groups = {}
        for name in list(sums):
            if name.startswith("ensemble/"):
                of_all_groups[name] = sums.pop(name)
        return _of_group(sums, grouped), of_all_groups

    def join(sums: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
        of_each_group, of_all_groups = sums
        return {**of_each_group, **of_all_groups}

    state_specs = state_lib.specs(experiment, mesh, state)
    per_group = jax.P(*mesh_lib.group_axes(mesh))
    return logical.Mapped(
        local_eval,
        in_specs=(
            state_lib.with_whole_slots(state_specs),
            jax.P(mesh_lib.REPLICAS),
            jax.P(),
        ),
        out_specs=(per_group, jax.P()),
        finish=join,
    )


def make_predict(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[..., Any]:
    """Returns the function that takes a state and a batch to the outputs of
    `Experiment.predict`, both replicated.

    A third argument, a random key, is passed on to `Experiment.predict`, which then
    needs a parameter for it.

    Args:
      experiment: the experiment.
      mesh: a mesh of `xshard.make_mesh`.
    """
    grouped = mesh_lib.num_groups(mesh) > 1

    def predict(state: TrainState, batch: Batch, *keys: jax.Array) -> Any:
        methods.check_key(experiment.predict, bool(keys))
        state = state_lib.on_devices(state)

        def local_predict(
            stored: TrainState, batch: Batch, keys: tuple[jax.Array, ...]
        ) -> Any:
            local = _local(stored, grouped)
            with _method_context(experiment, mesh, state, local.experiment) as inner:
                outputs = experiment.predict(inner, batch, *keys)
            if grouped and config_lib.separates_slices(experiment.config):
                # Slices differ in the state of their networks, so the first decides.
                of_slices = lax.all_gather(outputs, mesh_lib.GROUP)
                outputs = jax.tree.map(lambda x: x[0], of_slices)
            return outputs

        state_specs = state_lib.specs(experiment, mesh, state)
        prediction = logical.Mapped(
            local_predict,
            in_specs=(state_lib.with_whole_slots(state_specs), jax.P(), jax.P()),
            out_specs=jax.P(),
        )
        return prediction.on(mesh)(state, batch, keys)

    return predict


def make_for_evaluation(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState], TrainState]:
    """Returns the function that applies `Experiment.for_evaluation` to a state.

    The parameters of the result are whole on each device.

    Args:
      experiment: the experiment.
      mesh: a mesh of `xshard.make_mesh`.
    """
    grouped = mesh_lib.num_groups(mesh) > 1

    def for_evaluation(state: TrainState) -> TrainState:
        evaluated_metas = {}

        def local_state(stored: TrainState) -> TrainState:
            local = _local(stored, grouped)
            with _method_context(experiment, mesh, state, local.experiment) as inner:
                evaluated = experiment.for_evaluation(inner)
            whole = dataclasses.replace(local, experiment=evaluated)
            evaluated_metas.update(state_lib.metas(whole))
            # The specs of the results have the structure of the given state.
            same = state_lib.with_metas(whole, state_lib.metas(state))
            return _stored(same, grouped)

        specs = state_lib.specs(experiment, mesh, state)
        mapped = logical.Mapped(
            local_state,
            in_specs=(state_lib.with_whole_slots(specs),),
            # The method sees whole parameters, and so returns them, also where a
            # replica holds only its shard of each.
            out_specs=state_lib.whole(specs),
        )
        return state_lib.with_metas(mapped.on(mesh)(state), evaluated_metas)

    return for_evaluation


@contextlib.contextmanager
def _method_context(
    experiment: experiment_lib.Experiment,
    mesh: Any,
    shapes: TrainState,
    state: Any,
    equal_key: jax.Array | None = None,
) -> Iterator[Any]:
    """Lets a method of an experiment be called in its body, as of a run.

    A method sees whole arrays, so that any use of them is right. An array that it does
    not use costs nothing. Where a learner applies a network to such an array, its shard
    is gathered as the network asks for it, a layer at a time.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      shapes: the shapes of the run's state.
      state: the experiment's state, in which parameters may be a replica's shards.
      equal_key: the random key of a training step, equal on all replicas of a group.

    Yields:
      The experiment's state with whole parameters.
    """
    gatherer = gathering.Gatherer(mesh, state_lib.sharded_layouts(shapes))
    with run_context.run_on(mesh, experiment.sharding_rules(), equal_key=equal_key):
        shards = gatherer.select_shards(state)
        whole = gatherer.gather(shards)
        whole_state = jax.tree_util.tree_map_with_path(
            lambda path, x: whole.get(trees.path_name(path), x), state
        )
        with run_context.with_shards(whole, shards):
            yield whole_state


def _check_structure(experiment: experiment_lib.Experiment, old: Any, new: Any) -> None:
    """Raises UserError unless the state that a step returns has the structure, shapes
    and dtypes of the old one.
    """
    where = validation.describe_method(experiment.train_step)
    before = dict(jax.tree_util.tree_leaves_with_path(old))
    after = dict(jax.tree_util.tree_leaves_with_path(new))
    for path in [*before, *after]:
        name = trees.path_name(path)
        if path not in after:
            raise errors.UserError(
                f"{where} returned a state without {name!r}, which init created. A "
                "step returns the whole state."
            )
        if path not in before:
            raise errors.UserError(
                f"{where} returned a state with {name!r}, which init did not create: "
                "create it there, too."
            )
        x = before[path]
        y = jnp.asarray(after[path])
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise errors.UserError(
                f"{where} returned {name!r} as {y.dtype} of shape {y.shape}; init "
                f"created it as {x.dtype} of shape {x.shape}. An array of the state "
                "must keep its dtype and shape."
            )
    structure: Any = jax.tree.structure(old)
    new_structure: Any = jax.tree.structure(new)
    if new_structure != structure:
        raise errors.UserError(
            f"{where} returned a state whose structure differs from init's: "
            f"{new_structure} instead of {structure}."
        )


def _after(x: jax.Array, tree: Any) -> Any:
    """Returns the tree, made to depend on `x`, so that it is not computed before it.

    XLA for CPUs dropped an `optimization_barrier` before it decided which buffers to
    copy (jaxlib 0.10.2), so this adds a data dependence instead. `x` must have a finite
    sum, or the result is zeros. XLA does not know that the sum is finite.
    """
    is_there = jnp.isfinite(jnp.sum(x.astype(jnp.float32)))
    return jax.tree.map(lambda y: jnp.where(is_there, y, jnp.zeros_like(y)), tree)


def _metrics(
    experiment: experiment_lib.Experiment, logged: Any
) -> tuple[dict[str, jax.Array], Observed, dict[str, ArrayNorms]]:
    """Returns the values to log by name, and the observations and the norms by array of
    each learner.
    """
    norms: dict[str, ArrayNorms] = {}
    if isinstance(logged, Outcome):
        outcome = logged.joined()
        if outcome.norms is not None:
            norms[""] = outcome.norms
        return dict(outcome.metrics), {"": outcome.observed}, norms
    where = validation.describe_method(experiment.train_step)
    of_learners: dict[str, jax.Array] = {}
    others: dict[str, jax.Array] = {}
    observed: Observed = {}
    for name, value in logged.items():
        if isinstance(value, Outcome):
            methods.learner_name(where, name)
            outcome = value.joined()
            if outcome.norms is not None:
                norms[name] = outcome.norms
            for key, x in outcome.metrics.items():
                of_learners[trees.join(name, key)] = x
            observed[name] = outcome.observed
        else:
            others[name] = validation.scalar(where, name, value)
    taken = sorted(of_learners.keys() & others.keys())
    if taken:
        raise errors.UserError(
            f"{where} returned a scalar called {taken[0]!r}, which a learner logs: "
            "give it another name."
        )
    return of_learners | means.over_replicas(others), observed, norms


def _check_observed(
    experiment: experiment_lib.Experiment, old: Any, new: Any, observed: Observed
) -> None:
    """Raises UserError if a step updates a learner but does not return its outcome
    among the metrics.
    """
    before = state_lib.learners(TrainState(0, old, 0))
    after = state_lib.learners(TrainState(0, new, 0))
    for name in sorted(before.keys() - observed.keys()):
        # A learner that the step does not update, such as a teacher, keeps the very
        # same arrays.
        leaves = zip(
            jax.tree.leaves(before[name]), jax.tree.leaves(after[name]), strict=True
        )
        if all(x is y for x, y in leaves):
            continue
        where = validation.describe_method(experiment.train_step)
        learner = name or "whose state it is"
        logged = f"{{{name!r}: outcome}}" if name else "outcome"
        raise errors.UserError(
            f"{where} returned metrics without those of the learner {learner!r}: "
            "return the outcome of its update under the name of its state, as in "
            f"state, outcome = learner.update(...); return state, {logged}. The run "
            "reads from it whether the step is finite."
        )


def _masked_sums(
    values: Mapping[str, jax.Array], mask: jax.Array
) -> dict[str, jax.Array]:
    """Returns the sums over the examples of all replicas that count."""

    def masked_sum(value: jax.Array) -> jax.Array:
        counts = mask.reshape((-1,) + (1,) * (value.ndim - 1))
        # Padding is selected away: multiplied by zero, its nan would remain.
        return jnp.sum(jnp.where(counts, value.astype(jnp.float32), 0), axis=0)

    sums = {name: masked_sum(value) for name, value in values.items()}
    return lax.psum(sums, mesh_lib.REPLICAS)


def _key_of_group(key: jax.Array) -> jax.Array:
    return jax.random.fold_in(key, _index((mesh_lib.GROUP,)))


def _key_of_replica(group_key: jax.Array) -> jax.Array:
    return jax.random.fold_in(group_key, _index(mesh_lib.REPLICAS))


def _index(axes: tuple[str, ...]) -> Any:
    """Returns the replica's index along some axes.

    It is a constant where there is only one replica, which needs no value of its own.
    """
    long_axes = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
    return lax.axis_index(long_axes) if long_axes else 0


def _local(state: TrainState, grouped: bool) -> TrainState:
    """Returns the state as a replica's methods see it: without dimensions of groups and
    of replicas.
    """
    inner = state.experiment
    if grouped:
        inner = jax.tree.map(lambda x: x[0], inner)
    inner = jax.tree.map(
        lambda x: x.local() if experiment_lib.is_marked(x) else x,
        inner,
        is_leaf=experiment_lib.is_marked,
    )
    return dataclasses.replace(state, experiment=inner)


def _stored(state: TrainState, grouped: bool) -> TrainState:
    """Inverts `_local`."""
    inner = jax.tree.map(
        lambda x: x.stored() if experiment_lib.is_marked(x) else x,
        state.experiment,
        is_leaf=experiment_lib.is_marked,
    )
    return dataclasses.replace(state, experiment=_of_group(inner, grouped))


def _of_group(tree: Any, grouped: bool) -> Any:
    """Returns a group's arrays with the dimension of groups, if there are several."""
    if not grouped:
        return tree
    return jax.tree.map(lambda x: x[None], tree)
