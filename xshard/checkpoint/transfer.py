"""Takes a part of another run's checkpoint: its parameters, or what a pattern selects."""

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import reader
from xshard.checkpoint import source as source_lib
from xshard.checkpoint import store as store_lib

PARAMS = "^params/"
_NET_STATE = "net_state/"
# Of the network's state what is there: averages that a batch norm keeps go with the parameters.
BY_DEFAULT = "^(params|net_state)/"
_BUDGET_BYTES = 1 << 30
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Source:
    """The part of another checkpoint that is taken.

    Where the checkpoint has a model for each group and the state has one model, `group` says which; where
    the state has groups and the checkpoint has not, or others, all get the same.

    Attributes:
      place: a run's directory or a folder of checkpoints, with @STEP for another than the newest.
      select: a regular expression, searched for in the leaves' paths. By default that of parameters and the
        network's state, and of the latter what does not fit is left as the state has it.
      group: the group that is taken of a checkpoint with several.
    """

    place: str
    select: str = BY_DEFAULT
    group: int = 0


def check_init(source: Source, target: Any) -> None:
    """Sees whether `init_from` would work on a state like `target`.

    Raises:
      CheckpointError: if there is no such checkpoint, nothing is selected, or a leaf that is selected is
        not in it or has another shape.
    """
    _requests(source, arrays_lib.flatten(target))


def init_from(source: Source, state: Any, say: Callable[[str], None] = print) -> Any:
    """Replaces leaves of a state by those of the same path in a checkpoint.

    Floating-point types are converted.

    Args:
      source: what of which checkpoint.
      state: a tree of arrays; what is not selected stays.
      say: takes what has been done.

    Returns:
      The tree, on the same devices.

    Raises:
      CheckpointError: as `check_init`, or if the checkpoint is damaged.
    """
    leaves = arrays_lib.flatten(state)
    attempt, stored, requests = _requests(source, leaves)
    values = reader.read_leaves(attempt, requests, _BUDGET_BYTES, say)
    for request, value in zip(requests, values, strict=True):
        key = request.meta.key_impl is not None
        leaves[request.path] = value if key else value.astype(leaves[request.path].dtype)
    taken = {request.path for request in requests}
    unused = sorted(path for path in stored if _search(source.select, path) and path not in taken)
    lacking = sorted(path for path in leaves if _search(source.select, path) and path not in taken)
    notes = f"; not used: {', '.join(unused[:_SHOWN])}" if unused else ""
    notes += f"; not in it, and left as new: {', '.join(lacking[:_SHOWN])}" if lacking else ""
    say(f"initialised {len(requests)} arrays from {attempt}{notes}")
    return jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))


def _requests(
    source: Source, leaves: dict[str, Any]
) -> tuple[format_lib.Attempt, dict[str, arrays_lib.ArrayMeta], list[reader.Leaf]]:
    """The checkpoint, what is in it, and what to read of it."""
    attempt = find(source.place)
    stored = source_lib.array_metas(source_lib.read_meta(attempt))
    paths = [path for path in leaves if _search(source.select, path)]
    if not paths:
        raise format_lib.CheckpointError(
            f"--init_select='{source.select}' matches none of the paths of this run, such as "
            f"{', '.join(list(leaves)[:_SHOWN])}."
        )
    wanted = {path: arrays_lib.describe(leaves[path]) for path in paths}
    groups = _Groups(_count(stored), _count(leaves), source.group)
    found = {path: _problem(path, stored.get(path), wanted[path], groups) for path in paths}
    if source.select == BY_DEFAULT:
        fits = lambda path: not (path.startswith(_NET_STATE) and found[path])
        paths = [path for path in paths if fits(path)]
    problems = [problem for path in paths if (problem := found[path])]
    if problems:
        raise format_lib.CheckpointError(
            f"{attempt} does not have what --init_select='{source.select}' selects: "
            f"{arrays_lib.listed(problems)}. Narrow it, as in --init_select='^params/(?!head)'."
        )
    return attempt, stored, [_request(path, stored[path], leaves[path], groups) for path in paths]


def find(source: str) -> format_lib.Attempt:
    """The checkpoint that 'DIR' or 'DIR@STEP' names; CheckpointError if there is none."""
    place, at, step = source.rpartition("@")
    if not at or not step.isdigit():
        place, step = source, ""
    store = store_lib.Store(place)
    if store.path is not None and not format_lib.attempts(store):
        store = store_lib.Store(os.path.join(place, "checkpoints"))
    if step:
        return format_lib.find(store, int(step))
    there = format_lib.committed(store)
    if not there:
        raise format_lib.CheckpointError(f"There is no checkpoint in {place}.")
    return there[-1]


@dataclasses.dataclass(frozen=True)
class _Groups:
    """The groups of the checkpoint and of the state, 0 for a leaf without, and the one to take."""

    stored: int
    wanted: int
    chosen: int

    def differ(self, path: str) -> bool:
        """Returns whether a leaf has another first dimension here than there."""
        return self.stored != self.wanted and path not in ("step", "rng")

    def stored_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint that fits one here."""
        if not self.differ(path):
            return shape
        one = shape[1:] if self.wanted else shape
        return (self.stored, *one) if self.stored else one


def _count(tree: dict[str, Any]) -> int:
    """The groups of a run's state, which all but its step and key have as their first dimension."""
    shape = tree["global_step"].shape if "global_step" in tree else ()
    return shape[0] if shape else 0


def _request(path: str, meta: arrays_lib.ArrayMeta, leaf: Any, groups: _Groups) -> reader.Leaf:
    differ = groups.differ(path)
    if differ and groups.stored and not 0 <= groups.chosen < groups.stored:
        raise format_lib.CheckpointError(
            f"--init_group={groups.chosen}: the checkpoint has the groups 0 to {groups.stored - 1}."
        )
    return reader.Leaf(
        path,
        meta,
        tuple(arrays_lib.key_data(leaf)[0].shape),
        leaf.sharding,
        group=groups.chosen if differ and groups.stored else None,
        repeat=bool(differ and groups.wanted),
    )


def _problem(
    path: str, stored: arrays_lib.ArrayMeta | None, wanted: arrays_lib.ArrayMeta, groups: _Groups
) -> str | None:
    if stored is None:
        return f"'{path}' is missing in it"
    floats = all(jnp.issubdtype(jnp.dtype(m.dtype), jnp.floating) for m in (stored, wanted))
    same_type = (stored.dtype, stored.key_impl) == (wanted.dtype, wanted.key_impl)
    if stored.shape != groups.stored_shape(path, wanted.shape) or not (same_type or floats):
        return f"'{path}' is {stored} in it, {wanted} here"
    return None


def _search(select: str, path: str) -> bool:
    try:
        return bool(re.search(select, path))
    except re.error as e:
        raise format_lib.CheckpointError(
            f"--init_select='{select}' is no regular expression: {e}."
        ) from e
