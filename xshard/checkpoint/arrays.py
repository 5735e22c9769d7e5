"""The storage of an array.

Each is a zarr3 array: uncompressed chunks of at most 16 MiB, each followed by its CRC-32C.
"""

import dataclasses
import itertools
import math
import struct
from typing import Any

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np

from xshard.checkpoint import store as store_lib

# What is read or written at once. Larger chunks were slower: memory of that size is not reused.
CHUNK_BYTES = 16 << 20
# An array that several processes hold is cut into parts for each of them, but not into smaller ones.
SHARED_CHUNK_BYTES = 8 << 20
# Smaller chunks are written and read as bytes: to open an array takes half a millisecond, more than to
# copy them.
LARGE_BYTES = 1 << 20
_CHUNKS_EACH = 4
# Those that tensorstore's zarr3 knows.
TYPES = (
    "bool", "int2", "int4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float4_e2m1fn", "float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip
CRC_BYTES = 4
_SMALL_FACTORS = 7

CheckpointError = store_lib.CheckpointError
Shape = tuple[int, ...]
# Of a chunk, in the grid of its array.
Place = tuple[int, ...]
# The bounds of a part of an array, in each dimension.
Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class ArrayMeta:
    """An array of the tree as it is stored.

    Attributes:
      shape: its logical shape; of a PRNG key, that of its data.
      dtype: the name of its type, such as 'bfloat16'.
      chunk_shape: the shape of its chunks; those at its upper ends are filled up.
      key_impl: the name of the implementation if it is a typed PRNG key.
      sharding: how it lay on the devices, for people to read.
      sums: the CRC-32C of each of `chunks()`, so that no other checkpoint's chunk, nor another array's, passes for
        it; None in a checkpoint of a version that did not keep them.
    """

    shape: Shape
    dtype: str
    chunk_shape: Shape
    key_impl: str | None = None
    sharding: str = ""
    sums: Shape | None = None

    def __str__(self) -> str:
        return f"{self.key_impl or self.dtype}{list(self.shape)}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that a target must share."""
        return self.shape, self.dtype, self.key_impl

    @property
    def itemsize(self) -> int:
        """The size of a value."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk without its checksum."""
        return math.prod(self.chunk_shape) * self.itemsize

    @property
    def nbytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * self.itemsize

    @property
    def grid(self) -> Shape:
        """The number of its chunks in each dimension."""
        pairs = zip(self.shape, self.chunk_shape, strict=True)
        return tuple(-(-size // part) for size, part in pairs)

    @property
    def chunk_count(self) -> int:
        """The number of its chunks."""
        return math.prod(self.grid)

    @property
    def sum_place(self) -> slice:
        """The place of the checksum in the bytes of a chunk."""
        return slice(self.chunk_bytes, self.chunk_bytes + CRC_BYTES)

    def chunks(self, box: Box | None = None) -> list[Place]:
        """The places in the grid of the chunks that hold a part of the array; all by default."""
        if box is None:
            box = whole_box(self.shape)
        ranges = []
        for (low, high), size in zip(box, self.chunk_shape, strict=True):
            first = low // size
            # Of an empty part there are none.
            end = -(-high // size) if high > low else first
            ranges.append(range(first, end))
        return list(itertools.product(*ranges))

    def box(self, chunk: Place) -> Box:
        """The part of the array that a chunk holds."""
        box = []
        for i, size, end in zip(chunk, self.chunk_shape, self.shape, strict=True):
            box.append((i * size, min((i + 1) * size, end)))
        return tuple(box)

    def sum_of(self, chunk: Place) -> int | None:
        """The CRC-32C of a chunk, if it is known."""
        if self.sums is None:
            return None
        place = 0
        for index, count in zip(chunk, self.grid, strict=True):
            place = place * count + index
        return self.sums[place]

    def keys(self, path: str) -> list[str]:
        """The keys of the database that hold the array."""
        return [f"{path}/zarr.json", *self.chunk_keys(path)]

    def chunk_keys(self, path: str) -> list[str]:
        """The keys of `chunks()`."""
        return [chunk_key(path, chunk) for chunk in self.chunks()]

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


# Those of a tree, by their paths.
ArrayMetas = dict[str, ArrayMeta]


def whole_box(shape: Shape) -> Box:
    """The box that is all of an array."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> Shape:
    """The shape of what is in a box."""
    return tuple(high - low for low, high in box)


def box_index(box: Box) -> tuple[slice, ...]:
    """The index that takes a box out of an array."""
    return tuple(slice(low, high) for low, high in box)


def as_box(index: tuple[slice, ...], shape: Shape) -> Box:
    """The box that an index of slices takes out of an array."""
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def is_large(path: str, meta: ArrayMeta) -> bool:
    """Returns whether tensorstore puts an array's chunks together, which takes the time to open the array."""
    # It takes a path that begins with a slash, as that of an array that is a whole tree, for another.
    return bool(path) and meta.chunk_bytes >= LARGE_BYTES


def chunk_key(path: str, chunk: Place) -> str:
    """The key of a chunk."""
    return "/".join([path, "c", *map(str, chunk)])


def encode(chunk: np.ndarray, shape: Shape) -> bytes:
    """A chunk's bytes and their CRC-32C, filled up to a shape with zeros."""
    if chunk.shape != shape:
        whole = np.zeros(shape, chunk.dtype)
        whole[tuple(map(slice, chunk.shape))] = chunk
        chunk = whole
    flat = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
    return b"".join((flat, struct.pack("<I", google_crc32c.value(flat))))  # type: ignore[arg-type]


def stored_sum(content: bytes) -> int:
    """The CRC-32C that a chunk's bytes end with."""
    (stored,) = struct.unpack("<I", content[-CRC_BYTES:])
    return stored


def check_sum(content: bytes, meta: ArrayMeta, chunk: Place) -> None:
    """Raises ValueError if bytes, or their end, are another chunk's."""
    expected = meta.sum_of(chunk)
    if expected is not None and stored_sum(content) != expected:
        raise ValueError("it is another chunk than was written")


def decode(content: bytes, meta: ArrayMeta, chunk: Place) -> np.ndarray:
    """A chunk from its bytes.

    Args:
      content: the bytes.
      meta: how its array is stored.
      chunk: its place in the grid.

    Raises:
      ValueError: if they are not what was written.
    """
    if len(content) != meta.chunk_bytes + CRC_BYTES:
        raise ValueError(f"{len(content)} bytes instead of {meta.chunk_bytes + CRC_BYTES}")
    flat = np.frombuffer(content, np.uint8)
    if google_crc32c.value(flat[:-CRC_BYTES]) != stored_sum(content):
        raise ValueError("its checksum differs")
    check_sum(content, meta, chunk)
    return flat[:-CRC_BYTES].view(jnp.dtype(meta.dtype)).reshape(meta.chunk_shape)


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
    """Describes how an array, or a jax.ShapeDtypeStruct, is stored.

    Args:
      leaf: the array.
      holders: the number of processes that hold each of its blocks, and share in writing it.
    """
    data, impl = key_data(leaf)
    shape, dtype = tuple(data.shape), jnp.dtype(data.dtype)
    sharding = getattr(data, "sharding", None)
    block = sharding.shard_shape(shape) if sharding else shape
    limit = CHUNK_BYTES
    if holders > 1:
        # A few for each, so that one more or less makes no great difference.
        part = math.prod(block) * dtype.itemsize // (_CHUNKS_EACH * holders)
        limit = min(max(part, SHARED_CHUNK_BYTES), CHUNK_BYTES)
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


def _check_type(name: str, leaf: Any) -> None:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        raise CheckpointError(
            f"'{name}' is {leaf!r}, of type {type(leaf).__name__}; make it an array, such as jnp.int32(3)."
        )
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return
    if np.dtype(dtype).name not in TYPES:
        raise CheckpointError(f"'{name}' is of type {dtype}, which zarr cannot hold; convert it.")


def _chunk_shape(shape: Shape, block: Shape, limit: int) -> Shape:
    """Parts of a block of at most `limit` values, so that each chunk has one owner."""
    chunk = [max(size, 1) for size in block]
    while math.prod(chunk) > limit:
        # The longest dimension that can be cut; none if all are prime numbers of their blocks.
        longest, cut = None, 0
        for i, size in enumerate(chunk):
            smaller = _smaller(size, alone=block[i] == shape[i])
            if smaller < size and (longest is None or size > chunk[longest]):
                longest, cut = i, smaller
        if longest is None:
            break
        chunk[longest] = cut
    return tuple(chunk)


def _smaller(size: int, *, alone: bool) -> int:
    """The next smaller part: what divides the size, or a half if no other blocks follow."""
    # A part that does not divide is filled up, which costs a copy.
    most = min(size, _SMALL_FACTORS) if alone else size
    for factor in range(2, most + 1):
        if size % factor == 0:
            return size // factor
    return -(-size // 2) if alone else size


def _fill_value(dtype: str) -> Any:
    """Zero, as zarr writes it for a type."""
    if dtype == "bool":
        return False
    if jnp.issubdtype(jnp.dtype(dtype), jnp.complexfloating):
        return [0.0, 0.0]
    if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return 0.0
    return 0
