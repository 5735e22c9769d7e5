"""Validation of COMMIT, METRICS and meta.json. Their checksums detect damage, but not a
file of another origin.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.files import jsonfile

_LARGEST = (1 << 63) - 1
# The last second of the year 9999, the largest date that Python can represent.
_LAST_SECOND = 253402300799
# Tensorstore's limit.
_MOST_DIMENSIONS = 32
_SHOWN = 60


class _Field(NamedTuple):
    """A rule for a value: its description, for messages; its check; and whether the
    value may be missing.
    """

    words: str
    holds: Callable[[Any], bool]
    optional: bool = False


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list_of(is_good: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list) and all(map(is_good, value))


def _is_object_of(is_good: Callable[[Any], bool], value: Any) -> bool:
    return _is_object(value) and all(map(is_good, value.values()))


def _is_shape(value: Any) -> bool:
    if not _is_list_of(_is_count, value) or len(value) > _MOST_DIMENSIONS:
        return False
    # NumPy refuses larger arrays, even if one of their dimensions is 0. The widest type
    # has 16 bytes.
    return math.prod(max(size, 1) for size in value) <= _LARGEST // 16


_COUNT = _Field("an integer of at least 0", _is_count)
_TEXT = _Field("a string", _is_text)
_OBJECT = _Field("an object", _is_object)
_METRICS = _Field(
    "an object of numbers", lambda value: _is_object_of(jsonfile.is_number, value)
)
_SHAPE = _Field("a shape", _is_shape)
_COMMIT = {
    "step": _COUNT,
    "attempt": _TEXT,
    "bytes": _COUNT,
    "time": _Field(
        "a time",
        lambda value: type(value) in (int, float) and 0 <= value <= _LAST_SECOND,
    ),
    "sha256": _Field(
        "an object of strings", lambda value: _is_object_of(_is_text, value)
    ),
    "metrics": _METRICS,
    format_lib.NONFINITE: _Field(
        "a list of texts", lambda value: _is_list_of(_is_text, value), optional=True
    ),
}
_META = {
    "version": _COUNT,
    "step": _COUNT,
    "arrays": _OBJECT,
    "metadata": _OBJECT,
    "data": _Field("a list", lambda value: isinstance(value, list)),
    "written_with": _OBJECT,
}
_ARRAY = {
    "shape": _SHAPE,
    "chunk_shape": _SHAPE,
    "dtype": _Field(
        "a type that zarr supports", lambda value: value in arrays_lib.TYPES
    ),
    "key_impl": _Field(
        "a string", lambda value: value is None or _is_text(value), optional=True
    ),
    "sharding": _TEXT._replace(optional=True),
}


def commit(content: bytes) -> dict[str, Any]:
    """Parses a COMMIT, which may have further keys; raises ValueError if it is invalid."""
    value = format_lib.unseal(content)
    _check("", value, _COMMIT)
    if format_lib.OWNER in value:
        _check(format_lib.OWNER, value[format_lib.OWNER], {"id": _TEXT})
    return value


def metrics(content: bytes) -> dict[str, float]:
    """Parses a METRICS; raises ValueError if it is invalid."""
    value = format_lib.unseal(content)
    _check("", {"metrics": value}, {"metrics": _METRICS})
    return value


def meta(content: bytes) -> dict[str, Any]:
    """Parses a meta.json, which may have further keys.

    Raises:
      CheckpointError: if it has another format version.
      ValueError: if it is invalid.
    """
    value = format_lib.from_json(content)
    version = value.get("version")
    if _is_count(version) and version != format_lib.VERSION:
        raise format_lib.CheckpointError(
            f"has format version {version}; this code reads version {format_lib.VERSION}."
        )
    _check("", value, _META)
    for path, entry in value["arrays"].items():
        _check_array(f"arrays/{path}", entry)
    return value


def _check_array(name: str, entry: Any) -> None:
    _check(name, entry, _ARRAY)
    shape, chunk = entry["shape"], entry["chunk_shape"]
    if not _is_part(chunk, shape):
        raise ValueError(
            f"{name}/chunk_shape is {_shown(chunk)}, not a chunk of {_shown(shape)}"
        )


def _is_part(chunk: list[int], shape: list[int]) -> bool:
    """Returns whether a chunk fits in an array. Along a dimension of size 0 the chunk
    has size 1.
    """
    if len(chunk) != len(shape):
        return False
    return all(
        1 <= part <= max(size, 1) for part, size in zip(chunk, shape, strict=True)
    )


def _check(name: str, content: Any, fields: Mapping[str, _Field]) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{name} is {_shown(content)}, not an object")
    for key, field in fields.items():
        if field.optional and key not in content:
            continue
        place = f"{name}/{key}" if name else key
        if key not in content:
            raise ValueError(f"{place} is missing")
        if not field.holds(content[key]):
            raise ValueError(f"{place} is {_shown(content[key])}, not {field.words}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
