"""Fingerprints of arrays: sums of mixed words.

Each 32-bit word of an array is mixed with its position in the whole array and with the
array's path. The mixing yields two numbers per word, and each of the two is summed
modulo 2**32. The mixing is that of a hash function with two rounds
(https://github.com/skeeto/hash-prospector, lowbias32).
"""

import re
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_TEXT = re.compile("[0-9a-f]{16}")

# The number of words that are mixed at a time on the host, which bounds the memory for
# intermediate results.
_BLOCK = 1 << 20

# A prime near 2**32 divided by the golden ratio: it spreads consecutive positions.
_POSITION = 0x9E3779B1

# The multipliers of the two rounds.
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B


def words(x: Any, numpy: Any) -> Any:
    """Returns the bits of an array as uint32.

    The result has trailing dimensions if an element has more than 32 bits.

    Args:
      x: the array, of any type.
      numpy: the module to compute with, `numpy` or `jax.numpy`.
    """
    if numpy is jnp and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if numpy.iscomplexobj(x):
        x = numpy.stack([x.real, x.imag], axis=-1)
    if x.dtype == numpy.bool_:
        x = x.astype(numpy.uint8)
    # Types of less than 8 bits, such as int4, are widened to types that can be viewed
    # as unsigned integers.
    if jnp.issubdtype(x.dtype, jnp.integer):
        if jnp.iinfo(x.dtype).bits < 8:
            x = x.astype(numpy.int8)
    elif jnp.finfo(x.dtype).bits < 8:
        x = x.astype(numpy.float32)
    width = min(x.dtype.itemsize, 4)
    unsigned = np.dtype(f"uint{8 * width}")
    if numpy is jnp:
        return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    shape = x.shape
    if x.dtype.itemsize > width:
        shape = (*shape, x.dtype.itemsize // width)
    return np.ascontiguousarray(x).view(unsigned).reshape(shape).astype(np.uint32)


def keys(positions: Any, path: str, numpy: Any) -> Any:
    """Returns the keys with which the words of an array are mixed.

    Args:
      positions: the words' positions in the whole array, uint32.
      path: the array's path.
      numpy: the module to compute with.
    """
    salt = zlib.crc32(path.encode())
    return positions * numpy.uint32(_POSITION) + numpy.uint32(salt)


def mixed(words: Any, keys: Any, numpy: Any) -> tuple[Any, Any]:
    """Mixes each word with its key to two numbers.

    Both change with any change of the word, since each operation can be inverted.
    """
    u32 = numpy.uint32
    x = words ^ keys
    x = (x ^ (x >> u32(16))) * u32(_FIRST)
    x = x ^ (x >> u32(15))
    y = x * u32(_SECOND)
    return x, y ^ (y >> u32(16))


def text(value: Any) -> Any:
    """Formats a fingerprint as 16 hexadecimal digits.

    Those of several groups become a list of such texts.

    >>> text(np.array([10, 255], np.uint32))
    '0000000a000000ff'
    """
    pair = np.asarray(value)
    if pair.ndim > 1:
        return [text(of_group) for of_group in pair]
    return "".join(f"{int(word):08x}" for word in pair)


def of_arrays(arrays: Iterable[tuple[str, np.ndarray]]) -> str:
    """Computes the fingerprint of whole arrays on the host.

    It equals the sum of the fingerprints of all kinds (see `total`).

    Args:
      arrays: the arrays with their paths.

    Returns:
      The fingerprint as a `text`.
    """
    sums = np.zeros(2, np.uint32)
    for path, x in arrays:
        words_of_array = words(x, np).reshape(-1)
        for begin in range(0, words_of_array.size, _BLOCK):
            block = words_of_array[begin : begin + _BLOCK]
            # Positions wrap around at 2**32, as they do in the uint32 arithmetic on
            # devices.
            positions = np.arange(begin, begin + block.size, dtype=np.uint64)
            block_keys = keys(positions.astype(np.uint32), path, np)
            lanes = mixed(block, block_keys, np)
            sums += np.array([np.sum(lane, dtype=np.uint32) for lane in lanes])
    return text(sums)


def total(values: Iterable[Any]) -> str | None:
    """Adds fingerprints that are given as texts.

    The sum over all kinds equals the result of `of_arrays` for the same state. It is
    None if a value is no fingerprint, or has several groups.
    """
    sums = np.zeros(2, np.uint32)
    for value in values:
        if not isinstance(value, str) or not _TEXT.fullmatch(value):
            return None
        sums += np.array([int(value[:8], 16), int(value[8:], 16)], np.uint32)
    return text(sums)
