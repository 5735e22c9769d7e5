"""Locks by which only one run writes a store at a time.

On a disk, the lock is a claim; see `xshard.files.claim`. On an object store, it is a
lease: an object that its owner rewrites every few seconds. A process that finds a lease
watches it. If the object does not change, the owner is dead, or suspended, and the
process takes the lease over.

**What a suspended owner does when it wakes up must do no harm**, since it may have
asked whether it holds the lock just before it was suspended. So a holder makes its
changes through the lock:

    creation   COMMIT and marks are created only if absent. On a disk, by an operation
               that fails once another process has the claim. An object store has none,
               so whoever takes a lease over marks what its predecessor has begun and
               not committed as ABANDONED, before it looks which checkpoints count. An
               ABANDONED attempt never counts, whatever is created in it later; the mark
               stays when the rest is deleted.
    deletion   On a disk, as above. On an object store, the owner first writes into the
               lease what it is about to delete. That is conditional on the lease's
               generation, so it fails if another process has the lease. Whoever takes
               the lease over deletes what stands there before it looks which
               checkpoints count: a late deletion finds nothing more to delete.
    lease      It is only replaced while it has the generation that its owner wrote,
               also at its end: it is first replaced by a lease that nobody holds.

Attempts that have no COMMIT are deleted by the names that were listed while the lock
was held, which no later holder uses: each has its attempts in folders of new names.
"""

import contextlib
import json
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from absl import logging

from xshard import errors
from xshard.checkpoint import store as store_lib
from xshard.files import claim as claim_lib
from xshard.files import jsonfile

NAME = store_lib.LOCK
RENEW_SECONDS = claim_lib.RENEW_SECONDS
WATCH_SECONDS = claim_lib.WATCH_SECONDS


class LostError(store_lib.CheckpointError):
    """This process no longer holds the lock of a store, so its run must stop."""


def acquire(store: store_lib.Store, log: Callable[[str], None]) -> "Lock":
    """Locks a store for this process.

    Args:
      store: the store.
      log: called with a message if the caller must wait.

    Raises:
      CheckpointError: if another process holds the lock.
    """
    if isinstance(store, store_lib.Disk):
        return FileLock(store, log)
    return Lease(store, log)


class FileLock:
    """The lock of a folder on a disk.

    Attributes:
      inherited: None, since nothing that the last holder does can come late.
    """

    def __init__(
        self, store: store_lib.Disk, log: Callable[[str], None] = logging.info
    ):
        """Takes the lock; raises CheckpointError if another process holds it."""
        self.inherited: Sequence[str] | None = None
        self._store = store
        self._path = store.path
        try:
            self._claim = claim_lib.Claim(
                self._path,
                log,
                renew_seconds=RENEW_SECONDS,
                watch_seconds=WATCH_SECONDS,
            )
        except errors.UserError as e:
            raise store_lib.CheckpointError(str(e)) from e
        except (OSError, ValueError) as e:
            raise store_lib.CheckpointError(
                f"{store} cannot be written: {store_lib.reason(e)}."
            ) from e

    def check(self) -> None:
        """Raises LostError if another process has the lock."""
        with self._named():
            self._claim.check()

    def check_noticed(self) -> None:
        """Raises LostError if it is known that another process has the lock."""
        with self._named():
            self._claim.check_noticed()

    def create(self, name: str, content: bytes) -> None:
        """Creates a file as `Store.create` does, while the lock is held."""
        with self._named():
            try:
                self._claim.create(self._path / name, content)
            except FileExistsError as e:
                raise store_lib.exists(self._store, name) from e

    def delete(self, name: str) -> None:
        """Deletes a file as `Store.delete` does, while the lock is held."""
        with self._named():
            self._claim.delete(self._path / name)

    def announce(self, folders: Sequence[str]) -> None:
        """Checks that the lock is held: a late deletion fails by itself."""
        del folders
        self.check()

    def release(self) -> None:
        """Releases the lock."""
        self._claim.release()

    def leave(self) -> None:
        """Releases the lock, as a process does that is killed."""
        self._claim.release()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except claim_lib.LostError as e:
            raise LostError(str(e)) from e
        except OSError as e:
            raise store_lib.CheckpointError(store_lib.reason(e)) from e


class _Content(NamedTuple):
    """The content of a lease.

    Attributes:
      owner: the process that holds it; empty if it was released.
      beats: the number of times that the owner has written it.
      deleting: the folders that the owner is deleting.
    """

    owner: str
    beats: jsonfile.Count
    # A lease of an earlier version has none.
    deleting: list[str] | None = None


