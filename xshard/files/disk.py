"""Reads and writes of a run's files on a disk.

A disk error raises an error with the path. It is never taken for an absent file: a file
counts as absent only if the listing of its folder lacks it, too. Writes are durable
before a caller relies on them.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeVar

from absl import logging

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
# Errors of a disk that does not have an operation at all, such as `fsync` of a folder
# or `flock`. Trying again is of no use, and it is no failure of the disk.
LACKING = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
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


def expanded(path: str | os.PathLike[str]) -> str:
    """Returns a path that a user gives, with a ~ at its beginning as a shell reads it.

    No shell does so after `--workdir=`, or in a file. A URL stays as it is.

    Raises:
      UserError: if there is no such user.
    """
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise errors.UserError(
            f"{found}: there is no such user, or no home directory; a name of this "
            f"folder is ./{found}."
        )
    return found


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
    temporary, file = _open_temporary(path)
    try:
        with file:
            yield file
            file.flush()
            if durably:
                sync_open(file.fileno(), path)
            # Before the file is closed, which ends its lock: another program would
            # take it for what a killed one has left.
            temporary.replace(path)
    except BaseException:
        # On a full disk, what was written so far would take the room that is left.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durably:
        # The new name is an entry of the folder.
        sync(path.parent)


def make_folder(folder: _Path) -> None:
    """Creates a folder and those above it that are missing, durably.

    Only what this creates is synced, and the folder that each new one is an entry of.
    The folders above belong to others, and may be of a kind that cannot be synced, such
    as the root of an automounter or a read-only disk.
    """
    folder = pathlib.Path(folder).absolute()
    missing = []
    existing = folder
    while not existing.is_dir():
        missing.append(existing)
        # A broken link has no folder to create below it, and `mkdir` names it.
        if existing.is_symlink() or existing == existing.parent:
            break
        existing = existing.parent
    for new in reversed(missing):
        try:
            new.mkdir()
        except FileExistsError:
            # Another process may have created it meanwhile.
            if not new.is_dir():
                raise
        _sync_if_allowed(new.parent)


def can_sync(path: _Path) -> bool:
    """Returns whether the disk of a file or folder has `fsync` for it.

    Raises:
      OSError: if it has, and that fails.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            return _has_synced(fd)
    finally:
        os.close(fd)


def can_lock(path: _Path) -> bool:
    """Returns whether the disk of a file has the locks of `fcntl`."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.lockf(fd, fcntl.LOCK_UN)
    except OSError as e:
        return e.errno not in LACKING | {errno.ENOLCK}
    finally:
        os.close(fd)
    return True


def sync(path: _Path) -> None:
    """Makes the content of a file, or the list of names of a folder, durable.

    On a disk that has no such operation for it, it is as durable as such a disk makes
    it, and a warning says so once.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        sync_open(fd, path)
    finally:
        os.close(fd)


def sync_open(fd: int, path: _Path) -> None:
    """Makes an open file or folder durable, as `sync` does."""
    with naming(path):
        has_synced = _has_synced(fd)
    if not has_synced:
        logging.log_first_n(
            logging.WARNING,
            "the disk of %s has no fsync for it: what is written there outlives this "
            "program, and a loss of power only as far as the disk sees to that itself",
            1,
            os.fspath(path),
        )


def _has_synced(fd: int) -> bool:
    """Syncs an open file; returns whether its disk can."""
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in LACKING:
            raise
        return False
    return True


def _sync_if_allowed(folder: pathlib.Path) -> None:
    # A user may be allowed to create a folder in one that they may not read, which
    # cannot be opened to be synced.
    with contextlib.suppress(PermissionError):
        sync(folder)


def _open_temporary(path: pathlib.Path) -> tuple[pathlib.Path, BinaryIO]:
    """Creates the file that is to replace another, and returns its path.

    Several programs may write one file at a time, such as a report; each has its own
    temporary file, and the last one to finish replaces the others' result. A link or a
    file that somebody else put there is neither followed nor overwritten.

    A program that was killed leaves its temporary file. The first name is always the
    same, so that the next program finds what was left there and takes its place; that
    nobody writes it any more is known from its lock.
    """
    first = path.with_name(f".{path.name}.new")
    file = _create(first)
    if file is None and _remove_leftover(first):
        file = _create(first)
    if file is not None:
        if _is_locked_at(file, first, where_there_are_none=True):
            return first, file
        file.close()
    while True:
        other = first.with_name(f"{first.name}.{secrets.token_hex(4)}")
        file = _create(other)
        if file is not None:
            return other, file


def _create(path: pathlib.Path) -> BinaryIO | None:
    """Creates and opens a file; returns None if there is something of its name."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.fdopen(os.open(path, flags, 0o666), "wb")
    except FileExistsError:
        return None


def _remove_leftover(path: pathlib.Path) -> bool:
    """Deletes a temporary file of this user that no process writes any more; returns
    whether it did.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not is_ours or not _is_locked_at(file, path):
                return False
            path.unlink()
    except OSError:
        return False
    return True


def _is_locked_at(
    file: BinaryIO, path: pathlib.Path, *, where_there_are_none: bool = False
) -> bool:
    """Locks an open file; returns whether that succeeds and the path is still its.

    Only the holder of the lock removes the file from its path.

    Args:
      file: the file.
      path: its path.
      where_there_are_none: what to return if the disk has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except OSError as e:
        # Another process holds it, unless the disk has none.
        return where_there_are_none and e.errno in LACKING | {errno.ENOLCK}


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
        if e.errno == errno.ENOENT and not os.path.exists(path.parent):
            # What was saved there may be gone, too.
            fix = (
                f"{path.parent} does not exist: create it, or restore it if it was "
                "moved or removed."
            )
        reason = e.strerror or str(e)
        failed = e.filename
        # Such as the folder in which a new content is prepared.
        if isinstance(failed, str) and os.path.dirname(failed) != str(path.parent):
            reason += f" ({failed})"
        raise errors.UserError(f"{path} could not be written: {reason}. {fix}") from e


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
