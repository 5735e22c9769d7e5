"""Standard streams that last: what becomes of them never decides about the work of a program."""

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO, cast


class Lasting:
    """A stream of text that may break, be full or lack a character, which is no reason for a program to end.

    What cannot be written is dropped; what it cannot encode is written as an escape.
    """

    def __init__(self, stream: TextIO):
        """Takes over a stream."""
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors="backslashreplace")
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes what can be written; the length of the text."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes what can be written."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes what can be."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting(stream: Any) -> TextIO:
    """The stream as one that lasts."""
    return cast(TextIO, stream if isinstance(stream, Lasting) else Lasting(stream))


def last() -> None:
    """Has the streams of this program last, to its end: also the interpreter's last flush cannot fail then.

    Descriptors 0 to 2 that are closed lead nowhere from here on: the next file to be opened would get their
    numbers, and what is meant for a person would be written into it.
    """
    free = [number for number in range(3) if _open_if_closed(number)]
    # None stands for a stream whose descriptor was closed when Python started.
    sys.stdin = sys.stdin or _to_nowhere(0, free, "r")
    sys.stdout = lasting(sys.stdout or _to_nowhere(1, free, "w"))
    sys.stderr = lasting(sys.stderr or _to_nowhere(2, free, "w"))


def _to_nowhere(number: int, free: Sequence[int], mode: str) -> Any:
    """A stream on a descriptor that leads nowhere; on another one if a file has that number since."""
    descriptor = number if number in free else os.open(os.devnull, os.O_RDWR)
    return os.fdopen(descriptor, mode, closefd=False)


def _open_if_closed(number: int) -> bool:
    """Opens a descriptor that is closed, and leads nowhere then; False if it is open."""
    try:
        os.fstat(number)
    except OSError:
        # It gets the lowest number that is free. Programs that are started have it, too.
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        return True
    return False
