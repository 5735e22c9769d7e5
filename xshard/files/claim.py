"""The claim of one process to a folder: no other process writes in it.

.lock           the kernel's lock (flock), which it drops when its process ends
.holder.json    who holds the claim, written again every few seconds

**The kernel's lock is not enough.** A server of a network disk drops the locks of a
client that is silent, as a laptop that was closed or a machine that was paused. And
some disks have such a lock within each host only (sshfs, NFS with `local_lock`, Lustre
with `localflock`). So whoever takes a claim replaces the note of the last holder by its
own, and a holder reads the note before each act that would harm the next one: a row, a
`COMMIT`, a file that it replaces. If another process's note is there, it stops with
`LostError`.

**A disk without flock** (Lustre mounted so, some FUSE) has the note alone, as a lease:
a process that finds one watches it, and replaces it if it does not change for a while.
A warning says so once. A bucket has the same lease; see `xshard.checkpoint.lock`.

A process may be suspended between the look at the note and the act itself. Each holder
replaces a file of rows before it appends to it, so that a predecessor's late row goes
to a file that no longer has the name; see `xshard.metrics.writers`. What protects
checkpoints is described in `xshard.checkpoint.lock`.
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
import stat
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import msgspec
from absl import logging

from xshard import errors
from xshard.files import disk, forks, jsonfile

LOCK = ".lock"
HOLDER = ".holder.json"
RENEW_SECONDS = 5.0
WATCH_SECONDS = 20.0


class LostError(errors.UserError):
    """This process no longer holds a claim, so it must stop."""


class Note(msgspec.Struct, frozen=True):
    """What the holder of a lease writes.

    Attributes:
      owner: its host and its ID, with a slash between; empty if it has released it.
      beats: the number of times that it has written.
      process: its number on its host.
      deleting: the folders that it is deleting.
    """

    owner: str
    beats: jsonfile.Count
    # A lease of an earlier version has none of these.
    process: int | None = None
    deleting: list[str] | None = None


class Lease:
    """What one process at a time holds: a note, which it writes again and again.

    Attributes:
      inherited: the folders that the last holder was deleting, if the lease was taken
        over from it; None if that one had released it.
    """

    def __init__(self, place: object, say: Callable[[str], None]):
        """Takes the lease, and begins to renew it.

        Args:
          place: what is held, for messages.
          say: called with a message before a watch.

        Raises:
          UserError: if another process holds the lease, or it cannot be taken.
        """
        self.inherited: Sequence[str] | None = None
        self._place = place
        self._say = say
        self._id = secrets.token_hex(8)
        self._note = Note(f"{platform.node()}/{self._id}", 0, os.getpid())
        # Who has taken the lease over, in words.
        self._lost_to = ""
        # Held while the note is written, by the thread that renews it or another one.
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._take()
        self._thread = threading.Thread(
            target=_renew,
            args=(weakref.ref(self), self._ended),
            name="lease",
            daemon=True,
        )
        self._thread.start()

    def check(self) -> None:
        """Raises LostError if another process has taken the lease over."""
        self.check_noticed()
        # The thread may not have tried to renew it since, for example if this process
        # was suspended. So the note itself is read.
        _, content = self._read()
        if not self._is_own(content):
            self._lost_to = "no process" if content is None else _holder(content)
        self.check_noticed()

    def check_noticed(self) -> None:
        """Raises LostError if it is known that another process has taken the lease
        over. Asks no disk, so that it may be called in each step.
        """
        if self._lost_to:
            raise LostError(
                f"this process no longer holds {self._place} ({self._lost_to} holds "
                "it): it was suspended, or cut off from it, and another one came "
                "meanwhile; or the disk was unmounted, or the folder moved. It has "
                "changed nothing since. End one of two runs, or bring the folder back: "
                "the same command resumes."
            )

    def announce(self, folders: Sequence[str]) -> None:
        """Writes into the note which folders are about to be deleted.

        Raises:
          LostError: if another process has taken the lease over.
        """
        with self._writing:
            self._note = msgspec.structs.replace(self._note, deleting=list(folders))
            self._write()
        self.check_noticed()

    def release(self, *, is_settled: bool = True) -> None:
        """Ends the lease, which another process may have taken over.

        Args:
          is_settled: whether the next holder need not look after what this one has
            left; False: the note stays, as that of a process that is killed.
        """
        self._ended.set()
        self._thread.join()
        # A forked child holds no lease, but has a copy of this object.
        if is_settled and os.getpid() == self._note.process:
            # A note that cannot be deleted is taken for that of a dead process.
            with contextlib.suppress(OSError, errors.UserError):
                self.check()
                self._free()

    def _take(self) -> None:
        """Writes the first note, in the place of that of the last holder."""
        raise NotImplementedError

    def _read(self) -> tuple[bytes, bytes | None]:
        """Returns the generation of the note, if it has one, and its content; None as
        content if nobody holds the lease.
        """
        raise NotImplementedError

    def _write(self) -> None:
        """Writes the next note, unless another process has taken the lease over."""
        raise NotImplementedError

    def _free(self) -> None:
        """Deletes the note."""
        raise NotImplementedError

    def _content(self) -> bytes:
        """Returns the next note, which differs from all earlier ones."""
        self._note = msgspec.structs.replace(self._note, beats=self._note.beats + 1)
        return json.dumps(msgspec.structs.asdict(self._note)).encode()

    def _is_own(self, content: bytes | None) -> bool:
        return content is not None and self._id.encode() in content

    def _succeed(self, *, watches: bool) -> bytes:
        """Notes what the last holder has left; returns the generation of its note.

        Args:
          watches: whether to watch first that no process writes the note.

        Raises:
          UserError: if one does.
        """
        generation, content = self._read()
        if watches and content is not None:
            self._say(
                f"{self._place} is held by {_holder(content)}; watching for "
                f"{WATCH_SECONDS:g} s whether that process is alive"
            )
            # The watch measures elapsed time on this host only, since the clocks of two
            # hosts may differ.
            end = time.monotonic() + WATCH_SECONDS
            first = content
            while content == first and time.monotonic() < end:
                time.sleep(RENEW_SECONDS / 5)
                generation, content = self._read()
            if content not in (first, None):
                raise self._in_use(content)
        if content is not None:
            self.inherited = _parsed(content).deleting or []
            # It stays known until this process has deleted it.
            self._note = msgspec.structs.replace(
                self._note, deleting=list(self.inherited)
            )
        return generation

    def _in_use(self, content: bytes | None) -> errors.UserError:
        holder = "unknown" if content is None else _holder(content)
        return errors.UserError(
            f"{self._place} is in use by another process ({holder}): two runs cannot "
            "write to the same place. Wait for the other run to end, or give another "
            "place."
        )


class Claim(Lease):
    """The claim to a folder on a disk, until `release` or the end of this object."""

    def __init__(self, folder: pathlib.Path, say: Callable[[str], None] = logging.info):
        """Claims a folder, and creates it if necessary.

        Args:
          folder: the folder.
          say: called with a message before a watch.

        Raises:
          UserError: if another process holds the claim, the folder cannot be written or
            locked, or what is in the place of the lock cannot be one.
        """
        self._folder = folder
        self._path = folder / HOLDER
        super().__init__(folder, say)
        # A forked child would share the lock, and keep it after this process has ended.
        self._end_undo = forks.undo_in_children(self._unlock)

    def release(self, *, is_settled: bool = True) -> None:
        """Ends the claim, as any lease."""
        super().release(is_settled=is_settled)
        self._end_undo()
        self._unlock()

    def _take(self) -> None:
        try:
            disk.make_folder(self._folder)
            lock = self._opened()
            # At the latest when this object is garbage-collected.
            self._unlock = weakref.finalize(self, _close, lock)
            # Not when the interpreter ends, where a save may still be waited for.
            self._unlock.atexit = False
            try:
                has_lock = self._has_locked(lock)
                self._succeed(watches=not has_lock)
                disk.replace(self._path, self._content())
                if not has_lock:
                    # Of several that were watching, the last one to write holds it.
                    time.sleep(RENEW_SECONDS / 5)
                _, content = self._read()
                if not self._is_own(content):
                    raise self._in_use(content)
            except BaseException:
                self._unlock()
                raise
        except OSError as e:
            raise errors.UserError(
                f"{self._folder} cannot be written: {e.strerror} ({e.filename})."
            ) from e

    def _opened(self) -> int:
        """Opens the file that the kernel locks; returns its descriptor."""
        path = self._folder / LOCK
        # A link or a named pipe there is not the lock of a run. Opening a pipe would
        # wait.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            lock = disk.retried(lambda: os.open(path, flags, 0o666))
            if stat.S_ISREG(os.fstat(lock).st_mode):
                return lock
            os.close(lock)
        except OSError as e:
            if e.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
        raise errors.UserError(
            f"{self._folder} cannot be used: {path} is a link, a folder or a pipe, not "
            f"the lock of a run: make sure that no run uses {self._folder}, then move "
            "it away."
        )

    def _has_locked(self, lock: int) -> bool:
        """Locks an open file; returns whether the disk has locks."""
        try:
            with disk.naming(self._folder / LOCK):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise self._in_use(self._read()[1]) from e
        except OSError as e:
            if e.errno not in disk.LACKING | {errno.ENOLCK}:
                raise
            logging.log_first_n(
                logging.WARNING,
                "the disk of %s has no locks (flock: %s). A lease takes their place: a "
                "run that was killed there is watched for %g s before the next one "
                "begins",
                1,
                self._folder,
                e.strerror,
                WATCH_SECONDS,
            )
            return False
        return True

    def _read(self) -> tuple[bytes, bytes | None]:
        return b"", disk.read(self._path)

    def _write(self) -> None:
        # The file that is open stays this process's if another one replaces it. On a
        # full disk it stays as it is, and deletions go on.
        with contextlib.suppress(OSError), self._path.open("r+b") as file:
            if self._is_own(file.read()):
                file.seek(0)
                file.write(self._content())
                file.truncate()
        self.check()

    def _free(self) -> None:
        self._path.unlink()


def holder(folder: pathlib.Path) -> str:
    """Returns the ID of the process that holds a folder on a disk; empty if none does.

    It is new each time that a process takes the claim.
    """
    # The note may be half written again; its beginning stays.
    found = re.search(b'/([0-9a-f]{16})"', disk.read(folder / HOLDER) or b"")
    return found[1].decode() if found else ""


def _parsed(content: bytes) -> Note:
    """Parses a note; one that no run has written has no owner."""
    try:
        return jsonfile.parse(jsonfile.loads(content), Note)
    except ValueError:
        return Note("", 0)


def _holder(content: bytes) -> str:
    """Describes the process that has written a note."""
    note = _parsed(content)
    host, _, _ = note.owner.partition("/")
    if not host or note.process is None:
        return host or "a process that gave no name"
    return f"process {note.process} on {host}"


def _renew(lease: "weakref.ref[Lease]", ended: threading.Event) -> None:
    """Renews a lease until it ends, or nobody has it any more."""
    while not ended.wait(RENEW_SECONDS):
        held = lease()
        if held is None:
            return
        # If it cannot be written now, it is tried again.
        with contextlib.suppress(OSError, errors.UserError), held._writing:
            held._write()
        del held


def _close(lock: int) -> None:
    # A disk that was away may answer by an error; the file is closed all the same.
    with contextlib.suppress(OSError):
        os.close(lock)
