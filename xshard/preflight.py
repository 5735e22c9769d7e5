"""Traces before a run begins what it will trace later: a mistake is named while nothing is lost.

A trace computes nothing. What is traced by its jitted function is kept by JAX for its first call.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from xshard import contract, errors, nonfinite, step
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import model as model_lib
from xshard import state as state_lib

# What makes of the replicas' values one that all have.
_COLLECTIVES = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")


def programs(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    batch: Mapping[str, jax.ShapeDtypeStruct],
) -> tuple[Any, Any]:
    """The training step and the prediction, jitted and traced; the prediction, if `samples` needs it.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      state: the shapes of the run's state, as a step takes it.
      batch: the shapes of a batch, of all groups.

    Raises:
      UserError: if a method of the experiment does not fit.
    """
    train_step = jitted_step(experiment, mesh)
    train_step.trace(state, batch)
    _check_network_state(experiment, mesh, state, batch)
    # Replicated, so that each process has all of it.
    place = mesh_lib.sharding(mesh)
    predict = jax.jit(step.make_predict(experiment, mesh), out_shardings=place)
    _check_samples(experiment, mesh, predict, state)
    return train_step, predict


def jitted_step(experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh) -> Any:
    """The training step of a run, `step.make_watched_step`, jitted; it donates the state."""
    skip = experiment.config.on_nonfinite == nonfinite.SKIP
    watched_step = step.make_watched_step(experiment, mesh, skip_nonfinite=skip)
    return jax.jit(watched_step, donate_argnums=0)


def samples_key(experiment: experiment_lib.Experiment) -> jax.Array:
    """The key that `experiment.samples` is given."""
    return jax.random.key(experiment.config.seed)


def _check_network_state(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    batch: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Sees that one copy of the network's state can stand for those of all replicas.

    Floating-point state is averaged after each step. Integers, keys, and what is computed from the replica's
    number must not differ between replicas: one of them would be kept, and the others lost.
    """
    if not jax.tree.leaves(state.net_state) or mesh_lib.num_replicas(mesh) == 1:
        return
    jaxpr, inputs = _forward(experiment, mesh, state, batch)
    leaves = jax.tree_util.tree_leaves_with_path(state.net_state)
    for i, (path, leaf) in enumerate(leaves):
        used = [j == i for j in range(len(leaves))]
        part, is_used = partial_eval.dce_jaxpr(jaxpr, used)
        names = set(_primitives(part))
        differs = "axis_index" in names
        if not np.issubdtype(leaf.dtype, np.inexact):
            differs |= any(is_used[inputs:])
        if differs and not names.intersection(_COLLECTIVES):
            module, name = (key.key for key in path)
            raise errors.UserError(
                f"{contract.method(experiment, 'forward')} keeps the state {name!r} of {module!r}, of type "
                f"{leaf.dtype}, which differs between the replicas: it depends on their part of the batch, their "
                "keys or their number. One copy of a network's state is kept, and only of floating-point state "
                "can it be the mean. Count steps rather than examples, or keep a float32 mean over the batch."
            )


def _forward(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    batch: Mapping[str, jax.ShapeDtypeStruct],
) -> tuple[core.Jaxpr, int]:
    """A replica's new network state; and how many inputs are equal on all replicas: the batch and keys are not."""
    model = model_lib.Model(experiment, mesh)
    grouped = mesh_lib.num_groups(mesh) > 1
    of_one_group = lambda x: jax.ShapeDtypeStruct(x.shape[1:] if grouped else x.shape, x.dtype)
    equal = jax.tree.map(of_one_group, (state.params, state.net_state))
    rows = mesh_lib.num_groups(mesh) * mesh_lib.num_replicas(mesh) * experiment.config.micro_batches
    per_replica = {
        name: jax.ShapeDtypeStruct((x.shape[0] // rows, *x.shape[1:]), x.dtype)
        for name, x in batch.items()
    }

    def forward(params: Any, net_state: Any, batch: Any, key: jax.Array) -> Any:
        return model.forward(params, net_state, key, batch, True)[1]

    mapped = jax.shard_map(
        forward,
        mesh=mesh,
        axis_names={mesh_lib.GROUP, *mesh_lib.REPLICAS},
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    closed = jax.make_jaxpr(mapped)(*equal, per_replica, jax.random.key(0))
    (eqn,) = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    return eqn.params["jaxpr"], len(jax.tree.leaves(equal))


def _primitives(jaxpr: core.Jaxpr) -> Iterator[str]:
    """The names of all primitives, those in functions of others too."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if isinstance(inner, core.ClosedJaxpr):
                    yield from _primitives(inner.jaxpr)
                elif isinstance(inner, core.Jaxpr):
                    yield from _primitives(inner)


class _PredictedError(BaseException):
    """Ends `samples` where it would need a trained network; no error, and none that it may catch as one."""


def _check_samples(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    predict: Any,
    state: state_lib.TrainState,
) -> None:
    """Runs `experiment.samples` up to its first prediction, which is traced."""
    if type(experiment).samples is experiment_lib.Experiment.samples:
        return
    place = mesh_lib.sharding(mesh)

    def trace(batch: Mapping[str, Any]) -> Any:
        shapes = {}
        for name, x in batch.items():
            dtype = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
            shapes[name] = jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=place)
        predict.trace(state, shapes)
        raise _PredictedError

    with contextlib.suppress(_PredictedError):
        experiment.samples(trace, samples_key(experiment))
