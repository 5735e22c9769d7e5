"""Initializes a state from another run's checkpoint or a file: from the parameters, or
what a pattern selects.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import leaves as leaves_lib
from xshard.checkpoint import metadata_files as metadata_lib
from xshard.checkpoint import place as place_lib
from xshard.checkpoint import reader
from xshard.files import tensors
from xshard.metrics import formatting

# The parameters of every network. With several networks, paths begin with the network's
# name, as in 'generator/params/mlp/w'. Paths below opt_state/ are excluded, since slots
# contain the parameters' names.
PARAMS = "^(?!.*opt_state/)(.*/)?params/"
_NET_STATE = "^(?!.*opt_state/)(.*/)?net_state/"
# The default also takes the networks' state as far as it fits: the averages of a batch
# norm belong to the parameters.
BY_DEFAULT = f"{PARAMS}|{_NET_STATE}"
# The key of the number of groups in a file's metadata.
GROUPS = "groups"
_SHOWN = 5


class Source(NamedTuple):
    """The part of another checkpoint, or of a file, from which a state is initialized.

    If the checkpoint has a model for each group and the state has one model, `group`
    selects the model to take. If the state has groups, and the checkpoint has none or
    another number of them, all groups of the state get the same model.

    Attributes:
      place: a run's directory or a folder of checkpoints, with @STEP for a checkpoint
        other than the newest; or the path of a .safetensors file.
      select: a regular expression that is searched for in the leaves' paths. The
        default selects the parameters and the network's state; arrays of the network's
        state that do not fit are left as they are.
      group: the index of the group to take from a checkpoint with several groups.
      rename: pairs (prefix in the checkpoint, prefix in the state). A prefix consists
        of whole names. The first pair whose prefix matches applies; an empty prefix
        matches every path.
    """

    place: str
    select: str = BY_DEFAULT
    group: int = 0
    rename: Sequence[tuple[str, str]] = ()


class _Stored(NamedTuple):
    """The arrays that a checkpoint or a file offers, under their paths in the state.

    Attributes:
      where: the checkpoint or the file, for messages.
      names: the stored name of each array, by its path in the state.
      metas: how each array is stored, by its path in the state.
      groups: the size of the leading dimension of groups; 0: the arrays have none.
      read: reads arrays, by their stored names, onto devices.
    """

    where: Any
    names: dict[str, str]
    metas: arrays_lib.ArrayMetas
    groups: int
    read: Callable[[list[reader.Leaf], Callable[[str], None]], list[jax.Array]]


def renames(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parses renamings such as 'old/prefix=new/prefix' into pairs; a text may contain
    several, separated by commas.
    """
    pairs = []
    for text in ",".join(texts).split(",") if texts else ():
        old, equals, new = text.partition("=")
        if not equals or "=" in new or old == new:
            raise format_lib.CheckpointError(
                f"--init_rename={text}: a renaming has the form OLD=NEW, such as params/encoder=params/backbone/encoder."
            )
        pairs.append((old.strip("/"), new.strip("/")))
    return tuple(pairs)


def check_init(source: Source, target: Any) -> None:
    """Checks whether `init_from` would work on a state like `target`.

    Raises:
      CheckpointError: if there is no such checkpoint, nothing is selected, or a
        selected leaf is missing in the checkpoint or has another shape there.
    """
    _requests(source, leaves_lib.flatten(target))


def init_from(source: Source, state: Any, say: Callable[[str], None] = print) -> Any:
    """Replaces leaves of a state with the leaves of the same path in a checkpoint.

    Floating-point types are converted to the state's.

    Args:
      source: the checkpoint or file, and the part of it to take.
      state: a tree of arrays; leaves that are not selected are unchanged.
      say: called with a summary.

    Returns:
      The tree, on the same devices.

    Raises:
      CheckpointError: for the reasons of `check_init`, or if the checkpoint is damaged.
    """
    leaves = leaves_lib.flatten(state)
    stored, requests = _requests(source, leaves)
    values = stored.read(list(requests.values()), say)
    for path, value in zip(requests, values, strict=True):
        # Typed PRNG keys cannot be converted; `_problem` has checked that their types
        # are equal.
        if requests[path].meta.key_impl is None:
            value = value.astype(leaves[path].dtype)
        leaves[path] = value
    unused = sorted(set(_selected(source, stored.metas)) - requests.keys())
    lacking = sorted(set(_selected(source, leaves)) - requests.keys())
    message = f"initialized {len(requests)} arrays from {stored.where}"
    if unused:
        message += f"; not used: {', '.join(unused[:_SHOWN])}"
    if lacking:
        message += f"; not taken, and left at their initial values: {', '.join(lacking[:_SHOWN])}"
    say(message)
    return jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))


