"""On this machine: a pod of processes, each with virtual devices, watched and started again when it ends early."""

import collections
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from launch import engine
from xshard.files import streams
from xshard.pod import handshake, notice, signals, status

_STEP_SECONDS = 0.1
# A process that hears of another's failure says so and leaves by itself.
_HEAR_SECONDS = 15.0
# One that is told to leave does so, unless it waits for a peer that was killed.
_SETTLE_SECONDS = 3.0
# All that a process has printed is there when it has ended, but for what a child of it keeps open.
_READ_SECONDS = 15.0
_MOST_BACKOFF_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Local(engine.Engine):
    """The engine.

    Attributes:
      max_failures: so many failures in a row without a new step, and it gives up.
      grace_seconds: how long a pod that is told to stop may take before it is killed.
    """

    max_failures: int = 3
    grace_seconds: float = 120.0

    def launch(self, jobs: Sequence[engine.Job]) -> engine.Plan:
        """The commands of one start, all at once; the port is another each time."""
        return engine.Plan([c for job in jobs for c in commands(job, "PORT")])


def commands(job: engine.Job, port: object) -> list[list[str]]:
    """The command of each process."""
    if job.processes == 1:
        return [list(job.arguments)]
    return [
        [*job.arguments, f"--coordinator_address=127.0.0.1:{port}",
         f"--num_processes={job.processes}", f"--process_id={index}"]
        for index in range(job.processes)
    ]  # fmt: skip


