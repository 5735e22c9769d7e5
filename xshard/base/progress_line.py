"""The progress line on a terminal."""

import contextlib
import sys
from typing import Any

# The progress line that is open, if there is one: a `rich.progress.Progress`.
_OPEN: list[Any] = []


def close_open() -> None:
    """Closes the progress line, if there is one.

    It is called before a process is ended at once.
    """
    for line in list(_OPEN):
        close(line)


def begin(steps: int) -> Any:
    """Opens a `rich.progress.Progress` on stdout.

    Returns:
      The progress line; None if stdout is not a terminal that supports one.
    """
    if not sys.stdout.isatty():
        return None
    # Importing rich takes 0.2 s, which only terminals need.
    from rich import console as console_lib
    from rich import progress

    class Console(console_lib.Console):
        """A console that never hides the cursor.

        Nothing would show it again if the process is killed.
        """

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
        # If stderr is redirected to a file, it must stay there.
        redirect_stderr=sys.stderr.isatty(),
    )
    line.add_task("", total=steps)
    line.start()
    _OPEN.append(line)
    return line


def close(line: Any) -> None:
    """Closes a progress line."""
    # The terminal may be gone, or the line may be closed already.
    with contextlib.suppress(OSError, ValueError):
        line.stop()
        _OPEN.remove(line)
