"""The leaves of a state: their names in a checkpoint, and the chunks that each is cut
into.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import store as store_lib

_CHUNKS_EACH = 4
_SMALL_FACTORS = 7

CheckpointError = store_lib.CheckpointError
Shape = arrays_lib.Shape


def flatten(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, which is their name in a checkpoint."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise CheckpointError(
                f"Two leaves of the state have the path '{name}'; rename one."
            )
        _check_type(name, leaf)
        named[name] = leaf
    if not named:
        raise CheckpointError("The state holds no arrays.")
    return named


def describe(leaf: Any, holders: int = 1) -> arrays_lib.ArrayMeta:
    """Describes how an array, or a jax.ShapeDtypeStruct, is stored.

    Args:
      leaf: the array.
      holders: the number of processes that hold each of its blocks, and share in
        writing it.
    """
    data, impl = key_data(leaf)
    shape, dtype = tuple(data.shape), jnp.dtype(data.dtype)
    sharding = getattr(data, "sharding", None)
    block = sharding.shard_shape(shape) if sharding else shape
    limit = arrays_lib.CHUNK_BYTES
    if holders > 1:
        # Several chunks for each holder divide the work evenly: one more or less makes
        # little difference.
        part = math.prod(block) * dtype.itemsize // (_CHUNKS_EACH * holders)
        limit = min(max(part, arrays_lib.SHARED_CHUNK_BYTES), arrays_lib.CHUNK_BYTES)
    chunk = _chunk_shape(shape, block, limit // dtype.itemsize)
    return arrays_lib.ArrayMeta(
        shape, dtype.name, chunk, impl, str(getattr(sharding, "spec", ""))
    )


def key_data(leaf: Any) -> tuple[Any, str | None]:
    """Returns the data of a typed PRNG key and its implementation's name; for any other
    array, the array and None.
    """
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf, None
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf), str(jax.random.key_impl(leaf))
    impls: list[str] = []

    def traced(key: Any) -> Any:
        impls.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    # The function is traced because `jax.random.key_impl` takes arrays and tracers, not
    # a `jax.ShapeDtypeStruct`.
    return jax.eval_shape(traced, leaf), impls[0]


def _check_type(name: str, leaf: Any) -> None:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        raise CheckpointError(
            f"'{name}' is {leaf!r}, of type {type(leaf).__name__}; make it an array, such as jnp.int32(3)."
        )
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return
    if np.dtype(dtype).name not in arrays_lib.TYPES:
        raise CheckpointError(
            f"'{name}' is of type {dtype}, which zarr cannot hold; convert it."
        )


def _chunk_shape(shape: Shape, block: Shape, limit: int) -> Shape:
    """Cuts a shard's block into equal chunks of at most `limit` elements, so that no
    chunk spans two blocks.
    """
    chunk = [max(size, 1) for size in block]
    while math.prod(chunk) > limit:
        # The longest dimension that can still be cut. None can if the chunk has size 1
        # in every dimension.
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
    """Returns the next smaller chunk size for a dimension.

    Args:
      size: the current size of the chunk.
      alone: whether the block spans the whole dimension. Only then may the size be one
        that does not divide it.
    """
    # A chunk that does not fill its shape is padded, which costs a copy, so small
    # divisors are tried first.
    most = min(size, _SMALL_FACTORS) if alone else size
    for factor in range(2, most + 1):
        if size % factor == 0:
            return size // factor
    return -(-size // 2) if alone else size
