"""The claim of one process to a folder on a disk: no other process writes in it.

.lock          the kernel's lock (flock), which it drops when its process ends
.holder/ID/    the folder of the process that holds the claim; there is one at a time
    owner      who that is, written again every few seconds

**A question and an act are two things.** A process may ask whether it holds the claim,
be suspended, and act on the answer an hour later: a laptop that was closed, a machine
that was paused or migrated. Its lock may be gone by then, since a server of a network
disk drops the locks of a client that is silent, and another process may have come. So
what a holder does that would harm the next one goes through its own folder, by one
`rename` or `link` to or from it:

    a new file      is written in the holder's folder, and linked to its name
    a replaced file is written there, and renamed to its name
    a deletion      renames the file into the holder's folder

A process that takes the claim over renames the folder of its predecessor to its own
name. That is one operation of the disk, which several that try at once cannot all
succeed in. From then on no path of the predecessor's folder exists, so each of its late
acts fails, and it stops with `LostError`. What it had done before, the next holder
finds, since it looks only afterwards.

**A disk without flock** (Lustre mounted so, some FUSE) has the same folder as a lease:
a process that finds a holder's folder watches it, and takes it over if `owner` does not
change for a while. A warning says so once.

Appended files have no such operation. Each holder replaces a file before it appends to
it, so that a predecessor's open file is no longer the one with that name; see
`xshard.metrics.writers`.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import platform
import re
import secrets
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import BinaryIO

from absl import logging

from xshard import errors
from xshard.files import disk, forks, jsonfile

LOCK = ".lock"
HOLDER = ".holder"
RENEW_SECONDS = 5.0
WATCH_SECONDS = 20.0
_OWNER = "owner"
_ID = re.compile("[0-9a-f]{16}")
_OWNER_BYTES = 4096
# Errors of a disk that has no such link or rename.
_NO_LINK = disk.LACKING | {errno.EPERM, errno.EXDEV, errno.EMLINK}


class InUseError(errors.UserError):
    """Another process holds the claim to a folder."""


class LostError(errors.UserError):
    """This process no longer holds the claim to a folder, so it must stop."""


class Claim:
    """The claim to a folder, which ends with `release` or with this object."""

    def __init__(
        self,
        folder: pathlib.Path,
        say: Callable[[str], None] = logging.info,
        *,
        renew_seconds: float,
        watch_seconds: float,
    ):
        """Claims a folder, and creates it if necessary.

        Args:
          folder: the folder.
          say: called with a message before a watch.
          renew_seconds: the time between two signs of life.
          watch_seconds: how long a holder may give none before it counts as dead, where
            the disk has no locks.

        Raises:
          InUseError: if another process holds the claim.
          OSError: if the folder cannot be written or locked.
          ValueError: if what is in the place of the lock cannot be one.
        """
        disk.make_folder(folder)
        lock = _open_lock(folder / LOCK)
        try:
            has_lock = _lock(lock, folder)
            taken = _Taking(folder, say, watch_seconds, has_lock=has_lock).take()
        except BaseException:
            os.close(lock)
            raise
        self._held = _Held(folder, taken, lock)
        # At the latest when this object is garbage-collected.
        self._end = weakref.finalize(self, self._held.release)
        # Not when the interpreter ends, where a save may still be waited for.
        self._end.atexit = False
        # A forked child would share the lock, and keep it after this process has ended.
        self._end_undo = forks.undo_in_children(self._held.forget)
        threading.Thread(
            target=_renew,
            args=(self._held, renew_seconds),
            name="claim to a folder",
            daemon=True,
        ).start()

    def check(self) -> None:
        """Raises LostError if another process has taken the claim over."""
        self._held.check()

    def check_noticed(self) -> None:
        """Raises LostError if it is known that another process has taken the claim
        over. Asks no disk, so that it may be called in each step.
        """
        self._held.check_noticed()

    def create(self, path: pathlib.Path, content: bytes) -> None:
        """Creates a file below the folder, as a whole and durably, if it is absent. A
        folder that is missing is created.

        Raises:
          FileExistsError: if a file of that name has other content.
          LostError: if this process no longer holds the claim.
        """
        with self._held.writing() as (source, file):
            file.write(content)
        try:
            with self._held.acting():
                try:
                    _link(source, path)
                except FileNotFoundError:
                    # A folder is missing: this holder's own, if it was taken over.
                    self._held.check()
                    disk.make_folder(path.parent)
                    _link(source, path)
        except FileExistsError:
            if disk.read(path) != content:
                raise
        with contextlib.suppress(FileNotFoundError):
            source.unlink()
        with self._held.acting():
            disk.sync(path.parent)

    def replace(self, path: pathlib.Path, content: bytes) -> None:
        """Replaces a file below the folder, as a whole and durably.

        Raises:
          LostError: if this process no longer holds the claim.
        """
        with self.replacing(path) as file:
            file.write(content)

    @contextlib.contextmanager
    def replacing(self, path: pathlib.Path) -> Iterator[BinaryIO]:
        """Yields a file that replaces another when the context ends, as `replace` does.

        After an exception in the context, it does not.

        Raises:
          LostError: if this process no longer holds the claim.
        """
        with self._held.writing() as (source, file):
            yield file
        with self._held.acting():
            source.replace(path)
            disk.sync(path.parent)

    def delete(self, path: pathlib.Path) -> None:
        """Deletes a file below the folder, durably, if it exists.

        Raises:
          LostError: if this process no longer holds the claim.
        """
        target = self._held.new_path()
        with self._held.acting():
            if not disk.exists(path):
                return
            path.replace(target)
            disk.sync(path.parent)
        with contextlib.suppress(FileNotFoundError):
            target.unlink()

    def release(self) -> None:
        """Ends the claim. Another process may have taken it over."""
        self._end_undo()
        self._end()


class _Held:
    """What a claim and the thread that renews it share.

    Attributes:
      ended: is set when the claim ends.
    """

    def __init__(self, folder: pathlib.Path, own: pathlib.Path, lock: int):
        self.ended = threading.Event()
        self._folder = folder
        self._own = own
        self._lock = lock
        self._process = os.getpid()
        self._beats = 0
        # The holder that has taken the claim over, in words.
        self._lost_to = ""

    def check(self) -> None:
        self.check_noticed()
        if not disk.exists(self._own):
            self._lost_to = _holder(self._folder) or "no process"
        self.check_noticed()

    def check_noticed(self) -> None:
        if self._lost_to:
            raise LostError(
                f"this process no longer holds {self._folder} ({self._lost_to} holds "
                "it): it was suspended, or cut off from the disk, and another one came "
                "meanwhile; or the disk was unmounted, or the folder moved. It has "
                "changed nothing since. End one of two runs, or bring the folder back: "
                "the same command resumes."
            )

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Converts the error of an act that came too late to LostError."""
        try:
            yield
        except OSError:
            self.check()
            raise

    def new_path(self) -> pathlib.Path:
        """Returns the path of a new file in this holder's folder."""
        return self._own / secrets.token_hex(8)

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[pathlib.Path, BinaryIO]]:
        """Yields the path of a new file in this holder's folder, and the file.

        It is durable when the context ends, and deleted after an exception in it.
        """
        path = self.new_path()
        with self.acting():
            file = path.open("xb")
        try:
            with file, disk.naming(path):
                yield path, file
                file.flush()
            with self.acting():
                disk.sync(path)
        except BaseException:
            # On a full disk, it would take the room that is left.
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def renew(self) -> None:
        """Gives a sign of life."""
        self._beats += 1
        # The file is not created: the folder may have been taken over.
        with contextlib.suppress(OSError), (self._own / _OWNER).open("r+b") as file:
            file.write(_owner_note(self._own.name, self._beats))
            file.truncate()
        # If this cannot be known now, it is asked again.
        with contextlib.suppress(OSError, LostError):
            self.check()

    def forget(self) -> None:
        """Closes the lock, in a child that must not hold it."""
        lock = self._lock
        self._lock = -1
        # A disk that was away may answer by an error; the file is closed all the same.
        with contextlib.suppress(OSError):
            os.close(lock)

    def release(self) -> None:
        self.ended.set()
        # First, since a disk may be slow. Another process that comes now renames the
        # folder, and the rest finds nothing to do.
        self.forget()
        # A forked child has no claim, but a copy of this object.
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                _clear(self._own)
                self._own.rmdir()
                self._own.parent.rmdir()


