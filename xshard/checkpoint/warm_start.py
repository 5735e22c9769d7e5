"""Initializes a state from another run's checkpoint or a file: from the parameters, or
what a pattern selects.
"""

import difflib
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xshard.base import formatting
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import conversion as conversion_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import leaves as leaves_lib
from xshard.checkpoint import place as place_lib
from xshard.checkpoint import reader
from xshard.files import disk, tensors

# The parameters of every network. With several networks, paths begin with the network's
# name, as in 'generator/params/mlp/w'. Paths below opt_state/ are excluded, since slots
# contain the parameters' names.
PARAMS = "^(?!.*opt_state/)(.*/)?params/"
_NET_STATE = "^(?!.*opt_state/)(.*/)?net_state/"
# The default also takes the networks' state as far as it fits: the averages of a batch
# norm belong to the parameters.
BY_DEFAULT = f"{PARAMS}|{_NET_STATE}"
# What `optax.inject_hyperparams` keeps of a config's values.
_INJECTED = "(^|/)opt_state/(.*/)?hyperparams/[^/]+$"
# The key of the number of groups in a file's metadata.
GROUPS = "groups"
# The most paths that a message gives as examples.
_SHOWN = 5
_CONVERT = (
    "Convert them, with the scales that belong to them, to float32, bfloat16 or "
    "float16 by the program that wrote the file."
)


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
      convert: the conversion by which the arrays of another program's .safetensors
        file become this run's.
    """

    place: str
    select: str = BY_DEFAULT
    group: int = 0
    rename: Sequence[tuple[str, str]] = ()
    convert: conversion_lib.Conversion | None = None


class Offer(NamedTuple):
    """The arrays that a checkpoint or a file offers, under their paths in the state.

    Attributes:
      where: the checkpoint or the file, for messages.
      names: the stored name of each array, by its path in the state.
      metas: how each array is stored, by its path in the state.
      num_groups: the size of the leading dimension of groups; 0: the arrays have none.
      read: reads arrays, by their stored names, onto devices.
      metadata: the metadata of the checkpoint, or the texts of the file.
      left_out: descriptions of arrays that a conversion leaves out.
      unsupported: the names of the types that are not supported, by the path in the
        state of each array of such a type.
    """

    where: Any
    names: dict[str, str]
    metas: arrays_lib.ArrayMetas
    num_groups: int
    read: Callable[[list[reader.ArrayTarget], Callable[[str], None]], list[Any]]
    metadata: Mapping[str, Any] = types.MappingProxyType({})
    left_out: Sequence[str] = ()
    unsupported: Mapping[str, str] = types.MappingProxyType({})


class Meaning(NamedTuple):
    """What a run knows of its arrays beyond their paths, shapes and types; by default
    nothing.

    Attributes:
      stand_ins: returns, of the names of a checkpoint's arrays, the names of arrays to
        read in place of others, by the names of these.
      may_lack: a regular expression of paths that may be missing from what the arrays
        are taken from; empty for none.
      check: called with the offer, the stored names of the arrays that are taken, by
        path, and the paths of the state. It raises CheckpointError if they would mean
        something else here, and returns a note to be printed, or an empty text.
    """

    stand_ins: Callable[[Iterable[str]], Mapping[str, str]] = lambda names: {}
    may_lack: str = ""
    check: Callable[[Offer, Mapping[str, str], Collection[str]], str] = (
        lambda offer, taken, paths: ""
    )


_NO_MEANING = Meaning()


def renames(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parses renamings such as 'old/prefix=new/prefix' into pairs; a text may contain
    several, separated by commas.
    """
    pairs = []
    for text in ",".join(texts).split(",") if texts else ():
        old, equals, new = text.partition("=")
        if not equals or "=" in new or old == new:
            raise format_lib.CheckpointError(
                f"--init_rename={text}: a renaming has the form OLD=NEW, such as "
                "params/encoder=params/backbone/encoder."
            )
        pairs.append((old.strip("/"), new.strip("/")))
    return tuple(pairs)


def check_init(source: Source, target: Any, meaning: Meaning = _NO_MEANING) -> None:
    """Checks whether `init_from` would work on a state like `target`.

    Raises:
      CheckpointError: if there is no such checkpoint, nothing is selected, a selected
        leaf is missing in the checkpoint or has another shape there, or what is taken
        would mean something else here.
    """
    leaves = leaves_lib.of(target)
    _targets(source, _open(source, leaves, meaning), leaves, meaning)


