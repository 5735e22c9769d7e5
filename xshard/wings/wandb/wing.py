"""A writer that logs to Weights & Biases."""

import html
import math
import secrets
import types
from typing import Any

from xshard import errors, hooks, samples
from xshard.metrics import norms, rows, sent_rows, writer

# The largest width of an enlarged small image, in screen pixels.
_WIDTH = 480
# The name in wandb's summary of how the run ended.
_OUTCOME = "perf/outcome"


class WandbRun(writer.Writer):
    """One Weights & Biases run for all parts of a run.

    Its name is the work directory's name. wandb finds the project, the entity, the key
    and the mode itself: WANDB_PROJECT, WANDB_ENTITY, `wandb login`, WANDB_MODE. With
    the mode 'offline', `wandb sync WORKDIR/wandb/offline-run-*` sends the files later.

    wandb rejects rows of steps before its newest. See `SentRows` for how parts of a run
    share one.
    """

    package = "wandb"

    def __init__(self, part: writer.Part):
        """Starts or resumes the wandb run, and sends the rows that it lacks.

        The file `wandb/xshard.json` of the work directory keeps the ID of the wandb
        run, and the last row known to be sent, or on disk if wandb is offline.

        Raises:
          ValueError: if Weights & Biases cannot be reached, or has no key.
        """
        # wandb is an extra. `xshard.metrics.writers.check` has checked that it is
        # installed.
        import wandb

        self._sent = sent_rows.SentRows(part.directory / "wandb" / "xshard.json")
        self._sent.id = self._sent.id or secrets.token_hex(4)
        try:
            self._run = wandb.init(
                dir=str(part.directory),
                id=self._sent.id,
                name=part.directory.name,
                config=part.config,
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
        self._sent.record()
        self._wandb = wandb
        # The names of numbers so far.
        self._numbers: set[str] = set()
        # Without one, the wandb run ends as if wandb itself ended it.
        self._outcome: writer.Outcome | None = None
        for row in part.everything():
            self.write(row)

    def write(self, row: rows.Row, /) -> None:
        """Sends a row, unless it has been sent."""
        kind = rows.kind(row)
        if rows.has_numbers(row):
            self._numbers |= rows.numbers(row).keys()
        if not self._sent.is_new(row):
            return
        values: dict[str, Any] = {}
        if kind == rows.SAMPLES:
            for name, item in samples.items(row).items():
                # Under the same name it would replace the number of the step.
                if name in self._numbers:
                    name = f"samples/{name}"
                values[name] = self._sample(item)
        elif kind == rows.NORMS:
            for name, value in rows.flat(norms.by_name(row)).items():
                if math.isfinite(value):
                    values[name] = value
        else:
            for name, value in rows.flat(rows.numbers(row)).items():
                if value is not None:
                    values[name] = value
        self._run.log(values, step=row["step"])

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

    def write_outcome(self, outcome: writer.Outcome, /) -> None:
        """Writes how the run ended to wandb's summary, and as its exit code.

        wandb shows a run that stopped to go on as preempted.
        """
        self._outcome = outcome
        self._run.summary[_OUTCOME] = outcome.in_words()
        if outcome.kind == writer.STOPPED:
            self._run.mark_preempting()

    def close(self) -> None:
        """Waits until all rows are sent, or on disk if wandb is offline."""
        if self._outcome is None:
            self._run.finish()
        else:
            self._run.finish(exit_code=self._outcome.code or 0)
        self._sent.record()


class Wandb(hooks.Wing):
    """Brings the writer 'wandb'."""

    name = "wandb"
    writers = types.MappingProxyType({"wandb": WandbRun})
