"""The storage of an array in a checkpoint.

Each array is a zarr3 array of uncompressed chunks of at most 16 MiB. Each chunk is
followed by its CRC-32C.
"""

import dataclasses
import itertools
import math
import struct
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np

# The largest chunk. Larger ones were slower in measurements, because memory of that
# size is not reused.
CHUNK_BYTES = 16 << 20
# An array that several processes hold is cut into chunks for each of them, but not into
# chunks smaller than this.
SHARED_CHUNK_BYTES = 8 << 20
# Chunks smaller than this are written and read as bytes. Opening an array in
# tensorstore takes half a millisecond, longer than copying such a chunk.
LARGE_BYTES = 1 << 20
# The types that tensorstore's zarr3 driver supports.
TYPES = (
    "bool", "int2", "int4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float4_e2m1fn", "float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip
_CRC_BYTES = 4

Shape = tuple[int, ...]
# The index of a chunk in the grid of its array.
ChunkIndex = tuple[int, ...]
# The bounds of a part of an array, in each dimension.
Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class ArrayMeta:
    """An array of the tree as it is stored.

    Attributes:
      shape: the array's logical shape; for a typed PRNG key, the shape of its data.
      dtype: the name of its type, such as 'bfloat16'.
      chunk_shape: the shape of its chunks; chunks at the upper ends are padded.
      key_impl: the name of the PRNG implementation, if the array is a typed PRNG key.
      sharding: the partition spec at the time of the save, for people to read.
    """

    shape: Shape
    dtype: str
    chunk_shape: Shape
    key_impl: str | None = None
    sharding: str = ""

    def __str__(self) -> str:
        return f"{self.key_impl or self.dtype}{list(self.shape)}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that a target for a restore must share."""
        return self.shape, self.dtype, self.key_impl

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return dtype_of(self.dtype).itemsize

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk in bytes, without its checksum."""
        return math.prod(self.chunk_shape) * self.itemsize

    @property
    def nbytes(self) -> int:
        """The size of all elements in bytes."""
        return math.prod(self.shape) * self.itemsize

    @property
    def grid(self) -> Shape:
        """The number of chunks in each dimension."""
        pairs = zip(self.shape, self.chunk_shape, strict=True)
        return tuple(-(-size // part) for size, part in pairs)

    @property
    def chunk_count(self) -> int:
        """The number of chunks."""
        return math.prod(self.grid)

    def chunks(self, box: Box | None = None) -> list[ChunkIndex]:
        """Lists the chunks that hold a part of the array, by their places in the grid;
        all chunks by default.
        """
        if box is None:
            box = whole_box(self.shape)
        ranges = []
        for (low, high), size in zip(box, self.chunk_shape, strict=True):
            first = low // size
            # An empty part has no chunks.
            end = -(-high // size) if high > low else first
            ranges.append(range(first, end))
        return list(itertools.product(*ranges))

    def box(self, chunk: ChunkIndex) -> Box:
        """Returns the part of the array that a chunk holds."""
        box = []
        for i, size, end in zip(chunk, self.chunk_shape, self.shape, strict=True):
            box.append((i * size, min((i + 1) * size, end)))
        return tuple(box)

    def keys(self, path: str) -> list[str]:
        """Lists the keys of the database that hold the array."""
        chunk_keys = [chunk_key(path, chunk) for chunk in self.chunks()]
        return [f"{path}/zarr.json", *chunk_keys]

    def zarr(self) -> dict[str, Any]:
        """Returns the content of the array's zarr.json."""
        grid = {
            "name": "regular",
            "configuration": {"chunk_shape": list(self.chunk_shape)},
        }
        codecs = [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ]
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


# The arrays of a tree, by path.
ArrayMetas = dict[str, ArrayMeta]


def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the type of a name in `TYPES`, such as 'bfloat16', which NumPy alone does
    not know.
    """
    return np.dtype(getattr(ml_dtypes, name, name))


def whole_box(shape: Shape) -> Box:
    """Returns the box of a whole array."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> Shape:
    """Returns the shape of a box."""
    return tuple(high - low for low, high in box)


def box_index(box: Box) -> tuple[slice, ...]:
    """Converts a box to an index of slices."""
    return tuple(slice(low, high) for low, high in box)


def as_box(index: tuple[slice, ...], shape: Shape) -> Box:
    """Converts an index of slices into an array of a shape to a box."""
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def is_large(path: str, meta: ArrayMeta) -> bool:
    """Returns whether an array is read and written through tensorstore's zarr3 driver,
    not as bytes.
    """
    # A tree that is a single array has the empty path, and its keys begin with a slash.
    # The driver misreads them.
    return bool(path) and meta.chunk_bytes >= LARGE_BYTES


def chunk_key(path: str, chunk: ChunkIndex) -> str:
    """Returns the database key of a chunk."""
    return "/".join([path, "c", *map(str, chunk)])


def encode(chunk: np.ndarray, shape: Shape) -> bytes:
    """Encodes a chunk, padded with zeros to a shape, as its bytes followed by their
    CRC-32C.
    """
    if chunk.shape != shape:
        whole = np.zeros(shape, chunk.dtype)
        whole[tuple(map(slice, chunk.shape))] = chunk
        chunk = whole
    flat = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
    return b"".join((flat, struct.pack("<I", google_crc32c.value(flat))))  # type: ignore[arg-type]


def decode(content: bytes, meta: ArrayMeta) -> np.ndarray:
    """Decodes a chunk from its bytes.

    Args:
      content: the stored bytes, with the checksum.
      meta: how the array is stored.

    Raises:
      ValueError: if the bytes are not what was written.
    """
    if len(content) != meta.chunk_bytes + _CRC_BYTES:
        raise ValueError(
            f"{len(content)} bytes instead of {meta.chunk_bytes + _CRC_BYTES}"
        )
    flat = np.frombuffer(content, np.uint8)
    (stored,) = struct.unpack("<I", content[-_CRC_BYTES:])
    if google_crc32c.value(flat[:-_CRC_BYTES]) != stored:
        raise ValueError("its checksum differs")
    return flat[:-_CRC_BYTES].view(dtype_of(meta.dtype)).reshape(meta.chunk_shape)


def _fill_value(dtype: str) -> Any:
    """Returns zero as zarr's JSON represents it for a type."""
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    if dtype.startswith(("bfloat", "float")):
        return 0.0
    return 0
