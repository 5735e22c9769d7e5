"""The terminal: lines for people, and one line that is kept up to date."""

import contextlib
import enum
import sys
import time
from collections.abc import Callable
from typing import Any

from xshard.metrics import clock, rows
from xshard.metrics import show as show_lib

# Of the line that is kept up to date: how often, and over how many of its updates the rate is.
_SECONDS = 0.25
_RATE_UPDATES = 40
_NOT_SHOWN = ("step", "global_step")
# The terminal may be gone, or lack a character.
_UNSHOWN = contextlib.suppress(OSError, ValueError)


class Show(enum.Enum):
    """Levels of output: errors, what stops the run and its results are always shown."""

    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"


class Terminal:
    """The output of a run for people: stdout, whatever that is when something is shown.

    Where stdout is a terminal, one line at its bottom is kept up to date, and all else that this process
    prints, from any thread, appears above it. Elsewhere each logged row is a line.
    """

    def __init__(self, steps: int, show: Show, now: Callable[[], float] = time.monotonic):
        """Begins; nothing is shown yet.

        Args:
          steps: the number of steps of the run.
          show: how much.
          now: the time in seconds.
        """
        self._steps = steps
        self._show = show
        self._now = now
        # A `rich.progress.Progress` while there is a line that is kept up to date.
        self._line: Any = None
        self._row: rows.Row = {}
        self._rate = clock.Rate(_RATE_UPDATES)

    @property
    def verbose(self) -> bool:
        """Returns whether all is to be shown."""
        return self._show is Show.VERBOSE

    def say(self, text: str) -> None:
        """Shows a notice, unless it is to be quiet."""
        if self._show is not Show.QUIET:
            # In one piece, since several threads say something. Nothing that a run does depends on it.
            with _UNSHOWN:
                print(f"{text}\n", end="", flush=True)

    def start(self, step: int) -> None:
        """Begins to count, at a step; on a terminal shows the line that is kept up to date."""
        self._begin = (self._now(), step)
        self._every = clock.Every(_SECONDS, self._now)
        if self._show is not Show.QUIET and self._line is None:
            self._line = _open_line(self._steps)
        if self._line is not None:
            self._draw(step)

    def progress(self, step: int) -> None:
        """Brings the line up to date if it is due; otherwise it costs next to nothing."""
        if self._line is not None and self._every.has_passed():
            self._draw(step)

    def row(self, row: rows.Row, rate: float) -> None:
        """Takes a row of training.

        Args:
          row: the row.
          rate: the steps a second since the row before.
        """
        self._row = row
        if self._line is not None and not self.verbose:
            return
        step = row["step"]
        parts = [f"step {step:>{len(str(self._steps))}}/{self._steps}"]
        for name, value in {**_losses(row), **row}.items():
            if name not in _NOT_SHOWN and not name.startswith("perf/"):
                parts.append(f"{name} {show_lib.number(value)}")
        self.say("  ".join([*parts, f"{rate:.1f} steps/s", f"{self._left(step)} left"]))

    def close(self) -> None:
        """Leaves the line as it is, and what comes then below it."""
        if self._line is None:
            return
        # A row may be of a later step than what has been drawn.
        self._update(max(self._drawn, self._row.get("step", 0)))
        line, self._line = self._line, None
        _close(line)

    def _left(self, step: int) -> str:
        """The time left at the pace since the start, with all that came between."""
        begin, first = self._begin
        if step <= first:
            return show_lib.duration(float("nan"))
        pace = (self._now() - begin) / (step - first)
        return show_lib.duration((self._steps - step) * pace)

    def _draw(self, step: int) -> None:
        self._drawn = step
        self._rate.add(self._now(), step)
        self._update(step)

    def _update(self, step: int) -> None:
        parts = [f"step {step}/{self._steps}"]
        for name, value in _losses(self._row).items():
            parts.append(f"{name} {show_lib.number(value)}")
        rate = self._rate.value()
        if rate is not None:
            parts += [f"{rate:.1f} steps/s", f"{self._left(step)} left"]
        (task,) = self._line.task_ids
        with _UNSHOWN:
            self._line.update(task, completed=step, description="  ".join(parts), refresh=True)


_OPEN: list[Any] = []


def _losses(row: rows.Row) -> rows.Row:
    """The losses of all learners of a row, by name."""
    return {name: value for name, value in row.items() if name.rpartition("/")[2] == "loss"}


def leave() -> None:
    """Leaves the line that is kept up to date, if there is one: for who ends the process at once."""
    for line in list(_OPEN):
        _close(line)


def _open_line(steps: int) -> Any:
    """A `rich.progress.Progress`, or None where stdout is no terminal that it could be kept up to date on."""
    if not sys.stdout.isatty():
        return None
    # For people only: 0.2 s of imports.
    from rich import console as console_lib
    from rich import progress

    class Console(console_lib.Console):
        """Shows the cursor: nobody would bring it back for a process that is killed."""

        def show_cursor(self, show: bool = True) -> bool:
            del show
            return False

    console = Console(force_terminal=True, highlight=False)
    if console.is_dumb_terminal:
        return None
    line = progress.Progress(
        progress.BarColumn(bar_width=20),
        progress.TextColumn("{task.description}", markup=False),
        console=console,
        auto_refresh=False,
        # What goes elsewhere is to go there.
        redirect_stderr=sys.stderr.isatty(),
    )
    line.add_task("", total=steps)
    line.start()
    _OPEN.append(line)
    return line


def _close(line: Any) -> None:
    # The terminal may be gone, or the line have been left already.
    with contextlib.suppress(OSError, ValueError):
        line.stop()
        _OPEN.remove(line)
