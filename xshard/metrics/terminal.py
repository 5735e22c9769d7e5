"""The terminal: lines for people, and one line that is kept up to date."""

import collections
import contextlib
import enum
import sys
import time
from collections.abc import Callable
from typing import Any

from xshard.metrics import rows
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
        self._live: Any = None
        self._due = 0.0
        self._row: rows.Row = {}
        self._made: collections.deque[tuple[float, int]] = collections.deque(maxlen=_RATE_UPDATES)

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
        if self._show is not Show.QUIET and self._live is None:
            self._live = _open_line()
        self.progress(step)

    def progress(self, step: int) -> None:
        """Brings the line up to date if it is due; otherwise it costs next to nothing."""
        if self._live is None or (now := self._now()) < self._due:
            return
        self._due = now + _SECONDS
        self._made.append((now, step))
        line = self._line(step)
        with _UNSHOWN:
            self._live.update(line, refresh=True)

    def row(self, row: rows.Row, rate: float) -> None:
        """Takes a row of training.

        Args:
          row: the row.
          rate: the steps a second since the row before.
        """
        self._row = row
        if self._live is None or self.verbose:
            shown = {"loss": row["loss"], **row}
            numbers = "  ".join(
                f"{name} {show_lib.number(value)}"
                for name, value in shown.items()
                if name not in _NOT_SHOWN and not name.startswith("perf/")
            )
            step = f"step {row['step']:>{len(str(self._steps))}}/{self._steps}"
            self.say(f"{step}  {numbers}  {rate:.1f} steps/s  {self._left(row['step'])} left")

    def close(self) -> None:
        """Leaves the line as it is, and what comes then below it."""
        live, self._live = self._live, None
        if live is not None:
            if self._made:
                line = self._line(max(self._made[-1][1], self._row.get("step", 0)))
                with _UNSHOWN:
                    live.update(line)
            _close(live)

    def _left(self, step: int) -> str:
        """The time left at the pace since the start, with all that came between."""
        begin, first = self._begin
        pace = (self._now() - begin) / (step - first) if step > first else float("nan")
        return show_lib.duration((self._steps - step) * pace)

    def _line(self, step: int) -> Any:
        from rich import progress_bar, table, text

        parts = [f"step {step}/{self._steps}"]
        if "loss" in self._row:
            parts.append(f"loss {show_lib.number(self._row['loss'])}")
        (begin, first), (end, last) = self._made[0], self._made[-1]
        if last > first:
            parts += [f"{(last - first) / (end - begin):.1f} steps/s", f"{self._left(step)} left"]
        grid = table.Table.grid(padding=(0, 1))
        grid.add_column()
        grid.add_column(no_wrap=True, overflow="ellipsis")
        bar = progress_bar.ProgressBar(total=self._steps, completed=step, width=20)
        grid.add_row(bar, text.Text("  ".join(parts)))
        return grid


_OPEN: list[Any] = []


def leave() -> None:
    """Leaves the line that is kept up to date, if there is one: for who ends the process at once."""
    for live in list(_OPEN):
        _close(live)


def _open_line() -> Any:
    """A `rich.live.Live`, or None where stdout is no terminal that it could be kept up to date on."""
    if not sys.stdout.isatty():
        return None
    # For people only: 0.2 s of imports.
    from rich import console as console_lib
    from rich import live as live_lib

    class Console(console_lib.Console):
        """Shows the cursor: nobody would bring it back for a process that is killed."""

        def show_cursor(self, show: bool = True) -> bool:
            del show
            return False

    console = Console(force_terminal=True, highlight=False)
    if console.is_dumb_terminal:
        return None
    live = live_lib.Live(
        console=console,
        auto_refresh=False,
        # What goes elsewhere is to go there.
        redirect_stderr=sys.stderr.isatty(),
    )
    live.start()
    _OPEN.append(live)
    return live


def _close(live: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        live.stop()
        _OPEN.remove(live)
