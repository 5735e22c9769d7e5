"""The signals that stop a run with its state saved, and how they are received while
Python's handlers cannot run.
"""

import contextlib
import os
import signal
import socket

from xshard.files import forks
from xshard.pod import exit_codes

# The exit code of a run that each signal stops. Schedulers send SIGUSR1 and SIGUSR2
# ahead of a time limit, a terminal that closes sends SIGHUP, and the soft limit of CPU
# time sends SIGXCPU, repeated every second.
CODES = {
    signal.SIGINT: exit_codes.INTERRUPTED,
    signal.SIGTERM: exit_codes.PREEMPTED,
    signal.SIGHUP: exit_codes.PREEMPTED,
    signal.SIGUSR1: exit_codes.PREEMPTED,
    signal.SIGUSR2: exit_codes.PREEMPTED,
    signal.SIGXCPU: exit_codes.PREEMPTED,
}
# A shell makes its background programs ignore SIGINT, but a launcher in the background
# still sends it to a run.
_ALWAYS = (signal.SIGINT, signal.SIGTERM)


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that stop this program.

    It leaves out signals that the program was started to ignore, as nohup does with
    SIGHUP, and signals with a handler in C, which `faulthandler.register` sets. It
    never leaves out SIGINT and SIGTERM.
    """
    numbers = []
    for number in CODES:
        # Python returns None for a handler that was set in C.
        is_left_alone = signal.getsignal(number) in (signal.SIG_IGN, None)
        if number in _ALWAYS or not is_left_alone:
            numbers.append(number)
    return numbers


def exit_on_signal() -> None:
    """Makes the signals end this program at once, since it has nothing to save yet;
    Python itself handles Ctrl-C.
    """
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, _leave)


def ignore() -> None:
    """Ignores the signals from here on; for a program that has finished its work and
    decided its exit code.
    """
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


def _leave(number: int, frame: object) -> None:
    del frame
    name = signal.Signals(number).name
    message = f"{name}: stopped before the run began; there was nothing to save.\n"
    with contextlib.suppress(OSError):
        # Not `print`, because the handler may interrupt another one.
        os.write(2, message.encode())
    os._exit(exit_codes.PREEMPTED)


class SignalReceiver:
    """A context in which signals are collected; only the main thread may enter it.

    A signal is kept until any thread reads it. Python's handler in C writes it to a
    socket at once, even while handlers in Python cannot run, as in a long compilation.

    In a child that is forked within the context, such as a worker of a pool, SIGTERM
    ends the child. The other signals are ignored there: a terminal or a scheduler sends
    them to all processes of a run, which stops its children itself. A worker that
    Ctrl-C ended would lose its task, for whose result the run would wait forever.
    """

    def __enter__(self) -> "SignalReceiver":
        # Signals are written to one end of the pair, and read from the other.
        self._end, self._wake = socket.socketpair()
        self._end.setblocking(False)
        self._wake.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(
            self._wake.fileno(), warn_on_full_buffer=False
        )
        self._previous = {}
        for number in stop_signals():
            # A signal is written to the socket only if it has a Python handler; the
            # handler itself does nothing.
            self._previous[number] = signal.signal(number, lambda *_: None)
        self._end_undo = forks.undo_in_children(self._leave_to_parent)
        return self

    def _leave_to_parent(self) -> None:
        """Makes this process, a forked child, write no signal to the socket, which is
        the parent's too.
        """
        signal.set_wakeup_fd(-1)
        for number in self._previous:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
            else:
                signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *exc: object) -> None:
        self._end_undo()
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._end.close()
        self._wake.close()

    def fileno(self) -> int:
        """Returns the descriptor that is readable when a signal has come."""
        return self._end.fileno()

    def wake(self) -> None:
        """Makes the descriptor readable, without a signal."""
        # If the buffer is full, the descriptor is readable already.
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"\0")

    def read(self) -> list[signal.Signals]:
        """Returns the signals that have come since the last call, in their order."""
        try:
            numbers = self._end.recv(64)
        except BlockingIOError:
            return []
        # Python also writes the numbers of signals with other Python handlers.
        return [signal.Signals(number) for number in numbers if number in CODES]
