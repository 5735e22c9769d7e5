"""The device mesh of a run, and the sharding of trees over it.

`jax.shard_map` maps over the axes `group`, `slice` and `replica`: each replica computes
on its part of the batch. Gradients are reduced over `replica` first and then over
`slice`, because the network between slices is slower. The axis `model` is left to XLA's
partitioner.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xshard import errors
from xshard.base import arguments, mesh_axes, torus, torus_layout

GROUP = mesh_axes.GROUP
SLICE = mesh_axes.SLICE
REPLICA = mesh_axes.REPLICA
MODEL = mesh_axes.MODEL
AXES = mesh_axes.AXES
REPLICAS = mesh_axes.REPLICAS
BATCH = mesh_axes.BATCH
ShardingRules = mesh_axes.ShardingRules
torus_steps = torus.steps
AnyMesh = mesh_axes.AnyMesh
# XLA's partitioner handles the axes that `jax.shard_map` does not map.
_AXIS_TYPES = (jax.sharding.AxisType.Auto,) * len(AXES)


def make_mesh(
    group_assignment: Sequence[Sequence[int]] | None = None,
    *,
    slices: int = 1,
    separate_slices: bool = False,
    model: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
    """Lays devices out as groups of replicas.

    `mesh.devices[g].reshape(-1, model)[r]` are the devices of replica
    `group_assignment[g][r]`. The devices of replica n are the same for all groups of a
    size. They are numbered so that groups of consecutive numbers, such as [[0, 1], [2,
    3]], are best: the layout makes the devices of a model neighbors first, and then the
    replicas of such a group, since gradients are reduced within a group, and groups do
    not communicate. With several slices, each group has the same number of replicas in
    every slice.

    Args:
      group_assignment: the replica numbers of each group, such as [[0, 1], [2, 3]]; by
        default all replicas are one group.
      slices: the number of slices, or of machines, that a slower network connects.
      separate_slices: whether each slice trains on its own, under an outer rule. Such
        slices are the groups of the mesh.
      model: the number of devices that share one replica's parameters.
      devices: the devices, all by default. TPU devices are laid out by their
        coordinates, others in this order.

    Returns:
      A mesh of the shape (groups, slices, replicas of a group in a slice, model).

    Raises:
      ValueError: if the devices do not divide into these groups.

    >>> mesh = xshard.make_mesh([[0, 2], [1, 3]], devices=jax.devices()[:4])
    >>> print(dict(mesh.shape))
    {'group': 2, 'slice': 1, 'replica': 2, 'model': 1}
    >>> print([device.id for device in mesh.devices[0].flat])
    [0, 2]
    """
    if devices is None:
        # Sorted by ID, since `jax.devices()` orders devices by process.
        devices = sorted(jax.devices(), key=lambda device: device.id)
    devices = list(devices)
    good = divisors(len(devices))
    if not arguments.is_integer(model) or model not in good:
        raise errors.UserError(
            f"model_parallel={model!r} must divide the number of devices, "
            f"{len(devices)}; good values: {good}."
        )
    replicas = len(devices) // model
    groups = mesh_axes.check_groups(group_assignment) or [list(range(replicas))]
    replicas_per_group = len(groups[0])
    if len(groups) * replicas_per_group != replicas:
        num_good_groups = 2 if replicas % 2 == 0 else 1
        good_groups = np.arange(replicas).reshape(num_good_groups, -1).tolist()
        raise errors.UserError(
            f"group_assignment={mesh_axes.shortened(groups)} does not fit: it must "
            f"hold each of the {replicas} replicas ({len(devices)} devices / "
            f"model_parallel={model}) once, as {mesh_axes.shortened(good_groups)} does."
        )
    _check_slices(slices, replicas_per_group, devices)
    shape = (len(groups), slices, replicas_per_group // slices, model)
    layout = _lay_out(devices, shape)
    # The layout is that of groups of consecutive numbers.
    numbered = layout.reshape(replicas, model)
    layout = numbered[np.ravel(groups)].reshape(shape)
    _check_places(groups, layout)
    if separate_slices:
        # A network's collectives over slices and replicas then stay within a slice.
        if len(groups) > 1:
            raise errors.UserError(
                "separate_slices cannot be used with groups, which are models of "
                f"their own; received {mesh_axes.shortened(groups)}."
            )
        layout = layout.swapaxes(0, 1)
    return jax.sharding.Mesh(layout, AXES, axis_types=_AXIS_TYPES)


def of_one_device(mesh: jax.sharding.Mesh, device: jax.Device) -> jax.sharding.Mesh:
    """Returns a mesh of a single device, with the axes of another mesh."""
    devices = np.reshape(device, [1] * mesh.devices.ndim)
    return jax.sharding.Mesh(devices, mesh.axis_names)


def abstract(groups: int, replicas: int) -> jax.sharding.AbstractMesh:
    """Returns a mesh without devices, for tracing only.

    Args:
      groups: the number of groups.
      replicas: the number of replicas of each group, which form one slice.
    """
    shape = (groups, 1, replicas, 1)
    return jax.sharding.AbstractMesh(shape, AXES, axis_types=_AXIS_TYPES)


def _lay_out(
    devices: Sequence[jax.Device], shape: tuple[int, int, int, int]
) -> np.ndarray:
    """Lays out the devices of a mesh, each hardware slice by itself."""
    slices = torus.hardware_slices(devices)
    if len(slices) == 1:
        return torus_layout.lay_out(devices, shape)
    groups, _, replicas, model = shape
    layouts = [
        torus_layout.lay_out(part, (groups, 1, replicas, model)) for part in slices
    ]
    return np.concatenate(layouts, axis=1)


def _check_slices(slices: Any, replicas: int, devices: Sequence[jax.Device]) -> None:
    sizes = [len(part) for part in torus.hardware_slices(devices)]
    if len(set(sizes)) > 1:
        raise errors.UserError(
            f"The devices are in slices of different sizes, {sizes}; give `devices` "
            "with equally many of each slice."
        )
    # One hardware slice may count as several, for example for machines that a slower
    # network connects.
    good = [n for n in divisors(replicas) if len(sizes) in (1, n)]
    if not arguments.is_integer(slices) or slices not in good:
        raise errors.UserError(
            f"slices={slices!r} must divide the {replicas} replicas of a group, and "
            "equal the number of slices that the devices report, if they report any "
            f"({len(sizes)}); good values: "
            f"{good or 'none: each group needs as many replicas in each slice'}."
        )


def _check_places(groups: list[list[int]], layout: np.ndarray) -> None:
    """Raises UserError if a slice of a mesh has devices of several hardware slices."""
    for number in range(layout.shape[1]):
        places = {torus.slice_number(device) for device in layout[:, number].flat}
        if layout.shape[1] > 1 and len(places) > 1:
            blocks = np.arange(np.size(groups)).reshape(len(groups), -1).tolist()
            raise errors.UserError(
                f"group_assignment={mesh_axes.shortened(groups)} mixes hardware "
                "slices: the replicas that come at one place of each group form "
                f"slice {number} of the mesh, but lie in the hardware slices "
                f"{sorted(places)}. "
                f"Consecutive numbers fit, as {mesh_axes.shortened(blocks)}."
            )


def divisors(number: int) -> list[int]:
    """Lists the divisors of a number, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def num_groups(mesh: AnyMesh) -> int:
    """Returns the number of groups: models that train side by side."""
    return mesh.shape[GROUP]