def _requests(
    source: Source, leaves: dict[str, Any]
) -> tuple[_Stored, dict[str, reader.Leaf]]:
    """Returns the stored arrays, and what to read for each path of the state; raises as
    `check_init`.
    """
    stored = _open(source, leaves)
    paths = _selected(source, leaves)
    if not paths:
        raise format_lib.CheckpointError(
            f"--init_select='{source.select}' matches none of the paths of this run, such as "
            f"{', '.join(list(leaves)[:_SHOWN])}."
        )
    groups = _Groups(stored.groups, _count(leaves), source.group)
    fitting, problems = [], []
    for path in paths:
        wanted = leaves_lib.describe(leaves[path])
        problem = _problem(path, stored.metas.get(path), wanted, groups)
        if not problem:
            fitting.append(path)
        # By default, network state that is missing or has another shape is left as the
        # new run initialized it.
        elif source.select != BY_DEFAULT or not re.search(_NET_STATE, path):
            problems.append(
                problem + ("" if path in stored.metas else _near(path, stored.metas))
            )
    if problems:
        raise format_lib.CheckpointError(
            f"{stored.where} does not fit --init_select='{source.select}': "
            f"{formatting.listed(problems, _SHOWN, '; ')}. Narrow the selection, as in --init_select='^params/(?!head)', or "
            "rename paths, as in --init_rename=params/old=params/new."
        )
    requests = {}
    for path in fitting:
        leaf = _request(path, stored.metas[path], leaves[path], groups)
        requests[path] = leaf._replace(path=stored.names[path])
    return stored, requests


def _open(source: Source, leaves: Iterable[str]) -> _Stored:
    """Opens the checkpoint or the file, and applies the renamings."""
    where: Any
    if source.place.endswith(tensors.SUFFIX):
        file = tensors.File(source.place)
        where, read = (
            source.place,
            lambda leaves, _: [_read_leaf(file, leaf) for leaf in leaves],
        )
        metas = {
            name: arrays_lib.ArrayMeta(shape, file.dtypes[name], shape)
            for name, shape in file.shapes.items()
        }
        count = file.metadata.get(GROUPS, "")
        groups = int(count) if count.isdecimal() else 0
    else:
        where = place_lib.find(source.place)
        metas = metadata_lib.read_array_metas(where)
        groups = _count(metas)
        read = lambda leaves, say: reader.read_leaves(where, leaves, say)
    names = _renamed(source, where, metas, leaves)
    return _Stored(
        where, names, {path: metas[name] for path, name in names.items()}, groups, read
    )


def _read_leaf(file: tensors.File, leaf: reader.Leaf) -> jax.Array:
    def part(index: Any) -> Any:
        box = arrays_lib.box_index(leaf.stored_box(index))
        return leaf.wanted(file.read(leaf.path, box), index)

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def _renamed(
    source: Source, where: Any, stored: Iterable[str], leaves: Iterable[str]
) -> dict[str, str]:
    """Applies the renamings; returns the stored name of each array by its path in the
    state.
    """
    names: dict[str, str] = {}
    renamed: dict[tuple[str, str], list[str]] = {pair: [] for pair in source.rename}
    for name in stored:
        path = name
        for pair in source.rename:
            old, new = pair
            if not old or f"{name}/".startswith(f"{old}/"):
                path = "/".join(filter(None, [new, name[len(old) :].strip("/")]))
                renamed[pair].append(path)
                break
        if path in names:
            raise format_lib.CheckpointError(
                f"--init_rename maps both '{names[path]}' and '{name}' in {where} to '{path}': rename one of them."
            )
        names[path] = name
    for (old, new), paths in renamed.items():
        if not paths:
            raise format_lib.CheckpointError(
                f"--init_rename={old}={new}: no path in {where} begins with '{old}'{_near(old, stored)}."
            )
        if not set(paths) & set(leaves):
            raise format_lib.CheckpointError(
                f"--init_rename={old}={new}: this run has no '{paths[0]}'{_near(paths[0], leaves)}."
            )
    return names


