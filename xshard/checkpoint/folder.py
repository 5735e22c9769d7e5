"""The checkpoints of one run as a single process sees them: the ones that count, their
owner, and their deletion.
"""

import contextlib
import secrets
import time
from collections.abc import Callable

from absl import logging

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import lock as lock_lib
from xshard.checkpoint import metadata_files, retention, writer
from xshard.checkpoint import store as store_lib


class Folder:
    """The checkpoints in a store, as one process sees them.

    Call the methods that write on process 0 only. No method waits for other processes.
    """

    def __init__(
        self,
        store: store_lib.Store,
        keep: retention.Keep,
        owner: format_lib.Owner | None,
        *,
        keeps_finite: bool,
        say: Callable[[str], None],
    ):
        """Opens a store; nothing is written.

        Args:
          store: the store of the checkpoints.
          keep: the retention rules.
          owner: the run that owns the checkpoints; None accepts those of any run.
          keeps_finite: whether the newest checkpoint that records no nonfinite arrays
            is always kept.
          say: called with messages for the user.
        """
        self.store = store
        self.owner = owner
        self._keep = keep
        self._keeps_finite = keeps_finite
        self._say = say
        self._lock: lock_lib.FileLock | lock_lib.Lease | None = None
        # Attempts that this process found damaged, whether or not the store could be
        # marked.
        self._damaged: set[format_lib.SaveAttempt] = set()
        # Attempts that this process has begun to delete.
        self._deleting: set[format_lib.SaveAttempt] = set()
        # The nonfinite paths from COMMIT never change, so they are cached: an object
        # store takes a request for each.
        self._nonfinite: dict[format_lib.SaveAttempt, list[str]] = {}

    def committed(self) -> list[format_lib.SaveAttempt]:
        """Lists the attempts that count, oldest step first."""
        return [
            attempt
            for attempt in format_lib.attempts(self.store)
            if self._counts(attempt)
        ]

    def nonfinite(self, attempt: format_lib.SaveAttempt) -> list[str]:
        """Lists the checked arrays that are not finite, by path; empty if the save
        checked none.
        """
        if attempt not in self._nonfinite:
            try:
                commit = metadata_files.read_commit(attempt)
            except metadata_files.DamagedError as e:
                # A run must not resume from a damaged checkpoint either, so it is
                # treated as not finite.
                return [str(e)]
            self._nonfinite[attempt] = commit.nonfinite or []
        return self._nonfinite[attempt]

    def acquire(self) -> None:
        """Locks the store, if this process has not yet, and records the run as its
        owner.

        Raises:
          CheckpointError: if another process holds the lock, if the store holds another
            run's checkpoints, or if it cannot be written.
        """
        if self._lock is None:
            self._lock = lock_lib.acquire(self.store, self._say)
        if self.owner is not None:
            format_lib.claim(self.store, self.owner)

    def check_lock(self) -> None:
        """Raises CheckpointError if another process has taken over the lock."""
        if self._lock is not None:
            self._lock.check()

    def release(self) -> None:
        """Releases the lock."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def begin_attempt(self, step: int) -> str:
        """Prepares the store for an attempt to save a step.

        Returns:
          The nonce of the attempt; empty if the step already has a checkpoint that
          counts.
        """
        self.acquire()
        attempts = format_lib.attempts(self.store)
        # What is left of an attempt that is being deleted is for the deletion, which
        # may take long.
        self._remove_dead(
            [attempt for attempt in attempts if attempt not in self._deleting]
        )
        if any(attempt.step == step and self._counts(attempt) for attempt in attempts):
            return ""
        return secrets.token_hex(4)

    def remove_failed(self, attempt: format_lib.SaveAttempt) -> None:
        """Deletes an attempt that failed. If the deletion fails, a later save deletes
        it.
        """
        try:
            writer.remove(attempt)
        except Exception as e:
            self._say(
                f"{attempt} does not count, but could not be deleted: {store_lib.reason(e)}"
            )

    def remove_old(self) -> None:
        """Deletes the checkpoints that no rule keeps. A failure is reported and
        otherwise ignored.
        """
        try:
            committed = self.committed()
            kept = self._keep.kept([self._saved(attempt) for attempt in committed])
            for attempt in committed:
                if attempt.step not in kept:
                    self._deleting.add(attempt)
                    try:
                        writer.remove(attempt)
                    finally:
                        self._deleting.discard(attempt)
        except Exception as e:
            self._say(f"old checkpoints in {self.store} could not be deleted: {e}")

    def clean(self) -> None:
        """Deletes the leftovers of a run that was killed, if this process holds the
        lock. No save may be under way.
        """
        if self._lock is None:
            return
        try:
            self._remove_dead(format_lib.attempts(self.store))
        except format_lib.CheckpointError as e:
            self._say(f"leftover folders in {self.store} could not be deleted: {e}")
        self.remove_old()

    def mark_damaged(self, attempt: format_lib.SaveAttempt, damage: str) -> None:
        """Stops a checkpoint from counting.

        Its step can be saved again, and it no longer takes the place of another
        checkpoint in the retention rules.
        """
        self._damaged.add(attempt)
        # Only the process that holds the lock writes the mark, which other processes
        # see.
        if self._lock is None:
            return
        note = {"damage": damage, "found": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            self.store.create(
                attempt.prefix + format_lib.DAMAGED, format_lib.to_json(note)
            )
        except format_lib.CheckpointError as e:
            logging.error("%s could not be marked as damaged: %s", attempt, e)

    def _counts(self, attempt: format_lib.SaveAttempt) -> bool:
        return attempt.counts and attempt not in self._damaged

    def _remove_dead(self, attempts: list[format_lib.SaveAttempt]) -> None:
        for attempt in attempts:
            if format_lib.COMMIT in attempt.marks or attempt.is_link:
                continue
            # COMMIT is read by name before anything is deleted, since a listing may lag
            # behind.
            if self.store.read(attempt.prefix + format_lib.COMMIT) is None:
                writer.remove(attempt)

    def _saved(self, attempt: format_lib.SaveAttempt) -> retention.Saved:
        """Describes a checkpoint for the retention rules."""
        metric = None
        if self._keep.best:
            with contextlib.suppress(metadata_files.DamagedError):
                commit = metadata_files.read_commit(attempt)
                metric = commit.metrics.get(self._keep.metric)
        # A link means that a person moved the checkpoint elsewhere, and only that
        # person may delete it.
        pinned = format_lib.PINNED in attempt.marks or attempt.is_link
        finite = not (self._keeps_finite and self.nonfinite(attempt))
        return retention.Saved(attempt.step, metric, pinned, finite)
