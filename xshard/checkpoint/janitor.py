"""Keeps and deletes the checkpoints of a folder.

Deletions have a thread of their own: no save, no step and no stop waits for a store
that deletes slowly.
"""

import collections
import threading
import time
from collections.abc import Callable, Sequence

from absl import logging

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import listing as listing_lib
from xshard.checkpoint import lock as lock_lib
from xshard.checkpoint import retention
from xshard.checkpoint import store as store_lib

# How long one may wait for the deletions under way, all waits together.
_PATIENCE_SECONDS = 2.0


class Deletions:
    """Runs deletions one after the other.

    Their thread exists only while there are any, and does not keep the process from
    ending. What is left then, the next run in the store deletes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._is_running = False
        # The end of the patience with the present thread, from the first wait for it
        # on.
        self._patient_until: float | None = None

    def add(self, action: Callable[[], None]) -> None:
        """Adds a deletion, which must not raise.

        One that is waiting already is not added again.
        """
        with self._changed:
            if action not in self._waiting:
                self._waiting.append(action)
            if not self._is_running:
                self._is_running = True
                threading.Thread(
                    target=self._run, name="checkpoint deletions", daemon=True
                ).start()

    def wait(self) -> None:
        """Waits until all deletions have ended, but only a moment.

        Where deletions are slow, several waits take no longer than one.
        """
        with self._changed:
            now = time.monotonic()
            if not self._is_running:
                return
            if self._patient_until is None:
                self._patient_until = now + _PATIENCE_SECONDS
            remaining = max(self._patient_until - now, 0.0)
            self._changed.wait_for(lambda: not self._is_running, timeout=remaining)

    def cancel(self) -> None:
        """Removes the deletions that have not begun."""
        with self._changed:
            self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_running = False
                    self._patient_until = None
                    self._changed.notify_all()
                    return
                action = self._waiting.popleft()
            action()


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
        self._deletions = Deletions()
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
            lock = lock_lib.Lock(self._store, self._log)
            try:
                _settle(self._store, lock)
            except BaseException:
                lock.release(is_settled=False)
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
            remove(attempt, changes=lock)
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
                remove(attempt, changes=lock, by_hand=True)

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
        release = Deletions()
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
                remove(attempt, changes=lock)

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
                    remove(attempt, changes=lock)
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


def remove(
    attempt: format_lib.SaveAttempt,
    *,
    changes: format_lib.Changes | None = None,
    by_hand: bool = False,
) -> None:
    """Deletes an attempt. It stops counting first, so that an interrupted deletion
    leaves nothing to restore.

    Args:
      attempt: the attempt.
      changes: the lock of the run that deletes, without which nothing is deleted;
        None: a person does.
      by_hand: whether to record the deletion in the store, which permits the run to
        resume from an earlier step.

    Raises:
      CheckpointError: if the attempt's folder is a link, or cannot be deleted.
    """
    if attempt.is_link:
        raise format_lib.CheckpointError(
            f"{attempt} is a symbolic link, which a run never creates: delete it and "
            "its target by hand."
        )
    if changes is None:
        changes = attempt.store
    if by_hand:
        try:
            name = format_lib.REMOVED + attempt.folder
            note = {"removed": time.strftime("%Y-%m-%d %H:%M:%S")}
            if not format_lib.is_removed(attempt.store, attempt.folder):
                attempt.store.create(name, format_lib.to_json(note))
        except format_lib.CheckpointError as e:
            # A run needs the note of its newest checkpoint only. A full disk, which has
            # no room for a note, must let older ones be deleted.
            there = format_lib.committed(attempt.store)
            if all(other.step <= attempt.step for other in there):
                raise format_lib.CheckpointError(
                    f"{e}. The deletion of the newest checkpoint must be recorded: "
                    "make room first, as by deleting an older one."
                ) from e
    # Without COMMIT the attempt does not count, however far the rest of the deletion
    # gets. The sync keeps this order through a power loss.
    changes.delete(attempt.prefix + format_lib.COMMIT)
    attempt.store.sync_folder(attempt.prefix)
    if format_lib.ABANDONED in attempt.marks and isinstance(
        attempt.store, store_lib.Bucket
    ):
        # The mark stays: the run that was writing the attempt may wake up and create
        # its COMMIT.
        for name in attempt.store.names(attempt.prefix):
            if name != attempt.prefix + format_lib.ABANDONED:
                attempt.store.delete(name)
    else:
        attempt.store.delete_folder(attempt.prefix)


def _settle(store: store_lib.Store, lock: lock_lib.Lock) -> None:
    """Makes what the last holder of a store's lock does late do no harm.

    This process has taken the lock over from it, and has not looked yet which
    checkpoints count. See `xshard.checkpoint.lock`.

    Args:
      store: the store.
      lock: its lock, which this process holds.
    """
    if lock.inherited is None:
        return
    for attempt in format_lib.attempts(store):
        if attempt.folder in lock.inherited:
            # A person may have pinned it since, and the deletion have failed.
            if format_lib.PINNED not in attempt.marks:
                remove(attempt, changes=lock)
        # COMMIT is read by name, since a listing may lag behind.
        elif store.read(attempt.prefix + format_lib.COMMIT) is None:
            note = {"abandoned": time.strftime("%Y-%m-%d %H:%M:%S")}
            if format_lib.ABANDONED not in attempt.marks:
                store.create(
                    attempt.prefix + format_lib.ABANDONED, format_lib.to_json(note)
                )
    lock.announce([])