class _Taking:
    """Takes the place of the last holder of a folder."""

    def __init__(
        self,
        folder: pathlib.Path,
        say: Callable[[str], None],
        watch_seconds: float,
        *,
        has_lock: bool,
    ):
        self._folder = folder
        self._say = say
        self._watch_seconds = watch_seconds
        # Whether the kernel knows that no living process holds the folder.
        self._has_lock = has_lock
        self._id = secrets.token_hex(8)
        self._holders = folder / HOLDER
        self._own = self._holders / self._id

    def take(self) -> pathlib.Path:
        """Returns this process's folder, which no other process has now."""
        while not self._try():
            pass
        for name in _names(self._folder):
            # What a process left that was killed before it had a folder.
            if re.fullmatch(re.escape(HOLDER) + r"\.[0-9a-f]{16}", name):
                shutil.rmtree(self._folder / name, ignore_errors=True)
        _clear(self._own)
        (self._own / _OWNER).write_bytes(_owner_note(self._id, 0))
        return self._own

    def _try(self) -> bool:
        """Returns whether this process's folder is now the only one."""
        names = _names(self._holders)
        if self._id in names:
            return True
        if not names:
            return self._begin()
        for name in names:
            holder = self._holders / name
            # What is deleted there must not be reached by a link.
            is_link = self._holders.is_symlink() or holder.is_symlink()
            if is_link or not _ID.fullmatch(name):
                raise ValueError(
                    f"{holder} was not written by a run: make sure that no run uses "
                    f"{self._folder}, then delete {self._holders}, or the link there."
                )
        if not self._has_lock:
            self._watch(names[0])
        return self._replace(self._holders / names[0])

    def _begin(self) -> bool:
        """Creates the folder of holders with this process's in it, as one operation."""
        new = self._holders.with_name(f"{HOLDER}.{self._id}")
        (new / self._id).mkdir(parents=True)
        try:
            # An empty folder is replaced, another one is not.
            new.rename(self._holders)
        except OSError as e:
            shutil.rmtree(new)
            if e.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # Where an empty folder is not replaced either.
            with contextlib.suppress(OSError):
                self._holders.rmdir()
            return False
        return True

    def _replace(self, last: pathlib.Path) -> bool:
        try:
            last.rename(self._own)
        except FileNotFoundError:
            # Another process came first; or this one, and the reply of a network disk
            # was lost, which the next look shows.
            return False
        except OSError as e:
            # A folder in a lower layer of an overlay cannot be renamed. No living
            # process holds it, since such a layer does not change.
            if e.errno != errno.EXDEV or not self._has_lock:
                raise
            shutil.rmtree(self._holders)
            return False
        return True

    def _watch(self, name: str) -> None:
        """Raises InUseError if a holder gives a sign of life."""
        first = _note(self._holders / name)
        self._say(
            f"{self._folder} is held by {_owner_of(first)}; watching for "
            f"{self._watch_seconds:g} s whether that process is alive"
        )
        # The watch measures elapsed time on this host only, since the clocks of two
        # hosts may differ.
        end = time.monotonic() + self._watch_seconds
        while time.monotonic() < end:
            time.sleep(min(1.0, self._watch_seconds / 20))
            names = _names(self._holders)
            if not names:
                return
            if names != [name] or _note(self._holders / name) != first:
                raise in_use(self._folder)


