"""Reads and writes JSON files, and parses JSON into types.

A file may be damaged or forged, so it is read within bounds of size and depth. One that
exceeds the bounds, or is invalid, is refused with a message that names it. What a valid
file holds is checked by `parse`.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
import json
import math
import os
import pathlib
import stat
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

from xshard import errors
from xshard.files import disk

# The largest file and the longest line that are read into memory; far more than any run
# writes.
_FILE_BYTES = 64 << 20
LINE_BYTES = 4 << 20
_DECODER = json.JSONDecoder()
# What JSON may have around a value.
_SPACE = " \t\n\r"
# About how much of a file of lines is read at once.
_SOME_BYTES = 1 << 20
# The deepest nesting, low enough for recursive functions on the parsed value.
DEPTH = 200
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
        value = _parsed(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(content, value)
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
    with _reading(path), _open(path) as file:
        content = file.read(_FILE_BYTES + 1)
        if len(content) > _FILE_BYTES:
            raise ValueError(f"it is larger than {_FILE_BYTES >> 20} MiB")
        return loads(content, kind)


def read_if_exists(path: pathlib.Path, kind: type = dict) -> Any | None:
    """Reads the JSON value in a file, like `read`; returns None if the file does not
    exist.
    """
    return read(path, kind) if _exists(path) else None


def read_lines(path: pathlib.Path) -> Iterator[tuple[bool, dict[str, Any] | None]]:
    """Yields each line of a file of JSON lines; no lines if the file does not exist.

    Yields:
      Whether the line ends with a newline, and its object; None if it does not hold a
      JSON object.

    Raises:
      UserError: if the file cannot be read.
    """
    if not _exists(path):
        return
    with _reading(path):
        file = _open(path)
    with file:
        lines = _lines(file)
        while True:
            with _reading(path):
                some = _some(lines)
            if not some:
                return
            # The yield is outside `_reading`: an error that the caller throws in is not
            # an error of reading the file.
            for line in some:
                yield line.endswith(b"\n"), _object_in(line)


def write(
    path: pathlib.Path,
    value: Any,
    *,
    keep_nonfinite: bool = False,
    replace: Callable[[pathlib.Path, bytes], None] = disk.replace,
) -> None:
    """Replaces a file, durably, with indented JSON; raises UserError with the path if
    it cannot be written.

    Args:
      path: the file.
      value: the value.
      keep_nonfinite: whether to write numbers that are not finite as Python does, such
        as Infinity, and not as null.
      replace: replaces a file's content.
    """
    content = json.dumps(value, indent=2) if keep_nonfinite else dumps(value, indent=2)
    with disk.writing(path):
        replace(path, f"{content}\n".encode())


class Rule(NamedTuple):
    """A condition on a value beyond its type, as in `Annotated[int, Rule(...)]`.

    Attributes:
      words: what the value must be, for messages, such as "an integer of at least 0".
      holds: returns whether a parsed value satisfies the condition.
    """

    words: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Rule("an integer of at least 0", lambda value: value >= 0)]


def parse(value: Any, kind: Any, *, extra_keys: bool = False) -> Any:
    """Parses a JSON value into a type, and converts nothing to make it fit.

    A type is `str`, `bool`, `int`, `float`, `Any` or a `Literal`; `list[T]`,
    `tuple[T, ...]`, `tuple[S, T]` or `dict[str, T]`; a union such as `T | None`;
    `Annotated[T, Rule(...)]`; or a NamedTuple or a dataclass, which stands for an
    object with the keys of its fields. A field with a default may be missing. An int
    must fit in 64 bits, and a bool is no int. An int passes for a float, and a list for
    a tuple; nothing else passes for another type.

    >>> class Saved(NamedTuple):
    ...     step: int
    ...     metrics: dict[str, float]
    ...     attempt: str = ""
    >>> parse([{"step": 3, "metrics": {"error": 0.5}}], list[Saved])
    [Saved(step=3, metrics={'error': 0.5}, attempt='')]
    >>> parse([{"step": 3, "metrics": {"error": "low"}}], list[Saved])
    Traceback (most recent call last):
    ValueError: 0/metrics/error is 'low', not a number

    Args:
      value: the value, as `loads` and `read` return it.
      kind: the type.
      extra_keys: whether objects may have keys that their types do not name, as those
        that a later version adds. They are dropped.

    Raises:
      ValueError: if the value is not of the type. The message begins with the path of
        what is wrong, or with "it" if that is the whole value.
    """
    return _parse(value, kind, (), extra_keys)


def is_number(value: Any) -> bool:
    """Returns whether a JSON value is a float, or an integer that fits in an int64. A
    boolean is not a number.
    """
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


# For each scalar type of JSON: what messages call it, and whether a value is of it.
_SCALARS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer of 64 bits", lambda x: type(x) is int and is_number(x)),
    float: ("a number", is_number),
    str: ("a string", lambda value: isinstance(value, str)),
}
# The keys and the numbers of list items that lead to a value.
_Path = tuple[str | int, ...]


def _parse(value: Any, kind: Any, path: _Path, extra_keys: bool) -> Any:
    """Parses the value at a path, as `parse` describes."""
    if kind is Any:
        return value
    # For list[int], the origin is list, and the arguments are (int,).
    origin = typing.get_origin(kind) or kind
    arguments = typing.get_args(kind)
    if origin in _SCALARS:
        words, is_valid = _SCALARS[origin]
        if not is_valid(value):
            raise _mismatch(path, value, words)
        return value
    if origin is Literal:
        for choice in arguments:
            # The types are compared, too, since True equals 1.
            if type(value) is type(choice) and value == choice:
                return value
        choices = ", ".join(map(repr, arguments))
        raise _mismatch(path, value, f"one of {choices}")
    if origin is Annotated:
        inner, rule = arguments
        try:
            parsed = _parse(value, inner, path, extra_keys)
        except ValueError:
            # The rule's words tell more than those of the type.
            raise _mismatch(path, value, rule.words) from None
        if not rule.holds(parsed):
            raise _mismatch(path, value, rule.words)
        return parsed
    if origin in (typing.Union, types.UnionType):
        return _parse_union(value, arguments, path, extra_keys)
    if origin in (list, tuple):
        items = _parse_list(value, origin, arguments, path, extra_keys)
        return items if origin is list else tuple(items)
    if not isinstance(value, dict):
        raise _mismatch(path, value, "an object")
    if origin is dict:
        _, item_kind = arguments or (str, Any)
        parsed = {}
        for key, item in value.items():
            parsed[key] = _parse(item, item_kind, (*path, key), extra_keys)
        return parsed
    return _parse_record(value, origin, path, extra_keys)


def _parse_union(
    value: Any, kinds: tuple[Any, ...], path: _Path, extra_keys: bool
) -> Any:
    """Parses a value into the first of some types that it is of."""
    if value is None and types.NoneType in kinds:
        return None
    *others, last = [kind for kind in kinds if kind is not types.NoneType]
    for kind in others:
        try:
            return _parse(value, kind, path, extra_keys)
        except ValueError:
            continue
    # The last type's error is the message; for `T | None`, that of T.
    return _parse(value, last, path, extra_keys)


def _parse_list(
    value: Any, origin: type, arguments: tuple[Any, ...], path: _Path, extra_keys: bool
) -> list[Any]:
    """Parses the items of a list or a tuple, whose type has some arguments."""
    if not isinstance(value, list):
        raise _mismatch(path, value, "a list")
    item_kinds = (arguments[:1] or (Any,)) * len(value)
    # Only the likes of tuple[S, T] have a type for each item.
    if origin is tuple and arguments and Ellipsis not in arguments:
        item_kinds = arguments
    if len(item_kinds) != len(value):
        raise _mismatch(path, value, f"a list of {len(item_kinds)} values")
    parsed = []
    for i, (item, item_kind) in enumerate(zip(value, item_kinds, strict=True)):
        parsed.append(_parse(item, item_kind, (*path, i), extra_keys))
    return parsed


def _parse_record(
    value: dict[str, Any], kind: Any, path: _Path, extra_keys: bool
) -> Any:
    """Parses an object into a NamedTuple or a dataclass."""
    fields = _fields(kind)
    parsed = {}
    for key, item in value.items():
        if key in fields:
            field_kind = fields[key].annotation
            parsed[key] = _parse(item, field_kind, (*path, key), extra_keys)
        elif not extra_keys:
            known = ", ".join(fields)
            raise ValueError(f"{_place((*path, key))} is not one of {known}")
    for key, field in fields.items():
        if key not in value and field.default is field.empty:
            raise ValueError(f"{_place((*path, key))} is missing")
    return kind(**parsed)


@functools.cache
def _fields(kind: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the fields of a NamedTuple or a dataclass, by name."""
    if not hasattr(kind, "_fields") and not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind!r} is not a type that `parse` knows")
    return inspect.signature(kind).parameters


