"""Launches on this machine: a pod of processes, supervised, and started again when it
ends early.
"""

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
from xshard.files import standard_streams
from xshard.pod import notice, rendezvous, signals, status

_STEP_SECONDS = 0.1
# How long to wait after a failure: the other processes learn of it, report it and leave
# by themselves.
_EXIT_SECONDS = 15.0
# How long to wait after SIGTERM: a process leaves, unless it waits for a peer that was
# killed.
_SIGTERM_SECONDS = 3.0
# How long to read on after the processes have ended. A reader ends with its pipe, but a
# child may keep that open.
_READ_SECONDS = 15.0
_MOST_BACKOFF_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Local(engine.Engine):
    """The local engine.

    Attributes:
      max_failures: the number of failures in a row without a new step after which the
        launcher gives up.
      grace_seconds: how long a pod that is told to stop may take to save before it is
        ended.
    """

    max_failures: int = 3
    grace_seconds: float = 120.0

    def launch(self, jobs: Sequence[engine.Job]) -> engine.Plan:
        """Returns the commands of one start, which run in parallel. Each start replaces
        PORT by a free port.
        """
        return engine.Plan([c for job in jobs for c in commands(job, "PORT")])


def commands(job: engine.Job, port: object) -> list[list[str]]:
    """Returns the command of each process."""
    if job.processes == 1:
        return [list(job.arguments)]
    return [
        [*job.arguments, f"--coordinator_address=127.0.0.1:{port}",
         f"--num_processes={job.processes}", f"--process_id={index}"]
        for index in range(job.processes)
    ]  # fmt: skip


