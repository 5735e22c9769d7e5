"""Samples that show what an experiment has trained: texts, images and histograms.

A row of samples.jsonl is `{'step': 500, 'kind': 'samples', 'samples': {name:
item}}`. An item is one of

    {'kind': 'text', 'text': ...}
    {'kind': 'image', 'png': ..., 'height': ..., 'width': ..., 'channels': ...}
    {'kind': 'histogram', 'counts': [...], 'edges': [...], 'sum': ..., 'squares': ...}

where 'png' is the file in base64, and 'squares' the sum of the values' squares.
"""

import base64
import binascii
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from xshard import errors
from xshard.files import jsonfile

Item = dict[str, Any]
# The kind of a row, as `xshard.metrics.rows` reads it.
_KIND = "samples"
# The name of a text that an experiment returns without a dictionary.
_ONLY = "samples"
_NUM_BINS = 40
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# The part of a line of samples.jsonl that is left for the step and the names.
_NAME_BYTES = 4096


class Image:
    """An image, as a sample of an experiment.

    >>> Image(np.eye(8)).item()['width']
    8
    """

    def __init__(self, pixels: Any):
        """Takes the pixels.

        Args:
          pixels: an array of shape (height, width), (height, width, 1) or (height,
            width, 3): uint8, or floating point from 0 (black) to 1. Values outside are
            clipped; NaN is black.

        Raises:
          UserError: if the shape or dtype is another.
        """
        array = np.asarray(pixels)
        if array.ndim == 2:
            array = array[:, :, np.newaxis]
        is_float = jax.dtypes.issubdtype(array.dtype, np.floating)
        if array.ndim != 3 or array.shape[2] not in (1, 3) or not array.size:
            raise errors.UserError(
                f"xshard.Image received an array of shape {np.shape(pixels)}; an image "
                "is of shape (height, width), (height, width, 1) or (height, width, "
                "3): show several in one by np.concatenate(images, axis=1)."
            )
        if array.dtype != np.uint8 and not is_float:
            raise errors.UserError(
                f"xshard.Image received an array of {array.dtype}; pixels are uint8, "
                "or of floating point from 0 to 1: pixels.astype(np.uint8), or pixels "
                "/ 255."
            )
        if is_float:
            known = np.nan_to_num(array.astype(np.float32), posinf=1.0, neginf=0.0)
            array = np.round(255 * np.clip(known, 0, 1)).astype(np.uint8)
        self.pixels: np.ndarray = array

    def item(self) -> Item:
        """Returns the image as an item of a row."""
        height, width, channels = self.pixels.shape
        return {
            "kind": "image",
            "png": base64.b64encode(_png(self.pixels)).decode(),
            "height": height,
            "width": width,
            "channels": channels,
        }

    def words(self) -> str:
        """Describes the image in a few words."""
        height, width, _ = self.pixels.shape
        return f"an image of {width}x{height} pixels"


class Histogram:
    """A histogram of values, as a sample of an experiment.

    >>> Histogram(np.arange(100)).words()
    'a histogram of 100 values'
    """

    def __init__(self, values: Any):
        """Takes the values.

        Args:
          values: a one-dimensional array of real numbers. Values that are not finite
            are left out.

        Raises:
          UserError: if the shape or dtype is another.
        """
        array = np.asarray(values)
        is_number = jax.dtypes.issubdtype(array.dtype, np.number) or array.dtype == bool
        is_complex = jax.dtypes.issubdtype(array.dtype, np.complexfloating)
        if array.ndim != 1 or not is_number or is_complex:
            raise errors.UserError(
                f"xshard.Histogram received an array of {array.dtype} of shape "
                f"{array.shape}; it takes real numbers, in one dimension: "
                "values.ravel()."
            )
        self.values: np.ndarray = array.astype(np.float64)

    def item(self) -> Item:
        """Returns the histogram as an item of a row.

        Its bins have equal width, from the smallest value to the largest.
        """
        finite = self.values[np.isfinite(self.values)]
        counts, edges = np.histogram(finite, _NUM_BINS)
        return {
            "kind": "histogram",
            "counts": counts.tolist(),
            "edges": edges.tolist(),
            "sum": float(finite.sum()),
            "squares": float(np.square(finite).sum()),
        }

    def words(self) -> str:
        """Describes the histogram in a few words."""
        return f"a histogram of {len(self.values)} values"


