"""The rules for what COMMIT, METRICS and meta.json say, since their checksums do not tell who wrote them."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.files import jsonfile

_LARGEST = (1 << 63) - 1
# The last second of the year 9999, which is as far as dates go.
_LAST_SECOND = 253402300799
# Tensorstore's.
_MOST_DIMENSIONS = 32
_SHOWN = 60


class _Field(NamedTuple):
    """A rule: its words, and what sees whether a value follows it."""

    words: str
    holds: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LAST_SECOND


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _are_checksums(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _are_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(map(jsonfile.is_number, value.values()))


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_shape(value: Any) -> bool:
    right = (
        isinstance(value, list) and len(value) <= _MOST_DIMENSIONS and all(map(_is_count, value))
    )
    # NumPy has no array of more, even if one of its dimensions is 0; the widest type has 16 bytes.
    return right and math.prod(max(size, 1) for size in value) <= _LARGEST // 16


_COUNT = _Field("an integer of at least 0", _is_count)
_TEXT = _Field("a text", _is_text)
_OBJECT = _Field("an object", lambda value: isinstance(value, dict))
_METRICS = _Field("an object of numbers", _are_metrics)
_SHAPE = _Field("a shape", _is_shape)
_COMMIT = {
    "step": _COUNT,
    "attempt": _TEXT,
    "bytes": _COUNT,
    "time": _Field("a time", _is_time),
    "sha256": _Field("an object of texts", _are_checksums),
    "metrics": _METRICS,
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
    "dtype": _Field("a type that zarr has", lambda value: value in arrays_lib.TYPES),
}


def commit(content: bytes) -> dict[str, Any]:
    """Parses a COMMIT, which may say more than what is asked for here; raises ValueError if it is none."""
    said = format_lib.unseal(content)
    _check("", said, _COMMIT)
    if format_lib.NONFINITE in said:
        _check("", said, {format_lib.NONFINITE: _Field("a list of texts", _are_texts)})
    if format_lib.OWNER in said:
        _check("", said, {format_lib.OWNER: _OBJECT})
        _check(format_lib.OWNER, said[format_lib.OWNER], {"id": _TEXT})
    return said


def metrics(content: bytes) -> dict[str, float]:
    """Parses a METRICS; raises ValueError if it is none."""
    said = format_lib.unseal(content)
    _check("", {"metrics": said}, {"metrics": _METRICS})
    return said


def meta(content: bytes) -> dict[str, Any]:
    """Parses a meta.json, which may say more than what is asked for here.

    Raises:
      CheckpointError: if it is of another version.
      ValueError: if it is none.
    """
    said = format_lib.from_json(content)
    version = said.get("version")
    if _is_count(version) and version != format_lib.VERSION:
        raise format_lib.CheckpointError(
            f"has format version {version}; this code reads {format_lib.VERSION}."
        )
    _check("", said, _META)
    for path, entry in said["arrays"].items():
        _check_array(f"arrays/{path}", entry)
    return said


def _check_array(name: str, entry: Any) -> None:
    _check(name, entry, _ARRAY)
    if entry.get("key_impl") is not None:
        _check(name, entry, {"key_impl": _TEXT})
    if "sharding" in entry:
        _check(name, entry, {"sharding": _TEXT})
    if entry.get("sums") is not None:
        _check(name, entry, {"sums": _Field("a list of checksums", _are_counts)})
    shape, chunk = entry["shape"], entry["chunk_shape"]
    fits = len(shape) == len(chunk)
    # Of an array without values the chunks are as large as they can be.
    if not fits or any(not 1 <= c <= max(s, 1) for s, c in zip(shape, chunk, strict=True)):
        raise ValueError(f"{name}/chunk_shape is {_shown(chunk)}, no part of {_shown(shape)}")
    count = arrays_lib.ArrayMeta(tuple(shape), entry["dtype"], tuple(chunk)).chunk_count
    if entry.get("sums") is not None and len(entry["sums"]) != count:
        raise ValueError(f"{name}/sums has {len(entry['sums'])} checksums for {count} chunks")


def _check(name: str, content: Any, fields: Mapping[str, _Field]) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{name} is {_shown(content)}, not an object")
    for key, field in fields.items():
        place = f"{name}/{key}" if name else key
        if key not in content:
            raise ValueError(f"{place} is missing")
        if not field.holds(content[key]):
            raise ValueError(f"{place} is {_shown(content[key])}, not {field.words}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
