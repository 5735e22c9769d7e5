"""Fingerprints of arrays: sums of mixed words.

Each 32-bit word of an array is mixed with its place in the whole array and with the array's path, and the results are
added modulo 2**32, twice in two ways. The mixing is that of hash functions with two rounds
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
# Words of the host's that are mixed at a time.
_BLOCK = 1 << 20
_PLACE, _FIRST, _SECOND = 0x9E3779B1, 0x7FEB352D, 0x846CA68B


def words(x: Any, numpy: Any) -> Any:
    """The bits of an array as uint32, with more dimensions where an element has more of them."""
    if numpy is jnp and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if numpy.iscomplexobj(x):
        x = numpy.stack([x.real, x.imag], axis=-1)
    if x.dtype == numpy.bool_:
        x = x.astype(numpy.uint8)
    of_integers = jnp.issubdtype(x.dtype, jnp.integer)
    if (jnp.iinfo if of_integers else jnp.finfo)(x.dtype).bits < 8:
        x = x.astype(numpy.int8 if of_integers else numpy.float32)
    width = min(x.dtype.itemsize, 4)
    unsigned = np.dtype(f"uint{8 * width}")
    if numpy is jnp:
        return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    shape = x.shape if x.dtype.itemsize == width else (*x.shape, x.dtype.itemsize // width)
    return np.ascontiguousarray(x).view(unsigned).reshape(shape).astype(np.uint32)


def keys(number: Any, path: str, numpy: Any) -> Any:
    """The words' numbers in the whole array, uint32, and its path in one, with which the words are mixed."""
    salt = zlib.crc32(path.encode())
    return number * numpy.uint32(_PLACE) + numpy.uint32(salt)


def mixed(words: Any, keys: Any, numpy: Any) -> tuple[Any, Any]:
    """Two numbers for each word, of which any change of the word changes both."""
    u32 = numpy.uint32
    x = words ^ keys
    x = (x ^ (x >> u32(16))) * u32(_FIRST)
    x = x ^ (x >> u32(15))
    y = x * u32(_SECOND)
    return x, y ^ (y >> u32(16))


def text(value: Any) -> Any:
    """A fingerprint as 16 hexadecimal digits; of several groups a list.

    >>> text(np.array([10, 255], np.uint32))
    '0000000a000000ff'
    """
    pair = np.asarray(value)
    if pair.ndim > 1:
        return [text(of_group) for of_group in pair]
    return "".join(f"{int(word):08x}" for word in pair)


def of_arrays(arrays: Iterable[tuple[str, np.ndarray]]) -> str:
    """The fingerprint of whole arrays on the host with their paths: the sum of those of all kinds, as `text`."""
    sums = np.zeros(2, np.uint32)
    for path, x in arrays:
        of_array = words(x, np).reshape(-1)
        for begin in range(0, of_array.size, _BLOCK):
            block = of_array[begin : begin + _BLOCK]
            number = np.arange(begin, begin + block.size, dtype=np.uint64).astype(np.uint32)
            lanes = mixed(block, keys(number, path, np), np)
            sums += np.array([np.sum(lane, dtype=np.uint32) for lane in lanes])
    return text(sums)


def total(values: Iterable[Any]) -> str | None:
    """The sum of fingerprints, as `of_arrays` has it; None if one is none, or is of several groups."""
    sums = np.zeros(2, np.uint32)
    for value in values:
        if not isinstance(value, str) or not _TEXT.fullmatch(value):
            return None
        sums += np.array([int(value[:8], 16), int(value[8:], 16)], np.uint32)
    return text(sums)
