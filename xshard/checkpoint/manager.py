"""Which checkpoints are kept, and which one a run goes on from."""

import pathlib
import secrets
import shutil
from typing import Any

from absl import logging

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import reader, writer


class Manager:
    """The checkpoints of one run, in one directory."""

    def __init__(self, directory: str | pathlib.Path, *, keep_last: int):
        """Opens a directory, which need not exist.

        Args:
          directory: where the checkpoints are.
          keep_last: how many of the newest are kept, at least 1.

        Raises:
          CheckpointError: if there would be none to keep.
        """
        if not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last < 1:
            raise format_lib.CheckpointError(
                f"checkpoint.keep_last={keep_last!r} must be an integer of at least 1."
            )
        # Absolute, since tensorstore takes no other path.
        self.directory = pathlib.Path(directory).absolute()
        self._keep_last = keep_last
        self._damaged: set[format_lib.Attempt] = set()

    def all_steps(self) -> list[int]:
        """The steps with a checkpoint that counts, in ascending order."""
        return sorted({attempt.step for attempt in self._committed()})

    def latest_step(self) -> int | None:
        """The newest step with a checkpoint that counts, or None."""
        return max(self.all_steps(), default=None)

    def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
        """Saves a step, unless it has been, and deletes what need not be kept.

        Args:
          step: the step's number.
          state: a tree of arrays, typed PRNG keys among them.
          metadata: what JSON can hold.

        Raises:
          CheckpointError: if it could not be saved; earlier checkpoints are as they were.
        """
        if step in self.all_steps():
            return
        # A dead attempt is collected first: on a full disk it is what stands in the way.
        for attempt in format_lib.attempts(self.directory):
            if not attempt.is_committed:
                remove(attempt)
        attempt = format_lib.Attempt(self.directory, step, secrets.token_hex(4))
        try:
            writer.write(attempt, state, metadata)
        except BaseException:
            if not attempt.is_committed:
                remove(attempt)
            raise
        for old in self._committed()[: -self._keep_last]:
            remove(old)

    def restore(self, target: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
          target: a tree of `jax.ShapeDtypeStruct` with shardings.
          step: the step; the newest by default, or the newest before it that is not damaged.

        Returns:
          The tree and the metadata.

        Raises:
          CheckpointError: if there is none, if all are damaged, or if it does not fit the target.
        """
        candidates = [a for a in reversed(self._committed()) if step in (None, a.step)]
        if not candidates:
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise format_lib.CheckpointError(
                f"There is no {wanted} in {self.directory}; steps there: {self.all_steps() or 'none'}."
            )
        damage = []
        for attempt in candidates:
            try:
                return reader.read(attempt, target)
            except reader.DamagedError as e:
                damage.append(str(e))
                # From here on it does not count: its step is saved again, beside it, and it takes no
                # other checkpoint's place among those that are kept.
                self._damaged.add(attempt)
                logging.error("DAMAGED CHECKPOINT: %s Trying the one before.", e)
        raise format_lib.CheckpointError(
            f"All checkpoints in {self.directory} are damaged: {' '.join(damage)}"
        )

    def _committed(self) -> list[format_lib.Attempt]:
        return [a for a in format_lib.committed(self.directory) if a not in self._damaged]


def remove(attempt: format_lib.Attempt) -> None:
    """Deletes an attempt; from the first instant on it does not count."""
    if not attempt.path.exists():
        return
    # Without COMMIT it does not count, however far the rest of the deletion comes.
    (attempt.path / format_lib.COMMIT).unlink(missing_ok=True)
    shutil.rmtree(attempt.path, ignore_errors=True)
