"""How an array is stored in a checkpoint.

Each array is a zarr3 array of uncompressed chunks of at most 16 MiB, under its path in
the database of the checkpoint:

    params/mlp/w/zarr.json     its shape, its type and the shape of its chunks
    params/mlp/w/c/0/1         a chunk, padded to its full shape, and its CRC-32C

Any reader of zarr3 in OCDBT opens it, such as tensorstore.
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
    "bool",
    "int2",
    "int4",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e4m3b11fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
_CRC_BYTES = 4

Shape = tuple[int, ...]
# The place of a chunk in the grid of an array's chunks.
GridIndex = tuple[int, ...]
# A part of an array: (start, stop) in each dimension. It means the same as an index of
# slices, which Python 3.11 cannot hash.
Index = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class ArrayMeta:
    """How an array is stored; an entry of meta.json.

    Attributes:
      shape: the array's global shape; for a typed PRNG key, the shape of its data.
      dtype: the name of its type, such as 'bfloat16'.
      chunk_shape: the shape of its chunks. Those at the upper ends are padded to it.
      key_impl: the name of the PRNG implementation, if the array is a typed PRNG key.
      sharding: the partition spec at the time of the save, for people to read.
    """

    shape: Shape
    dtype: str
    chunk_shape: Shape
    key_impl: str | None = None
    sharding: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in TYPES:
            raise ValueError(f"{self.dtype!r} is not a type that zarr supports")

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

    def chunks(self, index: Index | None = None) -> list[GridIndex]:
        """Lists the chunks that hold a part of the array; by default, all chunks."""
        if index is None:
            index = full_index(self.shape)
        ranges = []
        for (start, stop), chunk_size in zip(index, self.chunk_shape, strict=True):
            first = start // chunk_size
            # An empty part has no chunks.
            end = -(-stop // chunk_size) if stop > start else first
            ranges.append(range(first, end))
        return list(itertools.product(*ranges))

    def index_of(self, chunk: GridIndex) -> Index:
        """Returns the part of the array that a chunk holds, without its padding."""
        index = []
        for i, chunk_size, size in zip(
            chunk, self.chunk_shape, self.shape, strict=True
        ):
            index.append((i * chunk_size, min((i + 1) * chunk_size, size)))
        return tuple(index)

    def keys(self, path: str) -> list[str]:
        """Lists the keys of the database that hold the array."""
        chunk_keys = [chunk_key(path, chunk) for chunk in self.chunks()]
        return [f"{path}/zarr.json", *chunk_keys]

    def zarr(self) -> dict[str, Any]:
        """Returns the content of the array's zarr.json."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": list(self.chunk_shape)},
            },
            "chunk_key_encoding": {"name": "default"},
            "fill_value": _zero(self.dtype),
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        }


# The arrays of a tree, by path.
ArrayMetas = dict[str, ArrayMeta]


def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the type of a name in `TYPES`, such as 'bfloat16', which NumPy alone does
    not know.
    """
    return np.dtype(getattr(ml_dtypes, name, name))


def full_index(shape: Shape) -> Index:
    """Returns the index of a whole array."""
    return tuple((0, size) for size in shape)


def as_index(slices: tuple[slice, ...], shape: Shape) -> Index:
    """Converts slices into an array of a shape, as JAX's shardings give them."""
    index = []
    for one, size in zip(slices, shape, strict=True):
        start, stop, _ = one.indices(size)
        index.append((start, stop))
    return tuple(index)


def as_slices(index: Index) -> tuple[slice, ...]:
    """Converts an index to slices."""
    return tuple(slice(start, stop) for start, stop in index)


def index_shape(index: Index) -> Shape:
    """Returns the shape of the part at an index."""
    return tuple(stop - start for start, stop in index)


def is_large(path: str, meta: ArrayMeta) -> bool:
    """Returns whether an array is read and written through tensorstore's zarr3 driver,
    not as bytes.
    """
    # A tree that is a single array has the empty path, and its keys begin with a slash.
    # The driver misreads them.
    return bool(path) and meta.chunk_bytes >= LARGE_BYTES


def chunk_key(path: str, chunk: GridIndex) -> str:
    """Returns the database key of a chunk."""
    return "/".join([path, "c", *map(str, chunk)])


def encode(chunk: np.ndarray, shape: Shape) -> bytes:
    """Encodes a chunk as its bytes, padded with zeros to a shape, and their CRC-32C."""
    if chunk.shape != shape:
        padded = np.zeros(shape, chunk.dtype)
        padded[tuple(map(slice, chunk.shape))] = chunk
        chunk = padded
    flat = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
    checksum = struct.pack("<I", google_crc32c.value(flat))
    return b"".join((flat, checksum))  # type: ignore[arg-type]


def decode(content: bytes, meta: ArrayMeta) -> np.ndarray:
    """Decodes a chunk from its bytes.

    Args:
      content: the stored bytes, with the checksum.
      meta: how the array is stored.

    Raises:
      ValueError: if the bytes are not those of a chunk of the array.
    """
    if len(content) != meta.chunk_bytes + _CRC_BYTES:
        raise ValueError(
            f"{len(content)} bytes instead of {meta.chunk_bytes + _CRC_BYTES}"
        )
    # Every flipped bit, overwritten block and torn write within a chunk shows here, or
    # in tensorstore's driver for large chunks. A whole chunk in the place of another
    # does not: the fingerprint of the state shows that (see
    # `xshard.training.fingerprint`), to a run that resumes and to `verify`.
    elements = np.frombuffer(content, np.uint8)[:-_CRC_BYTES]
    (checksum,) = struct.unpack("<I", content[-_CRC_BYTES:])
    if google_crc32c.value(elements) != checksum:
        raise ValueError("its checksum differs")
    return elements.view(dtype_of(meta.dtype)).reshape(meta.chunk_shape)


def _zero(dtype: str) -> Any:
    """Returns zero as zarr's JSON represents it for a type."""
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    if dtype.startswith(("bfloat", "float")):
        return 0.0
    return 0
