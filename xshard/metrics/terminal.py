"""Terminal output: messages, and a progress line."""

import contextlib
import enum
import time
from collections.abc import Callable
from typing import Any

from xshard.base import clock, progress_line
from xshard.base import formatting as formatting_lib
from xshard.metrics import rows

# The interval of the progress line's updates, and the number of updates that its rate
# is measured over.
_SECONDS = 0.25
_RATE_UPDATES = 40
_NOT_SHOWN = ("step", "global_step")
# The terminal may be gone, or unable to encode a character. Neither may end a run.
_TERMINAL_ERRORS_IGNORED = contextlib.suppress(OSError, ValueError)


class Show(enum.Enum):
    """Levels of output.

    Errors, the reason for a stop, and the results are always shown.
    """

    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"


class Terminal:
    """The output of a run to stdout, looked up at each print.

    If stdout is a terminal, a progress line stays at the bottom, and everything else
    that this process prints, from any thread, appears above it. Otherwise each logged
    row is printed as a line.
    """

    def __init__(
        self, steps: int, show: Show, now: Callable[[], float] = time.monotonic
    ):
        """Creates the terminal; nothing is shown yet.

        Args:
          steps: the number of steps of the run.
          show: the level of output.
          now: returns the time in seconds.
        """
        self._steps = steps
        self._show = show
        self._now = now
        # When the timing started, and at which step; set by `start`.
        self._begin = (now(), 0)
        self._every = clock.Every(_SECONDS, now)
        # A `rich.progress.Progress` while there is a progress line, and the step that
        # it shows.
        self._line: Any = None
        self._shown_step = 0
        # The newest row.
        self._row: rows.Row = {}
        self._rate = clock.Rate(_RATE_UPDATES)

    @property
    def verbose(self) -> bool:
        """Returns whether everything is shown."""
        return self._show is Show.VERBOSE

    def say(self, text: str) -> None:
        """Shows a message, unless the level is quiet."""
        if self._show is not Show.QUIET:
            # One write per message, since several threads print.
            with _TERMINAL_ERRORS_IGNORED:
                print(f"{text}\n", end="", flush=True)

    def start(self, step: int) -> None:
        """Starts timing at a step; on a terminal, shows the progress line."""
        self._begin = (self._now(), step)
        self._every = clock.Every(_SECONDS, self._now)
        if self._show is not Show.QUIET and self._line is None:
            self._line = progress_line.begin(self._steps)
        if self._line is not None:
            self._draw(step)

    def progress(self, step: int) -> None:
        """Updates the progress line if that is due; otherwise costs almost nothing."""
        if self._line is not None and self._every.has_passed():
            self._draw(step)

    def row(self, row: rows.Row, rate: float) -> None:
        """Shows a row of training, on its own line or in the progress line.

        Args:
          row: the row.
          rate: the steps per second since the previous row.
        """
        self._row = row
        if self._line is not None and not self.verbose:
            return
        step = row["step"]
        parts = [f"step {step:>{len(str(self._steps))}}/{self._steps}"]
        # The losses come first.
        for name, value in {**_losses(row), **row}.items():
            if name not in _NOT_SHOWN and not name.startswith(rows.PERFORMANCE):
                parts.append(f"{name} {formatting_lib.number(value)}")
        parts.append(f"{rate:.1f} steps/s")
        parts.append(f"{self._left(step)} left")
        self.say("  ".join(parts))

    def close(self) -> None:
        """Closes the progress line; it stays, and later output appears below it."""
        if self._line is None:
            return
        # The last row may be of a later step than the line shows.
        self._update(max(self._shown_step, self._row.get("step", 0)))
        line = self._line
        self._line = None
        progress_line.close(line)

    def _left(self, step: int) -> str:
        """Returns the time left at the average pace since the start.

        The pace includes evaluations and saves.
        """
        begin, first = self._begin
        if step <= first:
            return formatting_lib.duration(float("nan"))
        pace = (self._now() - begin) / (step - first)
        return formatting_lib.duration((self._steps - step) * pace)

    def _draw(self, step: int) -> None:
        self._shown_step = step
        self._rate.add(self._now(), step)
        self._update(step)

    def _update(self, step: int) -> None:
        parts = [f"step {step}/{self._steps}"]
        for name, value in _losses(self._row).items():
            parts.append(f"{name} {formatting_lib.number(value)}")
        rate = self._rate.value()
        if rate is not None:
            parts += [f"{rate:.1f} steps/s", f"{self._left(step)} left"]
        (task,) = self._line.task_ids
        text = "  ".join(parts)
        with _TERMINAL_ERRORS_IGNORED:
            self._line.update(task, completed=step, description=text, refresh=True)


def _losses(row: rows.Row) -> rows.Row:
    """Returns the losses of all learners in a row, by name."""
    return {
        name: value for name, value in row.items() if name.rpartition("/")[2] == "loss"
    }