def init_from(
    source: Source,
    state: Any,
    say: Callable[[str], None] = print,
    meaning: Meaning = _NO_MEANING,
) -> Any:
    """Replaces leaves of a state with the leaves of the same path in a checkpoint.

    Floating-point types are converted to the state's. The values of
    `optax.inject_hyperparams` are the state's: they are what its config says.

    Args:
      source: the checkpoint or file, and the part of it to take.
      state: a tree of arrays; leaves that are not selected are unchanged.
      say: called with a summary.
      meaning: what the run knows of its arrays.

    Returns:
      The tree, on the same devices.

    Raises:
      CheckpointError: for the reasons of `check_init`, or if the checkpoint is damaged.
    """
    leaves = leaves_lib.of(state)
    arrays = {path: leaf.value for path, leaf in leaves.items()}
    offer = _open(source, leaves, meaning)
    targets, note = _targets(source, offer, leaves, meaning)
    values = offer.read(list(targets.values()), say)
    scalars = []
    most = 1 if reader.num_groups({path: x.shape for path, x in arrays.items()}) else 0
    for path, value in zip(targets, values, strict=True):
        if value.ndim <= most and not re.search(BY_DEFAULT, path):
            taken = _local(value)
            initial = _local(arrays[path])
            if not np.array_equal(taken, initial):
                scalars.append(f"{path} {taken} ({initial})")
        # Typed PRNG keys cannot be converted; `_problem` has checked that their types
        # are equal.
        if targets[path].meta.key_impl is None:
            value = value.astype(arrays[path].dtype)
        arrays[path] = value

    offered = [*offer.metas, *offer.unsupported]
    unused = sorted(set(_selected(source, offered)) - leaves.keys())
    lacking = sorted(set(_selected(source, leaves)) - targets.keys())
    message = f"initialized {len(targets)} arrays from {offer.where}"
    if unused:
        message += f"; not used: {', '.join(unused)}"
    if offer.left_out:
        message += f"; left out by from_hub: {formatting.listed(offer.left_out)}"
    if lacking:
        message += (
            f"; not taken, and left at their initial values: {', '.join(lacking)}"
        )
    if scalars:
        message += (
            f"; taken, where this run would begin with the value in brackets: "
            f"{', '.join(scalars)}"
        )
    if note:
        message += f"; {note}"
    say(message)
    structure = jax.tree.structure(state)
    return jax.tree.unflatten(structure, list(arrays.values()))


def _local(x: Any) -> np.ndarray:
    """Returns this process's first part of an array."""
    data, _ = leaves_lib.key_data(x)
    return np.asarray(data.addressable_data(0) if isinstance(data, jax.Array) else data)


def _from_config(leaves: Iterable[str]) -> set[str]:
    """Returns the paths of hyperparameters, which a config gives; not those of the
    slots of a module of that name.
    """
    params = [path for path in leaves if re.search(PARAMS, path)]
    endings = tuple(re.sub(PARAMS, "/", path) for path in params)
    found = [path for path in leaves if re.search(_INJECTED, path)]
    return {path for path in found if not path.endswith(endings)}


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


def _selected(source: Source, paths: Iterable[str]) -> list[str]:
    return selected(source.select, paths, "--init_select")


def _open(source: Source, leaves: Iterable[str], meaning: Meaning) -> Offer:
    """Opens the checkpoint or the file, and applies the renamings."""
    if tensors.is_path(source.place):
        return _open_file(source, leaves)
    if source.convert is not None:
        raise format_lib.CheckpointError(
            "--init_convert is for a .safetensors file or an index of such; "
            f"--init_from={source.place} is neither."
        )
    attempt = place_lib.find(source.place)
    meta = format_lib.read_meta(attempt)
    metas = meta.arrays
    names = _renamed(source, attempt, metas, leaves)
    stand_ins = meaning.stand_ins(metas)
    for path, name in names.items():
        stand_in = stand_ins.get(name)
        # An array is read once, as itself or in place of the other.
        if stand_in is not None and not _selected(source, [stand_in]):
            names[path] = stand_in
    return Offer(
        where=attempt,
        names=names,
        metas={path: metas[name] for path, name in names.items()},
        num_groups=reader.num_groups({path: x.shape for path, x in metas.items()}),
        read=lambda targets, say: reader.read_arrays(attempt, targets, say),
        metadata=meta.metadata,
    )


