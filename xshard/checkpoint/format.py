"""What a checkpoint is.

    step_00001200.3f9a11c2/     a folder for each attempt to save, so that nothing is ever overwritten
        p0/, p1/, ...           what each process wrote: an OCDBT database each
        manifest.ocdbt, d/      all processes' databases, merged: its entries refer to p0/, p1/, ...
        meta.json               the tree: paths, shapes, types; the run's metadata; versions
        COMMIT                  created last and only if absent: with it the checkpoint counts
        PINNED, DAMAGED         marks: never deleted by a rule; set aside, with the reason

Each array of the tree is a zarr3 array under its path: uncompressed chunks of at most 16 MiB, each
followed by its CRC-32C. COMMIT holds the checksums of meta.json and of the manifest, the number of keys,
and the metrics that the best checkpoint is chosen by.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
import struct
from typing import Any

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np

from xshard.checkpoint import store as store_lib

VERSION = 2
COMMIT, META, MANIFEST = "COMMIT", "meta.json", "manifest.ocdbt"
PINNED, DAMAGED = "PINNED", "DAMAGED"
# What is read or written at once. Larger chunks were slower: memory of that size is not reused.
CHUNK_BYTES = 16 << 20
# An array that several processes hold is cut into parts for each of them, but not into smaller ones.
SHARED_CHUNK_BYTES = 8 << 20
# Smaller chunks are written and read as bytes: to open an array takes half a millisecond, more than to
# copy them.
LARGE_BYTES = 1 << 20
_CHUNKS_EACH = 4
# Those that tensorstore's zarr3 knows.
_TYPES = (
    "bool", "int2", "int4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float4_e2m1fn", "float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip
_CRC_BYTES = 4
_SMALL_FACTORS = 7
_NAME = re.compile(r"step_(\d{8,})\.([0-9a-f]{8})")

CheckpointError = store_lib.CheckpointError
Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The folder of one attempt to save a step, as it was when it was looked at.

    Attributes:
      store: where it is.
      step: the step's number.
      nonce: what tells it from other attempts.
      marks: which of COMMIT, PINNED and DAMAGED are in it.
    """

    store: store_lib.Store
    step: int
    nonce: str
    marks: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    @property
    def prefix(self) -> str:
        """What the names of its objects begin with."""
        return f"step_{self.step:08d}.{self.nonce}/"

    @property
    def counts(self) -> bool:
        """Whether it is a checkpoint that may be restored."""
        return COMMIT in self.marks and DAMAGED not in self.marks

    def __str__(self) -> str:
        return f"{self.store}/{self.prefix[:-1]}"

    def part(self, process: int) -> str:
        """The prefix of what a process writes."""
        return f"{self.prefix}p{process}/"


@dataclasses.dataclass(frozen=True)
class ArrayMeta:
    """An array of the tree as it is stored.

    Attributes:
      shape: its logical shape; of a PRNG key, that of its data.
      dtype: the name of its type, such as 'bfloat16'.
      chunk_shape: the shape of its chunks; those at its upper ends are filled up.
      key_impl: the name of the implementation if it is a typed PRNG key.
      sharding: how it lay on the devices, for people to read.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    key_impl: str | None = None
    sharding: str = ""

    def __str__(self) -> str:
        return f"{self.key_impl or self.dtype}{list(self.shape)}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a target must agree with."""
        return self.shape, self.dtype, self.key_impl

    @property
    def nbytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """The size of a value."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk without its checksum."""
        return math.prod(self.chunk_shape) * self.itemsize

    def chunks(self, box: Box | None = None) -> list[tuple[int, ...]]:
        """The places in the grid of the chunks that hold a part of the array; all by default."""
        box = box or tuple((0, size) for size in self.shape)
        ranges = [
            range(low // size, -(-high // size) if high > low else low // size)
            for (low, high), size in zip(box, self.chunk_shape, strict=True)
        ]
        return list(itertools.product(*ranges))

    def box(self, chunk: tuple[int, ...]) -> Box:
        """The part of the array that a chunk holds."""
        return tuple(
            (i * size, min((i + 1) * size, end))
            for i, size, end in zip(chunk, self.chunk_shape, self.shape, strict=True)
        )

    def keys(self, path: str) -> list[str]:
        """The keys of the database that hold the array."""
        return [f"{path}/zarr.json", *(chunk_key(path, chunk) for chunk in self.chunks())]

    def zarr(self) -> dict[str, Any]:
        """The content of the array's zarr.json."""
        grid = {"name": "regular", "configuration": {"chunk_shape": list(self.chunk_shape)}}
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": grid,
            "chunk_key_encoding": {"name": "default"},
            "fill_value": _fill_value(self.dtype),
            "codecs": codecs,
        }


def chunk_key(path: str, chunk: tuple[int, ...]) -> str:
    """The key of a chunk."""
    return "/".join([path, "c", *map(str, chunk)])


def encode(chunk: np.ndarray, shape: tuple[int, ...]) -> bytes:
    """A chunk's bytes and their CRC-32C, filled up to a shape with zeros."""
    if chunk.shape != shape:
        whole = np.zeros(shape, chunk.dtype)
        whole[tuple(map(slice, chunk.shape))] = chunk
        chunk = whole
    flat = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
    return b"".join((flat, struct.pack("<I", google_crc32c.value(flat))))  # type: ignore[arg-type]


