"""A run of Weights & Biases."""

import html
import pathlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from xshard import errors, samples
from xshard.files import disk, jsonfile
from xshard.metrics import rows

# Of small images, in pixels of a screen.
_WIDTH = 480


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
          history: the rows until now, of numbers and of samples, of which the others are sent.

        Raises:
          ValueError: if Weights & Biases cannot be reached, or knows no key.
        """
        # An extra, which is there if a config asks for it: see `xshard.metrics.writers.check`.
        import wandb

        self._note = directory / "wandb" / "xshard.json"
        with disk.writing(self._note):
            self._note.parent.mkdir(parents=True, exist_ok=True)
            note = jsonfile.read_if_exists(self._note) or {}
        self._id = note.get("id") or secrets.token_hex(4)
        self._last = tuple(note.get("sent", (0, False)))
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
        # A part that is killed before its end has a note of its id, too.
        self._write_note()
        self._wandb = wandb
        for row in history():
            self.write(row)

    def write(self, row: rows.Row) -> None:
        """Sends a row of numbers or of samples, unless it has been sent."""
        # At one step, what comes ahead of it comes before the training's row, that before the evaluation's, and that
        # before the one of samples.
        is_samples = samples.is_row(row)
        is_evaluation = any(name.startswith("eval/") for name in row)
        is_ahead = any(name.startswith("roll_back/") for name in row)
        place = (row["step"], 2 if is_samples else int(is_evaluation) - int(is_ahead))
        if place <= self._last:
            return
        self._last = place
        if is_samples:
            values = {name: self._sample(item) for name, item in samples.items(row).items()}
        else:
            values = {name: x for name, x in rows.flat(row).items() if x is not None}
        self._run.log(values, step=row["step"])

    write_samples = write

    def _sample(self, item: samples.Item) -> Any:
        if item["kind"] == "histogram":
            return self._wandb.Histogram(np_histogram=(item["counts"], item["edges"]))
        if item["kind"] == "text":
            return self._wandb.Html(f"<pre>{html.escape(item['text'])}</pre>")
        # An image of wandb's own would need Pillow.
        source = f"data:image/png;base64,{item['png']}"
        width = max(item["width"], min(20 * item["width"], _WIDTH))
        return self._wandb.Html(
            f'<img src="{source}" width="{width}" style="image-rendering: pixelated">'
        )

    def flush(self) -> None:
        """Does nothing: wandb's own process sends what it has been given."""

    def close(self) -> None:
        """Waits until all is sent, or on the disk if wandb is offline."""
        self._run.finish()
        self._write_note()

    def _write_note(self) -> None:
        with disk.writing(self._note):
            note = jsonfile.dumps({"id": self._id, "sent": list(self._last)})
            disk.replace(self._note, note.encode(), durably=False)
