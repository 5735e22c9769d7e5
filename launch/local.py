"""Launches on this machine: a pod of processes, supervised, and started again when it
ends early.
"""

import collections
import contextlib
import dataclasses
import itertools
import queue
import random
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, ClassVar

from launch import engine, hosts, meeting, processes
from xshard import cli
from xshard.files import standard_streams, workdir
from xshard.pod import exchange, exit_codes, rendezvous, request, signals, status

_STEP_SECONDS = 0.1
# How long to wait after a failure: the other processes learn of it, report it and leave
# by themselves.
_EXIT_SECONDS = 15.0
# How long to wait after SIGTERM: a process leaves, unless it is within a computation
# that needs a peer which was killed.
_SIGTERM_SECONDS = 3.0
_MAX_BACKOFF_SECONDS = 60.0
_TIME_IS_OVER = status.last_phase(exit_codes.PREEMPTED, request.TIME_IS_OVER)
# The exit codes of a run that was stopped: one such process ends it for all.
_STOPS = {exit_codes.PREEMPTED, exit_codes.INTERRUPTED, exit_codes.NONFINITE}


@dataclasses.dataclass(frozen=True)
class Local(engine.Engine):
    """The local engine."""

    name: ClassVar[str] = "local"
    has_spares: ClassVar[bool] = True

    max_failures: int = engine.option(
        3, "give up after this many failures in a row without a new step"
    )
    grace_seconds: float = engine.option(
        120, "how long a pod that is told to stop may take to save before it is ended"
    )
    parallel: int = engine.option(1, "how many jobs of a sweep run at a time")
    through: str | None = engine.option(
        None,
        "with --spares: a command that starts the processes on other hosts, as many as "
        "there are with the spares, such as 'srun --ntasks=4' or 'mpirun -n 4'",
    )

    def launch(self, jobs: Sequence[engine.Job]) -> engine.Plan:
        """Returns the commands of one start, which run in parallel. Each start replaces
        PORT by a free port.
        """
        all_commands = []
        host = meeting.HOST if self.through else "127.0.0.1"
        if self.through:
            all_commands.append([*shlex.split(self.through), *hosts.COMMAND, "ADDRESS"])
        for job in jobs:
            all_commands += commands(job, "PORT", host)
        return engine.Plan(all_commands)


def commands(job: engine.Job, port: object, host: str = "127.0.0.1") -> list[list[str]]:
    """Returns the command of each process with which a job starts.

    Args:
      job: the job.
      port: the port at which the processes meet each other, or their launcher.
      host: the launcher's host.
    """
    if job.spares is not None:
        return [
            member_command(job, f"{host}:{port}", number)
            for number in range(job.processes + job.spares)
        ]
    if job.processes == 1:
        return [list(job.arguments)]
    commands_of_processes = []
    for index in range(job.processes):
        place = (
            f"--coordinator_address=127.0.0.1:{port}",
            f"--num_processes={job.processes}",
            f"--process_id={index}",
        )
        commands_of_processes.append([*job.arguments, *place])
    return commands_of_processes


