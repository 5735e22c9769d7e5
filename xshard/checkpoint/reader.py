"""Restores a checkpoint to a tree of arrays on devices. Each process reads only the
shards of its own devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from xshard.checkpoint import array_reader, metadata_files
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import leaves as leaves_lib
from xshard.checkpoint import progress as progress_lib
from xshard.metrics import formatting

# Arrays are put on devices in groups of this size. One call for each of thousands takes
# longer than reading them.
_PLACED_AT_ONCE = 64
# The most arrays that a message names.
_SHOWN = 5


class Leaf(NamedTuple):
    """An array to be read onto devices.

    Attributes:
      path: its path in the checkpoint.
      meta: how it is stored.
      shape: the shape of the array to create.
      sharding: the sharding of the array to create.
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

    def stored_box(self, index: tuple[slice, ...]) -> arrays_lib.Box:
        """Maps an index of the wanted array to the part of the stored array that
        provides its values.
        """
        box = arrays_lib.as_box(index, self.shape)
        if self.repeat:
            box = box[1:]
        if self.group is not None:
            box = ((self.group, self.group + 1), *box)
        return box

    def wanted(self, part: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """Converts the part of the stored array for an index to the wanted array's
        dimensions.
        """
        if self.group is not None:
            part = part[0]
        if self.repeat:
            count, *_ = arrays_lib.box_shape(arrays_lib.as_box(index, self.shape))
            part = np.broadcast_to(part, (count, *part.shape))
        return part


class Restored(NamedTuple):
    """The content of a checkpoint.

    Attributes:
      state: the tree of arrays.
      metadata: the run's metadata, as it was saved.
      data: the position in the data of each process that saved the checkpoint.
      step: the checkpoint's step.
      folder: the name of its folder in the store.
      is_whole: whether the state contains every stored array.
    """

    state: Any
    metadata: dict[str, Any]
    data: list[Any]
    step: int
    folder: str
    is_whole: bool = True


def restore(
    attempt: format_lib.SaveAttempt,
    target: Any,
    owner: format_lib.Owner | None,
    budget_bytes: int,
    say: Callable[[str], None],
    may_hold: Callable[[], Any] | None = None,
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
      may_hold: returns a tree like `target` with every array that the checkpoint may
        hold. Arrays of this tree that are not in the target are not read. It is called
        only if the checkpoint has arrays that the target lacks.

    Raises:
      DamagedError: if the checkpoint does not hold what was written.
      CheckpointError: if the checkpoint belongs to another run, or its structure,
        shapes or types differ from the target's.
    """
    commit, meta = metadata_files.read_commit_meta(attempt)
    of_run = commit.get(format_lib.OWNER)
    if owner is not None and of_run is not None and of_run["id"] != owner.id:
        raise format_lib.CheckpointError(
            f"{attempt} belongs to run {of_run['id']}, but this is run {owner.id}: move it away, or give another "
            "checkpoint.directory."
        )
    stored = metadata_files.array_metas(meta)
    # A target may depend on the stored shapes: `PerReplica` state has one entry for
    # each replica that saved it.
    if callable(target):
        target = target({path: stored[path].shape for path in stored})
    wanted = leaves_lib.flatten(target)
    described = {path: leaves_lib.describe(leaf) for path, leaf in wanted.items()}
    unread = _unread(stored, described, may_hold)
    if unread:
        say(
            f"{attempt} holds arrays that are not used here: {formatting.listed(sorted(unread), _SHOWN, '; ')}"
        )
    _check_same(attempt, stored, described, unread)
    leaves = []
    for path, leaf in wanted.items():
        leaves.append(Leaf(path, stored[path], stored[path].shape, leaf.sharding))
    values = read_leaves(attempt, leaves, say, budget_bytes)
    state = jax.tree.unflatten(jax.tree.structure(target), values)
    is_whole = wanted.keys() == stored.keys()
    return Restored(
        state, meta["metadata"], meta["data"], attempt.step, attempt.folder, is_whole
    )


def read_leaves(
    attempt: format_lib.SaveAttempt,
    leaves: list[Leaf],
    say: Callable[[str], None],
    budget_bytes: int = array_reader.AHEAD_BYTES,
) -> list[jax.Array]:
    """Reads arrays onto their devices.

    A process reads only the parts that its own devices hold, and reads each of these
    parts once.

    Raises:
      DamagedError: if the checkpoint does not hold what was written.
    """
    parts: list[array_reader.ArrayRegion] = []
    readings: list[_Reading] = []
    for leaf in leaves:
        reading = _Reading(leaf)
        for box in reading.boxes:
            parts.append(array_reader.ArrayRegion(leaf.path, leaf.meta, box))
            readings.append(reading)
    total = sum(part.nbytes for part in parts)
    progress = progress_lib.ProgressReporter(f"reading {attempt}", total, say)
    values = array_reader.read_regions(attempt, parts, budget_bytes)
    full: list[_Reading] = []
    arrays: dict[str, jax.Array] = {}
    for reading, part, value in zip(readings, parts, values, strict=True):
        reading.parts[part.box] = value
        progress.add(value.nbytes)
        if len(reading.parts) == len(reading.boxes):
            full.append(reading)
        if len(full) >= _PLACED_AT_ONCE:
            arrays |= _place(full)
            full.clear()
    arrays |= _place(full)
    return [arrays[leaf.path] for leaf in leaves]


class _Reading:
    """Collects the parts of one array that this process's devices hold, while they are
    read.
    """

    def __init__(self, leaf: Leaf):
        self.leaf = leaf
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        self.devices = list(indices)
        self._places = [(index, leaf.stored_box(index)) for index in indices.values()]
        # Duplicates are dropped: a part that several devices hold is read once.
        self.boxes = list(dict.fromkeys(box for _, box in self._places))
        self.parts: dict[arrays_lib.Box, np.ndarray] = {}

    def on_host(self) -> list[np.ndarray]:
        """Returns the values for each of `devices`, in that order."""
        return [self.leaf.wanted(self.parts[box], index) for index, box in self._places]

    def join(self, parts: list[jax.Array]) -> jax.Array:
        """Combines the arrays of the single devices into one sharded array."""
        leaf = self.leaf
        array = jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, parts
        )
        if leaf.meta.key_impl is None:
            return array
        return jax.random.wrap_key_data(array, impl=leaf.meta.key_impl)


def _place(readings: list[_Reading]) -> dict[str, jax.Array]:
    """Puts arrays on their devices in one call, frees their host memory, and returns
    them by path.
    """
    values = [reading.on_host() for reading in readings]
    devices = [reading.devices for reading in readings]
    placed = jax.device_put(values, devices)
    arrays = {}
    for reading, parts in zip(readings, placed, strict=True):
        arrays[reading.leaf.path] = reading.join(parts)
    # The transfers read the host memory until they are complete.
    jax.block_until_ready(list(arrays.values()))
    for reading in readings:
        reading.parts.clear()
    return arrays


def _unread(
    stored: arrays_lib.ArrayMetas,
    wanted: arrays_lib.ArrayMetas,
    may_hold: Callable[[], Any] | None,
) -> set[str]:
    """Returns the paths of stored arrays that the target lacks and that `may_hold`
    allows.
    """
    more = stored.keys() - wanted.keys()
    if not more or may_hold is None:
        return set()
    unread = set()
    for path, leaf in leaves_lib.flatten(may_hold()).items():
        if path in more and stored[path].kind == leaves_lib.describe(leaf).kind:
            unread.add(path)
    return unread


def _check_same(
    attempt: format_lib.SaveAttempt,
    stored: arrays_lib.ArrayMetas,
    wanted: arrays_lib.ArrayMetas,
    unread: set[str],
) -> None:
    """Raises CheckpointError if the stored arrays differ from the target's in path,
    shape or type.
    """
    missing = sorted(wanted.keys() - stored.keys())
    more = sorted(stored.keys() - wanted.keys() - unread)
    problems = [f"'{path}' is missing from it" for path in missing]
    problems += [f"'{path}' is only in it" for path in more]
    for path in sorted(stored.keys() & wanted.keys()):
        if stored[path].kind != wanted[path].kind:
            problems.append(f"'{path}' is {stored[path]} in it, {wanted[path]} here")
    if problems:
        raise format_lib.CheckpointError(
            f"{attempt} was saved with another model or optimizer: {formatting.listed(problems, _SHOWN, '; ')}. "
            "Restore it with the config that it was saved with, start a new run in another directory, or "
            "take a part of it with --init_from."
        )
