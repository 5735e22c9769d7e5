"""The checkpoints of one run: saved in the background, kept by rules, restored by agreement."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from absl import logging

from xshard.checkpoint import agreement, reader, retention, saver, source, writer
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import lock as lock_lib
from xshard.checkpoint import store as store_lib
from xshard.pod import processes


class Manager:
    """The checkpoints in one folder. Every process of a run makes one, and calls it alike."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: retention.Keep,
        *,
        budget_bytes: int = 4 << 30,
        finite: str = "",
        refuse_nonfinite: bool = False,
        owner: format_lib.Owner | None = None,
        deadline_seconds: float = 1800.0,
        say: Callable[[str], None] = logging.info,
        committed: Callable[[saver.Committed], None] = lambda committed: None,
    ):
        """Opens a folder, which need not exist.

        Args:
          folder: a path that all processes see, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER.
          keep: which checkpoints are kept.
          budget_bytes: how many bytes of the state may be in host memory at a time, beside the state.
          finite: a regular expression of paths, such as '^params/': each checkpoint says whether these arrays are
            finite, and the newest in which they are is never deleted for one in which they are not.
          refuse_nonfinite: whether one in which they are not does not count.
          owner: the run; another's checkpoints are refused. None: whoever's they are.
          deadline_seconds: how long processes wait for one another.
          say: takes messages on progress.
          committed: called on process 0, from another thread, when a checkpoint counts.

        Raises:
          CheckpointError: if the folder cannot be one.
        """
        self.store = store_lib.Store(folder)
        self._keep = keep
        self._budget_bytes = budget_bytes
        self._owner = owner
        self._say, self._tell = say, committed
        self._lock: lock_lib.FileLock | lock_lib.Lease | None = None
        self._damaged: set[format_lib.Attempt] = set()
        self._finite = finite
        # Of attempts that count, what they say of themselves.
        self._nonfinite: dict[format_lib.Attempt, list[str]] = {}
        self._exchange = processes.Exchange(f"checkpoints in {self.store}", deadline_seconds)
        self._saver = saver.Saver(
            self.store,
            self._exchange,
            budget_bytes=budget_bytes,
            finite=finite,
            refuse_nonfinite=refuse_nonfinite,
            owner=owner,
            say=say,
            before=self._before,
            guard=self._guard,
            after=self._after,
        )

    def all_steps(self) -> list[int]:
        """The steps with a checkpoint that counts, in ascending order."""
        return sorted({attempt.step for attempt in self._committed()})

    def latest_step(self) -> int | None:
        """The newest step with a checkpoint that counts, or None."""
        return max(self.all_steps(), default=None)

    def agreed_latest_step(self) -> int | None:
        """The newest step, on all processes; None if there is no checkpoint, as all of them see it.

        Raises:
          CheckpointError: if some process does not see what process 0 does, as on a host where a disk is missing.
        """
        newest = self._saver.first(lambda: [a.folder for a in self._committed()[-1:]])
        agreement.check_seen(self.store, self._exchange, newest, self._say)
        return format_lib.step_of(newest[0]) if newest else None

    def is_given_up(self, folder: str) -> bool:
        """Returns whether a checkpoint that was there is known not to count any more: deleted by hand, or damaged."""
        return format_lib.is_given_up(self.store, folder)

    def damaged_steps(self) -> list[int]:
        """The steps of checkpoints that are marked as damaged, in ascending order."""
        damaged = [a for a in format_lib.attempts(self.store) if format_lib.DAMAGED in a.marks]
        return sorted({attempt.step for attempt in damaged})

    def agree(self, action: Callable[[], Any]) -> Any:
        """Returns, on all processes, what process 0's action returns, as JSON can hold it.

        Raises:
          CheckpointError: on all of them, if the action fails.
        """
        return self._saver.first(action)

    def pin(self, step: int) -> bool:
        """Keeps a step from every rule, until `unpin`; False if it was kept so already.

        Raises:
          CheckpointError: if there is no such step.
        """
        return format_lib.pin(format_lib.find(self.store, step))

    def unpin(self, step: int) -> None:
        """Leaves a step to the rules again."""
        format_lib.unpin(format_lib.find(self.store, step))

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of a step, as this process sees them; none if it has none, or is there no more."""
        found = [attempt for attempt in self._committed() if attempt.step == step]
        return dict(source.read_commit(found[-1])["metrics"]) if found else {}

    def nonfinite(self, step: int) -> list[str]:
        """The paths in a step of what is to be finite and is not; none if nobody has looked."""
        return self._nonfinite_of(format_lib.choose(self.store, self._committed(), step)[0])

    def newest_finite_step(self) -> int | None:
        """The newest step in which everything is finite that is to be, as far as it was looked at."""
        there = reversed(self._committed())
        return next((attempt.step for attempt in there if not self._nonfinite_of(attempt)), None)

    def add_metrics(
        self,
        step: int,
        metrics: dict[str, float],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Gives a step that was saved without metrics those that it is chosen by as the best.

        `before` is called first, on process 0.

        Raises:
          CheckpointError: on all processes, if there is no such step, or it cannot be written.
        """
        self.wait()

        def add() -> None:
            before()
            format_lib.add_metrics(format_lib.find(self.store, step), metrics)

        self._saver.first(add)

    def acquire(self) -> None:
        """Makes the folder this run's until `close`; a save does so too.

        Raises:
          CheckpointError: if another run has it, if it holds another run's checkpoints, if it cannot be written,
            or if some process does not see it, as on a host where a disk is missing.
        """
        self.wait()
        self._saver.first(self._acquire)
        if self._owner is not None:
            agreement.check_owner(self.store, self._exchange, self._owner, self._say)

    def save(
        self,
        step: int,
        state: Any,
        metadata: dict[str, Any],
        *,
        data: Any = None,
        metrics: dict[str, float] | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to save a step, unless it has been, and deletes what need not be kept when it is.

        Returns when the state has been copied to the host, and may be donated.

        Args:
          step: the step's number.
          state: a tree of arrays, typed PRNG keys among them; all processes' together.
          metadata: what JSON can hold, equal on all processes.
          data: this process's position in the data, as JSON can hold it.
          metrics: what the best checkpoint is chosen by.
          before_commit: called on process 0, from another thread, before the checkpoint counts: makes durable what
            it promises and does not hold. What it raises makes the save fail.

        Raises:
          CheckpointError: if the state or what is saved with it cannot be saved; or if the save before
            has failed, while this one is under way all the same.
        """
        extra = saver.Extra(metadata, data, metrics or {})
        self._saver.start(step, state, extra, before_commit)

    def check(self) -> None:
        """Raises CheckpointError if the last save has ended and failed. Does not wait."""
        self._saver.check()

    def wait(self) -> None:
        """Waits for the last save; CheckpointError if it has failed."""
        self._saver.wait()

    def clean(self) -> None:
        """Waits for the last save, and deletes what was left by a run that was killed while it deleted."""
        self.wait()
        if self._lock is None:
            return
        try:
            self._remove_dead(format_lib.attempts(self.store))
        except format_lib.CheckpointError as e:
            self._say(f"what was left in {self.store} could not be deleted: {e}")
        self._remove_old()

    def close(self) -> None:
        """Waits for the last save, and gives the folder back."""
        try:
            self.wait()
        finally:
            lock, self._lock = self._lock, None
            if lock is not None:
                lock.release()

    def restore(
        self,
        target: Any,
        step: int | None = None,
        *,
        may_hold: Callable[[], Any] | None = None,
    ) -> reader.Restored:
        """Reads a checkpoint: on every process its part, of the same one.

        Args:
          target: a tree of `jax.ShapeDtypeStruct` with shardings, or of arrays.
          step: the step; the newest by default, or the newest before it that is not damaged.
          may_hold: makes a tree such as `target`, of all that a checkpoint may hold: what of it is not in
            the target is left out. Anything else that is not in the target is an error.

        Raises:
          CheckpointError: if there is none, if all are damaged, or if it does not fit the target.
        """
        self.wait()
        damage = []
        for attempt in self._candidates(step):
            restored, damaged = agreement.read(
                attempt,
                self._exchange,
                lambda: reader.restore(
                    attempt, target, self._owner, self._budget_bytes, self._say, may_hold
                ),
            )
            if restored is not None:
                return restored
            damage.append(damaged)
            self._set_aside(attempt, damaged)
        raise format_lib.CheckpointError(
            f"All checkpoints in {self.store} are damaged: {' '.join(damage)}"
        )

    def _candidates(self, step: int | None) -> list[format_lib.Attempt]:
        def find() -> list[tuple[int, str]]:
            found = format_lib.choose(self.store, self._committed(), step)
            return [(a.step, a.nonce) for a in found]

        # As process 0 sees them: a listing may differ from one instant to the next.
        found = self._saver.first(find)
        attempts = [format_lib.Attempt(self.store, number, nonce) for number, nonce in found]
        folders = [attempt.folder for attempt in attempts]
        agreement.check_seen(self.store, self._exchange, folders, self._say)
        return attempts

    def _set_aside(self, attempt: format_lib.Attempt, damage: str) -> None:
        """From here on it does not count: its step is saved again, and it takes no other's place."""
        self._damaged.add(attempt)
        logging.error("DAMAGED CHECKPOINT: %s Trying the one before.", damage)
        # Only the run whose checkpoints they are says so for others, too.
        if self._lock is None:
            return
        note = {"damage": damage, "found": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            self.store.create(attempt.prefix + format_lib.DAMAGED, format_lib.to_json(note))
        except format_lib.CheckpointError as e:
            logging.error("%s could not be marked as damaged: %s", attempt, e)

    def _committed(self) -> list[format_lib.Attempt]:
        return [a for a in format_lib.committed(self.store) if a not in self._damaged]

    def _acquire(self) -> None:
        if self._lock is None:
            self._lock = lock_lib.acquire(self.store, self._say)
        if self._owner is not None:
            format_lib.claim(self.store, self._owner)

    def _before(self, step: int) -> bool:
        """Prepares a save, on process 0: it needs the folder, and the place of dead attempts."""
        self._acquire()
        found = format_lib.attempts(self.store)
        self._remove_dead(found)
        return step not in {a.step for a in found if a.counts and a not in self._damaged}

    def _remove_dead(self, found: list[format_lib.Attempt]) -> None:
        for attempt in found:
            if format_lib.COMMIT in attempt.marks or attempt.is_link:
                continue
            # Asked for by its name, since a listing may lag behind.
            if self.store.read(attempt.prefix + format_lib.COMMIT) is None:
                writer.remove(attempt)

    def _guard(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _after(self, committed: saver.Committed) -> None:
        """Follows a checkpoint that counts, on process 0."""
        self._tell(committed)
        self._remove_old()

    def _remove_old(self) -> None:
        try:
            there = self._committed()
            kept = self._keep.kept([self._saved(attempt) for attempt in there])
            for attempt in there:
                if attempt.step not in kept:
                    writer.remove(attempt)
        except Exception as e:
            self._say(f"old checkpoints in {self.store} could not be deleted: {e}")

    def _saved(self, attempt: format_lib.Attempt) -> retention.Saved:
        metric = None
        if self._keep.best:
            with contextlib.suppress(source.DamagedError):
                metric = source.read_commit(attempt)["metrics"].get(self._keep.metric)
        # What a person has moved elsewhere, and left a link to, is that person's.
        pinned = format_lib.PINNED in attempt.marks or attempt.is_link
        finite = not (self._finite and self._nonfinite_of(attempt))
        return retention.Saved(attempt.step, metric, pinned, finite)

    def _nonfinite_of(self, attempt: format_lib.Attempt) -> list[str]:
        if attempt not in self._nonfinite:
            try:
                commit = source.read_commit(attempt)
            except source.DamagedError as e:
                # As good as not finite: it is nothing to go on from.
                return [str(e)]
            self._nonfinite[attempt] = commit.get(format_lib.NONFINITE, [])
        return self._nonfinite[attempt]
