"""Logical replicas, and the places of the devices of a mesh that they occupy."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from xshard import errors
from xshard import mesh as mesh_lib
from xshard.base import mesh_axes


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of a group that an experiment sees, on the devices of a mesh.

    Consecutive replicas share a device, and each device holds equally many. If the
    number of devices does not divide `count`, the last devices hold fewer, or none.

    Attributes:
      count: the number of logical replicas of a group.
      device_mesh: the mesh of devices.
      is_exact: whether floats are summed as integers, so that the order of a sum does
        not matter.
    """

    count: int
    device_mesh: jax.sharding.Mesh
    is_exact: bool

    @property
    def rounds(self) -> int:
        """The number of logical replicas that a device computes one after the other."""
        return -(-self.count // mesh_lib.num_replicas(self.device_mesh))

    @property
    def places(self) -> int:
        """The number of places for logical replicas on all devices of a group.

        The places beyond `count` are empty.
        """
        return self.rounds * mesh_lib.num_replicas(self.device_mesh)

    @property
    def mesh(self) -> jax.sharding.AbstractMesh:
        """The abstract mesh that has one device for each logical replica."""
        return mesh_lib.abstract(mesh_lib.num_groups(self.device_mesh), self.count)

    @property
    def gather_steps(self) -> Sequence[Any]:
        """The groups of devices of each step of a gather, the last step first.

        None stands for all devices.
        """
        _, sizes = mesh_lib.torus_steps(self.device_mesh)
        if sizes and mesh_lib.num_slices(self.device_mesh) == 1:
            return mesh_axes.step_groups(sizes)
        return [None]

    def of_devices(self, table: np.ndarray) -> np.ndarray:
        """Selects one replica for each device.

        Args:
          table: an array of the shape (groups, 1, replicas of a group, ...).

        Returns:
          An array of the shape (groups, slices, devices of a slice, ...). A device
          without a replica gets the last replica, whose state it holds.
        """
        first_of_devices = np.arange(0, self.places, self.rounds)
        selected = np.minimum(first_of_devices, self.count - 1)
        num_slices = self.device_mesh.shape[mesh_lib.SLICE]
        num_devices = self.device_mesh.shape[mesh_lib.REPLICA]
        shape = (len(table), num_slices, num_devices, *table.shape[3:])
        return table[:, 0, selected].reshape(shape)

    def rows(self, batch_size: int) -> int:
        """The number of rows of a group's batch on its devices.

        The rows of empty places are padding, not examples.
        """
        return batch_size // self.count * self.places


def of_config(config: ml_collections.ConfigDict, mesh: Any) -> Replicas | None:
    """Returns the logical replicas of a config on a mesh.

    None if the config sets none: each replica of the mesh then counts as one.

    Raises:
      UserError: if the config asks for exact sums without logical replicas, or if the
        mesh or the reduction does not support what the config asks for.
    """
    count = config.get("logical_replicas", 0)
    model_parallel = mesh.shape[mesh_lib.MODEL]
    if not count:
        if is_exact(config):
            raise errors.UserError(
                "reduction.arithmetic='exact' makes the bits of a run independent of "
                "the number of its devices; set a number of replicas for it, as in "
                f"--config.logical_replicas={mesh_lib.num_replicas(mesh)}."
            )
        return None
    if model_parallel > 1:
        raise errors.UserError(
            f"logical_replicas={count} cannot be used with "
            f"model_parallel={model_parallel}: a logical replica is computed on one "
            "device. Set model_parallel to 1, or logical_replicas to 0."
        )
    _check_reduction(config.get("reduction", {}))
    return Replicas(count, mesh, is_exact(config))


def per_replica_spec(
    config: ml_collections.ConfigDict, mesh: mesh_lib.AnyMesh, counts: bool, leaf: Any
) -> jax.P:
    """Returns the mesh axes that an array of per-replica values lies along.

    Args:
      config: the run's config.
      mesh: the run's mesh.
      counts: whether the dimension after that of groups is one of replicas. If its size
        is not this run's number of replicas, as in a checkpoint of another run, the
        array is whole on each device.
      leaf: an object with the array's shape.
    """
    group_axes = mesh_lib.group_axes(mesh)
    if counts:
        num_replicas = mesh_lib.num_replicas(mesh_of(config, mesh))
        if leaf.shape[len(group_axes)] != num_replicas:
            return jax.P(*group_axes)
    return jax.P(*group_axes, mesh_lib.REPLICAS)


def check_even(
    config: ml_collections.ConfigDict,
    mesh: jax.sharding.Mesh,
    what: str,
    per_replica: Sequence[str],
) -> None:
    """Raises UserError if devices hold different numbers of replicas and their state.

    Args:
      config: the run's config.
      mesh: the run's mesh.
      what: the name of the function that creates the state, for the error.
      per_replica: the paths of the state that is per replica.
    """
    replicas = of_config(config, mesh)
    if not per_replica or replicas is None or replicas.places == replicas.count:
        return
    good = mesh_lib.divisors(replicas.count)
    raise errors.UserError(
        f"{what} creates {per_replica[0]!r}, which differs between replicas "
        "(xshard.PerReplica, xshard.PerExample). All devices must hold equal parts of "
        f"such state, but the {mesh_lib.num_replicas(mesh)} devices of a group do not "
        f"divide logical_replicas={replicas.count}. Use another number of devices for "
        f"each group, one of {good}."
    )


def is_exact(config: ml_collections.ConfigDict) -> bool:
    """Returns whether a config asks for sums that do not depend on their order."""
    return bool(config.get("reduction", {}).get("arithmetic") == "exact")


def mesh_of(config: ml_collections.ConfigDict, mesh: Any) -> mesh_lib.AnyMesh:
    """Returns the mesh whose replicas an experiment sees.

    It is that of the logical replicas, or the mesh of devices itself if there are none.
    """
    replicas = of_config(config, mesh)
    return mesh if replicas is None else replicas.mesh


def _check_reduction(reduction: Mapping[str, Any]) -> None:
    """Raises UserError if logical replicas do not support what `reduction` asks for."""
    for key in ("shard_update", "shard_params"):
        if reduction.get(key, False):
            raise errors.UserError(
                f"reduction.{key}=True cannot be used with logical_replicas, which "
                "share devices and make the same update on each of these: set "
                f"{key} to False, or logical_replicas to 0."
            )
    for key in ("reduce_dtype", "slice_dtype"):
        value = reduction.get(key, "float32")
        if value != "float32":
            raise errors.UserError(
                f"reduction.{key}={value!r} cannot be used with logical_replicas, "
                "whose sums are of float32 arrays: set it to 'float32', or "
                "logical_replicas to 0."
            )
