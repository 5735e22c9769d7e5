"""Locks by which only one run writes a store at a time.

On a disk, the kernel holds a file lock for as long as the process lives. On an object
store, the lock is a lease: an object that its owner rewrites every few seconds. A
process that finds a lease watches it. If the object does not change, the owner is dead,
and the process takes the lease over. If the owner was only slow, it detects the loss
before its next checkpoint counts, because the object names another owner.
"""

import contextlib
import fcntl
import json
import os
import platform
import secrets
import threading
import time
import weakref
from collections.abc import Callable

from xshard.checkpoint import store as store_lib
from xshard.files import disk, forks

NAME = store_lib.LOCK
RENEW_SECONDS = 5.0
WATCH_SECONDS = 20.0


def acquire(store: store_lib.Store, log: Callable[[str], None]) -> "FileLock | Lease":
    """Locks a store for this process.

    Args:
      store: the store.
      log: called with a message if the caller must wait.

    Raises:
      CheckpointError: if another process holds the lock.
    """
    if store.path is not None:
        return FileLock(store)
    return Lease(store, log)


class FileLock:
    """The lock of a folder on a disk."""

    def __init__(self, store: store_lib.Store):
        """Takes the lock; raises CheckpointError if another process holds it."""
        assert store.path is not None
        try:
            disk.make_folder(store.path)
            file = os.open(store.path / NAME, os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError as e:
            raise store_lib.CheckpointError(
                f"{store} cannot be written: {store_lib.reason(e)}."
            ) from e
        # Closing the file releases the lock, at the latest when this object is
        # garbage-collected.
        self._close = weakref.finalize(self, os.close, file)
        # A forked child would share the lock, and keep it after this process has ended.
        self._end_undo = forks.undo_in_children(self._close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._close()
            if isinstance(e, BlockingIOError):
                raise _in_use(store, "another process") from e
            raise store_lib.CheckpointError(
                f"{store} cannot be locked: {store_lib.reason(e)}."
            ) from e

    def check(self) -> None:
        """Does nothing: the kernel does not let another process take the lock."""

    def release(self) -> None:
        """Releases the lock."""
        self._end_undo()
        self._close()


class Lease:
    """The lease of a folder on an object store."""

    def __init__(self, store: store_lib.Store, log: Callable[[str], None]):
        """Takes the lease.

        If there already is one, watches it first, for `WATCH_SECONDS`.

        Args:
          store: the store.
          log: called with a message before such a watch.

        Raises:
          CheckpointError: if another process renews the lease, or takes it first.
        """
        self._store = store
        self._owner = f"{platform.node()}/{secrets.token_hex(8)}"
        self._beats = 0
        # The new owner, if another process has taken the lease over.
        self._lost_to = ""
        free = self._free_generation(log)
        # The write is conditional on the generation: of several processes that found
        # the lease free, one succeeds.
        generation = store.replace(NAME, self._content(), free)
        if generation is None:
            raise _in_use(store, "another process, which came first")
        self._generation = generation
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._renew, name="checkpoint lease", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raises CheckpointError if another process has taken the lease over."""
        if not self._lost_to:
            # The thread may not have tried to renew the lease since, for example if
            # this process was suspended. So the object itself is asked.
            _, content = self._store.stat(NAME)
            holder = _owner_of(content) if content else "nobody"
            if holder != self._owner:
                self._lost_to = holder
        if self._lost_to:
            raise store_lib.CheckpointError(
                f"this process no longer holds the lease on {self._store} "
                f"({self._lost_to} holds it), because it did not renew the lease for "
                f"{WATCH_SECONDS:g} s; end one of the two runs"
            )

    def release(self) -> None:
        """Ends the renewal and deletes the lease."""
        self._ended.set()
        self._thread.join()
        if not self._lost_to:
            # If the lease cannot be deleted, the next run watches it and takes it over.
            with contextlib.suppress(store_lib.CheckpointError):
                self._store.delete(NAME)

    def _content(self) -> bytes:
        """Returns the next content, which differs from all earlier ones."""
        self._beats += 1
        return json.dumps({"owner": self._owner, "beats": self._beats}).encode()

    def _free_generation(self, log: Callable[[str], None]) -> bytes:
        """Returns the lease's generation once it is known that no process renews it."""
        generation, content = self._store.stat(NAME)
        if content is None:
            return generation
        log(
            f"{self._store} is locked by {_owner_of(content)}; watching for "
            f"{WATCH_SECONDS:g} s whether that process is alive"
        )
        # The watch measures elapsed time on this host only, since the clocks of two
        # hosts may differ.
        end = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(RENEW_SECONDS / 5)
            now, content = self._store.stat(NAME)
            if content is None:
                return now
            if now != generation:
                raise _in_use(self._store, _owner_of(content))
        return generation

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            try:
                renewed = self._store.replace(NAME, self._content(), self._generation)
            except store_lib.CheckpointError:
                # The store is out of reach. If this lasts, another process may take the
                # lease, which `check` detects.
                continue
            if renewed is None:
                self._lost_to = "another process"
                return
            self._generation = renewed


def _owner_of(content: bytes) -> str:
    """Returns the owner that a lease names."""
    return json.loads(content)["owner"]


def _in_use(store: store_lib.Store, owner: str) -> store_lib.CheckpointError:
    return store_lib.CheckpointError(
        f"{store} is in use by {owner}: two runs cannot write to the same place. Wait "
        "for the other run to end, or give another place."
    )
