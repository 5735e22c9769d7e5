"""To and from orbax, without it: its checkpoints are tensorstore arrays with a description."""

import json
from typing import Any

import numpy as np
import tensorstore as ts

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import source as source_lib
from xshard.checkpoint import store as store_lib

_METADATA = "_METADATA"
# Orbax's name for a key of a mapping.
_DICT_KEY = 2


def describe(attempt: format_lib.Attempt) -> int:
    """Adds the file by which `orbax.checkpoint.StandardCheckpointer().restore` opens a checkpoint.

    Orbax sees one mapping of paths to arrays; PRNG keys as their data.

    Returns:
      The number of arrays.
    """
    arrays = source_lib.array_metas(source_lib.read_meta(attempt))
    tree = {
        str((path,)): {
            "key_metadata": [{"key": path, "key_type": _DICT_KEY}],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": list(meta.shape),
            },
        }
        for path, meta in arrays.items()
    }
    content = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": True, "custom_metadata": None}
    attempt.store.create(attempt.prefix + _METADATA, json.dumps(content).encode())
    return len(arrays)


def read(source: store_lib.Store) -> dict[str, np.ndarray]:
    """The arrays of an orbax checkpoint by path, such as 'params/mlp/w'.

    Args:
      source: the folder that holds _METADATA: of a CheckpointManager, STEP/default.

    Raises:
      CheckpointError: if it is no checkpoint of orbax's, or cannot be read.
    """
    content = source.read(_METADATA)
    if content is None:
        raise store_lib.CheckpointError(
            f"{source} is no checkpoint of orbax's: it has no {_METADATA}. Of a CheckpointManager's, give "
            "STEP/default."
        )
    meta = json.loads(content)
    flat = {}
    for entry in meta["tree_metadata"].values():
        if entry["value_metadata"].get("skip_deserialize"):
            continue
        keys = [str(key["key"]) for key in entry["key_metadata"]]
        flat["/".join(keys)] = _open(source, ".".join(keys), meta)
    try:
        return {path: np.asarray(future.result().read().result()) for path, future in flat.items()}
    except ValueError as e:
        raise store_lib.CheckpointError(f"{source}: {store_lib.reason(e)}.") from e


def _open(source: store_lib.Store, name: str, meta: dict[str, Any]) -> Any:
    base = source.spec()
    if meta.get("use_ocdbt", True):
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
        kvstore = {**base, "path": f"{base['path']}{name}/"}
    driver = "zarr3" if meta.get("use_zarr3") else "zarr"
    return ts.open({"driver": driver, "kvstore": kvstore}, open=True)
