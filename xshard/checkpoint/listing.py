"""The checkpoints in a folder, as one process sees them. It only reads."""

import os
from typing import Any

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib


class Listing:
    """The checkpoints in a folder, as this process sees them.

    A checkpoint "counts", that is it may be restored, from the moment its COMMIT
    exists. See `xshard/checkpoint/format.py` for the files.

    Attributes:
      store: the store of the checkpoints.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """Opens a folder, which need not exist.

        Args:
          folder: a path, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER.

        Raises:
          CheckpointError: if the folder is not a valid place for checkpoints.
        """
        self.store = store_lib.Store(folder)
        # Attempts that this process found damaged, whether or not the store could be
        # marked.
        self._damaged: set[format_lib.SaveAttempt] = set()
        # COMMIT never changes, so each is read once: an object store takes a request
        # for each.
        self._commits: dict[format_lib.SaveAttempt, format_lib.Commit] = {}

    def all_steps(self) -> list[int]:
        """Lists the steps with a checkpoint that counts, in ascending order."""
        return sorted({attempt.step for attempt in self.committed()})

    def latest_step(self) -> int | None:
        """Returns the newest step with a checkpoint that counts; None if none does."""
        return max(self.all_steps(), default=None)

    def damaged_steps(self) -> list[int]:
        """Lists the steps of checkpoints that are marked as damaged.

        They are in ascending order.
        """
        steps = set()
        for attempt in format_lib.attempts(self.store):
            if format_lib.DAMAGED in attempt.marks:
                steps.add(attempt.step)
        return sorted(steps)

    def finite_steps(self) -> list[int]:
        """Lists the steps with no array known to be nonfinite, in ascending order."""
        return [attempt.step for attempt in self.committed() if self.is_finite(attempt)]

    def newest_finite_step(self) -> int | None:
        """Returns the newest of `finite_steps`; None if there is none."""
        return max(self.finite_steps(), default=None)

    def folders_after(self, step: int) -> list[str]:
        """Lists the folders of checkpoints of later steps, as `give_up` takes them."""
        return [attempt.folder for attempt in self.committed() if attempt.step > step]

    def is_given_up(self, folder: str) -> bool:
        """Returns whether a checkpoint that once counted is known not to.

        It was deleted by hand, or is damaged.
        """
        if format_lib.is_removed(self.store, folder):
            return True
        return self.store.read(f"{folder}/{format_lib.DAMAGED}") is not None

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a step's arrays by path.

        Raises:
          CheckpointError: if the step cannot be read.
        """
        metas = format_lib.read_array_metas(format_lib.find(self.store, step))
        return {path: meta.shape for path, meta in metas.items()}

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata that was saved with a step.

        Raises:
          CheckpointError: if the step cannot be read.
        """
        return format_lib.read_meta(format_lib.find(self.store, step)).metadata

    def nonfinite(self, step: int) -> list[str]:
        """Lists arrays of a step that should be finite and are not, by path.

        The list is empty if the save did not check. It is also empty if the
        checkpoint's COMMIT is damaged: `restore` names the damage, and takes an older
        checkpoint.

        Raises:
          CheckpointError: if the step has no checkpoint that counts.
        """
        newest, *_ = format_lib.choose(self.store, self.committed(), step)
        try:
            return self.commit(newest).nonfinite or []
        except format_lib.DamagedError:
            return []

    def committed(self) -> list[format_lib.SaveAttempt]:
        """Lists the attempts that count, oldest step first."""
        attempts = format_lib.attempts(self.store)
        return [attempt for attempt in attempts if self.counts(attempt)]

    def counts(self, attempt: format_lib.SaveAttempt) -> bool:
        """Returns whether an attempt counts and was not found damaged since."""
        return attempt.counts and attempt not in self._damaged

    def commit(self, attempt: format_lib.SaveAttempt) -> format_lib.Commit:
        """Returns COMMIT of an attempt; raises the errors of `format.read_commit`."""
        if attempt not in self._commits:
            self._commits[attempt] = format_lib.retry_on_damage(
                lambda: format_lib.read_commit(attempt)
            )
        return self._commits[attempt]

    def is_finite(self, attempt: format_lib.SaveAttempt) -> bool:
        """Returns whether no array of an attempt is known to be nonfinite."""
        try:
            return not self.commit(attempt).nonfinite
        except format_lib.DamagedError:
            # A run must not resume from a damaged checkpoint either.
            return False

    def note_damaged(self, attempt: format_lib.SaveAttempt) -> None:
        """Stops an attempt from counting for this process."""
        self._damaged.add(attempt)
