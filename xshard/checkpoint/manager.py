"""The checkpoints of one run.

Checkpoints are saved in the background and deleted by retention rules. All processes
agree on which one to restore.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from xshard.checkpoint import (
    agreement,
    deletions,
    metadata_files,
    reader,
    retention,
    saver,
    writer,
)
from xshard.checkpoint import folder as folder_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib


class Manager:
    """The checkpoints in one folder.

    Every process of a run creates a manager and makes the same calls in the same order.
    Methods that return a result "as this process sees it" do not communicate.

    A checkpoint "counts", that is it may be restored, from the moment its COMMIT
    exists. See `xshard/checkpoint/format.py` for the files.
    """

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
          folder: a path that all processes see, gs://BUCKET/FOLDER or
            s3://BUCKET/FOLDER.
          keep: the retention rules.
          budget_bytes: the most bytes of host memory that a save or a restore holds at
            a time, beyond the state itself.
          finite: a regular expression of paths, such as '^params/'. Each checkpoint
            records which of the matching arrays are not finite. The newest checkpoint
            in which all of them are finite is never deleted.
          refuse_nonfinite: whether a checkpoint in which a matching array is not finite
            fails to count.
          owner: the run, which refuses the checkpoints of other runs; None accepts
            those of any run.
          deadline_seconds: how long processes wait for one another.
          say: called with progress messages.
          committed: called on process 0, from another thread, once a checkpoint counts.

        Raises:
          CheckpointError: if the folder is not a valid place for checkpoints.
        """
        self.store = store_lib.Store(folder)
        self._owner = owner
        self._say = say
        self._budget_bytes = budget_bytes
        self._folder = folder_lib.Folder(
            self.store, keep, owner, keeps_finite=bool(finite), say=say
        )
        self._agreement = agreement.Agreement(self.store, deadline_seconds, say)
        self._deletions = deletions.Deletions()
        self._saver = saver.Saver(
            self._folder,
            self._agreement,
            self._deletions,
            budget_bytes=budget_bytes,
            finite=finite,
            refuse_nonfinite=refuse_nonfinite,
            say=say,
            committed=committed,
        )

    def all_steps(self) -> list[int]:
        """Lists the steps with a checkpoint that counts, in ascending order, as this
        process sees them.
        """
        return sorted({attempt.step for attempt in self._folder.committed()})

    def latest_step(self) -> int | None:
        """Returns the newest step with a checkpoint that counts, as this process sees
        it; None if there is none.
        """
        return max(self.all_steps(), default=None)

    def agreed_latest_step(self) -> int | None:
        """Returns the newest step, the same on all processes; None if no process sees a
        checkpoint.

        Raises:
          CheckpointError: if a process does not see the checkpoints that process 0
            sees, for example because a disk is not mounted on its host.
        """
        newest = self.agree(lambda: [a.folder for a in self._folder.committed()[-1:]])
        self._agreement.check_seen(newest)
        if not newest:
            return None
        return format_lib.attempt_in(self.store, newest[0]).step

    def is_given_up(self, folder: str) -> bool:
        """Returns whether a checkpoint that once counted is known not to: it was
        deleted by hand, or is damaged.
        """
        return format_lib.is_given_up(self.store, folder)

    def damaged_steps(self) -> list[int]:
        """Lists the steps of checkpoints that are marked as damaged, in ascending
        order.
        """
        attempts = format_lib.attempts(self.store)
        return sorted({a.step for a in attempts if format_lib.DAMAGED in a.marks})

    def agree(self, action: Callable[[], Any]) -> Any:
        """Runs an action on process 0 and returns its result on all processes.

        Args:
          action: returns a JSON-serializable value.

        Raises:
          CheckpointError: on all processes, if the action fails.
        """
        return self._agreement.from_first(action)

    def pin(self, step: int) -> bool:
        """Pins a step, so that no retention rule deletes it until `unpin`; returns
        False if it was already pinned.

        Raises:
          CheckpointError: if the step has no checkpoint that counts.
        """
        return format_lib.pin(format_lib.find(self.store, step))

    def unpin(self, step: int) -> None:
        """Unpins a step, so that the retention rules apply to it again."""
        format_lib.unpin(format_lib.find(self.store, step))

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step, as this process sees them; empty if the step
        has none or no longer exists.
        """
        for attempt in reversed(self._folder.committed()):
            if attempt.step == step:
                return metadata_files.read_commit(attempt).metrics
        return {}

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a step's arrays by path, as this process sees them.

        Raises:
          CheckpointError: if the step cannot be read.
        """
        metas = metadata_files.read_array_metas(format_lib.find(self.store, step))
        return {path: meta.shape for path, meta in metas.items()}

    def nonfinite(self, step: int) -> list[str]:
        """Lists arrays of a step that should be finite and are not, by path; empty if
        the save did not check.

        Also empty if the checkpoint's COMMIT is damaged: `restore` names the damage,
        and takes an older checkpoint.
        """
        newest, *_ = format_lib.choose(self.store, self._folder.committed(), step)
        try:
            commit = metadata_files.retry_on_damage(
                lambda: metadata_files.read_commit(newest)
            )
        except metadata_files.DamagedError:
            return []
        return commit.nonfinite or []

    def finite_steps(self) -> list[int]:
        """Lists the steps with no array known to be nonfinite, in ascending order."""
        return [
            a.step for a in self._folder.committed() if not self._folder.nonfinite(a)
        ]

    def newest_finite_step(self) -> int | None:
        """Returns the newest of `finite_steps`; None if there is none."""
        return max(self.finite_steps(), default=None)

    def folders_after(self, step: int) -> list[str]:
        """Lists the folders of checkpoints of later steps, as `give_up` takes them."""
        return [
            attempt.folder
            for attempt in self._folder.committed()
            if attempt.step > step
        ]

    def give_up(self, folders: Sequence[str]) -> None:
        """Deletes checkpoints, pinned or not, that the run discarded when it rolled
        back. Call it on process 0.

        Each is recorded like a checkpoint that a person deleted, so that the run may
        resume from an earlier one. Folders that no longer exist are skipped: an earlier
        call deleted them.
        """
        for attempt in format_lib.attempts(self.store) if folders else ():
            if attempt.folder in folders and format_lib.COMMIT in attempt.marks:
                writer.remove(attempt, by_hand=True)

    def add_metrics(
        self,
        step: int,
        metrics: dict[str, float],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Adds to a step that was saved without metrics the ones by which the best
        checkpoint is chosen.

        Args:
          step: the step.
          metrics: the metrics by name.
          before: called on process 0 before the metrics are written.

        Raises:
          CheckpointError: on all processes, if the step has no checkpoint, or the
            metrics cannot be written.
        """
        # The step may be the one whose save is still under way.
        self.wait()

        def add() -> None:
            before()
            format_lib.add_metrics(format_lib.find(self.store, step), metrics)

        self.agree(add)

    def acquire(self) -> None:
        """Locks the folder for this run until `close`. A save does so too.

        Raises:
          CheckpointError: if another run holds the lock, if the folder holds another
            run's checkpoints, if it cannot be written, or if a process does not see it,
            for example because a disk is not mounted on its host.
        """
        self.wait()
        self.agree(self._folder.acquire)
        # Process 0 wrote RUN into the folder. A process that cannot read it sees
        # another folder.
        if self._owner is not None:
            self._agreement.check_owner(self._owner)

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
        """Begins to save a step in the background, unless the step already has a
        checkpoint that counts.

        Returns when the state has been copied to the host and may be donated. The
        budget permitting, that is before the state is written. When the checkpoint
        counts, checkpoints that no rule keeps are deleted.

        Args:
          step: the step's number.
          state: a tree of arrays, global across all processes. It may contain typed
            PRNG keys.
          metadata: JSON-serializable, and equal on all processes.
          data: this process's position in the data, JSON-serializable.
          metrics: the metrics by which the best checkpoint can be chosen, by name.
          before_commit: called on process 0, from another thread, before the checkpoint
            counts. It makes durable what the checkpoint relies on but does not contain,
            such as logged rows. If it raises, the save fails.

        Raises:
          CheckpointError: if the state or its metadata cannot be saved, or if the
            previous save failed. After a failure of the previous save, this save is
            under way nevertheless.
        """
        request = saver.Request(step, metadata, data, metrics or {}, before_commit)
        self._saver.start(request, state)

    def check(self) -> None:
        """Raises CheckpointError if the last save has finished and failed. Does not
        wait.
        """
        self._saver.check()

    def wait(self) -> None:
        """Waits for the last save to finish, and a moment for deletions; raises
        CheckpointError if the save failed.
        """
        self._saver.wait()
        self._deletions.wait()

    def clean(self) -> None:
        """Waits for the last save, then deletes the leftovers of attempts that do not
        count and old checkpoints.

        A run that was killed during a save or a deletion leaves such folders. Waits a
        moment for these deletions; what takes longer goes on beside the caller, who
        must not save before `close`.
        """
        self.wait()
        self._deletions.add(self._folder.clean)
        self._deletions.wait()

    def close(self) -> None:
        """Waits for the last save, then releases the lock on the folder. Waits for no
        slow deletion.
        """
        try:
            self.wait()
        finally:
            self._deletions.cancel()
            # The lock on an object store is an object, so this is a deletion as well.
            release = deletions.Deletions()
            release.add(self._folder.release)
            release.wait()

    def restore(
        self,
        target: Any,
        step: int | None = None,
        *,
        may_hold: Callable[[], Any] | None = None,
    ) -> reader.Restored:
        """Restores a checkpoint. All processes read the same one, and each reads its
        own shards.

        Args:
          target: a tree of `jax.ShapeDtypeStruct` with shardings, or of arrays; or a
            function from the stored shapes by path to such a tree.
          step: the step; by default the newest checkpoint that is not damaged.
          may_hold: returns a tree like `target` with every array that a checkpoint may
            hold. Arrays of this tree that are not in the target are not read. Any other
            stored array that is not in the target is an error.

        Raises:
          CheckpointError: if there is no checkpoint, if all are damaged, or if the
            checkpoint does not fit the target.
        """
        self.wait()
        damages = []
        for attempt in self._candidates(step):
            read = functools.partial(
                reader.restore,
                attempt,
                target,
                self._owner,
                self._budget_bytes,
                self._say,
                may_hold,
            )
            restored, damage = self._agreement.read(attempt, read)
            if restored is not None:
                return restored
            # All processes have the same verdict here, so all of them go on to the same
            # next checkpoint.
            damages.append(damage)
            logging.error("DAMAGED CHECKPOINT: %s Trying the previous one.", damage)
            self._folder.mark_damaged(attempt, damage)
        raise format_lib.CheckpointError(
            f"All checkpoints in {self.store} are damaged: {' '.join(damages)}"
        )

    def _candidates(self, step: int | None) -> list[format_lib.SaveAttempt]:
        """Lists the checkpoints that may be read, newest first, the same on all
        processes.
        """
        choose = lambda: format_lib.choose(self.store, self._folder.committed(), step)
        # Process 0 decides for all, since two listings of a store may differ from one
        # instant to the next.
        folders = self.agree(lambda: [attempt.folder for attempt in choose()])
        self._agreement.check_seen(folders)
        return [format_lib.attempt_in(self.store, folder) for folder in folders]
