"""State of single replicas (`PerReplica`) in a checkpoint with another number of
replicas.

A run cannot resume from such a checkpoint, because there is no rule for the values of a
new replica. An evaluation or a prediction can use the checkpoint if it does not read
this state; all replicas' values are then restored whole.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from xshard import errors
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.base.jax_internals import jaxprs
from xshard.learners import validation
from xshard.optimizers import trees, varying
from xshard.training import state as state_lib

Shapes = Mapping[str, Sequence[int]]


def check_count(
    target: state_lib.TrainState, mesh: jax.sharding.Mesh, stored: Shapes
) -> None:
    """Raises UserError if a checkpoint has `PerReplica` state of another number of
    replicas than the run.

    Args:
      target: the shapes of the run's state.
      mesh: the run's mesh.
      stored: the shapes of the checkpoint's arrays, by path.
    """
    dim = _replica_dim(mesh)
    for path, leaf in _per_replica_arrays(target).items():
        count = leaf.shape[dim]
        stored_count = _stored_shape(leaf, stored.get(path), mesh)[dim]
        if stored_count != count:
            raise errors.UserError(
                f"The state {path!r} differs by replica (xshard.PerReplica): the "
                f"checkpoint has values of {stored_count} replicas per group, and this "
                f"run has {count}. A run resumes only with the same number. Use the "
                "same number of devices and groups and the same model_parallel as "
                "before, or start another run with --init_from. State that belongs to "
                "examples can be marked xshard.PerExample, which is restored on any "
                "number of replicas."
            )


def fit(
    target: state_lib.TrainState, mesh: jax.sharding.Mesh, stored: Shapes
) -> state_lib.TrainState:
    """Returns the shapes with which to restore a state for evaluation.

    `PerReplica` arrays that the checkpoint has for another number of replicas get the
    stored shape, and are whole on every device of a group.

    Args:
      target: the shapes of the state.
      mesh: the mesh to restore on.
      stored: the shapes of the checkpoint's arrays, by path.
    """
    whole = mesh_lib.sharding(mesh, *mesh_lib.group_axes(mesh))
    per_replica = _per_replica_arrays(target)

    def fitted(path: Any, leaf: Any) -> Any:
        name = trees.path_name(path)
        if name not in per_replica:
            return leaf
        shape = _stored_shape(leaf, stored.get(name), mesh)
        if shape == leaf.shape:
            return leaf
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=whole)

    return jax.tree_util.tree_map_with_path(fitted, target)


def check_unread(
    method: Callable[..., Any],
    program: jaxprs.ClosedJaxpr,
    state: state_lib.TrainState,
    mesh: mesh_lib.AnyMesh,
) -> None:
    """Raises UserError if a program reads `PerReplica` state of another number of
    replicas than the mesh has.

    Args:
      method: the experiment's method, for the message.
      program: the traced program, with the state as its first argument.
      state: the state with which the program is called.
      mesh: the mesh on which the program runs.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    paths = [trees.path_name(path) for path, _ in leaves]
    for path, leaf in _of_other_counts(state, mesh).items():
        if varying.depends_on(program.jaxpr, paths.index(path)):
            raise errors.UserError(
                f"{validation.describe_method(method)} reads the state {path!r}, which "
                "differs by replica (xshard.PerReplica): it has values of "
                f"{leaf.shape[_replica_dim(mesh)]} replicas per group, and this mesh "
                f"has {mesh_lib.num_replicas(mesh)}. Use the same number of replicas, "
                "or read state that is equal on all of them, such as a mean by "
                "jax.lax.pmean in the step."
            )


def has_others(state: state_lib.TrainState, mesh: jax.sharding.Mesh) -> bool:
    """Returns whether a state has `PerReplica` values of another number of replicas
    than the mesh has.
    """
    return bool(_of_other_counts(state, mesh))


def _of_other_counts(
    state: state_lib.TrainState, mesh: mesh_lib.AnyMesh
) -> dict[str, Any]:
    """Returns the `PerReplica` arrays of another number of replicas, by path."""
    found = {}
    for path, leaf in _per_replica_arrays(state).items():
        if leaf.shape[_replica_dim(mesh)] != mesh_lib.num_replicas(mesh):
            found[path] = leaf
    return found


def _per_replica_arrays(state: state_lib.TrainState) -> dict[str, Any]:
    """Returns the `PerReplica` arrays of a state, by path."""
    is_marker = lambda x: isinstance(x, experiment_lib.PerReplica)
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_marker):
        if not is_marker(node):
            continue
        for path_in_node, leaf in jax.tree_util.tree_leaves_with_path(node):
            found[trees.path_name((*path, *path_in_node))] = leaf
    return found


def _replica_dim(mesh: mesh_lib.AnyMesh) -> int:
    """Returns the dimension of replicas of a `PerReplica` array."""
    return len(mesh_lib.group_axes(mesh))


def _stored_shape(
    leaf: Any, stored: Sequence[int] | None, mesh: jax.sharding.Mesh
) -> tuple[int, ...]:
    """Returns a leaf's shape, with the stored number of replicas."""
    dim = _replica_dim(mesh)
    if stored is None or len(stored) <= dim:
        return leaf.shape
    return (*leaf.shape[:dim], stored[dim], *leaf.shape[dim + 1 :])
