"""Logical replicas and their places on the devices of a mesh."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from xshard import errors
from xshard import mesh as mesh_lib

# The number of integers that represent each summand, for each value of
# `reduction.arithmetic`.
_LIMBS = {"exact": 1, "exact_wide": 2}

# The only values of other keys of `reduction` that exact sums support.
_EXACT_ONLY_WITH = {
    "reduce_dtype": "float32",
    "slice_dtype": "float32",
}


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of a group that an experiment sees, on the devices of a mesh.

    Consecutive replicas share a device, and each device holds equally many. If the
    number of devices does not divide `count`, the last devices hold fewer, or none.

    Attributes:
      count: the number of logical replicas of a group.
      on: the mesh of devices.
      num_words: the number of integers that represent each summand, so that the order of a
        sum does not matter; 0 to sum in floating point.
    """

    count: int
    on: jax.sharding.Mesh
    num_words: int

    @property
    def rounds(self) -> int:
        """The number of logical replicas that a device computes one after the other."""
        return -(-self.count // mesh_lib.num_replicas(self.on))

    @property
    def places(self) -> int:
        """The number of places for logical replicas on all devices of a group. Places
        beyond `count` are empty.
        """
        return self.rounds * mesh_lib.num_replicas(self.on)

    @property
    def mesh(self) -> jax.sharding.AbstractMesh:
        """The abstract mesh that has one device for each logical replica."""
        return mesh_lib.abstract(mesh_lib.num_groups(self.on), self.count)

    @property
    def gather_steps(self) -> Sequence[Any]:
        """The groups of devices of each gather step, the last step first; None stands
        for all devices.
        """
        _, sizes = mesh_lib.torus_steps(self.on)
        is_one_slice = mesh_lib.num_slices(self.on) == 1
        return mesh_lib.step_groups(sizes) if sizes and is_one_slice else [None]

    def of_devices(self, table: np.ndarray) -> np.ndarray:
        """Selects one replica for each device, from a table with all replicas of a
        group along its third dimension.

        A device without a replica gets the last replica, whose state it holds.
        """
        first = np.minimum(np.arange(0, self.places, self.rounds), self.count - 1)
        shape = self.on.shape[mesh_lib.SLICE], self.on.shape[mesh_lib.REPLICA]
        return table[:, 0, first].reshape(len(table), *shape, *table.shape[3:])

    def rows(self, batch_size: int) -> int:
        """The number of rows of a group's batch on its devices. Rows at empty places
        are padding, not examples.
        """
        return batch_size // self.count * self.places


def of_config(config: ml_collections.ConfigDict, mesh: Any) -> Replicas | None:
    """The logical replicas of a config on a mesh; None if the config sets none, and
    each mesh replica counts as one.

    Raises:
      UserError: if the config asks for exact sums without logical replicas, or if the
        mesh or the reduction does not support what the config asks for.
    """
    count = config.get("logical_replicas", 0)
    if not count:
        if is_exact(config):
            raise errors.UserError(
                f"reduction.arithmetic={config.reduction.arithmetic!r} makes the bits of a run independent of the number of its devices; "
                f"set a number of replicas for it, as in --config.logical_replicas={mesh_lib.num_replicas(mesh)}."
            )
        return None
    if mesh.shape[mesh_lib.MODEL] > 1:
        raise errors.UserError(
            f"logical_replicas={count} cannot be used with model_parallel={mesh.shape[mesh_lib.MODEL]}: a logical replica "
            "is computed on one device. Set model_parallel to 1, or logical_replicas to 0."
        )
    _check_whole(config.get("reduction", {}))
    if is_exact(config):
        _check_exact(config.reduction)
    return Replicas(count, mesh, _limbs(config))


def own_spec(
    config: ml_collections.ConfigDict, mesh: mesh_lib.AnyMesh, counts: bool, leaf: Any
) -> jax.P:
    """The mesh axes that an array of the replicas' own values lies along.

    Args:
      config: the run's config.
      mesh: the run's mesh.
      counts: whether the dimension after that of groups is one of replicas. If its size
        is not this run's number of replicas, as in a checkpoint of another run, the
        array is whole on each device.
      leaf: an object with the array's shape.
    """
    group = mesh_lib.group_axes(mesh)
    if counts and leaf.shape[len(group)] != mesh_lib.num_replicas(
        mesh_of(config, mesh)
    ):
        return jax.P(*group)
    return jax.P(*group, mesh_lib.REPLICAS)


def check_even(
    config: ml_collections.ConfigDict,
    mesh: jax.sharding.Mesh,
    what: str,
    own: Sequence[str],
) -> None:
    """Raises UserError if devices hold different numbers of logical replicas, but some
    state is a replica's own.

    Args:
      config: the run's config.
      mesh: the run's mesh.
      what: the name of the function that creates the state, for the error.
      own: the paths of the state that is a replica's own.
    """
    replicas = of_config(config, mesh)
    if own and replicas is not None and replicas.places != replicas.count:
        good = [n for n in range(1, replicas.count + 1) if replicas.count % n == 0]
        raise errors.UserError(
            f"{what} creates {own[0]!r}, which differs between replicas (xshard.PerReplica, xshard.PerExample). All devices "
            "must hold equal parts of such state, but the "
            f"{mesh_lib.num_replicas(mesh)} devices of a group do not divide "
            f"logical_replicas={replicas.count}. Use another number of devices for each group, one of {good}."
        )


def is_exact(config: ml_collections.ConfigDict) -> bool:
    """Returns whether a config asks for exact sums, which do not depend on their order."""
    return _limbs(config) > 0


def _limbs(config: ml_collections.ConfigDict) -> int:
    return _LIMBS.get(config.get("reduction", {}).get("arithmetic"), 0)


def mesh_of(config: ml_collections.ConfigDict, mesh: Any) -> mesh_lib.AnyMesh:
    """The mesh whose replicas an experiment sees: that of its logical replicas, or the
    mesh of devices itself.
    """
    replicas = of_config(config, mesh)
    return mesh if replicas is None else replicas.mesh


def _check_whole(reduction: Mapping[str, Any]) -> None:
    """Raises UserError if arrays are in shards over the replicas of a group, of which
    each logical replica needs all.
    """
    for key in ("shard_update", "shard_params"):
        if reduction.get(key, False):
            raise errors.UserError(
                f"reduction.{key}=True cannot be used with logical_replicas, which share devices and make the same update on each "
                f"of these: set {key} to False, or logical_replicas to 0."
            )


def _check_exact(reduction: ml_collections.ConfigDict) -> None:
    for key, only in _EXACT_ONLY_WITH.items():
        if reduction.get(key, only) != only:
            raise errors.UserError(
                f"reduction.{key}={reduction[key]!r} cannot be used with reduction.arithmetic={reduction.arithmetic!r}, which sums "
                f"float32 arrays: set it to {only!r}, or arithmetic to 'float'."
            )
