"""Reads and writes JSON files. A file may be damaged or forged, so it is read within
bounds of size and depth.

A file that exceeds the bounds, or is invalid, is refused with a message that names it.
"""

import contextlib
import json
import math
import os
import pathlib
import stat
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from xshard import errors
from xshard.files import disk

# The largest file and the longest line that are read into memory; far more than any run
# writes.
_FILE_BYTES = 64 << 20
LINE_BYTES = 4 << 20
# The deepest nesting, low enough for recursive functions on the parsed value.
_DEPTH = 200
_LARGEST = 1 << 63
_NAMES: dict[type, str] = {dict: "an object", list: "a list"}


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
        value = json.loads(content, object_pairs_hook=_object)
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
                line = next(lines, None)
            if line is None:
                return
            # The yield is outside `_reading`: an error that the caller throws in is not
            # an error of reading the file.
            yield line.endswith(b"\n"), _object_in(line)


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


def is_number(value: Any) -> bool:
    """Returns whether a JSON value is a float, or an integer that fits in an int64. A
    boolean is not a number.
    """
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("it has a duplicate key")
    return value


def _check_depth(content: bytes, value: Any) -> None:
    """Raises ValueError if a value is nested too deeply. It walks level by level, since
    recursion could overflow.
    """
    # Most files have so few brackets that they cannot be nested too deeply.
    if content.count(b"[") + content.count(b"{") <= _DEPTH:
        return
    level = [value]
    for _ in range(_DEPTH):
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
