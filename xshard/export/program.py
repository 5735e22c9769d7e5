"""Exports `Experiment.predict` as a standalone program for one device, which needs only
JAX or a StableHLO compiler.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from xshard import checkpoint, cli, errors, validation
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard import trained as trained_lib
from xshard.data import batches
from xshard.learners import run_context
from xshard.optimizers import varying
from xshard.run import preflight
from xshard.stored import replica_state

PLATFORMS = ("cpu", "cuda", "tpu")
_Shapes = dict[str, jax.ShapeDtypeStruct]


def export(
    trained: trained_lib.Trained,
    batch: Mapping[str, Any] | None,
    batch_size: int | None,
    arguments: Mapping[str, np.ndarray],
) -> tuple[jax_export.Exported, list[str]]:
    """Exports the prediction. Returns it, and descriptions of the batch arrays that it
    takes.

    Args:
      trained: the trained model.
      batch: as for `xshard.export.write`.
      batch_size: as for `xshard.export.write`.
      arguments: the arrays that form the first argument, by path; all other arrays are
        included in the program.
    """
    experiment = trained.experiment
    if batch is None:
        batch = preflight.samples_batch(experiment) or experiment_lib.example(
            experiment
        )
    shapes = batches.shapes_of(batch)
    # No prediction uses the run's random key, so a constant replaces it.
    state = trained.state
    state = jax.device_get(
        state_lib.TrainState(state.step, state.experiment, jnp.int32(0))
    )
    _check_own(trained, shapes)
    rows = batch_size or max(x.shape[0] for x in shapes.values())
    predict = functools.partial(_predict, trained, state)
    read = _read(predict, batches.shapes(shapes, rows), experiment)
    unread = {name: x for name, x in shapes.items() if name not in read}

    def with_unread(arguments: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        # Batch arrays that the network reads but its outputs do not depend on become
        # zeros in the program.
        rows = next(iter(batch.values())).shape[0]
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), batches.shapes(unread, rows)
        )
        return predict(arguments, {**zeros, **batch})

    shapes = {name: shapes[name] for name in read}
    function: Any = functools.partial(with_unread, {})
    first: tuple[Any, ...] = ()
    if arguments:
        function, first = with_unread, (batches.shapes_of(arguments),)
    (any_number,) = jax_export.symbolic_shape("batch")
    try:
        exported = _lower(
            function, (*first, batches.shapes(shapes, batch_size or any_number))
        )
    except Exception as e:
        if batch_size is not None:
            raise
        raise errors.UserError(
            f"{validation.describe_method(experiment.predict)} cannot be exported for batches of any size: {cli.summary(e)} "
            "Give the number of rows: --batch_size=1, or batch_size=1."
        ) from e
    args, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    names = [
        f"{name} {x.dtype}[{','.join(map(str, x.shape))}]"
        for name, x in args[-1].items()
    ]
    return exported, names


def _predict(
    trained: trained_lib.Trained,
    constants: state_lib.TrainState,
    arguments: Mapping[str, Any],
    batch: Mapping[str, Any],
) -> Any:
    """Computes the prediction on one device; `jax.vmap` replaces a run's mapping over
    replicas and groups.
    """
    experiment, mesh = trained.experiment, trained.state.step.sharding.mesh
    leaves = {**checkpoint.flatten(constants), **arguments}
    state = jax.tree.unflatten(jax.tree.structure(constants), [*leaves.values()])
    mapped: Callable[..., Any] = functools.partial(
        _predict_one, experiment, mesh, batch
    )
    for axis in reversed(mesh_lib.REPLICAS):
        mapped = jax.vmap(mapped, in_axes=None, out_axes=0, axis_name=axis, axis_size=1)
    several = mesh_lib.num_groups(mesh) > 1
    mapped = jax.vmap(
        mapped, 0 if several else None, 0, axis_name=mesh_lib.GROUP, axis_size=mesh_lib.num_groups(mesh)
    )  # fmt: skip
    # Predictions are equal on all groups and replicas.
    return jax.tree.map(lambda x: x[0, 0, 0], mapped(state.experiment))


def _predict_one(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    batch: Any,
    state: Any,
) -> Any:
    own = lambda x: x.local() if experiment_lib.is_own(x) else x
    state = jax.tree.map(own, state, is_leaf=experiment_lib.is_own)
    with run_context.run_on(mesh, experiment.sharding_rules()):
        return experiment.predict(state, batch)


def _check_own(trained: trained_lib.Trained, shapes: _Shapes) -> None:
    """Raises UserError if the prediction reads `PerReplica` state of a run with another
    number of replicas.
    """
    mesh = trained.state.step.sharding.mesh
    if replica_state.has_others(trained.state, mesh):
        traced = preflight.jitted_predict(trained.experiment, mesh).trace(
            trained.state, shapes
        )
        replica_state.check_unread(
            trained.experiment.predict, traced.jaxpr, trained.state, mesh
        )


def _read(
    predict: Callable[..., Any], shapes: _Shapes, experiment: experiment_lib.Experiment
) -> list[str]:
    """Returns the names of the batch arrays that the prediction depends on."""
    names = sorted(shapes)
    program = jax.make_jaxpr(functools.partial(predict, {}))(shapes)
    read = []
    for place, name in enumerate(names):
        if varying.depends_on(program.jaxpr, place):
            read.append(name)
    if not read:
        raise errors.UserError(
            f"{validation.describe_method(experiment.predict)} does not depend on any array of its batch ({', '.join(names)})."
        )
    return read


def _lower(function: Callable[..., Any], args: tuple[Any, ...]) -> jax_export.Exported:
    """Exports the function for all platforms if possible, else for those that it lowers
    for.
    """
    jitted = jax.jit(function)
    try:
        return jax_export.export(jitted, platforms=PLATFORMS)(*args)
    except Exception:
        able = []
        for platform in PLATFORMS:
            try:
                jax_export.export(jitted, platforms=[platform])(*args)
                able.append(platform)
            except Exception as e:
                error = e
        if not able:
            raise error from None
        return jax_export.export(jitted, platforms=able)(*args)
