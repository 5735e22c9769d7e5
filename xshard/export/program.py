"""Exports `Experiment.predict` as a program that stands alone.

The program is for one device, and needs only JAX or a StableHLO compiler.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from xshard import checkpoint, cli, errors, methods
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import trained as trained_lib
from xshard.data import batches
from xshard.learners import run_context, validation
from xshard.optimizers import varying
from xshard.run import preflight
from xshard.training import replica_state
from xshard.training import state as state_lib

PLATFORMS = ("cpu", "cuda", "tpu")
_Shapes = dict[str, jax.ShapeDtypeStruct]


def export(
    trained: trained_lib.Trained,
    batch: Mapping[str, Any] | None,
    batch_size: int | None,
    arguments: Mapping[str, np.ndarray],
) -> tuple[jax_export.Exported, list[str]]:
    """Exports the prediction.

    Args:
      trained: the trained model.
      batch: as for `xshard.export.write`.
      batch_size: as for `xshard.export.write`.
      arguments: the arrays that form the first argument, by path; all other arrays are
        included in the program.

    Returns:
      The program, and descriptions of what it takes: the arrays of the batch, and the
      random key on which the prediction may depend.
    """
    experiment = trained.experiment
    may_have_key, must_have_key = methods.takes_key(experiment.predict)
    if batch is None:
        batch = preflight.samples_batch(experiment)
    if batch is None:
        batch = experiment_lib.example(experiment)
    shapes = batches.shapes_of(batch)

    # No prediction uses the run's random key, so a constant replaces it.
    state = state_lib.TrainState(
        trained.state.step, trained.state.experiment, jnp.int32(0)
    )
    predict = functools.partial(_predict, trained, jax.device_get(state))
    rows = batch_size or max(x.shape[0] for x in shapes.values())
    example_shapes = batches.shapes(shapes, rows)
    keys = [_key_shape()] if must_have_key else []
    try:
        read, depends_on_key = _read_names(predict, example_shapes, keys, experiment)
    except Exception as e:
        if must_have_key or not may_have_key:
            raise
        # A network may draw keys also in a prediction. If the key is not what it lacks,
        # the first error tells more.
        keys = [_key_shape()]
        try:
            read, depends_on_key = _read_names(
                predict, example_shapes, keys, experiment
            )
        except Exception:
            raise e from None
    _check_replica_state(trained, shapes, keys)
    constant_keys = []
    if keys and not depends_on_key:
        constant_keys = [jax.random.key(0)]
        keys = []
    unread_shapes = {name: x for name, x in shapes.items() if name not in read}
    read_shapes = {name: shapes[name] for name in read}

    def predict_from_read(
        arguments: Mapping[str, Any], batch: Mapping[str, Any], *keys: jax.Array
    ) -> Any:
        # Batch arrays that the network reads but its outputs do not depend on become
        # zeros in the program.
        rows = next(iter(batch.values())).shape[0]
        zeros = {}
        for name, x in batches.shapes(unread_shapes, rows).items():
            zeros[name] = jnp.zeros(x.shape, x.dtype)
        return predict(arguments, {**zeros, **batch}, *keys, *constant_keys)

    (any_number,) = jax_export.symbolic_shape("batch")
    batch_shapes = batches.shapes(read_shapes, batch_size or any_number)
    try:
        if arguments:
            argument_shapes = batches.shapes_of(arguments)
            exported = _lower(predict_from_read, argument_shapes, batch_shapes, *keys)
        else:
            from_batch = functools.partial(predict_from_read, {})
            exported = _lower(from_batch, batch_shapes, *keys)
    except Exception as e:
        if batch_size is not None:
            raise
        raise errors.UserError(
            f"{validation.describe_method(experiment.predict)} cannot be exported for "
            f"batches of any size: {cli.summary(e)} Give the number of rows: "
            "--batch_size=1, or batch_size=1."
        ) from e
    given, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    batch_avals = given[1 if arguments else 0]
    descriptions = []
    for name, x in batch_avals.items():
        sizes = ",".join(map(str, x.shape))
        descriptions.append(f"{name} {x.dtype}[{sizes}]")
    if keys:
        descriptions.append("a random key")
    return exported, descriptions


def _predict(
    trained: trained_lib.Trained,
    constants: state_lib.TrainState,
    arguments: Mapping[str, Any],
    batch: Mapping[str, Any],
    *keys: jax.Array,
) -> Any:
    """Computes the prediction on one device.

    Args:
      trained: the trained model.
      constants: its state.
      arguments: arrays of the state, by path, that replace its own.
      batch: the batch.
      *keys: the random key, if there is one.
    """
    experiment = trained.experiment
    mesh = trained.state.step.sharding.mesh
    leaves = {**checkpoint.flatten(constants), **arguments}
    state = jax.tree.unflatten(jax.tree.structure(constants), list(leaves.values()))
    # `jax.vmap` replaces a run's mapping over replicas and groups.
    mapped: Callable[..., Any] = functools.partial(
        _predict_on_replica, experiment, mesh, batch, keys
    )
    for axis in reversed(mesh_lib.REPLICAS):
        mapped = jax.vmap(mapped, in_axes=None, out_axes=0, axis_name=axis, axis_size=1)
    num_groups = mesh_lib.num_groups(mesh)
    mapped = jax.vmap(
        mapped,
        # Without groups the arrays have no dimension of them.
        in_axes=0 if num_groups > 1 else None,
        out_axes=0,
        axis_name=mesh_lib.GROUP,
        axis_size=num_groups,
    )
    # Predictions are equal on all groups and replicas.
    return jax.tree.map(lambda x: x[0, 0, 0], mapped(state.experiment))


def _predict_on_replica(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    batch: Any,
    keys: tuple[jax.Array, ...],
    state: Any,
) -> Any:
    """Calls `predict` as a run does, with a replica's state, on all of a batch."""
    local = lambda x: x.local() if experiment_lib.is_marked(x) else x
    state = jax.tree.map(local, state, is_leaf=experiment_lib.is_marked)
    with run_context.run_on(mesh, experiment.sharding_rules()):
        return experiment.predict(state, batch, *keys)


