"""The checkpoints of one run, as a single process sees them: which count, whose they are, which are deleted."""

import contextlib
import secrets
import time
from collections.abc import Callable

from absl import logging

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import lock as lock_lib
from xshard.checkpoint import retention, source, writer
from xshard.checkpoint import store as store_lib


class Folder:
    """The checkpoints in a store. What writes there is called on process 0 only; nothing waits for other processes."""

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
          store: where they are.
          keep: which are kept.
          owner: the run; None: whoever's they are.
          keeps_finite: whether the newest that says that it is finite is kept.
          say: takes messages.
        """
        self.store = store
        self.owner = owner
        self._keep = keep
        self._keeps_finite = keeps_finite
        self._say = say
        self._lock: lock_lib.FileLock | lock_lib.Lease | None = None
        # Those that this process has found damaged, whether or not they could be marked.
        self._damaged: set[format_lib.Attempt] = set()
        # What COMMIT says of a checkpoint's arrays, which never changes: to ask an object store takes a request.
        self._nonfinite: dict[format_lib.Attempt, list[str]] = {}

    def committed(self) -> list[format_lib.Attempt]:
        """The attempts that count, the oldest step first."""
        return [attempt for attempt in format_lib.attempts(self.store) if self._counts(attempt)]

    def nonfinite(self, attempt: format_lib.Attempt) -> list[str]:
        """The paths of arrays that are to be finite and are not; none if nobody has looked."""
        if attempt not in self._nonfinite:
            try:
                commit = source.read_commit(attempt)
            except source.DamagedError as e:
                # As good as not finite: it is nothing to go on from.
                return [str(e)]
            self._nonfinite[attempt] = commit.get(format_lib.NONFINITE, [])
        return self._nonfinite[attempt]

    def acquire(self) -> None:
        """Makes the folder this run's, if it is not yet.

        Raises:
          CheckpointError: if another process has it, if it holds another run's checkpoints, or cannot be written.
        """
        if self._lock is None:
            self._lock = lock_lib.acquire(self.store, self._say)
        if self.owner is not None:
            format_lib.claim(self.store, self.owner)

    def check_lock(self) -> None:
        """Raises CheckpointError if another process has taken the folder meanwhile."""
        if self._lock is not None:
            self._lock.check()

    def release(self) -> None:
        """Gives the folder back."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def begin_attempt(self, step: int) -> str:
        """Makes the folder ready for an attempt to save a step.

        Returns:
          What tells the attempt from others of its step; empty if the step has been saved.
        """
        self.acquire()
        attempts = format_lib.attempts(self.store)
        self._remove_dead(attempts)
        if any(attempt.step == step and self._counts(attempt) for attempt in attempts):
            return ""
        return secrets.token_hex(4)

    def remove_failed(self, attempt: format_lib.Attempt) -> None:
        """Deletes an attempt that will not count; if that fails, a later save does."""
        try:
            writer.remove(attempt)
        except Exception as e:
            self._say(f"{attempt} does not count, but could not be removed: {store_lib.reason(e)}")

    def remove_old(self) -> None:
        """Deletes the checkpoints that no rule keeps; that this fails is said, and no reason to stop."""
        try:
            committed = self.committed()
            kept = self._keep.kept([self._saved(attempt) for attempt in committed])
            for attempt in committed:
                if attempt.step not in kept:
                    writer.remove(attempt)
        except Exception as e:
            self._say(f"old checkpoints in {self.store} could not be deleted: {e}")

    def clean(self) -> None:
        """Deletes what a run that was killed has left, if the folder is this run's."""
        if self._lock is None:
            return
        try:
            self._remove_dead(format_lib.attempts(self.store))
        except format_lib.CheckpointError as e:
            self._say(f"what was left in {self.store} could not be deleted: {e}")
        self.remove_old()

    def mark_damaged(self, attempt: format_lib.Attempt, damage: str) -> None:
        """Lets a checkpoint count no more: its step is saved again, and it takes no other's place."""
        self._damaged.add(attempt)
        # Only the run whose checkpoints they are says so for others, too.
        if self._lock is None:
            return
        note = {"damage": damage, "found": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            self.store.create(attempt.prefix + format_lib.DAMAGED, format_lib.to_json(note))
        except format_lib.CheckpointError as e:
            logging.error("%s could not be marked as damaged: %s", attempt, e)

    def _counts(self, attempt: format_lib.Attempt) -> bool:
        return attempt.counts and attempt not in self._damaged

    def _remove_dead(self, attempts: list[format_lib.Attempt]) -> None:
        for attempt in attempts:
            if format_lib.COMMIT in attempt.marks or attempt.is_link:
                continue
            # Asked for by its name, since a listing may lag behind.
            if self.store.read(attempt.prefix + format_lib.COMMIT) is None:
                writer.remove(attempt)

    def _saved(self, attempt: format_lib.Attempt) -> retention.Saved:
        """Describes a checkpoint for the rules that keep some."""
        metric = None
        if self._keep.best:
            with contextlib.suppress(source.DamagedError):
                metric = source.read_commit(attempt)["metrics"].get(self._keep.metric)
        # What a person has moved elsewhere, and left a link to, is that person's.
        pinned = format_lib.PINNED in attempt.marks or attempt.is_link
        finite = not (self._keeps_finite and self.nonfinite(attempt))
        return retention.Saved(attempt.step, metric, pinned, finite)