def group_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the axes of the leading dimension of groups in a state's arrays.

    There is no such dimension if there is one group.
    """
    return (GROUP,) if num_groups(mesh) > 1 else ()


def num_replicas(mesh: AnyMesh) -> int:
    """Returns the number of replicas of a group, over all slices."""
    return mesh.shape[SLICE] * mesh.shape[REPLICA]


def num_slices(mesh: AnyMesh) -> int:
    """Returns the number of slices."""
    return mesh.shape[SLICE]


def describe(mesh: jax.sharding.Mesh) -> str:
    """Returns the mesh's shape as text."""
    groups, slices, replicas, model = mesh.devices.shape
    per_slice = f"{slices} slices x " if slices > 1 else ""
    return f"{groups} group(s) x {per_slice}{replicas} replica(s) x {model} device(s)"


def sharding(mesh: AnyMesh, *spec: Any) -> jax.NamedSharding:
    """Returns the sharding of an array whose dimensions lie along these axes.

    Without axes, the array is replicated.
    """
    return jax.NamedSharding(mesh, jax.P(*spec))


def check_memory(mesh: AnyMesh, kind: str, key: str) -> None:
    """Checks that the devices of a mesh have a kind of memory.

    Args:
      mesh: the mesh. One without devices, for tracing only, has every kind.
      kind: JAX's name of the kind, such as 'pinned_host'.
      key: the key and the value of the config that ask for it.

    Raises:
      UserError: if a device does not have it.
    """
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if kind not in kinds:
        raise errors.UserError(
            f"{key} needs a backend with the memory {kind!r}; {device.device_kind} "
            f"({device.platform}) has {', '.join(kinds) or 'none that it names'}. "
            "Leave it out here."
        )


