"""Traces a run's programs before the run begins, so that a mistake is reported while
nothing is lost.

A trace computes nothing on the devices. JAX caches the trace of a jitted function for
the function's first call.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from xshard import config as config_lib
from xshard import errors, jax_internals, logical, samples, step, validation
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.data import batches
from xshard.optimizers import cross_shard, layouts, trees, varying
from xshard.run import rule_values
from xshard.stored import replica_state as stored

# Calls a function that predicts.
_PredictionCaller = Callable[[Callable[..., Any]], Any]
# Options of the TPU compiler that gather sharded parameters one layer ahead in a scan
# over layers: each round gathers for the next round. The second and third let the
# compiler move a gather whose operand is a slice that depends on the round.
_ONE_LAYER_AHEAD: dict[str, bool | str] = {
    "xla_tpu_enable_ici_ag_pipelining": True,
    "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
    "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
}
# Kinds of v5e, the only TPU that computes while a gather is in flight. The option that
# makes others do so, xla_tpu_enable_async_collective_fusion_fuse_all_gather, is refused
# there by libtpu 0.0.50, which warns of wrong results.
_AHEAD_ON = ("TPU v5 lite", "TPU v5e")
# The keys of `config.reduction` that rules take as arguments of the same names, and
# keep as attributes.
_PASSED_ON = (
    "reduction",
    "reduce_dtype",
    "slice_dtype",
    "shard_update",
    "shard_params",
)


def train_batches(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> batches.TrainBatches:
    """Returns the training batches that a run's config describes; raises UserError as
    `batches.TrainBatches` does.
    """
    sizes = {
        key: experiment.config[key] for key in ("batch_size", "seed", "micro_batches")
    }
    replicas = logical.of_config(experiment.config, mesh)
    return batches.TrainBatches(experiment.train_batches, mesh, replicas, **sizes)


def programs(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    act: _PredictionCaller | None = None,
) -> tuple[Any, Any]:
    """Returns the jitted training step and prediction, after tracing and checking them.

    The prediction is traced for the batches that the run will ask it for, or else for a
    replica's part of a training batch.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      state: the shapes of the run's state, in the form that a step takes.
      batch: the shapes of a batch for all groups.
      act: lets the training data act, given a function that predicts; None if the data
        does not act on the model.

    Raises:
      UserError: if a method of the experiment does not fit, or if a value that must be
        equal on all replicas differs.
    """
    train_step = jitted_step(experiment, mesh)
    analyzed_step = train_step
    if step.updates_in_shards(mesh, state):
        analyzed_step = jax.jit(step.make_analyzed_step(experiment, mesh))
    with cross_shard.recording() as rules:
        traced_step = analyzed_step.trace(state, batch)
    _check_reduction(experiment, rules)
    _check_equal(experiment, mesh, state, batch, traced_step)
    _check_rules(experiment, mesh, state, batch, traced_step.jaxpr)
    if analyzed_step is not train_step:
        train_step.trace(state, batch)
    predict = jitted_predict(experiment, mesh)
    whole = mesh_lib.sharding(mesh)
    trace = lambda batch, *keys: predict.trace(
        state, batches.shapes_of(batch, whole), *keys
    )
    predictions = []
    for ask in _prediction_callers(experiment, act):
        predictions += _at_first_prediction(ask, trace)
    if not predictions and experiment_lib.overrides(experiment, "predict"):
        rows = max(1, experiment.config.batch_size // mesh_lib.num_replicas(mesh))
        # The run itself makes no prediction, so an error is no reason to refuse it. The
        # first prediction reports the error.
        with contextlib.suppress(Exception):
            predictions = [trace(batches.shapes(batch, rows))]
    for traced in predictions:
        _check_prediction(experiment, mesh, traced)
        stored.check_unread(experiment.predict, traced.jaxpr, state, mesh)
    return train_step, predict


def warnings(
    experiment: experiment_lib.Experiment,
    config: ml_collections.ConfigDict,
    state: state_lib.TrainState,
) -> Iterator[str]:
    """Yields lines about what a run does, but its user may not mean.

    Args:
      experiment: the experiment, after everything that the run needs was traced.
      config: the run's config.
      state: the shapes of the run's state.
    """
    unread = config_lib.unread(experiment.config, config)
    if unread:
        yield (
            f"warning: no code has read these keys of the config so far: {', '.join(unread)}. If none reads them later, they have no "
            "effect."
        )
    yield from _warning_of_averages(state)
    yield from _note_of_whole_arrays(experiment, state)


def _note_of_whole_arrays(
    experiment: experiment_lib.Experiment, state: state_lib.TrainState
) -> Iterator[str]:
    """Yields a line about arrays that a sharded update leaves whole, if they are more
    than a hundredth of all.
    """
    mesh = state.step.sharding.mesh
    skip = len(mesh_lib.group_axes(mesh))
    count = mesh.shape[mesh_lib.REPLICA]
    whole = []
    total = 0
    for name, learner in state_lib.learners(state).items():
        if not learner.meta.shards_update:
            continue
        for path, x in trees.leaves_by_path(learner.params).items():
            spec = mesh_lib.spec_of(path, experiment.sharding_rules())
            layout = layouts.layout(trees.join(name, path), x.shape[skip:], count, spec)
            total += layout.size
            if layout.dim is None and layout.size >= count:
                whole.append(layout)
    size = sum(layout.size for layout in whole)
    if size * 100 > total:
        largest = sorted(whole, key=lambda layout: -layout.size)
        named = ", ".join(f"{layout.path} {layout.shape}" for layout in largest[:5])
        yield (
            f"note: of {total:,} parameters, {size:,} are updated whole on each replica, since {count} replicas divide no free "
            f"dimension of their arrays: {named}{', ...' if len(largest) > 5 else ''}."
        )


def _warning_of_averages(state: state_lib.TrainState) -> Iterator[str]:
    for name, learner in state_lib.learners(state).items():
        leaves = trees.leaves_by_path(learner.net_state)
        floats = [
            path for path, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        if learner.meta.averages_module is None or not floats:
            continue
        whose = f" of {name}" if name else ""
        yield (
            f"warning: the averages of parameters{whose} are evaluated with the networks' state of the parameters themselves, such as "
            f"{floats[0]}. If that is the statistics of a batch norm, 'average/...' may be far too low: estimate them anew for the "
            "averages, with some training batches, or use a layer norm."
        )
        return


def _check_reduction(
    experiment: experiment_lib.Experiment,
    rules: Sequence[cross_shard.CrossShardOptimizer],
) -> None:
    """Raises UserError if a key of `config.reduction` has a value that no rule of the
    step was made with.

    The experiment passes these values on. Where it does not, as in
    `CrossShardOptimizer(optax.adam(1e-3))`, nothing of what the config asks for would
    happen.
    """
    config = experiment.config
    if config.gather_once and not config.reduction.shard_params:
        raise errors.UserError(
            "gather_once=True has no effect without reduction.shard_params=True: set both, or neither."
        )
    defaults = config_lib.default().reduction
    for key in _PASSED_ON:
        value = config.reduction.get(key, defaults[key])
        if value == defaults[key] or any(getattr(rule, key) == value for rule in rules):
            continue
        raise errors.UserError(
            f"config.reduction.{key}={value!r} reaches no rule of {validation.describe_method(experiment.train_step)}, so nothing "
            f"of it would happen: pass it on, as in CrossShardOptimizer(rule, **self.config.reduction), or leave it at "
            f"{defaults[key]!r}."
        )


def jitted_step(experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh) -> Any:
    """Returns the training step of a run, `step.make_watched_step`, jitted; it donates
    the state.
    """
    replicas = logical.of_config(experiment.config, mesh)
    if replicas is not None:
        mapped = lambda state, _: step.step_of_replica(experiment, replicas.mesh, state)
        what = validation.describe_method(experiment.train_step)
        return logical.Program(what, mapped, replicas, donate_argnums=0)
    watched_step = step.make_watched_step(experiment, mesh)
    device = mesh.devices.flat[0]
    options: dict[str, bool | str] = {}
    if experiment.config.reduction.shard_params and device.device_kind in _AHEAD_ON:
        options = _ONE_LAYER_AHEAD
    return jax.jit(watched_step, donate_argnums=0, compiler_options=options or None)


def single_program(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Any:
    """Returns the training step as one jitted `jax.shard_map` with one replica on each
    device, for analysis.

    Raises:
      UserError: if the number of devices for each group differs from the config's
        number of logical replicas.
    """
    replicas = logical.of_config(experiment.config, mesh)
    if replicas is not None and replicas.count != mesh_lib.num_replicas(mesh):
        devices = replicas.count * mesh_lib.num_groups(mesh)
        raise errors.UserError(
            f"The config has logical_replicas={replicas.count}, but there are {mesh_lib.num_replicas(mesh)} devices for each "
            f"group. To inspect a step, each replica needs its own device: on CPUs, give --cpu_devices={devices}."
        )
    return jax.jit(step.make_analyzed_step(experiment, mesh))


def jitted_predict(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Any:
    """Returns the prediction, `step.make_predict`, jitted; its outputs are replicated,
    so each process has them all.
    """
    return jax.jit(
        step.make_predict(experiment, mesh), out_shardings=mesh_lib.sharding(mesh)
    )


def _check_equal(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    batch: Any,
    traced: Any,
) -> None:
    """Raises UserError if outputs of the step may differ between replicas without being
    declared as such.

    A checkpoint holds one copy of undeclared state. After a resume all replicas would
    continue from that copy. A row holds one number of all replicas: their mean, which
    for integers is none.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      state: the shapes of the run's state.
      batch: the shapes of a batch.
      traced: the traced step.
    """
    inputs = jax.tree.leaves(
        (_labeled(state, varying.Cause.STATE), _labeled(batch, varying.Cause.BATCH))
    )
    differing, declared = varying.mapped_outputs(traced.jaxpr.jaxpr, inputs)
    several = _several(mesh)
    leaves = jax.tree_util.tree_leaves_with_path(traced.out_info)
    for (path, leaf), own, variation in zip(leaves, declared, differing, strict=True):
        if not (variation.axes - own) & several:
            continue
        kind, _, name = trees.path_name(path).partition("/")
        if kind == "metrics" and jnp.issubdtype(leaf.dtype, jnp.integer):
            raise errors.UserError(
                f"{validation.describe_method(experiment.train_step)} returns the integer {name!r}, which differs between the "
                "replicas. A row has one number of all of them, and integers are logged as they are: return "
                "jax.lax.psum(x, ('slice', 'replica')) for the sum, or x.astype(jnp.float32) for the mean."
            )
        if kind != "state":
            continue
        why = (
            f"{name!r}, of type {leaf.dtype}, which differs between the replicas: on each of them it depends on "
            f"{varying.because(variation)}"
        )
        for learner in state_lib.learners(state):
            if name.removeprefix(f"{learner}/").startswith("net_state/"):
                raise errors.UserError(
                    f"A network keeps the state {why}. Only one copy of a network's state is kept: the mean over the replicas, "
                    "which needs a floating-point type. Count steps rather than examples, or keep a float32 mean over the batch."
                )
        raise errors.UserError(
            f"{validation.describe_method(experiment.train_step)} leaves the state {why}, but a checkpoint keeps only one copy of "
            "it. Wrap it in xshard.PerReplica or xshard.PerExample, in init and in the step; make it equal with a collective, "
            "such as jax.lax.pmean(x, ('slice', 'replica')); or, if it is equal for a reason that the program does not show, "
            "declare that with xshard.equal_on_replicas."
        )


def _check_rules(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    batch: Any,
    jaxpr: jax_internals.ClosedJaxpr,
) -> None:
    """Raises UserError if a rule's update depends on a replica's own values; see
    `rule_values`.
    """
    others = _labeled(state, varying.Cause.STATE)
    of_state = state_lib.map_learners(
        lambda _, x: _labeled(x, rule_values.LEARNER), others
    )
    inputs = jax.tree.leaves((of_state, _labeled(batch, varying.Cause.BATCH)))
    # Supervised has a method that makes its rule; other experiments make theirs where
    # they like.
    maker = getattr(experiment, "optimizer", experiment.train_step)
    rule_values.check(
        jaxpr.jaxpr, inputs, _long(mesh), validation.describe_method(maker)
    )


def _labeled(tree: Any, label: Any) -> Any:
    """Returns a tree with the label in place of each leaf."""
    return jax.tree.map(lambda _: label, tree)


def _long(mesh: jax.sharding.Mesh) -> varying.Axes:
    """Returns the mesh axes of groups and replicas with a size above 1."""
    return frozenset(axis for axis in varying.ALL if mesh.shape[axis] > 1)


def _several(mesh: jax.sharding.Mesh) -> varying.Axes:
    """Returns the mesh axes along which state could differ: those with a size above 1.

    With a single replica the replica axis counts too, so that one replica refuses the
    programs that several refuse.
    """
    several = _long(mesh)
    return several if several & {*mesh_lib.REPLICAS} else several | {mesh_lib.REPLICA}


class _PredictedError(BaseException):
    """Ends the user's code at its first prediction, which needs a trained network.

    It derives from BaseException, so that an `except Exception` in the user's code does
    not catch it.
    """


def samples_batch(experiment: experiment_lib.Experiment) -> Mapping[str, Any] | None:
    """Returns the first batch for which `experiment.samples` asks a prediction; None if
    it asks for none.
    """
    for ask in _prediction_callers(experiment, None):
        for batch in _at_first_prediction(ask, lambda batch, *keys: batch):
            return batch
    return None


def _prediction_callers(
    experiment: experiment_lib.Experiment, act: _PredictionCaller | None
) -> Iterator[_PredictionCaller]:
    """Yields the functions that ask for predictions in a run: the experiment's samples,
    and training data that acts.
    """
    if experiment_lib.overrides(experiment, "samples"):
        where = validation.describe_method(experiment.samples)
        key = experiment_lib.samples_key(experiment)
        yield lambda predict: samples.named(where, experiment.samples(predict, key))
    if act is None:
        return
    if not experiment_lib.overrides(experiment, "predict"):
        raise errors.UserError(
            f"The data that {validation.describe_method(experiment.train_batches)} returned acts on the model "
            f"(acts_every_steps), but {type(experiment).__name__} makes no predictions: define predict(state, batch), or "
            "leave acts_every_steps out."
        )
    yield act


def _at_first_prediction(ask: _PredictionCaller, use: Callable[..., Any]) -> list[Any]:
    """Runs `ask` up to its first prediction, and returns the result of `use` on that
    prediction's batch, and key if any.

    The list is empty if `ask` asks for no prediction.
    """
    results: list[Any] = []

    def predict(batch: Mapping[str, Any], key: jax.Array | None = None) -> Any:
        keys = () if key is None else (key,)
        # `use` runs inside the user's call, so that the traceback of an error shows the
        # line that asked.
        results.append(use(batch, *keys))
        raise _PredictedError

    with contextlib.suppress(_PredictedError):
        ask(predict)
    return results


def _check_prediction(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, traced: Any
) -> None:
    """Raises UserError if a prediction may differ between devices, because only one
    device's copy is read.
    """
    differing, _ = varying.mapped_outputs(traced.jaxpr.jaxpr)
    leaves = jax.tree_util.tree_leaves_with_path(traced.out_info)
    for (path, leaf), variation in zip(leaves, differing, strict=True):
        axes = variation.axes & _several(mesh)
        if not axes:
            continue
        name = trees.path_name(path) or "outputs"
        among = "replicas"
        fix = (
            "It depends on the replica's index, or on per-replica state: make it equal with a collective, such as "
            "jax.lax.pmean(x, ('slice', 'replica'))."
        )
        if mesh_lib.GROUP in axes:
            among = "groups"
            fix = "Return the outputs of all groups, as jax.lax.all_gather(outputs, 'group') does."
        raise errors.UserError(
            f"{validation.describe_method(experiment.predict)} returns {name!r}, {leaf.dtype} of shape {leaf.shape}, which differs "
            f"between the {among}; a prediction must be equal on all devices. {fix}"
        )
