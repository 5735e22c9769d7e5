"""Reads and writes JSON files, and parses JSON into types.

A file that is not JSON is refused with a message that names it. What a valid file holds
is checked by `parse`.
"""

import collections
import contextlib
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from xshard import errors
from xshard.files import disk

# The longest line that a run writes: whoever reads lines holds one of them in memory.
LINE_BYTES = 4 << 20
_LARGEST = 1 << 63
_NAMES: dict[type, str] = {dict: "an object", list: "a list"}
# The most characters of a wrong value that a message shows.
_SHOWN = 60


def loads(content: bytes, kind: type = dict) -> Any:
    """Parses a JSON value.

    Args:
      content: the text.
      kind: the required type, `dict` or `list`.

    Raises:
      ValueError: if the text is not JSON of this type, has a duplicate key, or is
        nested too deeply.
    """
    try:
        value = _DECODER.decode(content.decode("utf-8-sig", "surrogatepass"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, kind):
        raise ValueError(f"it is not {_NAMES[kind]}")
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    """Serializes a value to JSON. Numbers that are not finite become null, since JSON
    cannot represent them.
    """
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    """Replaces each number that is not finite with None."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read(path: pathlib.Path, kind: type = dict) -> Any:
    """Reads the JSON value in a file.

    Raises:
      UserError: if the file does not exist, cannot be read, or does not hold a value of
        type `kind`.
    """
    with _reading(path):
        return loads(disk.retried(path.read_bytes), kind)


def read_if_exists(path: pathlib.Path, kind: type = dict) -> Any | None:
    """Reads the JSON value in a file, like `read`; returns None if the file does not
    exist.
    """
    with _reading(path):
        content = disk.read(path)
        return None if content is None else loads(content, kind)


def read_lines(path: pathlib.Path) -> Iterator[tuple[bool, dict[str, Any] | None]]:
    """Yields each line of a file of JSON lines; no lines if the file does not exist.

    Yields:
      Whether the line ends with a newline, and its object; None if it does not hold a
      JSON object.

    Raises:
      UserError: if the file cannot be read.
    """
    with _reading(path):
        if not disk.exists(path):
            return
        with disk.retried(lambda: path.open("rb")) as file:
            for line in file:
                try:
                    value = loads(line)
                except ValueError:
                    value = None
                yield line.endswith(b"\n"), value


def write(path: pathlib.Path, value: Any, *, keep_nonfinite: bool = False) -> None:
    """Replaces a file, durably, with indented JSON; raises UserError with the path if
    it cannot be written.

    Args:
      path: the file.
      value: the value.
      keep_nonfinite: whether to write numbers that are not finite as Python does, such
        as Infinity, and not as null.
    """
    content = json.dumps(value, indent=2) if keep_nonfinite else dumps(value, indent=2)
    with disk.writing(path):
        disk.replace(path, f"{content}\n".encode())


# An integer of at least 0, as a field of what `parse` returns.
Count = Annotated[int, msgspec.Meta(ge=0)]


def parse(value: Any, kind: Any) -> Any:
    """Returns a JSON value as an object of a type, as `msgspec.convert` does.

    An int passes for a float, and a list for a tuple; nothing else passes for another
    type. Keys that a type does not name are dropped, as those that a later version
    adds, unless it has `forbid_unknown_fields`.

    >>> class Saved(msgspec.Struct):
    ...     step: int
    ...     metrics: dict[str, float]
    ...     attempt: str = ""
    >>> parse([{"step": 3, "metrics": {"error": 0.5}}], list[Saved])
    [Saved(step=3, metrics={'error': 0.5}, attempt='')]
    >>> parse([{"step": "3", "metrics": {}}], list[Saved])
    Traceback (most recent call last):
    ValueError: Expected `int`, got `str` - at `$[0].step`: '3'

    Args:
      value: the value, as `loads` and `read` return it.
      kind: the type.

    Raises:
      ValueError: if the value is not of the type. The message has the path and the
        value of what is wrong.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        place = re.search(r" - at `\$(\S*)`$", str(e))
        # In a path, [...] stands for a key that may be any text.
        path = place[1].partition("[...]")[0] if place else ""
        for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
            value = value[key or int(index)]
        raise ValueError(f"{e}: {_shown(value)}") from None


def is_number(value: Any) -> bool:
    """Returns whether a JSON value is a float, or an integer that fits in an int64. A
    boolean is not a number.
    """
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


def _shown(value: Any) -> str:
    shown = repr(value)
    return f"{shown[:_SHOWN]}..." if len(shown) > _SHOWN else shown


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Converts an error of reading to a UserError that names the file."""
    try:
        yield
    except (OSError, ValueError) as e:
        reason = str(e).rstrip(".")
        if isinstance(e, OSError):
            reason = e.strerror or reason
        raise errors.UserError(f"{path} cannot be read: {reason}.") from e


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        [(key, _)] = counts.most_common(1)
        raise ValueError(f"it has a duplicate key: {_shown(key)}")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