class Supervisor:
    """Keeps one job's pod running until it is done."""

    def __init__(self, job: engine.Job, options: Local, out: IO[str]):
        """Prepares.

        Args:
          job: the job.
          options: how patient it is.
          out: where what the processes print goes, each line after the process's number.
        """
        self._job = job
        self._elastic = job.elastic
        self._options = options
        self._out = streams.lasting(out)
        self._asked: collections.deque[int] = collections.deque()
        self._stopped = False

    def signal(self, number: int) -> None:
        """Passes a signal on, and starts the pod no more. For a signal handler or any thread."""
        self._stopped = True
        self._asked.append(number)

    def run(self) -> int:
        """Runs the job to its end.

        Returns:
          0 when it is done; 3 if it is not finite, which it would be again; 42 or 130 if it was told to stop; else
          the code of its last failure.
        """
        failures, best = 0, self._step()
        while True:
            pod = _Pod(self._job, self._out, self._options.grace_seconds)
            code = pod.wait(self._asked)
            if code in (notice.DONE, notice.INTERRUPTED) or self._stopped:
                return code
            if code == notice.NONFINITE:
                self._say(f"not started again, since it would end so again: {pod.cause}")
                return code
            if code == notice.PREEMPTED and (self._job.workdir / notice.STOP_FILE).exists():
                self._say(f"not started again: {self._job.workdir / notice.STOP_FILE} is there")
                return code
            # A failure after new steps is another one. To stop early is one only without any.
            step = self._step()
            has_progress = step > best
            best = max(best, step)
            if pod.lost and self._job.least:
                # No failure of the program's, and the number of hosts bounds how often it comes.
                if not self._goes_on_without(pod):
                    return code
                failures = 0
                continue
            if code == notice.PREEMPTED and has_progress:
                failures = 0
                self._say("stopped early with its state saved; starting it again")
                continue
            failures = 1 if has_progress else failures + 1
            if failures >= self._options.max_failures:
                self._say(f"giving up after failure {failures} without a new step: {pod.cause}")
                return code
            self._back_off(failures, pod.cause or "it stopped early, with no new step")
            if self._stopped:
                return code

    def _goes_on_without(self, pod: "_Pod") -> bool:
        """Leaves the hosts that a pod has lost out of the job; whether enough are left."""
        left = self._job.processes - pod.lost
        of_all = f"{left} of {self._job.processes} hosts are left"
        if left < self._job.least:
            self._say(
                f"{pod.cause}; not started again: {of_all}, and {self._elastic} asks for at least "
                f"{self._job.least}. The same command goes on from the last checkpoint when the hosts are back"
            )
            return False
        self._say(f"{pod.cause}; {of_all}: starting it again on these")
        self._job = dataclasses.replace(self._job, processes=left)
        return True

    def _back_off(self, failures: int, cause: str) -> None:
        seconds = min(2.0 ** (failures - 1), _MOST_BACKOFF_SECONDS)
        self._say(
            f"{cause}; failure {failures} of {self._options.max_failures}, again in {seconds:g} s"
        )
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stopped:
            time.sleep(_STEP_SECONDS)

    def _step(self) -> int:
        """The last step that the run is known to have made."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return status.read(self._job.workdir)[0]["step"] or 0
        return 0

    def _say(self, message: str) -> None:
        print(f"launch: {message}", file=self._out, flush=True)


class _Pod:
    """The processes of one start.

    Attributes:
      cause: why it has failed; empty if it has not.
      lost: how many processes could not be started, or were ended by a SIGKILL that is not this program's.
    """

    def __init__(self, job: engine.Job, out: IO[str], grace_seconds: float):
        self.cause = ""
        self.lost = 0
        self._out = out
        self._grace = grace_seconds
        self._has_killed = False
        self._first: list[int] = []
        self._errors: dict[int, str] = {}
        port = _free_port()
        token = engine.make_token()
        self._processes: list[subprocess.Popen[str]] = []
        for index, command in enumerate(commands(job, port)):
            try:
                self._processes.append(_start(command, token))
            except OSError as e:
                self.lost += 1
                self.cause = f"process {index} of {job.processes} cannot be started: {e.strerror}"
        self._readers = [
            threading.Thread(target=self._copy, args=(index, process.stdout), daemon=True)
            for index, process in enumerate(self._processes)
        ]
        for reader in self._readers:
            reader.start()

    def wait(self, asked: "collections.deque[int]") -> int:
        """Waits for the end of all; what has ended it.

        Args:
          asked: signals to pass on, as they come.
        """
        if self.lost:
            # Without these the others would wait for the start timeout.
            return self._break_up()
        deadline, is_told = float("inf"), False
        while None in (codes := self._codes()):
            if asked:
                self._send(asked.popleft())
                deadline = min(deadline, time.monotonic() + self._grace)
            failed = [index for index, code in enumerate(codes) if _failed(code)]
            if failed and not self._first:
                self._first = failed
                # Without a peer that was killed the others can neither train nor save.
                is_told = any((codes[index] or 0) < 0 for index in failed)
                patience = _SETTLE_SECONDS if is_told else _HEAR_SECONDS
                deadline = min(deadline, time.monotonic() + patience)
            if time.monotonic() >= deadline:
                # What did not leave at SIGTERM is killed.
                self._send(signal.SIGKILL if is_told else signal.SIGTERM)
                is_told, deadline = True, time.monotonic() + _SETTLE_SECONDS
            time.sleep(_STEP_SECONDS)
        for reader in self._readers:
            reader.join(_READ_SECONDS)
        # As a shell has it where a signal has ended a process.
        ends = [128 - code if code < 0 else code for code in codes if code is not None]
        failed = [index for index, code in enumerate(ends) if _failed(code)]
        if not failed:
            return max(ends)
        # All may have ended since they were last looked at, so that none was seen to be the first.
        first = (self._first or failed)[0]
        self.cause = self._describe(first, ends[first])
        return ends[first]

    def _break_up(self) -> int:
        """Ends a pod that has not all of its processes; the exit code."""
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        return notice.FAILED

    def _codes(self) -> list[int | None]:
        """The exit code of each process that has ended; counts those that are lost."""
        codes = [process.poll() for process in self._processes]
        if not self._has_killed:
            self.lost = codes.count(-signal.SIGKILL)
        return codes

    def _describe(self, index: int, code: int) -> str:
        count = len(self._processes)
        who = f"process {index} of {count}" if count > 1 else "it"
        how = f"ended with exit code {code}"
        if code > 128:
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(code - 128).name}"
        # Process 0 says what it has heard of another's failure.
        error = self._errors.get(index) or self._errors.get(0)
        return f"{who} {how}: {error}" if error else f"{who} {how}"

    def _send(self, number: int) -> None:
        self._has_killed |= number == signal.SIGKILL
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    # Its children, too.
                    os.killpg(process.pid, number)
                elif process.poll() is None:
                    process.send_signal(number)

    def _copy(self, index: int, lines: IO[str]) -> None:
        prefix = f"[{index}] " if len(self._processes) > 1 else ""
        with lines:
            for line in lines:
                if line.startswith("error: "):
                    self._errors[index] = line.strip()
                self._out.write(prefix + line)
                self._out.flush()


def _free_port() -> int:
    # Below those that the system gives away: process 0 takes it only when it has imported its libraries.
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def _start(command: Sequence[str], token: str) -> "subprocess.Popen[str]":
    if not shutil.which(command[0]):
        raise engine.LaunchError(f"{command[0]} cannot be started: there is no such program.")
    # Whatever ends this process, the pod does not train on unwatched. (By a program of util-linux: a function
    # to be run after a fork is none for a process that has threads.)
    guard = ["setpriv", "--pdeathsig=TERM", "--"] if shutil.which("setpriv") else []
    return subprocess.Popen(
        [*guard, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Ctrl-C comes to this process, which passes it on.
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", handshake.VARIABLE: token},
    )


def _failed(code: int | None) -> bool:
    return code not in (None, notice.DONE, notice.PREEMPTED, notice.INTERRUPTED)


def run(job: engine.Job, options: Local) -> int:
    """Runs a job to its end, on this terminal; signals are passed on to it."""
    supervisor = Supervisor(job, options, sys.stdout)
    with passed_on(supervisor.signal):
        return supervisor.run()


@contextlib.contextmanager
def passed_on(take: Callable[[int], None]) -> Iterator[None]:
    """Gives the signals that stop a run to `take` meanwhile."""
    previous = {}
    for number in signals.to_hear():
        previous[number] = signal.signal(number, lambda received, _: take(received))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
