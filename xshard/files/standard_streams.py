"""Standard streams that never end a program, though broken, full or closed."""

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO, cast


class TolerantStream:
    """A text stream that ignores errors, such as a broken pipe or a full disk.

    Text that cannot be written is dropped. A character that cannot be encoded is
    written as an escape.
    """

    def __init__(self, stream: TextIO):
        """Wraps a stream, which from now on escapes what it cannot encode."""
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors="backslashreplace")
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes the text if possible; returns its length in any case."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes the lines that can be written."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes the stream if possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tolerant(stream: Any) -> TextIO:
    """Wraps a stream in `TolerantStream`, unless it already is wrapped."""
    if not isinstance(stream, TolerantStream):
        stream = TolerantStream(stream)
    # It has all methods of a text stream, by `__getattr__`.
    return cast(TextIO, stream)


def make_tolerant() -> None:
    """Makes the program's standard streams tolerate errors until its end.

    This includes the interpreter's last flush.

    If descriptor 0, 1 or 2 is closed, it is opened on the null device. Otherwise the
    next file to be opened would get its number, and messages for the user would be
    written into that file.
    """
    free = [number for number in range(3) if _open_if_closed(number)]
    # None stands for a stream whose descriptor was closed when Python started.
    sys.stdin = sys.stdin or _open_null(0, free, "r")
    sys.stdout = tolerant(sys.stdout or _open_null(1, free, "w"))
    sys.stderr = tolerant(sys.stderr or _open_null(2, free, "w"))


class SetAside:
    """stdout and stderr that go to a file, except in the context `shown`."""

    def __init__(self, log: int):
        """Redirects the descriptors 1 and 2.

        Args:
          log: the descriptor of the file.
        """
        self._shown = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(log, number)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Lets them go where they went before, from now on."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, shown in zip((1, 2), self._shown, strict=True):
            os.dup2(shown, number)
        yield


def _open_null(number: int, free: Sequence[int], mode: str) -> Any:
    """Opens a stream on the null device.

    Args:
      number: the descriptor of the standard stream.
      free: the descriptors that were opened on the null device, since they were closed.
      mode: 'r' or 'w'.

    Returns:
      The stream, on the given descriptor, or on a new one if another file has that
      number.
    """
    descriptor = number
    if number not in free:
        descriptor = os.open(os.devnull, os.O_RDWR)
    return os.fdopen(descriptor, mode, closefd=False)


def _open_if_closed(number: int) -> bool:
    """Opens a descriptor on the null device if it is closed; returns whether it was."""
    try:
        os.fstat(number)
    except OSError:
        # `os.open` returns the lowest free number, which is this one. Child processes
        # inherit it, too.
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        return True
    return False
