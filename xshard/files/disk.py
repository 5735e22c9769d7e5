"""A run's files on a disk.

An error of the disk is an error, with its path, and is never taken for an absence: what is not there is not in
its folder's listing either. What has been written is on the disk before anybody counts on it.
"""

import contextlib
import errno
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from xshard import errors

_T = TypeVar("_T")
_Path = str | os.PathLike[str]
# A disk on a network may answer the next time. What lasts longer is for a person to look at.
_TRANSIENT = {
    errno.EIO, errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.ENOTCONN, errno.EREMOTEIO, errno.ETIMEDOUT,
    errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
}  # fmt: skip
_TRIES = 4
_FIRST_WAIT_SECONDS = 0.1


def retried(action: Callable[[], _T]) -> _T:
    """Calls what may be called again, such as a read, until no error comes of it that may pass by itself."""
    for attempt in range(_TRIES - 1):
        try:
            return action()
        except OSError as e:
            if e.errno not in _TRANSIENT:
                raise
            time.sleep(_FIRST_WAIT_SECONDS * 2**attempt)
    return action()


def read(path: _Path) -> bytes | None:
    """The content of a file; None if there is none."""
    return _unless_absent(path, _content)


def entries(folder: _Path) -> list[os.DirEntry[str]] | None:
    """Lists a folder, in the order of the names; None if there is no such folder."""
    return _unless_absent(folder, _listed)


def exists(path: _Path) -> bool:
    """Returns whether there is something of this name, as its folder's listing has it: a link to nothing is something."""
    parent, name = os.path.split(os.path.abspath(path))
    if not name:
        return True
    try:
        siblings = entries(parent)
    except NotADirectoryError:
        # Below a file there is nothing.
        return False
    except PermissionError:
        # Nobody may list it, as on some machines that many share; then its own word must do.
        return retried(lambda: os.path.lexists(path))
    return siblings is not None and any(entry.name == name for entry in siblings)


def replace(path: pathlib.Path, content: bytes, *, durably: bool = True) -> None:
    """Replaces a file: after a crash it is the old one or the new one; of the machine, if `durably`."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        if durably:
            os.fsync(file.fileno())
    temporary.replace(path)
    if durably:
        sync(path.parent)


def sync(path: _Path) -> None:
    """Makes a file's content, or a folder's list of names, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def naming(path: _Path) -> Iterator[None]:
    """Gives an OSError the path that it is of, which a call for an open file does not know."""
    try:
        yield
    except OSError as e:
        if isinstance(e.filename, str):
            raise
        raise OSError(e.errno, e.strerror, os.fspath(path)) from e


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Says of an OSError, as a `UserError`, which file it was and what to do."""
    try:
        yield
    except OSError as e:
        raise errors.UserError(
            f"{path} could not be written: {e.strerror or e}. What has been saved counts; the same command "
            "goes on from it when there is room."
        ) from e


def _unless_absent(path: _Path, action: Callable[[_Path], _T]) -> _T | None:
    """Applies an action to a path; None if there is nothing of this name."""
    # A disk on a network may say that a file is absent which its folder's listing still has.
    for _ in range(_TRIES):
        try:
            return retried(lambda: action(path))
        except FileNotFoundError as e:
            if not exists(path):
                return None
            error = e
    raise error


def _content(path: _Path) -> bytes:
    with naming(path), open(path, "rb") as file:
        return file.read()


def _listed(folder: _Path) -> list[os.DirEntry[str]]:
    with naming(folder), os.scandir(folder) as listed:
        return sorted(listed, key=lambda entry: entry.name)