def member_command(job: engine.Job, address: str, number: int) -> list[str]:
    """Returns the command of a process of a run that goes on without those it loses.

    Args:
      job: the job.
      address: the address of the meeting.
      number: the number of the process. The first ones begin the run; the others join
        it.
    """
    command = [
        *job.arguments,
        f"--meeting_address={address}",
        f"--process_id={number}",
    ]
    if number >= job.processes:
        command.append("--joins=true")
    return command


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
        num_failures = 0
        best = self._step()
        while True:
            if self._job.spares is None:
                pod = _Pod(self._job, self._out, self._options.grace_seconds)
            else:
                pod = _Lasting(self._job, self._out, self._options, self.signal)
            before = self._status()
            code = pod.wait(self._signals)
            self.cause = pod.cause
            if code in (exit_codes.DONE, exit_codes.INTERRUPTED) or self._stopped:
                return code
            if code == exit_codes.NONFINITE:
                self._log(
                    f"not started again, because it would end the same way: {pod.cause}"
                )
                return code
            stop_file = self._job.workdir / workdir.STOP_FILE
            if code == exit_codes.PREEMPTED and stop_file.exists():
                self._log(f"not started again: {stop_file} exists")
                return code
            row = self._status()
            # An attempt that ended before it began leaves the status of another one.
            is_told = row != before and row.get("doing") == _TIME_IS_OVER
            if code == exit_codes.PREEMPTED and is_told:
                self._log(f"not started again: {request.TIME_IS_OVER}")
                return code
            # A failure after new steps starts a new count. An early stop counts as a
            # failure only if no step was made.
            step = self._step()
            has_progress = step > best
            best = max(best, step)
            if pod.num_lost and self._job.least:
                # The program did not fail, and the number of hosts limits how often
                # this happens, so it is not counted.
                if not self._drop_lost_hosts(pod):
                    return code
                num_failures = 0
                continue
            if has_progress:
                num_failures = 0
            if code == exit_codes.PREEMPTED and has_progress:
                self._log("stopped early with its state saved; starting it again")
                continue
            num_failures += 1
            if num_failures == 1 < self._options.max_failures and pod.was_killed:
                # The program did not fail, and the next start is likely to succeed.
                self._log(
                    f"{pod.cause}; failure 1 of {self._options.max_failures}, starting "
                    "again at once"
                )
                continue
            if num_failures >= self._options.max_failures:
                self._log(
                    f"giving up after failure {num_failures} without a new step: "
                    f"{pod.cause}"
                )
                return code
            cause = pod.cause or "it stopped early, with no new step"
            self._back_off(num_failures, cause)
            if self._stopped:
                return code

    def _drop_lost_hosts(self, pod: "_Pod") -> bool:
        """Removes the hosts that a pod has lost from the job; returns whether enough
        are left.
        """
        left = self._job.processes - pod.num_lost
        of_all = f"{left} of {self._job.processes} hosts are left"
        if left < self._job.least:
            self._log(
                f"{pod.cause}; not started again: {of_all}, but {self._elastic} "
                f"requires at least {self._job.least}. The same command resumes from "
                "the last checkpoint when the hosts are back"
            )
            return False
        self._log(f"{pod.cause}; {of_all}: starting it again on these")
        self._job = dataclasses.replace(self._job, processes=left)
        return True

    def _back_off(self, num_failures: int, cause: str) -> None:
        seconds = min(2.0 ** (num_failures - 1), _MAX_BACKOFF_SECONDS)
        self._log(
            f"{cause}; failure {num_failures} of {self._options.max_failures}, "
            f"starting again in {seconds:g} s"
        )
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stopped:
            time.sleep(_STEP_SECONDS)

    def _step(self) -> int:
        """Returns the last step in the run's status; 0 if it cannot be read."""
        return self._status().get("step") or 0

    def _status(self) -> dict[str, Any]:
        """Returns the status of process 0; empty if it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return status.read(self._job.workdir)[0]
        return {}

    def _log(self, message: str) -> None:
        print(f"launch: {message}", file=self._out, flush=True)


class _Pod:
    """The processes of one start.

    Attributes:
      cause: why the pod failed; empty if it did not.
      num_lost: how many processes could not be started, or were ended by a SIGKILL that
        this program did not send.
      was_killed: whether such a SIGKILL was the first failure.
    """

    def __init__(self, job: engine.Job, out: IO[str], grace_seconds: float):
        self.cause = ""
        self.num_lost = 0
        self.was_killed = False
        self._job = job
        self._out = out
        self._grace_seconds = grace_seconds
        self._has_killed = False
        # By the index that the output is marked with.
        self._processes: dict[int, processes.Process | hosts.Process] = {}
        self._start_all(job, engine.make_token())

    def _start_all(self, job: engine.Job, token: str) -> None:
        port = _free_port()
        for index, command in enumerate(commands(job, port)):
            self._start(index, command, token)

    def _start(self, index: int, command: Sequence[str], token: str) -> None:
        try:
            self._processes[index] = self._make_process(index, command, token)
        except OSError as e:
            self.num_lost += 1
            self.cause = (
                f"process {index} of {self._job.processes} cannot be started: "
                f"{e.strerror}"
            )

    def _make_process(
        self, index: int, command: Sequence[str], token: str
    ) -> processes.Process | hosts.Process:
        """Starts a process; raises OSError if the system starts none now."""
        prefix = ""
        if self._job.processes > 1 or self._job.spares is not None:
            prefix = f"[{index}] "
        return processes.Process(command, token, self._out, prefix)

    def wait(self, signal_queue: "collections.deque[int]") -> int:
        """Waits until all processes have ended; returns the exit code of the pod.

        Args:
          signal_queue: the queue of signals to pass on.
        """
        if self.num_lost:
            # The others would wait for the missing processes until the start timeout.
            self._send(signal.SIGKILL)
            for process in self._processes.values():
                process.wait()
            return exit_codes.FAILED
        first_failed: list[int] = []
        # When the processes that are left are ended: since they were told to stop, and
        # since some have failed.
        deadline = float("inf")
        failed_deadline = float("inf")
        is_terminating = False
        codes = self._codes()
        while None in codes.values():
            now = time.monotonic()
            if signal_queue:
                self._send(signal_queue.popleft())
                deadline = min(deadline, now + self._grace_seconds)
            # Some may not count any more.
            first_failed = [i for i in first_failed if i in codes]
            if not first_failed:
                first_failed = _failed(codes)
                failed_deadline = float("inf")
                if first_failed:
                    failed_deadline = now + _EXIT_SECONDS
                if any((codes[i] or 0) < 0 for i in first_failed):
                    # The others can neither train nor save without a process that was
                    # killed by a signal, and need not find that out.
                    failed_deadline = now
            if now >= min(deadline, failed_deadline):
                # First SIGTERM, then SIGKILL for the processes that did not leave.
                self._send(signal.SIGKILL if is_terminating else signal.SIGTERM)
                is_terminating = True
                deadline = now + _SIGTERM_SECONDS
                failed_deadline = float("inf")
            time.sleep(_STEP_SECONDS)
            codes = self._codes()
        for process in self._processes.values():
            process.read_to_end()
        # No process runs any more, so each has a code.
        ends = {}
        for index, code in codes.items():
            if code is not None:
                ends[index] = engine.shell_code(code)
        failed = _failed(codes)
        if not failed:
            self.cause = ""
            return max(ends.values())
        # Several may have ended between two polls of this loop, so the first to fail
        # may be unknown. No process of a run sends SIGKILL, so that is no effect of
        # another failure.
        candidates = [i for i in first_failed if i in codes] or failed
        killed = [i for i in candidates if codes[i] == -signal.SIGKILL]
        self.was_killed = bool(killed) and self.num_lost > 0
        if self.was_killed:
            candidates = killed
        first = candidates[0]
        self.cause = self._describe(first, ends[first])
        return ends[first]

    def _codes(self) -> dict[int, int | None]:
        """Returns the exit code of each process, None while it runs, and counts the
        lost processes.
        """
        codes = {i: process.poll() for i, process in self._processes.items()}
        if not self._has_killed:
            self.num_lost = _killed(codes)
        return codes

    def _describe(self, index: int, code: int) -> str:
        who = self._name(index)
        how = f"ended with exit code {code}"
        if code > 128:
            # There may be no such signal.
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(code - 128).name}"
        # Process 0 also prints the failures that other processes report.
        for each in (index, 0):
            if each in self._processes and self._processes[each].error:
                return f"{who} {how}: {self._processes[each].error}"
        return f"{who} {how}"

    def _name(self, index: int) -> str:
        if len(self._processes) > 1:
            return f"process {index} of {len(self._processes)}"
        return "it"

    def _send(self, number: int) -> None:
        if number == signal.SIGKILL:
            self._has_killed = True
        for process in self._processes.values():
            process.send_signal(number)


class _Lasting(_Pod):
    """The processes of a run that goes on without those it loses, and their meeting.

    Another process is started for each that is lost, as long as they come to be
    members.
    """

    def __init__(
        self,
        job: engine.Job,
        out: IO[str],
        options: Local,
        told: Callable[[int], None],
    ):
        """Starts them.

        Args:
          job: the job.
          out: the stream for their output.
          options: the limits, and how processes are started.
          told: called with a signal that a process on another host has received there.
        """
        self._max_failures = options.max_failures
        # Why the meeting has ended processes, by their number.
        self._reasons: dict[int, str] = {}
        # How many in a row were lost that were not members yet, and when the next one
        # is started.
        self._num_failures = 0
        self._num_missing = 0
        self._next_start = 0.0
        self._has_begun = False
        # Whether the processes were told to stop.
        self._is_stopped = False
        # When the first has ended of those with which the run begins.
        self._first_end = float("inf")
        # How many hosts an elastic run has lost and gone on without.
        self._num_gone = 0
        # What the meeting says, until its end. Its thread must not wait for the
        # terminal.
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._speaker = threading.Thread(target=self._log_what_is_said, daemon=True)
        self._speaker.start()
        self._through = shlex.split(options.through or "")
        self._told = told
        self._hosts: hosts.Hosts | None = None
        super().__init__(job, out, options.grace_seconds)

    def _start_all(self, job: engine.Job, token: str) -> None:
        self._token = token
        defaults = rendezvous.Timeouts()
        seconds = {}
        for name in ("start", "heartbeat", "shutdown"):
            given = cli.flag_value(job.command, f"{name}_timeout_seconds")
            seconds[name] = float(given or getattr(defaults, name))
        self._meeting = meeting.Meeting(
            job.processes,
            token,
            self._put_out,
            self._said.put,
            start_seconds=seconds["start"],
            silence_seconds=seconds["heartbeat"],
            shutdown_seconds=seconds["shutdown"],
            answers=bool(self._through),
        )
        if self._through:
            self._hosts = hosts.Hosts(
                self._through,
                job.processes + (job.spares or 0),
                token,
                exchange.lease_seconds(seconds["heartbeat"]),
                self._told,
                self._meeting.last_answer,
                self._out,
            )
        self._numbers = itertools.count()
        for _ in range(job.processes + (job.spares or 0)):
            self._start_next()

    def _start_next(self) -> None:
        number = next(self._numbers)
        self._meeting.started(number, joins=number >= self._job.processes)
        command = member_command(self._job, self._meeting.address, number)
        try:
            self._start(number, command, self._token)
        except engine.LaunchError as e:
            if not self._has_begun:
                raise
            self._log(str(e))
        if number not in self._processes:
            # The system starts no further process now.
            self._meeting.ended(number)
            self._num_missing += 1
            self._next_start = time.monotonic() + _MAX_BACKOFF_SECONDS
            return
        process = self._processes[number]
        if number in self._reasons:
            # The meeting has put it out while it was being started.
            process.send_signal(signal.SIGKILL)

        def watch() -> None:
            """Tells the meeting of the end of the process at once."""
            process.wait()
            self._meeting.ended(number)

        threading.Thread(target=watch, daemon=True).start()

    def wait(self, signal_queue: "collections.deque[int]") -> int:
        """Waits until the run has ended; returns its exit code."""
        try:
            return super().wait(signal_queue)
        finally:
            if self._hosts is not None:
                self._hosts.close()
            self._meeting.close()
            self._said.put(None)
            self._speaker.join()

    def _send(self, number: int) -> None:
        self._is_stopped = True
        if number == signal.SIGKILL:
            for index in self._processes:
                self._meeting.forsake(index)
        super()._send(number)

    def _make_process(
        self, index: int, command: Sequence[str], token: str
    ) -> processes.Process | hosts.Process:
        """Starts a process, here or on another host."""
        if self._hosts is None:
            return super()._make_process(index, command, token)
        return self._hosts.start(index, command)

    def _put_out(self, number: int, why: str) -> None:
        self._reasons[number] = why
        process = self._processes.get(number)
        if process is not None:
            process.send_signal(signal.SIGKILL)

    def _describe(self, index: int, code: int) -> str:
        if index in self._reasons:
            return f"process {index} was ended: {self._reasons[index]}"
        return super()._describe(index, code)

    def _name(self, index: int) -> str:
        return f"process {index}"

    def _codes(self) -> dict[int, int | None]:
        """Returns the exit codes of the processes that count: of those that the run
        goes on without, only while no member is left.
        """
        codes = {i: process.poll() for i, process in self._processes.items()}
        self._has_begun = self._has_begun or bool(self._meeting.generation)
        if self._has_killed:
            return self._counting(codes)
        if not self._has_begun:
            return self._codes_before(codes)
        members = self._meeting.members
        is_left = any(codes.get(number, 0) is None for number in members)
        is_ending = self._meeting.is_done
        former = self._meeting.former
        is_ending = is_ending or any(codes.get(n) in _STOPS for n in former)
        for number, code in list(codes.items()):
            if code is None or len(codes) == 1:
                continue
            is_end = code in _STOPS or (code == exit_codes.DONE and is_ending)
            if is_end and number in former:
                continue
            if is_left or is_ending or number in self._reasons:
                self._drop(number, code, is_left=is_left and not is_ending)
                del codes[number]
        if self._num_missing and is_left and not (is_ending or self._is_stopped):
            self._replace()
        self.num_lost = self._num_gone + _killed(codes)
        return codes

    def _counting(self, codes: dict[int, int | None]) -> dict[int, int | None]:
        """Returns the exit codes without those of processes that never had a place, if
        there are others.
        """
        counting = {}
        for number, code in codes.items():
            had_place = number < self._job.processes or number in self._meeting.former
            if code is None or had_place:
                counting[number] = code
        return counting or codes

    def _codes_before(self, codes: dict[int, int | None]) -> dict[int, int | None]:
        """Returns the exit codes that count before the run has begun: not of spares,
        which it does not need for that.

        If a process has left that it needs, the others are told to stop, too.
        """
        now = time.monotonic()
        beginning = [codes.get(number) for number in range(self._job.processes)]
        is_over = None not in beginning
        if any(code is not None for code in beginning):
            self._first_end = min(self._first_end, now)
        is_stopping = any(code in _STOPS for code in beginning)
        is_late = now > self._first_end + _EXIT_SECONDS
        if (is_stopping or is_late) and not (is_over or self._is_stopped):
            self._send(signal.SIGTERM)
        for number, code in list(codes.items()):
            if number < self._job.processes:
                if self._is_stopped and code == -signal.SIGTERM:
                    # It was told before it could handle that.
                    codes[number] = exit_codes.PREEMPTED
            elif code is not None:
                self._drop(number, code, is_left=not is_over)
                del codes[number]
            elif is_over:
                self._meeting.kill(number, "the run has ended")
        if self._num_missing and not (is_over or self._is_stopped):
            self._replace()
        self.num_lost = _killed(codes)
        return codes

    def _drop(self, number: int, code: int, *, is_left: bool) -> None:
        """Forgets a process that has ended; the run goes on, if any member is left."""
        cause = self._describe(number, engine.shell_code(code))
        del self._processes[number]
        is_of_run = number in self._meeting.former or number not in self._reasons
        if code == -signal.SIGKILL and is_of_run:
            self._num_gone += 1
        if not is_left:
            return
        if self._job.least and code == -signal.SIGKILL:
            # The program did not fail, and the host is gone.
            self._go_on_with_less(cause)
            return
        self._num_missing += 1
        if number in self._meeting.former:
            self._num_failures = 0
        else:
            self._num_failures += 1
        if self._num_failures >= self._max_failures:
            self._num_missing = 0
            self._log(f"{cause}; the run goes on without it, and without another")
            return
        if self._num_failures:
            seconds = min(2.0 ** (self._num_failures - 1), _MAX_BACKOFF_SECONDS)
            self._next_start = time.monotonic() + seconds
        self._log(f"{cause}; the run goes on without it")

    def _go_on_with_less(self, cause: str) -> None:
        """Stops an elastic run, with its state saved, if too few hosts are left."""
        left = len(self._processes)
        of_all = f"{left} of {self._job.processes} hosts are left"
        if left >= self._job.least:
            self._log(f"{cause}; {of_all}, with which the run goes on")
            return
        self._log(
            f"{cause}; {of_all}, but --elastic requires at least {self._job.least}: "
            "the run saves and stops. The same command resumes when the hosts are back"
        )
        self._told(signal.SIGTERM)

    def _replace(self) -> None:
        """Starts a process for each that is missing, when it is time."""
        if time.monotonic() >= self._next_start:
            count = self._num_missing
            self._num_missing = 0
            for _ in range(count):
                self._start_next()

    def _log_what_is_said(self) -> None:
        while (message := self._said.get()) is not None:
            self._log(message)

    def _log(self, message: str) -> None:
        # At once, because several threads write there.
        self._out.write(f"launch: {message}\n")
        self._out.flush()


def _free_port() -> int:
    # Below the range from which the system assigns ports. Process 0 binds the port only
    # after it has imported its libraries, and until then the system must not assign it
    # to another program.
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def _failed(codes: Mapping[int, int | None]) -> list[int]:
    """Returns the indices of the processes that have ended with a failure."""
    as_told = (None, exit_codes.DONE, exit_codes.PREEMPTED, exit_codes.INTERRUPTED)
    return [index for index, code in codes.items() if code not in as_told]


def _killed(codes: Mapping[int, int | None]) -> int:
    """Returns how many processes were ended by SIGKILL."""
    return list(codes.values()).count(-signal.SIGKILL)


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