class Lease:
    """The lease of a folder on an object store.

    Attributes:
      inherited: the folders that the last holder was deleting when its lease was taken
        over; None if it was released.
    """

    def __init__(self, store: store_lib.Store, log: Callable[[str], None]):
        """Takes the lease.

        If there already is one, watches it first, for `WATCH_SECONDS`.

        Args:
          store: the store.
          log: called with a message before such a watch.

        Raises:
          CheckpointError: if another process renews the lease, or takes it first; or if
            the object is not a lease.
        """
        self._store = store
        self._owner = f"{platform.node()}/{secrets.token_hex(8)}"
        self._beats = 0
        self._deleting: list[str] = []
        # The new owner, if another process has taken the lease over.
        self._lost_to = ""
        free, last = self._free_generation(log)
        self.inherited: Sequence[str] | None = None
        if last is not None and last.owner:
            self.inherited = last.deleting or []
            # What the last owner was deleting stays known until this process has
            # deleted it.
            self._deleting = list(self.inherited)
        # The write is conditional on the generation: of several processes that found
        # the lease free, one succeeds.
        first = self._replaced(free)
        self._generation = self._replaced(first)
        # A service that does not heed the conditions replaces it again: of an object
        # that must be unchanged, or absent.
        for outdated in (first, free):
            ignored = store.replace(NAME, self._content(), outdated)
            if ignored is not None:
                self._generation = ignored
                log(
                    f"warning: the service of {store} ignores the conditions of "
                    "writes, so a second run in this folder may not be refused, and "
                    "would damage this one: start none there"
                )
                break
        # Held while the lease is written, by the thread that renews it or another one.
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._renew, name="checkpoint lease", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raises LostError if another process has taken the lease over."""
        self.check_noticed()
        # The thread may not have tried to renew the lease since, for example if this
        # process was suspended. So the object itself is asked.
        _, content = self._store.stat(NAME)
        if content is None:
            self._lost_to = "nobody"
        else:
            owner = _parse(self._store, content).owner
            if owner != self._owner:
                self._lost_to = owner or "nobody"
        self.check_noticed()

    def check_noticed(self) -> None:
        """Raises LostError if it is known that another process has the lease."""
        if self._lost_to:
            raise LostError(
                f"this process no longer holds the lease on {self._store} "
                f"({self._lost_to} holds it), because it did not renew the lease for "
                f"{WATCH_SECONDS:g} s; end one of the two runs"
            )

    def create(self, name: str, content: bytes) -> None:
        """Creates an object as `Store.create` does, while the lease is held.

        If the lease was lost, the object may be there, in an ABANDONED attempt.
        """
        self.check()
        self._store.create(name, content)
        self.check()

    def delete(self, name: str) -> None:
        """Deletes an object as `Store.delete` does, while the lease is held."""
        self.check()
        self._store.delete(name)
        # A process that was suspended in between knows it here.
        self.check()

    def announce(self, folders: Sequence[str]) -> None:
        """Writes into the lease which folders are about to be deleted."""
        with self._writing:
            self._deleting = list(folders)
            written = self._store.replace(NAME, self._content(), self._generation)
            if written is not None:
                self._generation = written
        if written is None:
            self._lost_to = "another process"
            self.check()

    def leave(self) -> None:
        """Ends the renewal, and leaves the lease as a process does that is killed.

        The next one takes it over, with what it has inherited.
        """
        self._ended.set()
        self._thread.join()

    def release(self) -> None:
        """Ends the renewal and deletes the lease."""
        self.leave()
        if self._lost_to:
            return
        # If the lease cannot be deleted, the next run watches it and takes it over.
        with contextlib.suppress(store_lib.CheckpointError):
            self._owner = ""
            self._deleting = []
            # The next owner may already have replaced the one that nobody holds.
            free = self._store.replace(NAME, self._content(), self._generation)
            if free is not None:
                self._store.delete(NAME, generation=free)

    def _replaced(self, generation: bytes) -> bytes:
        """Writes the lease, if it still has a generation; returns the new one."""
        written = self._store.replace(NAME, self._content(), generation)
        if written is not None:
            return written
        _, content = self._store.stat(NAME)
        if content is None or _parse(self._store, content).owner != self._owner:
            raise _in_use(self._store, "another process, which came first")
        # This process has written the lease, and nobody since.
        self._store.delete(NAME)
        raise store_lib.CheckpointError(
            f"{self._store}: the service refuses to replace an object if it is "
            "unchanged (If-Match), although it is; Ceph's gateway and DigitalOcean "
            "Spaces do so. Add the option conditional_writes=false to the URL. A "
            "second run that is started there at the same instant may then not be "
            "refused: start none"
        )

    def _content(self) -> bytes:
        """Returns the next content, which differs from all earlier ones."""
        self._beats += 1
        content = _Content(self._owner, self._beats, self._deleting)
        return json.dumps(content._asdict()).encode()

    def _free_generation(
        self, log: Callable[[str], None]
    ) -> tuple[bytes, _Content | None]:
        """Returns the lease's generation, and its content, once it is known that no
        process renews it.
        """
        generation, content = self._store.stat(NAME)
        if content is None:
            return generation, None
        last = _parse(self._store, content)
        if not last.owner:
            return generation, last
        log(
            f"{self._store} is locked by {last.owner}; watching for "
            f"{WATCH_SECONDS:g} s whether that process is alive"
        )
        # The watch measures elapsed time on this host only, since the clocks of two
        # hosts may differ.
        end = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(RENEW_SECONDS / 5)
            now, content = self._store.stat(NAME)
            if content is None:
                return now, None
            if now != generation:
                changed = _parse(self._store, content)
                if not changed.owner:
                    return now, changed
                raise _in_use(self._store, changed.owner)
        return generation, last

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            try:
                with self._writing:
                    renewed = self._store.replace(
                        NAME, self._content(), self._generation
                    )
                    if renewed is not None:
                        self._generation = renewed
            except store_lib.CheckpointError:
                # The store is out of reach. If this lasts, another process may take the
                # lease, which `check` detects.
                continue
            if renewed is None:
                self._lost_to = "another process"
                return


Lock = FileLock | Lease


def _parse(store: store_lib.Store, content: bytes) -> _Content:
    """Parses a lease.

    Raises:
      CheckpointError: if a run cannot have written it.
    """
    try:
        return jsonfile.parse(jsonfile.loads(content), _Content, extra_keys=True)
    except ValueError as e:
        raise store_lib.CheckpointError(
            f"{store}/{NAME} is not the lease of a run: {str(e).rstrip('.')}. Make "
            "sure that no run writes there, then delete it; or give another place."
        ) from e


def _in_use(store: store_lib.Store, owner: str) -> store_lib.CheckpointError:
    return store_lib.CheckpointError(
        f"{store} is in use by {owner}: two runs cannot write to the same place. Wait "
        "for the other run to end, or give another place."
    )