def decode(content: bytes, meta: ArrayMeta) -> np.ndarray:
    """A chunk from its bytes.

    Raises:
      ValueError: if they are not what was written.
    """
    if len(content) != meta.chunk_bytes + _CRC_BYTES:
        raise ValueError(f"{len(content)} bytes instead of {meta.chunk_bytes + _CRC_BYTES}")
    flat = np.frombuffer(content, np.uint8)
    (stored,) = struct.unpack("<I", content[-_CRC_BYTES:])
    if google_crc32c.value(flat[:-_CRC_BYTES]) != stored:
        raise ValueError("its checksum differs")
    return flat[:-_CRC_BYTES].view(jnp.dtype(meta.dtype)).reshape(meta.chunk_shape)


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, which are the names in a checkpoint."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise CheckpointError(f"Two leaves of the state have the path '{name}'; rename one.")
        _check_type(name, leaf)
        named[name] = leaf
    if not named:
        raise CheckpointError("The state holds no arrays.")
    return named


def describe(leaf: Any, holders: int = 1) -> ArrayMeta:
    """How an array, or a jax.ShapeDtypeStruct, is stored.

    Args:
      leaf: the array.
      holders: the number of processes that hold each of its blocks, and share in writing it.
    """
    data, impl = key_data(leaf)
    shape, dtype = tuple(data.shape), jnp.dtype(data.dtype)
    sharding = getattr(data, "sharding", None)
    block = sharding.shard_shape(shape) if sharding else shape
    # A few for each, so that one more or less makes no great difference.
    part = math.prod(block) * dtype.itemsize // (_CHUNKS_EACH * holders)
    limit = CHUNK_BYTES if holders == 1 else min(max(part, SHARED_CHUNK_BYTES), CHUNK_BYTES)
    chunk = _chunk_shape(shape, block, limit // dtype.itemsize)
    return ArrayMeta(shape, dtype.name, chunk, impl, str(getattr(sharding, "spec", "")))


def key_data(leaf: Any) -> tuple[Any, str | None]:
    """The data of a typed PRNG key and the name of its implementation; of another array, itself."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf, None
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf), str(jax.random.key_impl(leaf))
    impls: list[str] = []

    def traced(key: Any) -> Any:
        impls.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    # Traced, since JAX tells the implementation of an array only, not of a shape.
    return jax.eval_shape(traced, leaf), impls[0]


def attempts(store: store_lib.Store) -> list[Attempt]:
    """All attempts in a store, the oldest step first."""
    marks: dict[str, set[str]] = {}
    for name in store.names():
        folder, _, rest = name.partition("/")
        if _NAME.fullmatch(folder):
            marks.setdefault(folder, set()).add(rest)
    found = [
        Attempt(store, int(match[1]), match[2], frozenset(inside & {COMMIT, PINNED, DAMAGED}))
        for folder, inside in marks.items()
        if (match := _NAME.fullmatch(folder))
    ]
    return sorted(found, key=lambda attempt: (attempt.step, attempt.nonce))


def committed(store: store_lib.Store) -> list[Attempt]:
    """The attempts that count, the oldest step first."""
    return [attempt for attempt in attempts(store) if attempt.counts]


def find(store: store_lib.Store, step: int) -> Attempt:
    """The checkpoint of a step.

    Raises:
      CheckpointError: if there is none that counts.
    """
    there = committed(store)
    for attempt in reversed(there):
        if attempt.step == step:
            return attempt
    steps = sorted({attempt.step for attempt in there})
    raise CheckpointError(
        f"There is no checkpoint of step {step} in {store}; steps there: {steps or 'none'}."
    )


def checksum(content: bytes) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(content).hexdigest()


def to_json(value: Any) -> bytes:
    """Readable JSON, the same for the same value."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def seal(value: dict[str, Any]) -> bytes:
    """JSON with a checksum of its own."""
    return to_json({"content": value, "sha256": checksum(to_json(value))})


def unseal(content: bytes) -> dict[str, Any]:
    """What was sealed; ValueError if it is not as it was."""
    outer = json.loads(content)
    if not isinstance(outer, dict) or content != seal(outer.get("content", {})):
        raise ValueError("its checksum differs")
    return outer["content"]


def _check_type(name: str, leaf: Any) -> None:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        raise CheckpointError(
            f"'{name}' is {leaf!r}, of type {type(leaf).__name__}; make it an array, such as jnp.int32(3)."
        )
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return
    if np.dtype(dtype).name not in _TYPES:
        raise CheckpointError(f"'{name}' is of type {dtype}, which zarr cannot hold; convert it.")


def _chunk_shape(shape: tuple[int, ...], block: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Parts of a block of at most `limit` values, so that each chunk has one owner."""
    chunk = [max(size, 1) for size in block]
    while math.prod(chunk) > limit:
        smaller = [
            _smaller(size, alone=part == whole)
            for size, part, whole in zip(chunk, block, shape, strict=True)
        ]
        # The longest dimension that can be cut; none if all are prime numbers of their blocks.
        candidates = [i for i, size in enumerate(smaller) if size < chunk[i]]
        if not candidates:
            break
        longest = max(candidates, key=lambda i: chunk[i])
        chunk[longest] = smaller[longest]
    return tuple(chunk)


def _smaller(size: int, *, alone: bool) -> int:
    """The next smaller part: what divides the size, or a half if no other blocks follow."""
    # A part that does not divide is filled up, which costs a copy.
    most = min(size, _SMALL_FACTORS) if alone else size
    exact = next((size // n for n in range(2, most + 1) if size % n == 0), None)
    return exact or (-(-size // 2) if alone else size)


def _fill_value(dtype: str) -> Any:
    """Zero, as zarr writes it for a type."""
    if dtype == "bool":
        return False
    if jnp.issubdtype(jnp.dtype(dtype), jnp.complexfloating):
        return [0.0, 0.0]
    return 0.0 if jnp.issubdtype(jnp.dtype(dtype), jnp.floating) else 0