def _check_replica_state(
    trained: trained_lib.Trained, shapes: _Shapes, keys: list[jax.ShapeDtypeStruct]
) -> None:
    """Checks that the prediction reads no state of replicas that are not there.

    Raises:
      UserError: if it reads `PerReplica` state, and the state has that of other
        replicas than the mesh.
    """
    mesh = trained.state.step.sharding.mesh
    if not replica_state.has_others(trained.state, mesh):
        return
    predict = preflight.jitted_predict(trained.experiment, mesh)
    traced = predict.trace(trained.state, shapes, *keys)
    replica_state.check_unread(
        trained.experiment.predict, traced.jaxpr, trained.state, mesh
    )


def _read_names(
    predict: Callable[..., Any],
    shapes: _Shapes,
    keys: list[jax.ShapeDtypeStruct],
    experiment: experiment_lib.Experiment,
) -> tuple[list[str], bool]:
    """Returns what the prediction depends on.

    Returns:
      The names of the batch arrays, and whether it depends on the random key.
    """
    # The order of the names is that of the program's inputs; the key is the last.
    names = sorted(shapes)
    program = jax.make_jaxpr(functools.partial(predict, {}))(shapes, *keys)
    read = []
    for place, name in enumerate(names):
        if varying.depends_on(program.jaxpr, place):
            read.append(name)
    depends_on_key = bool(keys) and varying.depends_on(program.jaxpr, len(names))
    if not read and depends_on_key:
        # Samples are drawn for the rows of a batch, whatever these hold.
        read = names[:1]
    if not read:
        raise errors.UserError(
            f"{validation.describe_method(experiment.predict)} does not depend on any "
            f"array of its batch ({', '.join(names)})."
        )
    return read, depends_on_key


def _key_shape() -> jax.ShapeDtypeStruct:
    key = jax.random.key(0)
    return jax.ShapeDtypeStruct(key.shape, key.dtype)


def _lower(function: Callable[..., Any], *shapes: Any) -> jax_export.Exported:
    """Exports a function for all platforms, or for those that it lowers for."""
    jitted = jax.jit(function)
    try:
        return jax_export.export(jitted, platforms=PLATFORMS)(*shapes)
    except Exception:
        able = []
        for platform in PLATFORMS:
            try:
                jax_export.export(jitted, platforms=[platform])(*shapes)
                able.append(platform)
            except Exception as e:
                error = e
        if not able:
            raise error from None
        return jax_export.export(jitted, platforms=able)(*shapes)