def _open_file(source: Source, leaves: Iterable[str]) -> Offer:
    opened = tensors.open_path(disk.expanded(source.place))
    file: tensors.File | tensors.Files | conversion_lib.Converted = opened
    left_out: Sequence[str] = ()
    if source.convert is not None:
        if opened.unsupported:
            described = [f"{x} ({kind})" for x, kind in opened.unsupported.items()]
            raise format_lib.CheckpointError(
                f"{source.place} has arrays of types that are not supported: "
                f"{', '.join(described)}. {_CONVERT}"
            )
        converted = conversion_lib.Converted(opened, source.convert)
        left_out = converted.left_out
        file = converted
    stored = [*file.shapes, *file.unsupported]
    names = _renamed(source, source.place, stored, leaves)
    homeless = [path for path in _selected(source, names) if path not in set(leaves)]
    if source.convert is not None and homeless:
        raise format_lib.CheckpointError(
            f"--init_convert gives arrays of {source.place} paths that this run does "
            f"not have: {', '.join(homeless)}. Nothing is taken in part: correct "
            "from_hub, or leave their arrays out there."
        )
    metas = {}
    unsupported = {}
    for path, name in names.items():
        if name not in file.shapes:
            unsupported[path] = file.unsupported[name]
            continue
        shape = file.shapes[name]
        # A file has no chunks: each array is one.
        metas[path] = arrays_lib.ArrayMeta(shape, file.dtypes[name], chunk_shape=shape)
    count = file.metadata.get(GROUPS, "")

    def read(targets: list[reader.ArrayTarget], _: Any) -> list[jax.Array]:
        return [_read_from_file(file, target) for target in targets]

    return Offer(
        where=source.place,
        names=names,
        metas=metas,
        num_groups=int(count) if count.isdecimal() else 0,
        read=read,
        metadata=file.metadata,
        left_out=left_out,
        unsupported=unsupported,
    )


def _read_from_file(
    file: tensors.File | tensors.Files | conversion_lib.Converted,
    target: reader.ArrayTarget,
) -> jax.Array:
    def read_shard(shard: Any) -> Any:
        slices = arrays_lib.as_slices(target.stored_index(shard))
        return target.to_shard(file.read(target.path, slices), shard)

    return jax.make_array_from_callback(target.shape, target.sharding, read_shard)


def _renamed(
    source: Source, where: Any, stored: Iterable[str], leaves: Iterable[str]
) -> dict[str, str]:
    """Applies the renamings.

    Args:
      source: has the renamings.
      where: the checkpoint or the file, for messages.
      stored: the names of the stored arrays.
      leaves: the paths of the state.

    Returns:
      The stored name of each array, by its path in the state.

    Raises:
      CheckpointError: if two arrays get the same path, or a renaming applies to none.
    """
    names: dict[str, str] = {}
    # The paths that each renaming has led to.
    renamed: dict[tuple[str, str], list[str]] = {}
    for pair in source.rename:
        renamed[pair] = []
    for name in stored:
        path = name
        for pair in source.rename:
            old, new = pair
            # A prefix consists of whole names: 'params/mlp' is none of 'params/mlp_1'.
            if not old or f"{name}/".startswith(f"{old}/"):
                rest = name[len(old) :].strip("/")
                path = "/".join(filter(None, [new, rest]))
                renamed[pair].append(path)
                break
        if path in names:
            raise format_lib.CheckpointError(
                f"--init_rename maps both '{names[path]}' and '{name}' in {where} to "
                f"'{path}': rename one of them."
            )
        names[path] = name
    for (old, new), paths in renamed.items():
        if not paths:
            raise format_lib.CheckpointError(
                f"--init_rename={old}={new}: no path in {where} begins with "
                f"'{old}'{_near(old, stored)}."
            )
        if not set(paths) & set(leaves):
            raise format_lib.CheckpointError(
                f"--init_rename={old}={new}: this run has no "
                f"'{paths[0]}'{_near(paths[0], leaves)}."
            )
    return names


