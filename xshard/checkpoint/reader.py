"""Restores a checkpoint to a tree of arrays, on devices or on the host. Each process
reads only the shards of its own devices, and the whole of NumPy's arrays.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xshard.base import formatting
from xshard.checkpoint import array_reader
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import leaves as leaves_lib
from xshard.checkpoint import progress as progress_lib

# Arrays are put on devices in groups of this size. One call for each of thousands takes
# longer than reading them.
_PLACED_AT_ONCE = 64
# The most arrays that a message names.
_SHOWN = 5
# The paths of arrays that never have a dimension of groups.
UNGROUPED = ("step", "rng")


class ArrayTarget(NamedTuple):
    """A stored array, and the array to create from it.

    Attributes:
      path: its path in the checkpoint.
      meta: how it is stored.
      shape: the shape of the array to create.
      sharding: the sharding of the array to create; None: NumPy's, on the host.
      group: the index along the stored array's first dimension to select; None reads
        the whole array.
      repeat: whether to broadcast the stored array along a new leading dimension.
    """

    path: str
    meta: arrays_lib.ArrayMeta
    shape: arrays_lib.Shape
    sharding: Any
    group: int | None = None
    repeat: bool = False

    def stored_index(self, shard: tuple[slice, ...]) -> arrays_lib.Index:
        """Returns the part of the stored array that provides the values of a shard of
        the array to create.
        """
        index = arrays_lib.as_index(shard, self.shape)
        if self.repeat:
            index = index[1:]
        if self.group is not None:
            index = ((self.group, self.group + 1), *index)
        return index

    def to_shard(self, stored: np.ndarray, shard: tuple[slice, ...]) -> np.ndarray:
        """Returns the values of a shard of the array to create.

        Args:
          stored: the part of the stored array at `stored_index(shard)`.
          shard: the slices of the shard.
        """
        if self.group is not None:
            stored = stored[0]
        if self.repeat:
            index = arrays_lib.as_index(shard, self.shape)
            count, *_ = arrays_lib.index_shape(index)
            stored = np.broadcast_to(stored, (count, *stored.shape))
        return stored


class Groups(NamedTuple):
    """The numbers of groups in the checkpoint and in the state: the sizes of the first
    dimension of their arrays.

    Attributes:
      stored: the number of groups in the checkpoint; 0: its arrays have no dimension of
        groups.
      wanted: likewise in the state.
      chosen: the index of the group to take.
      without: the paths of arrays that never have a dimension of groups.
    """

    stored: int = 0
    wanted: int = 0
    chosen: int = 0
    without: Sequence[str] = UNGROUPED

    def differ(self, path: str) -> bool:
        """Returns whether a leaf has another leading dimension of groups in the state
        than in the checkpoint.
        """
        return self.stored != self.wanted and path not in self.without

    def target(
        self, path: str, meta: arrays_lib.ArrayMeta, leaf: leaves_lib.Leaf
    ) -> ArrayTarget:
        """Returns how to create a leaf of the state from a stored array."""
        sharding = getattr(leaf.value, "sharding", None)
        if sharding is None and isinstance(leaf.value, jax.ShapeDtypeStruct):
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        differ = self.differ(path)
        return ArrayTarget(
            path=path,
            meta=meta,
            shape=tuple(leaf.data.shape),
            sharding=sharding,
            group=self.chosen if differ and self.stored else None,
            repeat=differ and self.wanted > 0,
        )

    def stored_shape(self, path: str, shape: arrays_lib.Shape) -> arrays_lib.Shape:
        """Returns the shape in the checkpoint that fits a shape in the state."""
        if not self.differ(path):
            return shape
        of_one_group = shape[1:] if self.wanted else shape
        return (self.stored, *of_one_group) if self.stored else of_one_group


def num_groups(shapes: Mapping[str, Sequence[int]]) -> int:
    """Returns the number of groups in a run's state, the first dimension of every array
    but the step and the key; 0 if they have no such dimension.

    Args:
      shapes: the shapes of the state's arrays, by path.
    """
    for path, shape in shapes.items():
        # A state may have several learners, each with a global_step. It is a scalar
        # unless there are groups.
        if path.rpartition("/")[2] == "global_step" and len(shape) == 1:
            return int(shape[0])
    return 0


class Restored(NamedTuple):
    """The content of a checkpoint.

    Attributes:
      state: the tree of arrays.
      metadata: the run's metadata, as it was saved.
      data: the position in the data of each process that saved the checkpoint.
      step: the checkpoint's step.
      folder: the name of its folder in the store.
      shapes: the shapes of its arrays, by path.
    """

    state: Any
    metadata: dict[str, Any]
    data: list[Any]
    step: int
    folder: str
    shapes: Mapping[str, arrays_lib.Shape] = types.MappingProxyType({})


def restore(
    attempt: format_lib.SaveAttempt,
    target: Any,
    owner: format_lib.Owner | None,
    budget_bytes: int,
    say: Callable[[str], None],
    *,
    any_groups: bool,
) -> Restored:
    """Reads a checkpoint of a run into the structure, types and shardings of `target`.

    Args:
      attempt: a checkpoint that counts.
      target: a tree of `jax.ShapeDtypeStruct` with shardings, or of arrays; or a
        function from the stored shapes by path to such a tree.
      owner: the run that restores; None accepts a checkpoint of any run.
      budget_bytes: the most bytes that may be read at a time, beyond the restored
        arrays themselves.
      say: called with progress messages.
      any_groups: whether the checkpoint may have another number of groups, whose first
        becomes each group of the target.

    Raises:
      DamagedError: if the checkpoint does not hold what was written.
      CheckpointError: if the checkpoint belongs to another run, or its structure,
        shapes or types differ from the target's.
    """
    commit, meta = format_lib.read_commit_meta(attempt)
    # RUN names the owner of the folder, but a person may have moved another run's
    # checkpoint there.
    if owner is not None and commit.run is not None and commit.run.id != owner.id:
        raise format_lib.CheckpointError(
            f"{attempt} belongs to run {commit.run.id}, but this is run {owner.id}: "
            "move it away, or give another checkpoint.directory."
        )
    stored = meta.arrays
    shapes = {path: entry.shape for path, entry in stored.items()}
    # A target may depend on the stored shapes: state that differs by replica has one
    # entry for each replica that saved it.
    if callable(target):
        target = target(shapes)
    leaves = leaves_lib.of(target)
    wanted = {path: leaf.describe() for path, leaf in leaves.items()}
    groups = Groups()
    if any_groups:
        shapes_here = {path: x.shape for path, x in wanted.items()}
        groups = Groups(num_groups(shapes), num_groups(shapes_here))
    in_checkpoint = {}
    for path, meta_of_leaf in wanted.items():
        shape = groups.stored_shape(path, meta_of_leaf.shape)
        in_checkpoint[path] = dataclasses.replace(meta_of_leaf, shape=shape)
    _check_same(attempt, stored, in_checkpoint)

    targets = []
    for path, leaf in leaves.items():
        dtype = arrays_lib.dtype_of(stored[path].dtype)
        is_narrowed = jax.dtypes.canonicalize_dtype(dtype) != dtype
        target_of_leaf = groups.target(path, stored[path], leaf)
        if is_narrowed and target_of_leaf.sharding is not None:
            raise format_lib.CheckpointError(
                f"'{path}' is {dtype}, which JAX holds only with jax_enable_x64: set "
                "it, or give an array of NumPy in its place."
            )
        targets.append(target_of_leaf)
    arrays: list[Any] = read_arrays(attempt, targets, say, budget_bytes)
    for i, leaf in enumerate(leaves.values()):
        # NumPy's numbers are no arrays.
        if isinstance(leaf.value, np.generic):
            arrays[i] = arrays[i][()]
    return Restored(
        state=jax.tree.unflatten(jax.tree.structure(target), arrays),
        metadata=meta.metadata,
        data=meta.data,
        step=attempt.step,
        folder=attempt.folder,
        shapes=shapes,
    )


def read_arrays(
    attempt: format_lib.SaveAttempt,
    targets: list[ArrayTarget],
    say: Callable[[str], None],
    budget_bytes: int = array_reader.AHEAD_BYTES,
) -> list[jax.Array | np.ndarray]:
    """Reads arrays onto their devices, or to the host.

    A process reads only the parts that its own devices hold, and reads each of these
    parts once.

    Raises:
      DamagedError: if the checkpoint does not hold what was written.
    """
    parts: list[array_reader.ArraySlice] = []
    # For each part, the array that it belongs to.
    arrays: list[_LocalShards] = []
    for target in targets:
        array = _LocalShards(target)
        for index in array.indices:
            parts.append(array_reader.ArraySlice(target.path, target.meta, index))
            arrays.append(array)
    total = sum(part.nbytes for part in parts)
    progress = progress_lib.ProgressReporter(f"reading {attempt}", total, say)
    values = array_reader.read_slices(attempt, parts, budget_bytes)

    complete: list[_LocalShards] = []
    placed: dict[str, jax.Array | np.ndarray] = {}
    for array, part, value in zip(arrays, parts, values, strict=True):
        array.parts[part.index] = value
        progress.add(value.nbytes)
        if len(array.parts) == len(array.indices):
            complete.append(array)
        # Placed arrays leave the host's memory, so at most these few are in it.
        if len(complete) >= _PLACED_AT_ONCE:
            placed |= _place(complete)
            complete.clear()
    placed |= _place(complete)
    return [placed[target.path] for target in targets]


class _LocalShards:
    """The shards of one array on this process's devices, while they are read.

    Attributes:
      target: the array.
      places: this process's devices that hold a shard, each with the kind of memory.
      indices: the parts of the stored array to read, each once.
      parts: the parts that have been read, by index.
    """

    def __init__(self, target: ArrayTarget):
        self.target = target
        self.places: list[jax.sharding.SingleDeviceSharding] = []
        slices = [arrays_lib.as_slices(arrays_lib.full_index(target.shape))]
        if target.sharding is not None:
            shards = target.sharding.addressable_devices_indices_map(target.shape)
            slices = list(shards.values())
            kind = target.sharding.memory_kind
            for device in shards:
                place = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
                self.places.append(place)
        # Each shard, and the part of the stored array that it needs.
        self._shards = [(shard, target.stored_index(shard)) for shard in slices]
        # A part that several devices need is read once.
        self.indices = list(dict.fromkeys(index for _, index in self._shards))
        self.parts: dict[arrays_lib.Index, np.ndarray] = {}

    def on_host(self) -> list[np.ndarray]:
        """Returns the shard of each of `places`, or the whole array."""
        values = []
        for shard, index in self._shards:
            values.append(self.target.to_shard(self.parts[index], shard))
        return values

    def join(self, shards: list[jax.Array]) -> jax.Array:
        """Combines the shards on `places` into one array."""
        array = jax.make_array_from_single_device_arrays(
            self.target.shape, self.target.sharding, shards
        )
        key_impl = self.target.meta.key_impl
        if key_impl is None:
            return array
        return jax.random.wrap_key_data(array, impl=key_impl)


def _place(arrays: list[_LocalShards]) -> dict[str, jax.Array | np.ndarray]:
    """Puts arrays on their devices in one call, frees their host memory, and returns
    them by path.
    """
    placed: dict[str, jax.Array | np.ndarray] = {}
    on_devices = [array for array in arrays if array.target.sharding is not None]
    values = [array.on_host() for array in on_devices]
    places = [array.places for array in on_devices]
    shards = jax.device_put(values, places)
    for array, shards_of_array in zip(on_devices, shards, strict=True):
        placed[array.target.path] = array.join(shards_of_array)
    # The transfers read the host memory until they are complete.
    jax.block_until_ready(list(placed.values()))
    for array in arrays:
        if array.target.sharding is None:
            placed[array.target.path] = array.on_host()[0]
        array.parts.clear()
    return placed


def _check_same(
    attempt: format_lib.SaveAttempt,
    stored: arrays_lib.ArrayMetas,
    wanted: arrays_lib.ArrayMetas,
) -> None:
    """Raises CheckpointError if the stored arrays differ from the target's in path,
    shape or type.
    """
    missing = sorted(wanted.keys() - stored.keys())
    more = sorted(stored.keys() - wanted.keys())
    problems = [f"'{path}' is missing from it" for path in missing]
    problems += [f"'{path}' is only in it" for path in more]
    for path in sorted(stored.keys() & wanted.keys()):
        if stored[path].kind != wanted[path].kind:
            problems.append(f"'{path}' is {stored[path]} in it, {wanted[path]} here")
    if problems:
        listed = formatting.listed(problems, _SHOWN, "; ")
        raise format_lib.CheckpointError(
            f"{attempt} holds another tree than the one to restore, or was saved with "
            f"another model or optimizer: {listed}. Give a tree like the one that was "
            "saved; in a run, restore it with the config that it was saved with, start "
            "a new run in another directory, or take a part of it with --init_from."
        )
