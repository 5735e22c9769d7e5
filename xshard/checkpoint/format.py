"""What a checkpoint is on disk.

    step_00001200.3f9a11c2/     a directory for each attempt to save, so that nothing is ever overwritten
        p0/                     what process 0 wrote: an OCDBT database
        manifest.ocdbt, d/      all processes' databases, merged: its entries refer to p0/ ...
        meta.json               the tree: paths, shapes, types; the run's own metadata; versions
        COMMIT                  created last and only if absent: with it the checkpoint counts

Each array of the tree is a zarr3 array under its path, in chunks of at most 32 MiB with a CRC-32C each.
COMMIT holds the checksums of meta.json and of the manifest, and the number of keys.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

VERSION = 1
CHUNK_BYTES = 32 << 20
COMMIT, META, MANIFEST = "COMMIT", "meta.json", "manifest.ocdbt"
_STEP_DIR = re.compile(r"step_(\d{8,})\.([0-9a-f]{8})")


class CheckpointError(ValueError):
    """A checkpoint that could not be written, or cannot be read as asked. The message says why."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The directory of one attempt to save a step."""

    root: pathlib.Path
    step: int
    nonce: str

    @property
    def path(self) -> pathlib.Path:
        """Where it is."""
        return self.root / f"step_{self.step:08d}.{self.nonce}"

    @property
    def is_committed(self) -> bool:
        """Whether it counts."""
        return (self.path / COMMIT).is_file()


@dataclasses.dataclass(frozen=True)
class ArrayMeta:
    """An array of the tree as it is stored.

    Attributes:
      shape: its logical shape; of a PRNG key, that of its data.
      dtype: the name of its type, such as 'bfloat16'.
      key_impl: the name of the implementation if it is a typed PRNG key.
    """

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of a chunk: halves of the array until it is small enough."""
        shape = [max(size, 1) for size in self.shape]
        while math.prod(shape) * jnp.dtype(self.dtype).itemsize > CHUNK_BYTES:
            longest = shape.index(max(shape))
            shape[longest] = -(-shape[longest] // 2)
        return tuple(shape)

    def keys(self, path: str) -> set[str]:
        """The keys of the database that hold the array."""
        counts = [-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True)]
        indices = itertools.product(*map(range, counts))
        return {f"{path}/zarr.json"} | {"/".join([path, "c", *map(str, i)]) for i in indices}

    def spec(self, kvstore: dict[str, Any], path: str) -> dict[str, Any]:
        """Tensorstore's spec of the array in a database."""
        return {
            "driver": "zarr3",
            "kvstore": {**kvstore, "path": f"{path}/"},
            "metadata": {
                "shape": list(self.shape),
                "data_type": self.dtype,
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": list(self.chunk_shape)},
                },
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "crc32c"},
                ],
            },
            # A missing chunk is damage, not zeros.
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }


def database(directory: pathlib.Path) -> dict[str, Any]:
    """The spec of the OCDBT database in a directory."""
    return {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{directory}/"},
        "config": {"manifest_kind": "single", "max_inline_value_bytes": 1024},
        "target_data_file_size": 64 << 20,
    }


def context() -> ts.Context:
    """A context for one save or restore: a longer life would keep its cache in memory."""
    return ts.Context(
        {"file_io_concurrency": {"limit": 32}, "cache_pool": {"total_bytes_limit": 0}}
    )


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, which are the names in a checkpoint."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise CheckpointError(f"Two leaves of the state have the path '{name}'; rename one.")
        named[name] = leaf
    return named


def describe(leaf: Any) -> ArrayMeta:
    """How an array, or a jax.ShapeDtypeStruct, is stored."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impls: list[str] = []

        def key_data(key: Any) -> Any:
            impls.append(str(jax.random.key_impl(key)))
            return jax.random.key_data(key)

        # Traced, since JAX tells the implementation of an array only, not of a shape.
        data = jax.eval_shape(key_data, leaf)
        return ArrayMeta(data.shape, data.dtype.name, impls[0])
    return ArrayMeta(tuple(leaf.shape), np.dtype(leaf.dtype).name)


def attempts(root: pathlib.Path) -> list[Attempt]:
    """All attempts in a directory, the oldest step first."""
    if not root.is_dir():
        return []
    matches = (_STEP_DIR.fullmatch(path.name) for path in root.iterdir())
    found = [Attempt(root, int(match[1]), match[2]) for match in matches if match]
    return sorted(found, key=lambda attempt: (attempt.step, attempt.nonce))


def committed(root: pathlib.Path) -> list[Attempt]:
    """The attempts that count, the oldest step first."""
    return [attempt for attempt in attempts(root) if attempt.is_committed]


def checksum(path: pathlib.Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def to_json(value: Any) -> bytes:
    """Readable JSON, the same for the same value."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