def named(where: str, returned: Any) -> dict[str, Any]:
    """Checks the result of `Experiment.samples`.

    Args:
      where: the method, for messages.
      returned: its result.

    Returns:
      The samples by name; none for an empty text.

    Raises:
      UserError: if something else than samples was returned.
    """
    if returned == "":
        return {}
    if isinstance(returned, str):
        return {_ONLY: returned}
    rule = (
        "It must return a text, or a dictionary of texts, xshard.Image and "
        "xshard.Histogram by name: return {'digits': xshard.Image(pixels)}."
    )
    if not isinstance(returned, Mapping):
        raise errors.UserError(f"{where} returned {type(returned).__name__}. {rule}")
    for name, value in returned.items():
        if not isinstance(name, str) or not name:
            raise errors.UserError(f"{where} returned a sample called {name!r}. {rule}")
        if not isinstance(value, str | Image | Histogram):
            raise errors.UserError(
                f"{where} returned {type(value).__name__} called {name!r}. {rule}"
            )
    return dict(returned)


def row(where: str, step: int, samples: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of samples.jsonl.

    Args:
      where: the method that returned the samples, for messages.
      step: the number of completed steps.
      samples: the samples by name, from `named`.

    Raises:
      UserError: if the samples are larger than a line may be.
    """
    items = {name: _item(value) for name, value in samples.items()}
    sizes = {name: len(jsonfile.dumps(item)) for name, item in items.items()}
    if sum(sizes.values()) > jsonfile.LINE_BYTES - _NAME_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise errors.UserError(
            f"{where} returned samples of {sum(sizes.values()):,} bytes; the samples "
            f"of a step must be below {jsonfile.LINE_BYTES:,} bytes together. The "
            f"largest is {largest!r}: show less of it, or at a lower resolution."
        )
    return {"step": step, "kind": _KIND, "samples": items}


def text(samples: Mapping[str, Any]) -> str:
    """Formats samples by name, from `named`, for printing."""
    if samples.keys() == {_ONLY} and isinstance(samples[_ONLY], str):
        # It was returned without a name.
        return samples[_ONLY]
    parts = []
    for name, value in samples.items():
        if isinstance(value, str):
            parts.append(f"{name}:\n{value}")
        else:
            parts.append(f"{name}: {value.words()}")
    return "\n".join(parts)


def items(row: Mapping[str, Any]) -> dict[str, Item]:
    """Returns the items of a row by name.

    The file may have been edited by hand, so invalid items are left out.
    """
    samples = row.get("samples")
    if not isinstance(samples, dict):
        return {}
    valid = {}
    for name, item in samples.items():
        if isinstance(item, dict) and _is_item(item):
            valid[name] = item
    return valid


def png(item: Item) -> bytes:
    """Returns the PNG file of an image item.

    Raises:
      binascii.Error: if its base64 is invalid.
    """
    return base64.b64decode(item["png"], validate=True)


def _item(value: Any) -> Item:
    if not isinstance(value, str):
        return value.item()
    # A text that was cut may end in half of a surrogate pair, which UTF-8 cannot
    # encode.
    return {"kind": "text", "text": value.encode("utf-8", "replace").decode()}


def _is_item(x: Item) -> bool:
    """Returns whether a value of a file is an item of one of the three kinds."""
    if x.get("kind") == "text":
        return isinstance(x.get("text"), str)
    if x.get("kind") == "image":
        for name in ("height", "width", "channels"):
            size = x.get(name)
            # Not isinstance, because a bool is an int too. Event files store sizes as
            # 32-bit integers.
            if type(size) is not int or not 0 < size < 1 << 31:
                return False
        return _is_png(x.get("png"))
    if x.get("kind") == "histogram":
        counts = x.get("counts")
        edges = x.get("edges")
        if not isinstance(counts, list) or not isinstance(edges, list):
            return False
        if not counts or len(edges) != len(counts) + 1:
            return False
        numbers = [*counts, *edges, x.get("sum"), x.get("squares")]
        return all(map(jsonfile.is_number, numbers))
    return False


def _is_png(content: Any) -> bool:
    try:
        return base64.b64decode(content, validate=True).startswith(_PNG_SIGNATURE)
    except (TypeError, ValueError, binascii.Error):
        return False


def _png(pixels: np.ndarray) -> bytes:
    """Encodes pixels as PNG.

    Source: the PNG specification, W3C, 2003.

    Args:
      pixels: uint8 of shape (height, width, channels), with 1 or 3 channels.
    """
    height, width, channels = pixels.shape
    color_type = {1: 0, 3: 2}[channels]
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    # Each line begins with its filter type; 0 is none.
    lines = np.insert(pixels.reshape(height, -1), 0, 0, axis=1)
    chunks = [
        (b"IHDR", header),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    ]
    content = _PNG_SIGNATURE
    for kind, data in chunks:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        content += struct.pack(">I", len(data)) + kind + data + checksum
    return content
