"""A process of a run on this machine."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import IO

from launch import engine
from xshard.pod import rendezvous

# How long to read on after the process has ended. The reader ends with its pipe, but a
# child may keep that open.
_READ_SECONDS = 15.0


class Process:
    """A process, which has a process group and a session of its own.

    Attributes:
      error: the last line in which it reports an error; empty if it reported none.
    """

    def __init__(
        self,
        command: Sequence[str],
        token: str,
        out: IO[str],
        prefix: str = "",
        at_end: str = "TERM",
        keeps_children: bool = False,
    ):
        """Starts it.

        Args:
          command: the program and its arguments.
          token: the token of the launch.
          out: the stream for its output.
          prefix: what each line of that begins with.
          at_end: the signal that it receives if this program ends before it.
          keeps_children: whether what it has started goes on if a signal ends it.

        Raises:
          LaunchError: if there is no such program.
          OSError: if the system starts no further process now.
        """
        self.error = ""
        # Whether what it has started is still to be ended after a signal has ended it.
        self._ends_children = not keeps_children
        self._process = _start(command, token, at_end)
        self._reader = threading.Thread(
            target=self._forward_output, args=(out, prefix), daemon=True
        )
        self._reader.start()

    def poll(self) -> int | None:
        """Returns its exit code, negative if a signal ended it; None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._end_children(code)
        return code

    def wait(self) -> int:
        """Waits for its end; returns the exit code, as `poll` does."""
        code = self._process.wait()
        self._end_children(code)
        return code

    def _end_children(self, code: int) -> None:
        """Ends what a killed process has started: it may be a script that runs the
        program, which must not go on when another takes its place.
        """
        if code < 0 and self._ends_children:
            self._ends_children = False
            self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it runs; SIGKILL to its children, too."""
        # What is left of a group may be another user's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            elif self.poll() is None:
                self._process.send_signal(number)

    def read_to_end(self) -> None:
        """Waits until its output has been forwarded, after its end."""
        self._reader.join(_READ_SECONDS)

    def _forward_output(self, out: IO[str], prefix: str) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith("error: "):
                    self.error = line.strip()
                out.write(prefix + line)
                out.flush()


def _start(command: Sequence[str], token: str, at_end: str) -> "subprocess.Popen[str]":
    if not shutil.which(command[0]):
        raise engine.LaunchError(
            f"{command[0]} cannot be started: there is no such program."
        )
    # If this program ends for any reason, the process must not go on unsupervised. A
    # program of util-linux sets this up, because subprocess's preexec_fn is not safe in
    # a program with threads.
    guard = []
    if shutil.which("setpriv"):
        guard = ["setpriv", f"--pdeathsig={at_end}", "--"]
    variables = {"PYTHONUNBUFFERED": "1", rendezvous.TOKEN_VARIABLE: token}
    return subprocess.Popen(
        [*guard, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # A terminal sends Ctrl-C to the launcher only, which passes it on.
        start_new_session=True,
        env={**os.environ, **variables},
    )
