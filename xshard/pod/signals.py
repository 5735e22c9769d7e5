"""The signals that stop a run with its state saved, and how they are heard while Python stands still."""

import contextlib
import os
import signal
import socket

from xshard.pod import notice

# Each with the exit code of what it has stopped. Schedulers send SIGUSR1 and SIGUSR2 ahead of a time limit, a
# terminal that goes away sends SIGHUP, and the soft limit of CPU time SIGXCPU, again with each further second.
CODES = {
    signal.SIGINT: notice.INTERRUPTED,
    signal.SIGTERM: notice.PREEMPTED,
    signal.SIGHUP: notice.PREEMPTED,
    signal.SIGUSR1: notice.PREEMPTED,
    signal.SIGUSR2: notice.PREEMPTED,
    signal.SIGXCPU: notice.PREEMPTED,
}
# A shell has what it starts in the background ignore SIGINT, which a launcher then sends all the same.
_ALWAYS = (signal.SIGINT, signal.SIGTERM)


def to_hear() -> list[signal.Signals]:
    """The signals that stop this program: not those that it was started to ignore, as nohup does with SIGHUP.

    Nor those that C has a handler for, such as the one of `faulthandler.register`.
    """
    numbers = []
    for number in CODES:
        # Python knows a handler of C's as None.
        is_left_alone = signal.getsignal(number) in (signal.SIG_IGN, None)
        if number in _ALWAYS or not is_left_alone:
            numbers.append(number)
    return numbers


def leave_at_once() -> None:
    """Has the signals end this program, which has nothing to save yet; Ctrl-C is Python's own to handle."""
    for number in to_hear():
        if number != signal.SIGINT:
            signal.signal(number, _leave)


def ignore() -> None:
    """Ignores the signals: for a program that has done all, and whose exit code is decided."""
    for number in to_hear():
        signal.signal(number, signal.SIG_IGN)


def _leave(number: int, frame: object) -> None:
    del frame
    with contextlib.suppress(OSError):
        name = signal.Signals(number).name
        os.write(2, f"{name}: stopped before the run began; nothing was to be saved.\n".encode())
    os._exit(notice.PREEMPTED)


class Heard:
    """Takes the signals meanwhile. A context, for the main thread.

    What comes is kept until it is read, by any thread. The handler in C writes it to a socket at once, also
    while Python's own handlers cannot run: in a long compilation.
    """

    def __enter__(self) -> "Heard":
        self._end, self._wake = socket.socketpair()
        self._end.setblocking(False)
        self._wake.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._previous = {}
        for number in to_hear():
            # Only what has a handler of Python's is written to the socket; the handler itself has nothing to do.
            self._previous[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._end.close()
        self._wake.close()

    def fileno(self) -> int:
        """Returns the descriptor that is readable when a signal has come, for `select`."""
        return self._end.fileno()

    def wake(self) -> None:
        """Makes the descriptor readable, without a signal."""
        # One that is full is readable already.
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"\0")

    def read(self) -> list[signal.Signals]:
        """The signals that have come since the last time, in their order."""
        try:
            numbers = self._end.recv(64)
        except BlockingIOError:
            return []
        # Python writes those of other handlers, too.
        return [signal.Signals(number) for number in numbers if number in CODES]
