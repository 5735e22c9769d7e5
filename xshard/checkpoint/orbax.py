"""Conversion to and from orbax's checkpoints, without orbax.

Both are arrays in tensorstore with a description. Orbax's is the file _METADATA.
"""

import json
import math
import os
from typing import Any

import msgspec
import numpy as np
import tensorstore as ts

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib
from xshard.files import jsonfile

_METADATA = "_METADATA"
# Orbax's code for a key of a mapping.
_DICT_KEY = 2


class _Key(msgspec.Struct, frozen=True):
    """A key on the path of an array, which may be the index of a list."""

    key: str | int


class _Value(msgspec.Struct, frozen=True):
    """The value of an entry, which may be one that is not stored, such as None."""

    skip_deserialize: bool | None = None


class _Entry(msgspec.Struct, frozen=True):
    """An entry of the tree: an array, or another value."""

    key_metadata: list[_Key]
    value_metadata: _Value


class _Description(msgspec.Struct, frozen=True):
    """The content of _METADATA, as far as it is read."""

    tree_metadata: dict[str, _Entry]
    use_ocdbt: bool = True
    use_zarr3: bool | None = None


def describe(attempt: format_lib.SaveAttempt) -> int:
    """Adds the file by which `orbax.checkpoint.StandardCheckpointer().restore` opens a
    checkpoint.

    Orbax restores one flat mapping of paths to arrays. Typed PRNG keys are restored as
    their data.

    Returns:
      The number of arrays.
    """
    arrays = format_lib.read_array_metas(attempt)
    tree = {}
    for path, meta in arrays.items():
        tree[str((path,))] = {
            "key_metadata": [{"key": path, "key_type": _DICT_KEY}],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": list(meta.shape),
            },
        }
    content = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "custom_metadata": None,
    }
    attempt.store.create(attempt.prefix + _METADATA, json.dumps(content).encode())
    return len(arrays)


def read(source: store_lib.Store) -> dict[str, np.ndarray]:
    """Reads the arrays of an orbax checkpoint, by path, such as 'params/mlp/w'.

    Args:
      source: the folder that holds _METADATA; for a CheckpointManager's checkpoint,
        STEP/default.

    Raises:
      CheckpointError: if the folder is not an orbax checkpoint, or cannot be read.
    """
    content = source.read(_METADATA)
    if content is None:
        raise store_lib.CheckpointError(
            f"{source} is not an orbax checkpoint: it has no {_METADATA}. For a "
            "checkpoint of a CheckpointManager, give STEP/default."
        )
    try:
        value = jsonfile.loads(content)
        description = jsonfile.parse(value, _Description)
        names = _names(description.tree_metadata)
    except ValueError as e:
        raise store_lib.CheckpointError(
            f"{source}/{_METADATA} is not a valid orbax file: {e}."
        ) from e
    # All arrays are opened before one is read, so that their total size is checked
    # before memory is allocated.
    futures = {path: _open(source, name, description) for path, name in names.items()}
    try:
        opened = {path: future.result() for path, future in futures.items()}
        _check_size(source, opened)
        arrays = {}
        for path, array in opened.items():
            arrays[path] = np.asarray(array.read().result())
        return arrays
    except store_lib.CheckpointError:
        raise
    except (ValueError, OSError, MemoryError) as e:
        raise store_lib.CheckpointError(f"{source}: {store_lib.reason(e)}.") from e


def _names(tree: dict[str, _Entry]) -> dict[str, str]:
    """Returns the folder name of each array, by path; raises ValueError if the
    description is invalid.
    """
    if not tree:
        raise ValueError("its tree_metadata is empty")
    names = {}
    for name, entry in tree.items():
        if entry.value_metadata.skip_deserialize:
            continue
        keys = [str(key.key) for key in entry.key_metadata]
        # Orbax joins the keys of a path with dots to the name of the array's folder.
        path = "/".join(keys)
        folder = ".".join(keys)
        # A forged description must not lead to files outside the checkpoint.
        is_elsewhere = not {"", ".", ".."}.isdisjoint(folder.split("/"))
        if is_elsewhere or "\0" in folder:
            raise ValueError(
                f"its entry {name!r} is named {path!r}, which is not a path of an array"
            )
        if path in names:
            raise ValueError(f"it has two arrays named {path!r}")
        names[path] = folder
    return names


def _check_size(source: store_lib.Store, arrays: dict[str, Any]) -> None:
    """Raises CheckpointError if the arrays exceed the machine's memory, as a damaged
    description may claim.
    """
    sizes = {}
    for path, array in arrays.items():
        sizes[path] = math.prod(array.shape) * array.dtype.numpy_dtype.itemsize
    total = sum(sizes.values())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total <= memory:
        return
    largest = max(sizes, key=lambda path: sizes[path])
    raise store_lib.CheckpointError(
        f"{source} declares arrays of {total} bytes, {sizes[largest]} of them in "
        f"'{largest}'; an import holds them all in memory, and this machine has "
        f"{memory} bytes."
    )


def _open(source: store_lib.Store, name: str, description: _Description) -> Any:
    base = source.spec()
    if description.use_ocdbt:
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
        kvstore = {**base, "path": f"{base['path']}{name}/"}
    driver = "zarr3" if description.use_zarr3 else "zarr"
    return ts.open({"driver": driver, "kvstore": kvstore}, open=True)