def holder_folder(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder of the process that holds a folder; None if none does."""
    for name in _names(folder / HOLDER):
        return folder / HOLDER / name
    return None


def in_use(folder: pathlib.Path) -> InUseError:
    """Returns the error that another process holds a folder."""
    return InUseError(
        f"{folder} is in use by another process ({_holder(folder) or 'unknown'}): two "
        "runs cannot write to the same place. Wait for the other run to end, or give "
        "another place."
    )


def _open_lock(path: pathlib.Path) -> int:
    # A link or a named pipe there is not the lock of a run. Opening a pipe would wait.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = disk.retried(lambda: os.open(path, flags, 0o666))
    except OSError as e:
        if e.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        kinds = {errno.ELOOP: "a link", errno.EISDIR: "a folder"}
        raise _not_a_lock(path, kinds.get(e.errno, "no file")) from e
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_lock(path, "no file")
    return descriptor


def _not_a_lock(path: pathlib.Path, kind: str) -> ValueError:
    return ValueError(
        f"{path} is {kind}, not the lock of a run: make sure that no run uses "
        f"{path.parent}, then move it away."
    )


def _lock(descriptor: int, folder: pathlib.Path) -> bool:
    """Locks an open file; returns whether the disk has locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise in_use(folder) from e
    except OSError as e:
        if e.errno not in disk.LACKING | {errno.ENOLCK}:
            raise OSError(e.errno, e.strerror, str(folder / LOCK)) from e
        logging.log_first_n(
            logging.WARNING,
            "the disk of %s has no locks (flock: %s). A lease takes their place: a "
            "run that was killed there is watched for %g s before the next one begins",
            1,
            folder,
            e.strerror,
            WATCH_SECONDS,
        )
        return False
    return True


def _renew(held: _Held, seconds: float) -> None:
    while not held.ended.wait(seconds):
        held.renew()


def _link(source: pathlib.Path, path: pathlib.Path) -> None:
    """Gives a file another name, if there is nothing of that name."""
    try:
        os.link(source, path, follow_symlinks=False)
    except OSError as e:
        if e.errno not in _NO_LINK:
            raise
        # Such a disk has no operation that does both.
        if disk.exists(path):
            raise FileExistsError(
                errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path)
            ) from e
        source.rename(path)


