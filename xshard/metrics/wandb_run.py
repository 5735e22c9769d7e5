"""A writer that logs to Weights & Biases."""

import html
import pathlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from xshard import errors, samples
from xshard.files import disk, jsonfile
from xshard.metrics import rows

# The largest width of an enlarged small image, in screen pixels.
_WIDTH = 480


class WandbRun:
    """One Weights & Biases run for all parts of a run.

    Its name is the work directory's name. wandb finds the project, the entity, the key
    and the mode itself: WANDB_PROJECT, WANDB_ENTITY, `wandb login`, WANDB_MODE. With
    the mode 'offline', `wandb sync WORKDIR/wandb/offline-run-*` sends the files later.

    Rows in wandb cannot be deleted, and wandb rejects rows of steps before its newest.
    Repeated steps give the same bits, so the rows that were sent stay valid. If a part
    of the run was killed before it sent its rows, the next part sends them.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        config: dict[str, Any],
        history: Callable[[], Iterator[rows.Row]],
    ):
        """Starts or resumes the wandb run, and sends the rows that it lacks.

        Args:
          directory: the work directory. Its `wandb/xshard.json` keeps the ID of the
            wandb run, and the last row known to be sent, or on disk if wandb is
            offline.
          config: the run's config, for wandb to show.
          history: returns the earlier rows, of numbers and of samples.

        Raises:
          ValueError: if Weights & Biases cannot be reached, or has no key.
        """
        # wandb is an extra. `xshard.metrics.writers.check` has checked that it is
        # installed.
        import wandb

        self._note = directory / "wandb" / "xshard.json"
        with disk.writing(self._note):
            self._note.parent.mkdir(parents=True, exist_ok=True)
            note = jsonfile.read_if_exists(self._note) or {}
        self._id = note.get("id") or secrets.token_hex(4)
        # The last row that was sent: its step, and its rank among the rows of the step.
        self._last = tuple(note.get("sent", (0, 0)))
        try:
            self._run = wandb.init(
                dir=str(directory),
                id=self._id,
                name=directory.name,
                config=config,
                resume="allow",
                # wandb must not capture the output: it goes to the process's log and
                # the progress line.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as e:
            raise errors.UserError(
                f"writers has 'wandb', but Weights & Biases cannot start: {e} Run "
                "`wandb login` to give it a key, or set WANDB_MODE=offline."
            ) from e
        # The ID is recorded now, so that it survives if this part is killed.
        self._write_note()
        self._wandb = wandb
        for row in history():
            self.write(row)

    def write(self, row: rows.Row) -> None:
        """Sends a row of numbers or of samples, unless it has been sent."""
        place = (row["step"], _rank(row))
        if place <= self._last:
            return
        self._last = place
        values: dict[str, Any] = {}
        if samples.is_row(row):
            for name, item in samples.items(row).items():
                values[name] = self._sample(item)
        else:
            for name, value in rows.flat(row).items():
                if value is not None:
                    values[name] = value
        self._run.log(values, step=row["step"])

    write_samples = write

    def _sample(self, item: samples.Item) -> Any:
        """Converts a sample to what wandb shows."""
        if item["kind"] == "histogram":
            return self._wandb.Histogram(np_histogram=(item["counts"], item["edges"]))
        if item["kind"] == "text":
            return self._wandb.Html(f"<pre>{html.escape(item['text'])}</pre>")
        # wandb.Image would need Pillow.
        source = f"data:image/png;base64,{item['png']}"
        width = max(item["width"], min(20 * item["width"], _WIDTH))
        return self._wandb.Html(
            f'<img src="{source}" width="{width}" style="image-rendering: pixelated">'
        )

    def flush(self) -> None:
        """Does nothing: wandb's own process sends the rows in the background."""

    def close(self) -> None:
        """Waits until all rows are sent, or on disk if wandb is offline."""
        self._run.finish()
        self._write_note()

    def _write_note(self) -> None:
        with disk.writing(self._note):
            note = jsonfile.dumps({"id": self._id, "sent": list(self._last)})
            disk.replace(self._note, note.encode(), durably=False)


def _rank(row: rows.Row) -> int:
    """Returns the place of a row among the rows of its step."""
    if rows.is_of_roll_back(row):
        return -1
    if rows.is_of_evaluation(row):
        return 1
    if samples.is_row(row):
        return 2
    return 0
