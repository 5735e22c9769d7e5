"""State that is a replica's own (`PerReplica`), where there are other numbers of replicas than it was made on.

A run does not go on so: which replica's would a new one have? An evaluation or a prediction that does not read it does, and
has all of it, whole.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from xshard import contract, errors
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.optimizers import trees, varying

Shapes = Mapping[str, Sequence[int]]
# Stands, where the results of a program are asked what they differ by, for what is a replica's own.
_OWN = frozenset(["own"])


def check_count(target: state_lib.TrainState, mesh: jax.sharding.Mesh, stored: Shapes) -> None:
    """Raises UserError if a run cannot go on from a checkpoint, since that has values of other numbers of replicas.

    Args:
      target: the shapes of the run's state.
      mesh: of the run.
      stored: the shapes of the checkpoint's arrays, by path.
    """
    for path, leaf in _own(target).items():
        count = _shape(leaf, stored.get(path), mesh)[len(mesh_lib.group_axes(mesh))]
        if count != _count(leaf, mesh):
            raise errors.UserError(
                f"The state {path!r} is a replica's own (xshard.PerReplica): the checkpoint has it of {count} "
                f"replicas a group, and here are {_count(leaf, mesh)}. It comes back on as many. Go on with as many devices, "
                "groups and model_parallel as before; or begin another run with --init_from. What belongs to examples is "
                "xshard.PerExample, which comes back on any number."
            )


def fit(
    target: state_lib.TrainState, mesh: jax.sharding.Mesh, stored: Shapes
) -> state_lib.TrainState:
    """The shapes of a state; where a checkpoint has a replica's own of others, its shape, whole on the devices of a group."""
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
    program: core.ClosedJaxpr,
    state: state_lib.TrainState,
    mesh: mesh_lib.AnyMesh,
) -> None:
    """Raises UserError if a program reads what is a replica's own of other numbers of replicas.

    Args:
      method: the experiment's, for the message.
      program: the traced program, of which the state is the first argument.
      state: what it is called with.
      mesh: what it runs on.
    """
    here = mesh_lib.num_replicas(mesh)
    others = {path: leaf for path, leaf in _own(state).items() if _count(leaf, mesh) != here}
    paths = [trees.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    for path, leaf in others.items():
        inputs: list[varying.Axes] = [frozenset() for _ in program.jaxpr.invars]
        inputs[paths.index(path)] = _OWN
        if any(_OWN & axes for axes in varying.outputs(program.jaxpr, inputs)):
            raise errors.UserError(
                f"{contract.described(method)} reads the state {path!r}, which is a replica's own (xshard.PerReplica): there "
                f"are values of {_count(leaf, mesh)} replicas a group, and here are {here}. Call it on as many, or do without: "
                "what is to be evaluated or predicted with is equal on all replicas, as by jax.lax.pmean in the step."
            )


def has_others(state: state_lib.TrainState, mesh: jax.sharding.Mesh) -> bool:
    """Returns whether a state has values of other numbers of replicas than the mesh has."""
    here = mesh_lib.num_replicas(mesh)
    return any(_count(leaf, mesh) != here for leaf in _own(state).values())


def _own(state: state_lib.TrainState) -> dict[str, Any]:
    """The arrays that are a replica's own, by path."""
    is_leaf = lambda x: isinstance(x, experiment_lib.PerReplica)
    own = {}
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_leaf):
        if is_leaf(node):
            for below, leaf in jax.tree_util.tree_leaves_with_path(node):
                own[trees.path_name((*path, *below))] = leaf
    return own


def _count(leaf: Any, mesh: mesh_lib.AnyMesh) -> int:
    return leaf.shape[len(mesh_lib.group_axes(mesh))]


def _shape(leaf: Any, stored: Sequence[int] | None, mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """A leaf's shape, with as many replicas as are stored."""
    dim = len(mesh_lib.group_axes(mesh))
    if stored is None or len(stored) <= dim:
        return leaf.shape
    return (*leaf.shape[:dim], stored[dim], *leaf.shape[dim + 1 :])