class Supervisor:
    """Keeps one job's pod running until it is done.

    Attributes:
      cause: why the last pod failed; empty if it did not.
    """

    def __init__(self, job: engine.Job, options: Local, out: IO[str]):
        """Prepares to run a job; starts nothing.

        Args:
          job: the job.
          options: the limits of failures and of the time to stop.
          out: the stream for the output of the processes; each line is prefixed with
            the index of its process.
        """
        self._job = job
        self._elastic = job.elastic
        self._options = options
        self._out = standard_streams.tolerant(out)
        self._signals: collections.deque[int] = collections.deque()
        self._stopped = False
        self.cause = ""

    def signal(self, number: int) -> None:
        """Passes a signal on to the pod, and prevents another start. A signal handler
        or any thread may call it.
        """
        self._stopped = True
        self._signals.append(number)

    def run(self) -> int:
        """Runs the job to its end.

        Returns:
          0 if the job is done; 3 if it is not finite, since a repetition would end the
          same way; 42 or 130 if it was told to stop; otherwise the exit code of its
          last failure.
        """
        failures, best = 0, self._step()
        while True:
            pod = _Pod(self._job, self._out, self._options.grace_seconds)
            code = pod.wait(self._signals)
            self.cause = pod.cause
            if code in (notice.DONE, notice.INTERRUPTED) or self._stopped:
                return code
            if code == notice.NONFINITE:
                self._say(
                    f"not started again, because it would end the same way: {pod.cause}"
                )
                return code
            if (
                code == notice.PREEMPTED
                and (self._job.workdir / notice.STOP_FILE).exists()
            ):
                self._say(
                    f"not started again: {self._job.workdir / notice.STOP_FILE} exists"
                )
                return code
            # A failure after new steps starts a new count. An early stop counts as a
            # failure only if no step was made.
            step = self._step()
            has_progress = step > best
            best = max(best, step)
            if pod.lost and self._job.least:
                # The program did not fail, and the number of hosts limits how often
                # this happens, so it is not counted.
                if not self._drop_lost_hosts(pod):
                    return code
                failures = 0
                continue
            if code == notice.PREEMPTED and has_progress:
                failures = 0
                self._say("stopped early with its state saved; starting it again")
                continue
            failures = 1 if has_progress else failures + 1
            if failures >= self._options.max_failures:
                self._say(
                    f"giving up after failure {failures} without a new step: {pod.cause}"
                )
                return code
            self._back_off(failures, pod.cause or "it stopped early, with no new step")
            if self._stopped:
                return code

    def _drop_lost_hosts(self, pod: "_Pod") -> bool:
        """Removes the hosts that a pod has lost from the job; returns whether enough
        are left.
        """
        left = self._job.processes - pod.lost
        of_all = f"{left} of {self._job.processes} hosts are left"
        if left < self._job.least:
            self._say(
                f"{pod.cause}; not started again: {of_all}, but {self._elastic} requires at least "
                f"{self._job.least}. The same command resumes from the last checkpoint when the hosts are back"
            )
            return False
        self._say(f"{pod.cause}; {of_all}: starting it again on these")
        self._job = dataclasses.replace(self._job, processes=left)
        return True

    def _back_off(self, failures: int, cause: str) -> None:
        seconds = min(2.0 ** (failures - 1), _MOST_BACKOFF_SECONDS)
        self._say(
            f"{cause}; failure {failures} of {self._options.max_failures}, starting again in {seconds:g} s"
        )
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stopped:
            time.sleep(_STEP_SECONDS)

    def _step(self) -> int:
        """Returns the last step in the run's status; 0 if there is no readable status."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return status.read(self._job.workdir)[0]["step"] or 0
        return 0

    def _say(self, message: str) -> None:
        print(f"launch: {message}", file=self._out, flush=True)


class _Pod:
    """The processes of one start.

    Attributes:
      cause: why the pod failed; empty if it did not.
      lost: how many processes could not be started, or were ended by a SIGKILL that
        this program did not send.
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
            threading.Thread(
                target=self._forward_output, args=(index, process.stdout), daemon=True
            )
            for index, process in enumerate(self._processes)
        ]
        for reader in self._readers:
            reader.start()

    def wait(self, signal_queue: "collections.deque[int]") -> int:
        """Waits until all processes have ended; returns the exit code of the pod.

        Args:
          signal_queue: the queue of signals to pass on.
        """
        if self.lost:
            # The others would wait for the missing processes until the start timeout.
            return self._kill_all()
        deadline, is_terminating = float("inf"), False
        while None in (codes := self._codes()):
            if signal_queue:
                self._send(signal_queue.popleft())
                deadline = min(deadline, time.monotonic() + self._grace)
            failed = [index for index, code in enumerate(codes) if _failed(code)]
            if failed and not self._first:
                self._first = failed
                # If a process was killed by a signal, the others can neither train nor
                # save without it, so they are not given time to save.
                is_terminating = any((codes[index] or 0) < 0 for index in failed)
                patience = _SIGTERM_SECONDS if is_terminating else _EXIT_SECONDS
                deadline = min(deadline, time.monotonic() + patience)
            if time.monotonic() >= deadline:
                # First SIGTERM, then SIGKILL for the processes that did not leave.
                self._send(signal.SIGKILL if is_terminating else signal.SIGTERM)
                is_terminating, deadline = True, time.monotonic() + _SIGTERM_SECONDS
            time.sleep(_STEP_SECONDS)
        for reader in self._readers:
            reader.join(_READ_SECONDS)
        # 128 plus the signal's number if a signal ended a process, as in a shell.
        ends = [128 - code if code < 0 else code for code in codes if code is not None]
        failed = [index for index, code in enumerate(ends) if _failed(code)]
        if not failed:
            return max(ends)
        # All may have ended between two polls of this loop, so the first to fail may be
        # unknown.
        first = (self._first or failed)[0]
        self.cause = self._describe(first, ends[first])
        return ends[first]

    def _kill_all(self) -> int:
        """Kills a pod that could not be started in full; returns the exit code."""
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        return notice.FAILED

    def _codes(self) -> list[int | None]:
        """Returns the exit code of each process, None while it runs, and counts the
        lost processes.
        """
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
        # Process 0 also prints the failures that other processes report.
        error = self._errors.get(index) or self._errors.get(0)
        return f"{who} {how}: {error}" if error else f"{who} {how}"

    def _send(self, number: int) -> None:
        self._has_killed |= number == signal.SIGKILL
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    # The process group, to kill the process's children too.
                    os.killpg(process.pid, number)
                elif process.poll() is None:
                    process.send_signal(number)

    def _forward_output(self, index: int, lines: IO[str]) -> None:
        prefix = f"[{index}] " if len(self._processes) > 1 else ""
        with lines:
            for line in lines:
                if line.startswith("error: "):
                    self._errors[index] = line.strip()
                self._out.write(prefix + line)
                self._out.flush()


def _free_port() -> int:
    # Below the range from which the system assigns ports. Process 0 binds the port only
    # after it has imported its libraries, and until then the system must not assign it
    # to another program.
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def _start(command: Sequence[str], token: str) -> "subprocess.Popen[str]":
    if not shutil.which(command[0]):
        raise engine.LaunchError(
            f"{command[0]} cannot be started: there is no such program."
        )
    # If this process ends for any reason, the pod must not go on unsupervised. A
    # program of util-linux sets this up, because subprocess's preexec_fn is not safe in
    # a process with threads.
    guard = ["setpriv", "--pdeathsig=TERM", "--"] if shutil.which("setpriv") else []
    return subprocess.Popen(
        [*guard, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # A terminal sends Ctrl-C to this process only, which passes it on.
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", rendezvous.TOKEN_VARIABLE: token},
    )


def _failed(code: int | None) -> bool:
    return code not in (None, notice.DONE, notice.PREEMPTED, notice.INTERRUPTED)


def run(job: engine.Job, options: Local) -> int:
    """Runs a job to its end on this terminal, and passes signals on to it; returns the
    exit code.
    """
    supervisor = Supervisor(job, options, sys.stdout)
    with forwarding_signals(supervisor.signal):
        return supervisor.run()


@contextlib.contextmanager
def forwarding_signals(take: Callable[[int], None]) -> Iterator[None]:
    """Passes the signals that stop a run to `take` while the context lasts."""
    previous = {}
    for number in signals.stop_signals():
        previous[number] = signal.signal(number, lambda received, _: take(received))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
