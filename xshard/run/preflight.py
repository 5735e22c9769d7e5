"""Traces before a run begins what it will trace later: a mistake is named while nothing is lost.

A trace computes nothing. What is traced by its jitted function is kept by JAX for its first call.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend import core

from xshard import contract, errors, logical, samples, step
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.data import batches
from xshard.optimizers import trees, varying
from xshard.stored import replicas as stored

# Calls a function that predicts.
_Ask = Callable[[Callable[..., Any]], Any]
# What a TPU gathers goes on while it computes. On v5e the compiler decides so by itself, on v5p and v6e it does not.
_WHILE_COMPUTING = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
}


def train_batches(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> batches.TrainBatches:
    """The batches of a run, as its config says; raises UserError as `xshard.data.batches.TrainBatches`."""
    sizes = {key: experiment.config[key] for key in ("batch_size", "seed", "micro_batches")}
    replicas = logical.of_config(experiment.config, mesh)
    return batches.TrainBatches(experiment.train_batches, mesh, replicas, **sizes)


def programs(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    act: _Ask | None = None,
) -> tuple[Any, Any]:
    """The training step and the prediction, jitted and traced; the prediction, if a batch for it is known.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      state: the shapes of the run's state, as a step takes it.
      batch: the shapes of a batch, of all groups.
      act: has the training data act, with a function that predicts; None where it does not.

    Raises:
      UserError: if a method of the experiment does not fit, or if what it leaves or returns as equal differs.
    """
    train_step = jitted_step(experiment, mesh)
    _check_equal(experiment, mesh, state, train_step.trace(state, batch).jaxpr)
    predict = jitted_predict(experiment, mesh)
    whole = mesh_lib.sharding(mesh)
    trace = lambda batch: predict.trace(state, batches.shapes_of(batch, whole))
    traced = [of for ask in _asking(experiment, act) for of in _of_first(ask, trace)]
    for program in traced or _of_example(experiment, mesh, batch, trace):
        _check_prediction(experiment, mesh, program)
        stored.check_unread(experiment.predict, program.jaxpr, state, mesh)
    return train_step, predict


def jitted_step(experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh) -> Any:
    """The training step of a run, `step.make_watched_step`, jitted; it donates the state."""
    replicas = logical.of_config(experiment.config, mesh)
    if replicas is not None:
        mapped = step.on_replicas(experiment, replicas.mesh)
        what = contract.described(experiment.train_step)
        return logical.Program(what, mapped, replicas, donate_argnums=0)
    watched_step = step.make_watched_step(experiment, mesh)
    on_tpus = mesh.devices.flat[0].platform == "tpu"
    options = _WHILE_COMPUTING if on_tpus and experiment.config.reduction.shard_params else None
    return jax.jit(watched_step, donate_argnums=0, compiler_options=options)


def one_program(experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh) -> Any:
    """The training step as one program with a replica on each device, jitted, to be looked into.

    Raises:
      UserError: if there are other numbers of devices than the config has logical replicas.
    """
    replicas = logical.of_config(experiment.config, mesh)
    if replicas is not None and replicas.count != mesh_lib.num_replicas(mesh):
        devices = replicas.count * mesh_lib.num_groups(mesh)
        raise errors.UserError(
            f"The config has logical_replicas={replicas.count}, and here are {mesh_lib.num_replicas(mesh)} devices for each "
            f"group. To look into a step takes one for each replica: on CPUs by --cpu_devices={devices}."
        )
    return jax.jit(step.make_watched_step(experiment, mesh))


def jitted_predict(experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh) -> Any:
    """The prediction, `step.make_predict`, jitted; its outputs are replicated, so that each process has all of them."""
    return jax.jit(step.make_predict(experiment, mesh), out_shardings=mesh_lib.sharding(mesh))


def _check_equal(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    jaxpr: core.ClosedJaxpr,
) -> None:
    """Sees that what the step leaves of the state is equal on all replicas, where it is not a replica's own.

    Of what is kept as equal a checkpoint has one copy, and the replicas would go on with that.
    """
    differing, declared = varying.mapped_outputs(jaxpr.jaxpr)
    several = _several(mesh)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), own, axes in zip(leaves, declared, differing, strict=False):
        if (axes - own) & several:
            raise errors.UserError(_differs(experiment, state, path, leaf))


def _several(mesh: jax.sharding.Mesh) -> varying.Axes:
    """The axes along which there is more than one; what would differ on more replicas is refused on one, too."""
    several = {axis for axis in varying.ALL if mesh.shape[axis] > 1}
    return frozenset(several if several & {*mesh_lib.REPLICAS} else several | {mesh_lib.REPLICA})


def _differs(
    experiment: experiment_lib.Experiment, state: state_lib.TrainState, path: Any, leaf: Any
) -> str:
    name = trees.path_name(path)
    why = (
        f"{name!r}, of type {leaf.dtype}, which differs between the replicas: it depends on their part of the batch, "
        "their keys or their number"
    )
    if any(
        name.removeprefix(f"{of}/").startswith("net_state/") for of in state_lib.learners(state)
    ):
        return (
            f"A network keeps the state {why}. One copy of a network's state is kept, and only of floating-point state "
            "can it be the mean. Count steps rather than examples, or keep a float32 mean over the batch."
        )
    return (
        f"{contract.described(experiment.train_step)} leaves the state {why}, and a checkpoint keeps one copy of it. Wrap it "
        "in xshard.PerReplica or xshard.PerExample, in init and in the step; make it equal with a collective, such as "
        "jax.lax.pmean(x, ('slice', 'replica')); or, where it is equal for a reason that cannot be seen, say so with "
        "xshard.equal_on_replicas."
    )


class _PredictedError(BaseException):
    """Ends what would need a trained network; no error, and none that may be caught as one."""


def samples_batch(experiment: experiment_lib.Experiment) -> Mapping[str, Any] | None:
    """The first batch that `experiment.samples` asks a prediction of; None if it asks none."""
    for ask in _asking(experiment, None):
        for batch in _of_first(ask, lambda batch: batch):
            return batch
    return None


def _asking(experiment: experiment_lib.Experiment, act: _Ask | None) -> Iterator[_Ask]:
    """Yields what asks for predictions, as the run has it do: the experiment for samples, and training data that acts."""
    if type(experiment).samples is not experiment_lib.Experiment.samples:
        where, key = contract.described(experiment.samples), experiment_lib.samples_key(experiment)
        yield lambda predict: samples.named(where, experiment.samples(predict, key))
    if act is None:
        return
    if type(experiment).predict is experiment_lib.Experiment.predict:
        raise errors.UserError(
            f"What {contract.described(experiment.train_batches)} returned acts on the model (acts_every_steps), and "
            f"{type(experiment).__name__} makes no predictions: define predict(state, batch), or leave "
            "acts_every_steps out."
        )
    yield act


def _of_first(ask: _Ask, use: Callable[[Mapping[str, Any]], Any]) -> list[Any]:
    """Runs what asks for predictions up to its first one, of whose batch it has the result of `use`."""
    results: list[Any] = []

    def predict(batch: Mapping[str, Any]) -> Any:
        # Where it is asked: an error shows who has asked.
        results.append(use(batch))
        raise _PredictedError

    with contextlib.suppress(_PredictedError):
        ask(predict)
    return results


def _of_example(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    trace: Callable[[Mapping[str, Any]], Any],
) -> list[Any]:
    """The prediction, traced with a replica's part of a training batch; none if it takes another."""
    if type(experiment).predict is experiment_lib.Experiment.predict:
        return []
    rows = max(1, experiment.config.batch_size // mesh_lib.num_replicas(mesh))
    # The run itself makes no prediction. What it lacks for one is said by the first that is asked for.
    with contextlib.suppress(Exception):
        return [trace(batches.shapes(batch, rows))]
    return []


def _check_prediction(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, traced: Any
) -> None:
    """Sees that a prediction is equal on all devices, of which one is asked."""
    differing, _ = varying.mapped_outputs(traced.jaxpr.jaxpr)
    leaves = jax.tree_util.tree_leaves_with_path(traced.out_info)
    for (path, leaf), axes in zip(leaves, differing, strict=True):
        if not axes & _several(mesh):
            continue
        name = trees.path_name(path) or "outputs"
        among = "replicas"
        fix = (
            "It depends on the replica's number, or on what is a replica's own: make it equal with a collective, "
            "such as jax.lax.pmean(x, ('slice', 'replica'))."
        )
        if mesh_lib.GROUP in axes & _several(mesh):
            among = "groups"
            fix = "Return that of all groups together, as of jax.lax.all_gather(outputs, 'group')."
        raise errors.UserError(
            f"{contract.described(experiment.predict)} returns {name!r}, {leaf.dtype} of shape {leaf.shape}, which differs "
            f"between the {among}; a prediction is one, equal on all devices. {fix}"
        )