def _mismatch(path: _Path, value: Any, words: str) -> ValueError:
    return ValueError(f"{_place(path)} is {_shown(value)}, not {words}")


def _shown(value: Any) -> str:
    shown = repr(value)
    return f"{shown[:_SHOWN]}..." if len(shown) > _SHOWN else shown


def _place(path: _Path) -> str:
    return "/".join(map(str, path)) or "it"


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file. Of a line that is too long, it yields only the end,
    made invalid as JSON.
    """
    # The prefix of the end of a line that is too long. No JSON begins with it, even if
    # the end alone were JSON.
    prefix = b""
    while piece := file.readline(LINE_BYTES):
        if len(piece) == LINE_BYTES and not piece.endswith(b"\n"):
            prefix = b"\0"
        else:
            yield prefix + piece
            prefix = b""
    if prefix:
        yield prefix


def _some(lines: Iterator[bytes]) -> list[bytes]:
    """Returns the next lines, of about a megabyte together; none at the end.

    A file may have many, and to enter a context for each would take as long as to parse
    it.
    """
    some = []
    size = 0
    for line in lines:
        some.append(line)
        size += len(line)
        if size >= _SOME_BYTES:
            break
    return some


def _object_in(line: bytes) -> dict[str, Any] | None:
    try:
        return loads(line)
    except ValueError:
        return None


def _exists(path: pathlib.Path) -> bool:
    with _reading(path):
        return disk.exists(path)


def _open(path: pathlib.Path) -> BinaryIO:
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = disk.retried(lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Converts an error of reading to a UserError that names the file."""
    try:
        yield
    except (OSError, ValueError) as e:
        raise errors.UserError(f"{path} cannot be read: {_reason(e)}.") from e


