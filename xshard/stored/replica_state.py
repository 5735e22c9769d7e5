"""State of single replicas (`PerReplica`) in a checkpoint with another number of
replicas.

A run cannot resume from such a checkpoint, because there is no rule for the values of a
new replica. An evaluation or a prediction can use the checkpoint if it does not read
this state; all replicas' values are then restored whole.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from xshard import errors, jax_internals, validation
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.optimizers import trees, varying

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
    for path, leaf in _own(target).items():
        count = _shape(leaf, stored.get(path), mesh)[len(mesh_lib.group_axes(mesh))]
        if count != _count(leaf, mesh):
            raise errors.UserError(
                f"The state {path!r} differs by replica (xshard.PerReplica): the checkpoint has values of {count} "
                f"replicas per group, and this run has {_count(leaf, mesh)}. A run resumes only with the same number. Use the "
                "same number of devices and groups and the same model_parallel as before, or start another run with "
                "--init_from. State that belongs to examples can be marked xshard.PerExample, which is restored on any "
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
    place = mesh_lib.sharding(mesh, *mesh_lib.group_axes(mesh))
    own = _own(target)

    def fitted(path: Any, leaf: Any) -> Any:
        name = trees.path_name(path)
        shape = _shape(leaf, stored.get(name), mesh) if name in own else leaf.shape
        if shape == leaf.shape:
            return leaf
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place)

    return jax.tree_util.tree_map_with_path(fitted, target)


def check_unread(
    method: Callable[..., Any],
    program: jax_internals.ClosedJaxpr,
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
    paths = [
        trees.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)
    ]
    for path, leaf in _others(state, mesh).items():
        if varying.depends_on(program.jaxpr, paths.index(path)):
            raise errors.UserError(
                f"{validation.describe_method(method)} reads the state {path!r}, which differs by replica (xshard.PerReplica): it "
                f"has values of {_count(leaf, mesh)} replicas per group, and this mesh has {mesh_lib.num_replicas(mesh)}. Use the same number of "
                "replicas, or read state that is equal on all of them, such as a mean by jax.lax.pmean in the step."
            )


def has_others(state: state_lib.TrainState, mesh: jax.sharding.Mesh) -> bool:
    """Returns whether a state has `PerReplica` values of another number of replicas
    than the mesh has.
    """
    return bool(_others(state, mesh))


def _others(state: state_lib.TrainState, mesh: mesh_lib.AnyMesh) -> dict[str, Any]:
    """Returns the `PerReplica` arrays of another number of replicas than the mesh has,
    by path.
    """
    here = mesh_lib.num_replicas(mesh)
    return {
        path: leaf for path, leaf in _own(state).items() if _count(leaf, mesh) != here
    }


def _own(state: state_lib.TrainState) -> dict[str, Any]:
    """Returns the `PerReplica` arrays of a state, by path."""
    is_leaf = lambda x: isinstance(x, experiment_lib.PerReplica)
    own = {}
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_leaf):
        if is_leaf(node):
            for below, leaf in jax.tree_util.tree_leaves_with_path(node):
                own[trees.path_name((*path, *below))] = leaf
    return own


def _count(leaf: Any, mesh: mesh_lib.AnyMesh) -> int:
    return leaf.shape[len(mesh_lib.group_axes(mesh))]


def _shape(
    leaf: Any, stored: Sequence[int] | None, mesh: jax.sharding.Mesh
) -> tuple[int, ...]:
    """Returns a leaf's shape, with the stored number of replicas."""
    dim = len(mesh_lib.group_axes(mesh))
    if stored is None or len(stored) <= dim:
        return leaf.shape
    return (*leaf.shape[:dim], stored[dim], *leaf.shape[dim + 1 :])
