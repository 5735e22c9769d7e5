"""The checkpoints of one run: saved in the background, kept by rules, restored by agreement."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from xshard.checkpoint import agreement, reader, retention, saver, source, writer
from xshard.checkpoint import folder as folder_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib


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
        self._owner = owner
        self._say = say
        self._budget_bytes = budget_bytes
        self._folder = folder_lib.Folder(
            self.store, keep, owner, keeps_finite=bool(finite), say=say
        )
        self._agreement = agreement.Agreement(self.store, deadline_seconds, say)
        self._saver = saver.Saver(
            self._folder,
            self._agreement,
            budget_bytes=budget_bytes,
            finite=finite,
            refuse_nonfinite=refuse_nonfinite,
            say=say,
            committed=committed,
        )

    def all_steps(self) -> list[int]:
        """The steps with a checkpoint that counts, in ascending order."""
        return sorted({attempt.step for attempt in self._folder.committed()})

    def latest_step(self) -> int | None:
        """The newest step with a checkpoint that counts, or None."""
        return max(self.all_steps(), default=None)

    def agreed_latest_step(self) -> int | None:
        """The newest step, on all processes; None if there is no checkpoint, as all of them see it.

        Raises:
          CheckpointError: if some process does not see what process 0 does, as on a host where a disk is missing.
        """
        newest = self.agree(lambda: [a.folder for a in self._folder.committed()[-1:]])
        self._agreement.check_seen(newest)
        if not newest:
            return None
        return format_lib.attempt_in(self.store, newest[0]).step

    def is_given_up(self, folder: str) -> bool:
        """Returns whether a checkpoint that was there is known not to count any more: deleted by hand, or damaged."""
        return format_lib.is_given_up(self.store, folder)

    def damaged_steps(self) -> list[int]:
        """The steps of checkpoints that are marked as damaged, in ascending order."""
        attempts = format_lib.attempts(self.store)
        return sorted({a.step for a in attempts if format_lib.DAMAGED in a.marks})

    def agree(self, action: Callable[[], Any]) -> Any:
        """Returns, on all processes, what process 0's action returns, as JSON can hold it.

        Raises:
          CheckpointError: on all of them, if the action fails.
        """
        return self._agreement.from_first(action)

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
        for attempt in reversed(self._folder.committed()):
            if attempt.step == step:
                return source.read_commit(attempt)["metrics"]
        return {}

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a step's arrays by path, as this process sees them; CheckpointError if it cannot be read."""
        metas = source.read_array_metas(format_lib.find(self.store, step))
        return {path: meta.shape for path, meta in metas.items()}

    def nonfinite(self, step: int) -> list[str]:
        """The paths in a step of what is to be finite and is not; none if nobody has looked."""
        newest, *_ = format_lib.choose(self.store, self._folder.committed(), step)
        return self._folder.nonfinite(newest)

    def finite_steps(self) -> list[int]:
        """The steps in which everything is finite that is to be, as far as it was looked at, in ascending order."""
        return [a.step for a in self._folder.committed() if not self._folder.nonfinite(a)]

    def newest_finite_step(self) -> int | None:
        """The newest of `finite_steps`, if there is one."""
        return max(self.finite_steps(), default=None)

    def folders_after(self, step: int) -> list[str]:
        """The checkpoints of later steps, as `give_up` takes them."""
        return [attempt.folder for attempt in self._folder.committed() if attempt.step > step]

    def give_up(self, folders: Sequence[str]) -> None:
        """Deletes checkpoints of a history that their run has gone back behind, pinned or not; on process 0.

        They are noted as deleted by hand are. What is not there any more has been deleted before.
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
        """Gives a step that was saved without metrics those that it is chosen by as the best.

        `before` is called first, on process 0.

        Raises:
          CheckpointError: on all processes, if there is no such step, or it cannot be written.
        """
        # A step that is being saved is not there to be given anything.
        self.wait()

        def add() -> None:
            before()
            format_lib.add_metrics(format_lib.find(self.store, step), metrics)

        self.agree(add)

    def acquire(self) -> None:
        """Makes the folder this run's until `close`; a save does so too.

        Raises:
          CheckpointError: if another run has it, if it holds another run's checkpoints, if it cannot be written,
            or if some process does not see it, as on a host where a disk is missing.
        """
        self.wait()
        self.agree(self._folder.acquire)
        # What process 0 has written there tells each process whether it sees the same folder.
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
        request = saver.Request(step, metadata, data, metrics or {}, before_commit)
        self._saver.start(request, state)

    def check(self) -> None:
        """Raises CheckpointError if the last save has ended and failed. Does not wait."""
        self._saver.check()

    def wait(self) -> None:
        """Waits for the last save; CheckpointError if it has failed."""
        self._saver.wait()

    def clean(self) -> None:
        """Waits for the last save, and deletes what was left by a run that was killed while it deleted."""
        self.wait()
        self._folder.clean()

    def close(self) -> None:
        """Waits for the last save, and gives the folder back."""
        try:
            self.wait()
        finally:
            self._folder.release()

    def restore(
        self,
        target: Any,
        step: int | None = None,
        *,
        may_hold: Callable[[], Any] | None = None,
    ) -> reader.Restored:
        """Reads a checkpoint: on every process its part, of the same one.

        Args:
          target: a tree of `jax.ShapeDtypeStruct` with shardings, or of arrays; or a function that makes one of the
            stored shapes by path.
          step: the step; the newest by default, or the newest before it that is not damaged.
          may_hold: makes a tree such as `target`, of all that a checkpoint may hold: what of it is not in
            the target is left out. Anything else that is not in the target is an error.

        Raises:
          CheckpointError: if there is none, if all are damaged, or if it does not fit the target.
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
            damages.append(damage)
            logging.error("DAMAGED CHECKPOINT: %s Trying the one before.", damage)
            self._folder.mark_damaged(attempt, damage)
        raise format_lib.CheckpointError(
            f"All checkpoints in {self.store} are damaged: {' '.join(damages)}"
        )

    def _candidates(self, step: int | None) -> list[format_lib.Attempt]:
        """The checkpoints that may be read, the newest first, on all processes."""

        def choose() -> list[str]:
            chosen = format_lib.choose(self.store, self._folder.committed(), step)
            return [attempt.folder for attempt in chosen]

        # As process 0 sees them: a listing may differ from one instant to the next.
        folders = self.agree(choose)
        self._agreement.check_seen(folders)
        return [format_lib.attempt_in(self.store, folder) for folder in folders]