def _near(path: str, paths: Iterable[str]) -> str:
    """Returns a hint with paths, or beginnings of paths, that are similar to one; empty
    if there are none.
    """
    parts = {"/".join(x.split("/")[: path.count("/") + 1]) for x in paths}
    near = difflib.get_close_matches(path, sorted({*paths, *parts}), n=2, cutoff=0.5)
    return f" (near it: {', '.join(near)})" if near else ""


class _Groups(NamedTuple):
    """The numbers of groups in the checkpoint and in the state, 0 for none, and the
    index of the group to take.
    """

    stored: int
    wanted: int
    chosen: int

    def differ(self, path: str) -> bool:
        """Returns whether a leaf has another leading dimension of groups in the state
        than in the checkpoint.
        """
        return self.stored != self.wanted and path not in ("step", "rng")

    def stored_shape(self, path: str, shape: arrays_lib.Shape) -> arrays_lib.Shape:
        """Returns the shape in the checkpoint that fits a shape in the state."""
        if not self.differ(path):
            return shape
        of_one_group = shape[1:] if self.wanted else shape
        return (self.stored, *of_one_group) if self.stored else of_one_group


def _count(tree: dict[str, Any]) -> int:
    """Returns the number of groups in a run's state, the first dimension of every array
    but the step and the key.
    """
    for path, leaf in tree.items():
        # A state may have several learners, each with a global_step. It is a scalar
        # unless there are groups.
        if path.rpartition("/")[2] == "global_step" and len(leaf.shape) == 1:
            return int(leaf.shape[0])
    return 0


def _request(
    path: str, meta: arrays_lib.ArrayMeta, leaf: Any, groups: _Groups
) -> reader.Leaf:
    group, repeat = None, False
    if groups.differ(path):
        repeat = groups.wanted > 0
        if groups.stored:
            group = groups.chosen
            if not 0 <= group < groups.stored:
                raise format_lib.CheckpointError(
                    f"--init_group={group}: the checkpoint has groups 0 to {groups.stored - 1}."
                )
    data, _ = leaves_lib.key_data(leaf)
    return reader.Leaf(path, meta, tuple(data.shape), leaf.sharding, group, repeat)


def _problem(
    path: str,
    stored: arrays_lib.ArrayMeta | None,
    wanted: arrays_lib.ArrayMeta,
    groups: _Groups,
) -> str:
    """Explains why an array of the checkpoint cannot be taken; returns an empty text if
    it can.
    """
    if stored is None:
        return f"'{path}' is missing from it"
    is_same_type = (stored.dtype, stored.key_impl) == (wanted.dtype, wanted.key_impl)
    fits = is_same_type or (_is_float(stored) and _is_float(wanted))
    if fits and stored.shape == groups.stored_shape(path, wanted.shape):
        return ""
    return f"'{path}' is {stored} in it, {wanted} here"


def _is_float(meta: arrays_lib.ArrayMeta) -> bool:
    return jnp.issubdtype(jnp.dtype(meta.dtype), jnp.floating)


def _selected(source: Source, paths: Iterable[str]) -> list[str]:
    return selected(source.select, paths, "--init_select")


def selected(pattern: str, paths: Iterable[str], flag: str) -> list[str]:
    """Lists the paths in which a regular expression matches.

    Raises:
      CheckpointError: if the pattern is not a regular expression; the message names the
        flag.
    """
    try:
        return [path for path in paths if re.search(pattern, path)]
    except re.error as e:
        raise format_lib.CheckpointError(
            f"{flag}='{pattern}' is not a valid regular expression: {e}."
        ) from e