def _near(path: str, paths: Iterable[str]) -> str:
    """Returns a hint with paths, or beginnings of paths, that are similar to one; empty
    if there are none.
    """
    depth = path.count("/") + 1
    beginnings = {"/".join(other.split("/")[:depth]) for other in paths}
    choices = sorted({*paths, *beginnings})
    near = difflib.get_close_matches(path, choices, n=2, cutoff=0.5)
    return f" (near it: {', '.join(near)})" if near else ""


def _targets(
    source: Source,
    offer: Offer,
    leaves: dict[str, leaves_lib.Leaf],
    meaning: Meaning,
) -> tuple[dict[str, reader.ArrayTarget], str]:
    """Returns what to read for each selected path of the state, and the note of
    `meaning.check`.

    Raises:
      CheckpointError: for the reasons of `check_init`.
    """
    paths = _selected(source, leaves)
    if not paths and source.select == BY_DEFAULT:
        raise format_lib.CheckpointError(
            "This run has no parameters or network state of a learner, which "
            f"--init_from={source.place} takes by default: name what to take by "
            f"--init_select. It has {', '.join(list(leaves)[:_SHOWN])}."
        )
    if not paths:
        raise format_lib.CheckpointError(
            f"--init_select='{source.select}' matches none of the paths of this run, "
            f"such as {', '.join(list(leaves)[:_SHOWN])}."
        )
    groups = reader.Groups(
        stored=offer.num_groups,
        wanted=reader.num_groups({path: x.data.shape for path, x in leaves.items()}),
        chosen=source.group,
    )
    targets = {}
    problems = []
    needs_conversion = False
    # This run's config may say other values than the one that wrote the checkpoint.
    from_config = _from_config(leaves)
    for path in paths:
        if path in from_config:
            continue
        stored = offer.metas.get(path)
        problem = _problem(path, stored, leaves[path].describe(), groups)
        if path in offer.unsupported:
            # Network state of such a type is not left at its initial values, either.
            kind = offer.unsupported[path]
            problems.append(f"'{path}' is {kind} in it, which is not supported")
            needs_conversion = True
            continue
        if stored is not None and not problem:
            target = groups.target(path, stored, leaves[path])
            if target.group is not None and not 0 <= target.group < groups.stored:
                raise format_lib.CheckpointError(
                    f"--init_group={target.group}: the checkpoint has groups 0 to "
                    f"{groups.stored - 1}."
                )
            targets[path] = target._replace(path=offer.names[path])
        elif stored is None and meaning.may_lack and re.search(meaning.may_lack, path):
            continue
        # By default, network state that is missing or has another shape is left as the
        # new run initialized it.
        elif source.select != BY_DEFAULT or not re.search(_NET_STATE, path):
            hint = _near(path, offer.metas) if stored is None else ""
            problems.append(problem + hint)
    taken = {path: target.path for path, target in targets.items()}
    note = meaning.check(offer, taken, leaves)
    if not targets and not problems:
        problems = [f"'{path}' is missing from it" for path in paths]
    if problems:
        remedy = ""
        if needs_conversion:
            remedy = f"{_CONVERT} "
        elif source.convert is not None:
            remedy = "Correct from_hub of --init_convert, or this run's config. "
        elif tensors.is_path(source.place):
            remedy = "If another program wrote it, convert it by --init_convert. "
        raise format_lib.CheckpointError(
            f"{offer.where} does not fit --init_select='{source.select}': "
            f"{'; '.join(problems)}. {remedy}"
            "Narrow the selection, as in --init_select='^params/(?!head)', or rename "
            "paths, as in --init_rename=params/old=params/new."
        )
    return targets, note


def _problem(
    path: str,
    stored: arrays_lib.ArrayMeta | None,
    wanted: arrays_lib.ArrayMeta,
    groups: reader.Groups,
) -> str:
    """Explains why an array of the checkpoint cannot be taken; returns an empty text if
    it can.
    """
    if stored is None:
        return f"'{path}' is missing from it"
    is_same_type = (stored.dtype, stored.key_impl) == (wanted.dtype, wanted.key_impl)
    # Floating-point numbers are converted.
    fits = is_same_type or (_is_float(stored) and _is_float(wanted))
    if fits and stored.shape == groups.stored_shape(path, wanted.shape):
        return ""
    return f"'{path}' is {stored} in it, {wanted} here"


def _is_float(meta: arrays_lib.ArrayMeta) -> bool:
    return jnp.issubdtype(jnp.dtype(meta.dtype), jnp.floating)