def _clear(folder: pathlib.Path) -> None:
    """Deletes the files of a holder's folder; it has no folders."""
    for name in _names(folder):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()


def _names(folder: pathlib.Path) -> list[str]:
    """Lists a folder; it is empty if there is none."""
    return [entry.name for entry in disk.entries(folder) or ()]


def _owner_note(identity: str, beats: int) -> bytes:
    note = {
        "owner": f"{platform.node()}/{identity}",
        "process": os.getpid(),
        "beats": beats,
    }
    return json.dumps(note).encode()


def _note(own: pathlib.Path) -> bytes:
    """Reads what a holder has written last; empty if it has written nothing."""
    try:
        with (own / _OWNER).open("rb") as file:
            return file.read(_OWNER_BYTES)
    except OSError:
        return b""


def _holder(folder: pathlib.Path) -> str:
    """Describes the process that holds a folder; empty if there is none."""
    with contextlib.suppress(OSError):
        for name in _names(folder / HOLDER):
            return _owner_of(_note(folder / HOLDER / name))
    return ""


def _owner_of(note: bytes) -> str:
    """Returns the owner that a note names, in words."""
    with contextlib.suppress(ValueError):
        content = jsonfile.loads(note)
        owner = content.get("owner")
        process = content.get("process")
        if isinstance(owner, str) and isinstance(process, int):
            return f"process {process} on {owner.partition('/')[0]}"
    return "a process that gave no name"
