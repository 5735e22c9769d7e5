"""A run of Weights & Biases."""

import pathlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from xshard import errors
from xshard.files import disk, jsonfile
from xshard.metrics import rows


class WandbRun:
    """One run of Weights & Biases for all parts of a run.

    Its name is the work directory's; the project, the entity, the key and the mode are taken from where wandb
    itself finds them: WANDB_PROJECT, WANDB_ENTITY, `wandb login`, WANDB_MODE (such as 'offline', whose files
    `wandb sync WORKDIR/wandb/offline-run-*` sends later).

    There rows cannot be taken back. Steps that are made again end in the same bits, so that what has been sent
    of them may stay: wandb takes no row of a step before its newest. What a part of the run that was killed
    may not have sent is sent by the next one.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        config: dict[str, Any],
        history: Callable[[], Iterator[rows.Row]],
    ):
        """Begins, or goes on.

        Args:
          directory: the work directory. `wandb/xshard.json` in it keeps the id of the run, and the last row
            that is known to be sent, or on the disk if wandb is offline.
          config: what is shown as the run's config.
          history: the rows until now, of which the others are sent.

        Raises:
          ValueError: if Weights & Biases cannot be reached, or knows no key.
        """
        # An extra, which is there if a config asks for it: see `xshard.metrics.writers.check`.
        import wandb

        self._note = directory / "wandb" / "xshard.json"
        with disk.writing(self._note):
            self._note.parent.mkdir(parents=True, exist_ok=True)
            known = jsonfile.read_if_exists(self._note) or {}
        self._id = known.get("id") or secrets.token_hex(4)
        self._last = tuple(known.get("sent", (0, False)))
        try:
            self._run = wandb.init(
                dir=str(directory),
                id=self._id,
                name=directory.name,
                config=config,
                resume="allow",
                # What is printed is kept elsewhere, and the terminal has its own line.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as e:
            raise errors.UserError(
                f"writers has 'wandb', and Weights & Biases does not begin: {e} `wandb login` gives it a key; "
                "WANDB_MODE=offline does without."
            ) from e
        self._write_note(known.get("sent", [0, False]))
        for row in history():
            self.write(row)

    def write(self, row: rows.Row) -> None:
        """Sends a row, unless it has been sent."""
        # At one step, the training's row comes before the evaluation's.
        place = (row["step"], "loss" not in row)
        if place > self._last:
            self._last = place
            values = {name: value for name, value in rows.flat(row).items() if value is not None}
            self._run.log(values, step=row["step"])

    def flush(self) -> None:
        """Does nothing: wandb's own process sends what it has been given."""

    def close(self) -> None:
        """Waits until all is sent, or on the disk if wandb is offline."""
        self._run.finish()
        self._write_note(list(self._last))

    def _write_note(self, sent: list[Any]) -> None:
        with disk.writing(self._note):
            note = jsonfile.dumps({"id": self._id, "sent": sent})
            disk.replace(self._note, note.encode(), durably=False)