def _parsed(content: bytes) -> Any:
    """Parses a JSON value; raises ValueError if it has a duplicate key."""
    # Rows are such objects, and a file may have hundreds of thousands. They are UTF-8.
    if content.startswith(b'{"') and content.count(b"{") == 1:
        text = content.decode("utf-8", "surrogatepass")
        value, end = _DECODER.raw_decode(text)
        # Each key is followed by a colon, so no key is there twice if there are as many
        # colons as keys.
        if content.count(b":") == len(value) and not text[end:].strip(_SPACE):
            return value
    return json.loads(content, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        [(key, _)] = counts.most_common(1)
        raise ValueError(f"it has a duplicate key: {_shown(key)}")
    return value


def _check_depth(content: bytes, value: Any) -> None:
    """Raises ValueError if a value is nested too deeply. It walks level by level, since
    recursion could overflow.
    """
    # Most files have so few brackets that they cannot be nested too deeply.
    if content.count(b"[") + content.count(b"{") <= DEPTH:
        return
    level = [value]
    for _ in range(DEPTH):
        below: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                below.extend(container.values())
            elif isinstance(container, list):
                below.extend(container)
        level = [item for item in below if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _reason(e: Exception) -> str:
    if isinstance(e, OSError):
        return e.strerror or str(e)
    return str(e).rstrip(".")