def on_replicas(
    f: Callable[..., Any], mesh: jax.sharding.Mesh, **specs: Any
) -> Callable[..., Any]:
    """Maps a function over the replicas of all groups by `jax.shard_map`.

    Args:
      f: the function of one replica.
      mesh: the mesh.
      **specs: `in_specs` and `out_specs`.
    """
    # `check_vma` is off: values that differ between groups always have a dimension of
    # groups, so it would find nothing, and it does not support sums over groups.
    names = manual_axes(mesh, BATCH)
    return jax.shard_map(f, mesh=mesh, axis_names=names, check_vma=False, **specs)


def manual_axes(mesh: AnyMesh, axes: Sequence[str]) -> set[str]:
    """Returns the axes to map by `jax.shard_map`: these, and all others of size 1.

    XLA's compiler for CPUs aborts if a network sums bfloat16 over the replicas and an
    axis is left to its partitioner.
    """
    return {axis for axis in mesh.axis_names if axis in axes or mesh.shape[axis] == 1}


def put(mesh: jax.sharding.Mesh, array: np.ndarray, spec: jax.P) -> jax.Array:
    """Puts a host array, equal on all processes, on the devices along these axes.

    Every process must call it.
    """
    on_mesh = sharding(mesh, *spec)
    return jax.make_array_from_callback(array.shape, on_mesh, array.__getitem__)


def put_whole(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """Puts host arrays, equal on all processes, whole on every device.

    Every process must call it.
    """
    return jax.tree.map(lambda x: put(mesh, np.asarray(x), jax.P()), tree)


def replicate(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """Replicates arrays whose values this process could not read otherwise.

    Every process must call it.
    """

    def readable(array: jax.Array) -> jax.Array:
        if array.is_fully_addressable or array.is_fully_replicated:
            return array
        return jax.device_put(array, sharding(mesh))

    return jax.tree.map(readable, tree)


def tree_shardings(
    mesh: AnyMesh, tree: Any, rules: ShardingRules, *, slots: bool = False
) -> Any:
    """Returns the sharding of each leaf of a tree.

    Args:
      mesh: the mesh. With several groups all leaves have a leading dimension of groups.
      tree: arrays or shapes.
      rules: pairs of a regular expression and a spec over 'model'. The first expression
        that matches anywhere in a leaf's path applies; a leaf without a match is
        replicated. A slot's path ends with its parameter's path, so one rule applies to
        both.
      slots: whether to replicate leaves that a spec does not fit, such as factored
        slots, instead of raising.

    Raises:
      ValueError: if a spec does not fit its leaf.
    """
    leading_axes = group_axes(mesh)

    def sharding_of(path: tuple[Any, ...], leaf: Any) -> jax.NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = mesh_axes.spec_of(name, rules)
        try:
            _check_spec(mesh, name, leaf.shape[len(leading_axes) :], spec)
        except ValueError:
            if not slots:
                raise
            spec = ()
        return sharding(mesh, *leading_axes, *spec)

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def _check_spec(mesh: AnyMesh, name: str, shape: tuple[int, ...], spec: Any) -> None:
    axes = [axis for axis in spec if axis is not None]
    if len(spec) > len(shape) or any(axis != MODEL for axis in axes):
        raise errors.UserError(
            f"The sharding rule {tuple(spec)} for '{name}' of shape {shape} must have "
            "at most one entry for each dimension, None or 'model'."
        )
    for size, axis in zip(shape, spec, strict=False):
        if axis is not None and size % mesh.shape[MODEL]:
            raise errors.UserError(
                f"The sharding rule {tuple(spec)} for '{name}' splits a dimension of "
                f"{size} over model_parallel={mesh.shape[MODEL]} devices, which does "
                "not divide it."
            )
