"""Reads a checkpoint into a tree of arrays on devices, of each only what this process's devices hold."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import budget as budget_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import ownership, source

# Arrays are put on devices in groups, since a call for each of thousands takes longer than reading them.
_PLACED_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array to be read onto devices.

    Attributes:
      path: its path in the checkpoint.
      meta: how it is stored.
      shape: the shape that is wanted.
      sharding: where it belongs.
      group: which place along the stored array's first dimension is wanted; None: all of it.
      repeat: whether the stored array is wanted at each place of a first dimension that it lacks.
    """

    path: str
    meta: arrays_lib.ArrayMeta
    shape: tuple[int, ...]
    sharding: Any
    group: int | None = None
    repeat: bool = False

    def stored_box(self, index: tuple[slice, ...]) -> arrays_lib.Box:
        """The part of the stored array that belongs at an index of the wanted one."""
        box = ownership.as_box(index, self.shape)
        box = box[1:] if self.repeat else box
        return box if self.group is None else ((self.group, self.group + 1), *box)

    def wanted(self, part: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """Cuts what belongs at an index out of the part of the stored array."""
        part = part if self.group is None else part[0]
        if not self.repeat:
            return part
        (low, high), *_ = ownership.as_box(index, self.shape)
        return np.broadcast_to(part, (high - low, *part.shape))


class Restored(NamedTuple):
    """The content of a checkpoint.

    Attributes:
      state: the tree of arrays.
      metadata: the run's own, as it was saved.
      data: the position in the data of each process that saved it.
      step: its step.
      folder: its name in the store.
    """

    state: Any
    metadata: dict[str, Any]
    data: list[Any]
    step: int
    folder: str


def restore(
    attempt: format_lib.Attempt,
    target: Any,
    owner: format_lib.Owner | None,
    budget_bytes: int,
    say: Callable[[str], None],
    may_hold: Callable[[], Any] | None = None,
) -> Restored:
    """Reads a checkpoint of a run; as `read`, which says what the arguments are.

    Raises:
      CheckpointError: if it is another run's than `owner`.
    """
    commit, meta = source.read_both(attempt)
    of_run = commit.get(format_lib.OWNER)
    if owner is not None and of_run is not None and of_run["id"] != owner.id:
        raise format_lib.CheckpointError(
            f"{attempt} is of run {of_run['id']}, and this is run {owner.id}: move it away, or give another "
            "checkpoint.directory."
        )
    state = read(attempt, target, meta, budget_bytes, say, may_hold)
    return Restored(state, meta["metadata"], meta["data"], attempt.step, attempt.folder)


def read(
    attempt: format_lib.Attempt,
    target: Any,
    meta: dict[str, Any],
    budget_bytes: int,
    say: Callable[[str], None],
    may_hold: Callable[[], Any] | None = None,
) -> Any:
    """Reads a checkpoint into the structure, types and shardings of `target`.

    Args:
      attempt: a checkpoint that counts.
      target: a tree of `jax.ShapeDtypeStruct` with shardings, or of arrays.
      meta: its description.
      budget_bytes: how much may be read at a time, beyond the arrays themselves.
      say: takes messages on progress.
      may_hold: makes a tree such as `target`, of all that the checkpoint may hold: what of it is not in the
        target is not read. It is called only if there is more than in the target.

    Raises:
      DamagedError: if something is not what was written.
      CheckpointError: if the checkpoint has another structure, shape or type than the target.
    """
    stored = source.array_metas(meta)
    wanted = arrays_lib.flatten(target)
    described = {path: arrays_lib.describe(leaf) for path, leaf in wanted.items()}
    unread = _unread(stored, described, may_hold)
    if unread:
        say(f"{attempt} holds what is not used here: {arrays_lib.listed(sorted(unread))}")
    _check_same(attempt, {p: meta for p, meta in stored.items() if p not in unread}, described)
    leaves = [
        Leaf(path, stored[path], stored[path].shape, leaf.sharding) for path, leaf in wanted.items()
    ]
    values = read_leaves(attempt, leaves, budget_bytes, say)
    return jax.tree.unflatten(jax.tree.structure(target), values)


def read_leaves(
    attempt: format_lib.Attempt,
    leaves: list[Leaf],
    budget_bytes: int,
    say: Callable[[str], None],
) -> list[jax.Array]:
    """Reads arrays onto their devices: of each only what this process's devices hold, and that once.

    Raises:
      DamagedError: if something is not what was written.
    """
    boxes = [_Boxes(leaf) for leaf in leaves]
    parts = [(one, box) for one in boxes for box in one.distinct]
    total = sum(source.box_bytes(one.leaf.meta, box) for one, box in parts)
    progress = budget_lib.Progress(f"reading {attempt}", total, say)
    requests = ((one.leaf.path, one.leaf.meta, box) for one, box in parts)
    done: list[_Boxes] = []
    arrays: dict[str, jax.Array] = {}
    for (one, box), part in zip(
        parts, source.read_parts(attempt, requests, budget_bytes), strict=True
    ):
        one.fill(box, part)
        progress.add(part.nbytes)
        if one.is_full:
            done.append(one)
        if len(done) >= _PLACED_AT_ONCE:
            arrays |= _place(done)
    arrays |= _place(done)
    return [arrays[leaf.path] for leaf in leaves]


class _Boxes:
    """The parts of an array that this process's devices hold."""

    def __init__(self, leaf: Leaf):
        self.leaf = leaf
        self._indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        self._boxes = {d: leaf.stored_box(index) for d, index in self._indices.items()}
        self.distinct = list(dict.fromkeys(self._boxes.values()))
        self._parts: dict[arrays_lib.Box, np.ndarray] = {}

    @property
    def is_full(self) -> bool:
        return len(self._parts) == len(self.distinct)

    def fill(self, box: arrays_lib.Box, part: np.ndarray) -> None:
        self._parts[box] = part

    def on_host(self) -> list[tuple[Any, np.ndarray]]:
        """Returns what belongs on each device."""
        return [
            (device, self.leaf.wanted(self._parts[box], self._indices[device]))
            for device, box in self._boxes.items()
        ]

    def join(self, parts: list[jax.Array]) -> jax.Array:
        """One array of what is on the devices."""
        leaf = self.leaf
        array = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
        impl = leaf.meta.key_impl
        return jax.random.wrap_key_data(array, impl=impl) if impl else array


def _place(done: list[_Boxes]) -> dict[str, jax.Array]:
    """Puts arrays on their devices, in one call, and forgets them on the host."""
    hosts = [one.on_host() for one in done]
    devices = [device for parts in hosts for device, _ in parts]
    placed = iter(jax.device_put([value for parts in hosts for _, value in parts], devices))
    arrays = {
        one.leaf.path: one.join([next(placed) for _ in parts])
        for one, parts in zip(done, hosts, strict=True)
    }
    # Until then the host's memory is in use.
    jax.block_until_ready(list(arrays.values()))
    done.clear()
    return arrays


def _unread(
    stored: dict[str, arrays_lib.ArrayMeta],
    wanted: dict[str, arrays_lib.ArrayMeta],
    may_hold: Callable[[], Any] | None,
) -> set[str]:
    """The paths of what is stored and not wanted, and may be so."""
    more = stored.keys() - wanted.keys()
    if not more or may_hold is None:
        return set()
    allowed = arrays_lib.flatten(may_hold())
    return {
        path
        for path in more & allowed.keys()
        if stored[path].kind == arrays_lib.describe(allowed[path]).kind
    }


def _check_same(
    attempt: format_lib.Attempt,
    stored: dict[str, arrays_lib.ArrayMeta],
    wanted: dict[str, arrays_lib.ArrayMeta],
) -> None:
    problems = [f"'{path}' is missing in it" for path in sorted(wanted.keys() - stored.keys())]
    problems += [f"'{path}' is only in it" for path in sorted(stored.keys() - wanted.keys())]
    problems += [
        f"'{path}' is {stored[path]} in it, {wanted[path]} here"
        for path in sorted(stored.keys() & wanted.keys())
        if stored[path].kind != wanted[path].kind
    ]
    if problems:
        raise format_lib.CheckpointError(
            f"{attempt} is of another model or optimizer: {arrays_lib.listed(problems)}. "
            "Restore it with the config it was saved with, begin anew in another directory, or take a "
            "part of it with --init_from."
        )
