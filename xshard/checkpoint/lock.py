"""The lock by which only one run writes a store at a time.

On a disk, it is a claim; see `xshard.files.claim`. In a bucket, it is the lease that a
disk without locks has: an object that its owner rewrites every few seconds. A process
that finds a lease watches it. If the object does not change, the owner is dead, or
suspended, and the process takes the lease over.

**What a suspended owner does when it wakes up must do no harm**, and it may have been
suspended just after it looked whether it holds the lock. So a holder makes its changes
through the lock:

    creation   COMMIT and marks are created only if absent. Whoever takes a lease over
               marks what its predecessor has begun and not committed as ABANDONED,
               before it looks which checkpoints count. An ABANDONED attempt never
               counts, whatever is created in it later. In a bucket, the mark stays when
               the rest is deleted; on a disk, COMMIT is not created in a folder that is
               gone.
    deletion   The owner first writes into the lease what it is about to delete, which
               fails if another process has the lease. Whoever takes the lease over
               deletes what stands there before it looks which checkpoints count: a late
               deletion finds nothing more to delete.
    lease      In a bucket, it is only replaced while it has the generation that its
               owner wrote, also at its end: it is first replaced by a lease that nobody
               holds.

Attempts that have no COMMIT are deleted by the names that were listed while the lock
was held, which no later holder uses: each has its attempts in folders of new names.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import msgspec

from xshard import errors
from xshard.checkpoint import store as store_lib
from xshard.files import claim, jsonfile

NAME = store_lib.LOCK


class LostError(store_lib.CheckpointError):
    """This process no longer holds the lock of a store, so its run must stop."""


class Lock:
    """The lock of a store, until `release`."""

    def __init__(self, store: store_lib.Store, log: Callable[[str], None]):
        """Takes the lock.

        Args:
          store: the store.
          log: called with a message if the caller must wait.

        Raises:
          CheckpointError: if another process holds the lock, or the store cannot be
            written.
        """
        self._store = store
        try:
            self._lease: claim.Lease
            if isinstance(store, store_lib.Disk):
                self._lease = claim.Claim(store.path, log)
            else:
                self._lease = _BucketLease(store, log)
        except errors.UserError as e:
            raise store_lib.CheckpointError(str(e)) from e

    @property
    def inherited(self) -> Sequence[str] | None:
        """The folders that the last holder was deleting, if the lock was taken over
        from it; None if that one had released it.
        """
        return self._lease.inherited

    def check(self) -> None:
        """Raises LostError if another process has the lock."""
        with _named():
            self._lease.check()

    def check_noticed(self) -> None:
        """Raises LostError if it is known that another process has the lock."""
        with _named():
            self._lease.check_noticed()

    def create(self, name: str, content: bytes) -> None:
        """Creates an object as `Store.create` does, while the lock is held. On a disk,
        its folder must exist.

        If the lock was lost, the object may be there, in an ABANDONED attempt.
        """
        with self._changing():
            if not isinstance(self._store, store_lib.Disk):
                self._store.create(name, content)
                return
            existing = self._store.read(name)
            if existing is None:
                self._store.write(name, content)
            elif existing != content:
                raise store_lib.exists(self._store, name)

    def delete(self, name: str) -> None:
        """Deletes an object as `Store.delete` does, while the lock is held."""
        with self._changing():
            self._store.delete(name)

    def announce(self, folders: Sequence[str]) -> None:
        """Writes into the lease which folders are about to be deleted."""
        with _named():
            self._lease.announce(folders)

    def release(self, *, is_settled: bool = True) -> None:
        """Releases the lock, as any lease."""
        self._lease.release(is_settled=is_settled)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Checks the lock before a change, and after it: a process that was suspended
        in between knows it then.
        """
        self.check()
        try:
            yield
        finally:
            self.check()


class _BucketLease(claim.Lease):
    """The lease of a folder in a bucket."""

    def __init__(self, store: store_lib.Store, log: Callable[[str], None]):
        """Takes the lease as any lease, or raises CheckpointError if the object is
        none.
        """
        self._store = store
        super().__init__(store, log)

    def _take(self) -> None:
        free = self._succeed(watches=True)
        # The write is conditional on the generation: of several processes that found
        # the lease free, one succeeds.
        first = self._replaced(free)
        self._generation = self._replaced(first)
        # A service that does not heed the conditions replaces it again: of an object
        # that must be unchanged, or absent.
        for outdated in (first, free):
            ignored = self._store.replace(NAME, self._content(), outdated)
            if ignored is not None:
                self._generation = ignored
                self._say(
                    f"warning: the service of {self._store} ignores the conditions of "
                    "writes, so a second run in this folder may not be refused, and "
                    "would damage this one: start none there"
                )
                break

    def _replaced(self, generation: bytes) -> bytes:
        """Writes the lease, if it still has a generation; returns the new one."""
        written = self._store.replace(NAME, self._content(), generation)
        if written is not None:
            return written
        _, content = self._read()
        if not self._is_own(content):
            raise self._in_use(content)
        # This process has written the lease, and nobody since.
        self._store.delete(NAME)
        raise store_lib.CheckpointError(
            f"{self._store}: the service refuses to replace an object if it is "
            "unchanged (If-Match), although it is; Ceph's gateway and DigitalOcean "
            "Spaces do so. Add the option conditional_writes=false to the URL. A "
            "second run that is started there at the same instant may then not be "
            "refused: start none"
        )

    def _read(self) -> tuple[bytes, bytes | None]:
        generation, content = self._store.stat(NAME)
        if content is None:
            return generation, None
        try:
            note = jsonfile.parse(jsonfile.loads(content), claim.Note)
        except ValueError as e:
            raise store_lib.CheckpointError(
                f"{self._store}/{NAME} is not the lease of a run: "
                f"{str(e).rstrip('.')}. Make sure that no run writes there, then "
                "delete it; or give another place."
            ) from e
        return generation, content if note.owner else None

    def _write(self) -> None:
        written = self._store.replace(NAME, self._content(), self._generation)
        if written is None:
            self._lost_to = "another process"
        else:
            self._generation = written

    def _free(self) -> None:
        self._note = msgspec.structs.replace(self._note, owner="", deleting=None)
        # The next owner may already have replaced the one that nobody holds.
        free = self._store.replace(NAME, self._content(), self._generation)
        if free is not None:
            self._store.delete(NAME, generation=free)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Converts the errors of a lease to those of a store."""
    try:
        yield
    except claim.LostError as e:
        raise LostError(str(e)) from e
    except OSError as e:
        raise store_lib.CheckpointError(store_lib.reason(e)) from e
