"""JSON that somebody else may have written, damaged or forged: read within bounds, or refused by name."""

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

# Nothing that a run writes comes near these, and what does is not kept in memory to see what it is.
_FILE_BYTES = 64 << 20
LINE_BYTES = 4 << 20
# Low enough for what walks through a value by calling itself.
_DEPTH = 200
_LARGEST = 1 << 63
_NAMES: dict[type, str] = {dict: "an object", list: "a list"}


def loads(content: bytes, kind: type = dict) -> Any:
    """A JSON value.

    Args:
      content: the text.
      kind: what it is to be, `dict` or `list`.

    Raises:
      ValueError: if it is something else, has a key twice, or is nested too deeply to be looked at.
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
    """JSON, in which a number that is not finite is null: JSON has no other way to write it."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    """The value with None in the place of each number that is not finite."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read(path: pathlib.Path, kind: type = dict) -> Any:
    """The JSON value in a file.

    Raises:
      UserError: if there is no such file, it cannot be read, or it holds something else.
    """
    with _reading(path), _open(path) as file:
        content = file.read(_FILE_BYTES + 1)
        if len(content) > _FILE_BYTES:
            raise ValueError(f"it is larger than {_FILE_BYTES >> 20} MiB")
        return loads(content, kind)


def read_if_exists(path: pathlib.Path, kind: type = dict) -> Any | None:
    """The JSON value in a file, as `read`; None if there is no such file."""
    return read(path, kind) if _exists(path) else None


def read_lines(path: pathlib.Path) -> Iterator[tuple[bool, dict[str, Any] | None]]:
    """Each line of a file of JSON lines; nothing if there is no such file.

    Yields:
      Whether the line has its end, and the object in it; None if it holds none.

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
            # Outside of what names the file: an error of who asks for the lines is not one of reading.
            yield line.endswith(b"\n"), _object_in(line)


def write(path: pathlib.Path, value: Any) -> None:
    """Replaces a file, durably, by readable JSON; raises UserError, with its path, if it cannot be written."""
    with disk.writing(path):
        disk.replace(path, (dumps(value, indent=2) + "\n").encode())


def is_number(value: Any) -> bool:
    """Returns whether a JSON value is a number that a float and an int64 can stand for: not every integer is."""
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines, of those that are too long only the last part, which is no JSON."""
    # What stands before the end of a line that is too long: with it no line is JSON.
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
    # A pipe of this name would wait for somebody to write into it.
    descriptor = disk.retried(lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Says of which file an error is."""
    try:
        yield
    except (OSError, ValueError) as e:
        raise errors.UserError(f"{path} cannot be read: {_reason(e)}.") from e


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("it has a key twice")
    return value


def _check_depth(content: bytes, value: Any) -> None:
    """Raises ValueError if a value is nested too deeply; goes through it level by level, without calling itself."""
    # Of most files this is known by a look at the text.
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
