"""Reads and writes of a run's files on a disk.

A disk error raises an error with the path. It is never taken for an absent file: a file
counts as absent only if the listing of its folder lacks it, too. Writes are durable
before a caller relies on them.
"""

import contextlib
import errno
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeVar

from xshard import errors

_T = TypeVar("_T")
_Path = str | os.PathLike[str]
# Errors that may pass by themselves, as of a network disk. An error that persists after
# the retries is raised.
_TRANSIENT = {
    errno.EIO,
    errno.ESTALE,
    errno.EINTR,
    errno.EAGAIN,
    errno.ENOTCONN,
    errno.EREMOTEIO,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
}
_TRIES = 4
# The largest file that is read whole, far more than any run writes.
_LARGEST_BYTES = 4 << 30
_FIRST_WAIT_SECONDS = 0.1
_RESUMES = (
    "Everything saved so far counts; the same command resumes from it once there is "
    "room or the fault is gone."
)


def retried(action: Callable[[], _T]) -> _T:
    """Calls an action, again after errors that may pass by themselves.

    Args:
      action: what may be repeated, such as a read.

    Raises:
      OSError: if the error does not pass by itself, or has not.
    """
    for attempt in range(_TRIES - 1):
        try:
            return action()
        except OSError as e:
            if e.errno not in _TRANSIENT:
                raise
            time.sleep(_FIRST_WAIT_SECONDS * 2**attempt)
    return action()


def read(path: _Path) -> bytes | None:
    """Reads a file; returns None if it does not exist.

    Raises:
      OSError: if it cannot be read, or has more than 4 GiB.
    """
    return _unless_absent(path, _content)


def entries(folder: _Path) -> list[os.DirEntry[str]] | None:
    """Lists a folder in the order of the names; returns None if it does not exist."""
    return _unless_absent(folder, _listed)


def exists(path: _Path) -> bool:
    """Returns whether a path exists, by the listing of its folder.

    A broken link exists.
    """
    parent, name = os.path.split(os.path.abspath(path))
    if not name:
        return True
    try:
        siblings = entries(parent)
    except NotADirectoryError:
        # The parent is a file, so nothing can exist below it.
        return False
    except PermissionError:
        # This user may not list the folder, as on some shared machines, so the path
        # itself is queried.
        return retried(lambda: os.path.lexists(path))
    return siblings is not None and any(entry.name == name for entry in siblings)


def replace(path: pathlib.Path, content: bytes, *, durably: bool = True) -> None:
    """Replaces a file atomically.

    After a crash of the process, the file has the old content or the new one.

    Args:
      path: the file.
      content: the new content.
      durably: whether this also holds after a crash of the machine, and the new content
        is on the disk on return.
    """
    with replacing(path, durably=durably) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: pathlib.Path, *, durably: bool = True) -> Iterator[BinaryIO]:
    """Yields a file that replaces another when the context ends, as `replace` does.

    After an exception in the context, it does not.

    Args:
      path: the file to replace.
      durably: as for `replace`.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if durably:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        # On a full disk, what was written so far would take the room that is left.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durably:
        # The new name is an entry of the folder.
        sync(path.parent)


def sync(path: _Path) -> None:
    """Makes the content of a file, or the list of names of a folder, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def naming(path: _Path) -> Iterator[None]:
    """Adds the path to an OSError. Calls on an open file raise errors without it."""
    try:
        yield
    except OSError as e:
        if isinstance(e.filename, str):
            raise
        raise OSError(e.errno, e.strerror, os.fspath(path)) from e


@contextlib.contextmanager
def writing(path: pathlib.Path, fix: str = _RESUMES) -> Iterator[None]:
    """Converts an OSError to a `UserError` that names the file.

    Args:
      path: the file that is written.
      fix: a sentence that tells the user what to do.
    """
    try:
        yield
    except OSError as e:
        if not path.parent.exists():
            # What was saved there may be gone, too.
            fix = (
                f"{path.parent} does not exist: create it, or restore it if it was "
                "moved or removed."
            )
        raise errors.UserError(
            f"{path} could not be written: {e.strerror or e}. {fix}"
        ) from e


def _unless_absent(path: _Path, action: Callable[[_Path], _T]) -> _T | None:
    """Applies an action to a path; returns None if the path does not exist."""
    # A network disk may report a file as absent that its folder still lists, so both
    # must agree.
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
        # A sparse file takes no room on the disk, and all of its size in memory.
        if os.fstat(file.fileno()).st_size > _LARGEST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
        return file.read()


def _listed(folder: _Path) -> list[os.DirEntry[str]]:
    with naming(folder), os.scandir(folder) as listed:
        return sorted(listed, key=lambda entry: entry.name)
