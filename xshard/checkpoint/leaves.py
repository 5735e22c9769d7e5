"""The leaves of a state: their names in a checkpoint, and the chunks that each is cut
into.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xshard.base import array_types
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import store as store_lib

# An array that several processes hold is cut into this many chunks for each of them.
_CHUNKS_EACH = 4
# The largest factor by which a dimension is divided at a time, if it may also be
# divided otherwise.
_LARGEST_FACTOR = 7

CheckpointError = store_lib.CheckpointError
Shape = arrays_lib.Shape


def flatten(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, which is their name in a checkpoint.

    Raises:
      CheckpointError: if two leaves have the same path, if a leaf is not an array, or
        its type or path cannot be stored, or if there are no leaves.
    """
    leaves: dict[str, Any] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if path in leaves:
            raise CheckpointError(
                f"Two leaves of the state have the path '{path}'; rename one."
            )
        leaves[path] = _checked(path, leaf)
    if not leaves:
        raise CheckpointError("The state holds no arrays.")
    return leaves


def describe(leaf: Any, holders: int = 1) -> arrays_lib.ArrayMeta:
    """Describes how an array, or a jax.ShapeDtypeStruct, is stored.

    Args:
      leaf: the array.
      holders: the number of processes that hold each of its shards, and share in
        writing it.
    """
    data, impl = key_data(leaf)
    shape = tuple(data.shape)
    dtype = jnp.dtype(data.dtype)
    sharding = getattr(data, "sharding", None)
    shard_shape = sharding.shard_shape(shape) if sharding else shape
    limit = arrays_lib.CHUNK_BYTES
    if holders > 1:
        # Several chunks for each holder divide the work evenly: one more or less makes
        # little difference.
        shard_bytes = math.prod(shard_shape) * dtype.itemsize
        share = shard_bytes // (_CHUNKS_EACH * holders)
        limit = min(max(share, arrays_lib.SHARED_CHUNK_BYTES), arrays_lib.CHUNK_BYTES)
    return arrays_lib.ArrayMeta(
        shape=shape,
        dtype=dtype.name,
        chunk_shape=_chunk_shape(shape, shard_shape, limit // dtype.itemsize),
        key_impl=impl,
        sharding=str(getattr(sharding, "spec", "")),
    )


def key_data(leaf: Any) -> tuple[Any, str | None]:
    """Returns the data of a typed PRNG key, and the name of its implementation.

    Returns any other array as it is, and None.
    """
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf, None
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf), str(jax.random.key_impl(leaf))

    # `jax.random.key_impl` takes arrays and tracers, not a `jax.ShapeDtypeStruct`, so
    # the implementation is noted while the function is traced.
    impls: list[str] = []

    def traced(key: Any) -> Any:
        impls.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    data = jax.eval_shape(traced, leaf)
    return data, impls[0]


def _checked(path: str, leaf: Any) -> Any:
    """Returns a leaf in the byte order of this machine, in which bytes are stored.

    Raises:
      CheckpointError: if it is no array, or of a type or path that cannot be stored.
    """
    try:
        path.encode()
    except UnicodeEncodeError as e:
        raise CheckpointError(f"The path {path!r} is no text ({e}); rename it.") from e
    # A target may have shapes in place of arrays.
    is_taken = isinstance(leaf, np.generic | jax.ShapeDtypeStruct)
    if not is_taken and not array_types.is_array(leaf):
        raise CheckpointError(
            f"'{path}' is {leaf!r}, of type {type(leaf).__name__}; make it an array of "
            "NumPy's own or of JAX's, such as jnp.int32(3), np.asarray(...), or "
            ".filled(value) where a mask hides elements."
        )
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return leaf
    if np.dtype(dtype).name not in arrays_lib.TYPES:
        raise CheckpointError(
            f"'{path}' is of type {dtype}, which zarr cannot hold; convert it."
        )
    if isinstance(leaf, np.ndarray):
        return leaf.astype(dtype.newbyteorder("="), copy=False)
    return leaf


def _chunk_shape(shape: Shape, shard_shape: Shape, limit: int) -> Shape:
    """Cuts a shard into equal chunks, so that no chunk spans two shards.

    Args:
      shape: the shape of the array.
      shard_shape: the shape of its shards.
      limit: the most elements of a chunk.
    """
    chunk = [max(size, 1) for size in shard_shape]
    while math.prod(chunk) > limit:
        # The longest dimension that can still be cut. None can if the chunk has size 1
        # in every dimension.
        longest = None
        smaller = 0
        for i, size in enumerate(chunk):
            cut = _smaller(size, is_whole=shard_shape[i] == shape[i])
            if cut < size and (longest is None or size > chunk[longest]):
                longest = i
                smaller = cut
        if longest is None:
            break
        chunk[longest] = smaller
    return tuple(chunk)


def _smaller(size: int, *, is_whole: bool) -> int:
    """Returns the next smaller chunk size for a dimension.

    Args:
      size: the current size of the chunk.
      is_whole: whether a shard spans the whole dimension. Only then may the size be one
        that does not divide it.
    """
    # A chunk that does not fill its shape is padded, which costs a copy, so small
    # divisors are tried first.
    largest_factor = min(size, _LARGEST_FACTOR) if is_whole else size
    for factor in range(2, largest_factor + 1):
        if size % factor == 0:
            return size // factor
    return -(-size // 2) if is_whole else size
