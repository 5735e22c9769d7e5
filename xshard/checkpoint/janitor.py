"""Keeps and deletes the checkpoints of a folder."""

import time
from collections.abc import Callable, Sequence

from absl import logging

from xshard.checkpoint import deletions as deletions_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import listing as listing_lib
from xshard.checkpoint import lock as lock_lib
from xshard.checkpoint import retention, writer
from xshard.checkpoint import store as store_lib


class Janitor:
    """Keeps and deletes the checkpoints of a folder, of which it holds the lock.

    Only process 0 takes the lock; on the others nothing is changed.
    """

    def __init__(
        self,
        listing: listing_lib.Listing,
        keep: retention.Keep,
        owner: format_lib.Owner | None,
        log: Callable[[str], None],
    ):
        """Takes no lock yet.

        Args:
          listing: the checkpoints that are there.
          keep: the retention rules.
          owner: the run, which is recorded as the folder's owner; None: it is not.
          log: called with what could not be deleted.
        """
        self._listing = listing
        self._store = listing.store
        self._keep = keep
        self._owner = owner
        self._log = log
        self._lock: lock_lib.Lock | None = None
        self._deletions = deletions_lib.Deletions()
        # Attempts that this process has begun to delete.
        self._deleting: set[format_lib.SaveAttempt] = set()

    def locked(self) -> lock_lib.Lock:
        """Returns the lock of the folder, which it takes if necessary.

        Raises:
          CheckpointError: if another process has it, if the folder holds another run's
            checkpoints, or if it cannot be written.
        """
        lock = self._lock
        if lock is None:
            lock = lock_lib.acquire(self._store, self._log)
            try:
                writer.settle(self._store, lock)
            except BaseException:
                lock.leave()
                raise
            self._lock = lock
        if self._owner is not None:
            format_lib.claim(self._store, self._owner)
        return lock

    def check_noticed(self) -> None:
        """Raises LostError if it is known that another process has the lock."""
        if self._lock is not None:
            self._lock.check_noticed()

    def make_room(self) -> list[format_lib.SaveAttempt]:
        """Deletes what is left of attempts that do not count.

        Returns:
          The attempts that were there before.
        """
        # Only the process that holds the lock knows that no attempt is under way.
        lock = self.locked()
        attempts = format_lib.attempts(self._store)
        # What is left of an attempt that is being deleted is for the deletion, which
        # may take long.
        left = [attempt for attempt in attempts if attempt not in self._deleting]
        self._remove_dead(lock, left)
        return attempts

    def remove_failed(self, attempt: format_lib.SaveAttempt) -> None:
        """Deletes an attempt that failed.

        If the deletion fails, a later save deletes it.
        """
        try:
            lock = self.locked()
            lock.announce([attempt.folder])
            writer.remove(attempt, changes=lock)
        except Exception as e:
            self._log(
                f"{attempt} does not count, but could not be deleted: "
                f"{store_lib.reason(e)}"
            )

    def begin_to_remove_old(self) -> None:
        """Begins to delete, in the background, the checkpoints that no rule keeps."""
        self._deletions.add(self._remove_old)

    def give_up(self, folders: Sequence[str]) -> None:
        """Deletes checkpoints, as if a person did; see `Manager.give_up`."""
        if not folders:
            return
        lock = self.locked()
        lock.announce(folders)
        for attempt in format_lib.attempts(self._store):
            if attempt.folder in folders and format_lib.COMMIT in attempt.marks:
                writer.remove(attempt, changes=lock, by_hand=True)

    def mark_damaged(self, attempt: format_lib.SaveAttempt, damage: str) -> None:
        """Stops a checkpoint from counting.

        Its step can be saved again, and it no longer takes the place of another
        checkpoint in the retention rules.
        """
        self._listing.note_damaged(attempt)
        # Only the process that holds the lock writes the mark, which other processes
        # see.
        if self._lock is None:
            return
        note = {"damage": damage, "found": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            self._lock.create(
                attempt.prefix + format_lib.DAMAGED, format_lib.to_json(note)
            )
        except store_lib.CheckpointError as e:
            logging.error("%s could not be marked as damaged: %s", attempt, e)

    def clean(self) -> None:
        """Deletes old checkpoints and leftovers; see `Manager.clean`."""
        self._deletions.add(self._remove_leftovers)
        self._deletions.wait()

    def wait(self) -> None:
        """Waits a moment for the deletions under way."""
        self._deletions.wait()

    def close(self) -> None:
        """Gives up the deletions that have not begun, and releases the lock."""
        self._deletions.cancel()
        # The lock on an object store is an object, so this is a deletion as well.
        release = deletions_lib.Deletions()
        release.add(self._release)
        release.wait()

    def _release(self) -> None:
        lock = self._lock
        self._lock = None
        if lock is not None:
            lock.release()

    def _remove_leftovers(self) -> None:
        lock = self._lock
        if lock is None:
            return
        try:
            self._remove_dead(lock, format_lib.attempts(self._store))
        except store_lib.CheckpointError as e:
            self._log(f"leftover folders in {self._store} could not be deleted: {e}")
        self._remove_old()

    def _remove_dead(
        self, lock: lock_lib.Lock, attempts: list[format_lib.SaveAttempt]
    ) -> None:
        """Deletes those of some attempts that have no COMMIT.

        Args:
          lock: the lock of the folder.
          attempts: the attempts, which were listed before this call: if the lock is
            still held now, none of them is that of another run which is under way.
        """
        for attempt in attempts:
            # A damaged attempt has COMMIT, too, and stays in place for inspection. A
            # link was created by a person, and is for that person to delete.
            is_abandoned = format_lib.ABANDONED in attempt.marks
            has_commit = format_lib.COMMIT in attempt.marks and not is_abandoned
            if has_commit or attempt.is_link:
                continue
            # COMMIT is read by name before anything is deleted, since a listing may lag
            # behind.
            commit = self._store.read(attempt.prefix + format_lib.COMMIT)
            if commit is None or is_abandoned:
                lock.check()
                writer.remove(attempt, changes=lock)

    def _remove_old(self) -> None:
        """Deletes the checkpoints that no rule keeps.

        A failure is logged and otherwise ignored.
        """
        lock = self._lock
        if lock is None:
            return
        try:
            committed = self._listing.committed()
            kept = self._keep.kept([self._for_rules(attempt) for attempt in committed])
            old = [attempt for attempt in committed if attempt.step not in kept]
            if old:
                lock.announce([attempt.folder for attempt in old])
            for attempt in old:
                self._deleting.add(attempt)
                try:
                    writer.remove(attempt, changes=lock)
                finally:
                    self._deleting.discard(attempt)
        except Exception as e:
            # After `close`, the deletions that are left are for the next run.
            if self._lock is lock:
                self._log(f"old checkpoints in {self._store} could not be deleted: {e}")

    def _for_rules(self, attempt: format_lib.SaveAttempt) -> retention.Saved:
        """Describes a checkpoint for the retention rules."""
        # A link means that a person moved the checkpoint elsewhere, and only that
        # person may delete it.
        is_pinned = format_lib.PINNED in attempt.marks or attempt.is_link
        # What takes the place of others is read again, since it must still be whole.
        replaces = self._keep.best or self._keep.hours
        read = format_lib.read_commit if replaces else self._listing.commit
        # A damaged checkpoint has no metric. One that cannot be read raises, and then
        # nothing is deleted: it may be the best.
        try:
            commit = read(attempt)
        except format_lib.DamagedError:
            return retention.Saved(attempt.step, pinned=is_pinned, finite=False)
        metric = None
        if self._keep.best:
            metrics = format_lib.metrics_of(attempt, commit)
            metric = metrics.get(self._keep.metric)
        return retention.Saved(
            step=attempt.step,
            metric=metric,
            pinned=is_pinned,
            finite=not commit.nonfinite,
            time=commit.time,
        )
