"""Messages between the processes of a run: stop, save, heartbeat and failure.

A thread on the host exchanges them beside the training. It goes on while a step is
computed or compiled, and while a step never ends because a peer is gone.
"""

import contextlib
import faulthandler
import os
import pathlib
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TextIO

import jax

from xshard import errors
from xshard.base import places
from xshard.files import claim, jsonfile, workdir
from xshard.pod import (
    attempts,
    exit_codes,
    exits,
    heartbeat,
    host_collectives,
    rendezvous,
    signals,
    status,
    sync_point,
)
from xshard.pod import members as members_lib
from xshard.pod import request as request_lib

_TICK_SECONDS = 0.5
# How long a process that leaves waits for the others to read the reason.
_LEAVE_SECONDS = 5.0
# The topics of the board: the status of each process, the failures in their order, and
# the processes that have left.
_ALIVE = "alive"
_FAILED = "failed"
_GONE = "gone"
_NO_PROGRESS = "no progress for"
_GO_ON = "The same command resumes from the last checkpoint."
_TIMEOUTS = rendezvous.Timeouts()


class _EndedError(Exception):
    """The context was left, so the talking thread ends."""


class Watchdog:
    """One process's watch over a run. It is a context for the main thread, because it
    takes the signals.

    It has two threads. One handles signals and never waits for the network; the other
    talks to the other processes.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        hosts: Sequence[str] = (),
        *,
        stop_after_seconds: float = 0,
        timeouts: rendezvous.Timeouts = _TIMEOUTS,
        console: TextIO | None = None,
        signal_receiver: signals.SignalReceiver | None = None,
        members: members_lib.Members | None = None,
    ):
        """Prepares the watch; it starts when the context is entered.

        Args:
          directory: the work directory; it need not exist.
          hosts: the host name of each process; by default this process is the only one.
          stop_after_seconds: the time after which the run stops; 0 for never.
          timeouts: how long a process may be silent before it is treated as lost. While
            a process starts, which may include reading much data, the start timeout
            holds.
          console: a stream that errors are written to, in addition to stderr.
          signal_receiver: the signals, if they are already collected; by default the
            context collects them.
          members: the members of the run, if they agree on requests by themselves.
        """
        self._directory = pathlib.Path(directory)
        self._hosts = list(hosts) or [socket.gethostname()]
        self._count = len(self._hosts)
        self._index = 0
        if self._count > 1:
            self._index = places.own().index
        self._timeouts = timeouts
        self._stop_at = float("inf")
        if stop_after_seconds:
            self._stop_at = time.monotonic() + stop_after_seconds
        self._console = console
        self._board = host_collectives.Board(self._index, self._count)
        self._end = host_collectives.Channel("the end of the run", timeouts.shutdown)
        self._sync_point = sync_point.SyncPoint(self._board)
        self._members = members or members_lib.Members()
        if self._members.exchange is not None:
            self._sync_point = sync_point.Polled(self._members)
        self._heartbeat = heartbeat.Heartbeat(self._count, timeouts, _TICK_SECONDS)
        self._stall = heartbeat.StallDetector(timeouts.step, _TICK_SECONDS)
        self._status = status.Status(
            self._hosts[self._index], lambda: self._members.standing
        )
        # Whether the directory belongs to this run, so that the status may be written.
        self._is_published = False
        # Who holds the directory while it is this process's.
        self._holder = ""
        # What the talking thread also does in each tick.
        self._in_each_tick: list[Callable[[], None]] = []
        # When the next exchange with the other processes is due.
        self._due = 0.0
        # When the status of all processes is next written.
        self._write_due = 0.0
        # Held by the thread that ends this process, so that no other thread reports a
        # second reason.
        self._exit_lock = threading.Lock()
        self._num_interrupts = 0
        self._numbers: set[signal.Signals] = set()
        self._is_told_to_stop = threading.Event()
        # Whether this process has failed, and can no longer save.
        self._awaits_cause = False
        self._given_signals = signal_receiver
        self._signals = signal_receiver or signals.SignalReceiver()
        self._threads = [
            threading.Thread(target=self._handle_signals, daemon=True),
            threading.Thread(target=self._exchange_messages, daemon=True),
        ]
        self._ended = threading.Event()
        # Restores the handlers of signals and of aborts when the context ends.
        self._exit_stack = contextlib.ExitStack()

    def __enter__(self) -> "Watchdog":
        if self._count > 1:
            self._exit_stack.enter_context(exits.before_abort(self._before_abort))
        if self._given_signals is None:
            self._exit_stack.enter_context(self._signals)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._sync_point.nudge()
        self._signals.wake()
        for thread in self._threads:
            thread.join(_LEAVE_SECONDS)
        self._exit_stack.close()

    def poll(self) -> request_lib.Request | None:
        """Returns the request to act on now, if any: the same on all processes, which
        poll at the same steps.
        """
        self._stall.note_progress()
        return self._sync_point.poll()

    @property
    def stop_reason(self) -> str:
        """Returns why all processes have agreed to stop; empty if they have not."""
        return self._sync_point.stop_reason

    def ask(self, request: request_lib.Request) -> None:
        """Asks all processes to act on a request, at the next poll that all can still
        reach.
        """
        self._sync_point.ask(request)

    def in_each_tick(self, action: Callable[[], None]) -> None:
        """Adds what the talking thread does about twice a second, in little time.

        Args:
          action: looks whether something is to be asked for.
        """
        self._in_each_tick.append(action)

    def set_phase(self, phase: str, **more: Any) -> None:
        """Sets the phase of this process, as `Status.set_phase` does, and counts as
        progress.
        """
        self._stall.note_progress()
        self._status.set_phase(phase, **more)

    def publish(self) -> None:
        """Starts to write the status of the processes into the directory, once it
        belongs to this run.
        """
        if self._index == 0:
            # Whoever leads after another one goes on with the same attempt.
            if not self._members.has_succeeded:
                attempts.preserve_previous(self._directory)
            self._holder = claim.holder(self._directory)
        self._is_published = True
        if self._members.has_succeeded:
            # While the directory is known to be this process's. It may end before the
            # next write is due, and the predecessor's status would stay.
            self._write_status()

    def end(self, phase: str) -> None:
        """Meets all processes for the last time; raises UserError if one of them does
        not come.

        Args:
          phase: the last phase of this process.
        """
        self.set_phase(phase)
        self._post_status()
        try:
            self._end.gather()
        except host_collectives.LostError as e:
            raise errors.UserError(str(e)) from e
        self._write_status()

    def await_cause(self) -> None:
        """Waits, after an error, for a report that another process failed first; that
        ends this process too.

        A signal to stop ends it at once. A launcher sends one when it has seen another
        process end.
        """
        self._awaits_cause = True
        if not self._is_told_to_stop.wait(self._timeouts.heartbeat + 2):
            return
        with self._exit_lock:
            failure = host_collectives.with_timeout(
                self._first_failure, exits.SHORT_SECONDS
            )
            if failure:
                self._report(failure)
            else:
                self._log(f"told to stop; not waiting for the cause. {_GO_ON}")
            exits.exit_now(exit_codes.FAILED)

    def fail(self, message: str) -> NoReturn:
        """Ends all processes because this one has failed."""
        first_line = message.partition("\n")[0]
        self.set_phase(f"{status.FAILED}: {first_line}")
        failure = f"{self._name(self._index)}: {message}"
        with self._exit_lock:
            self._fail_all(failure)
            # Another process may have failed earlier, and caused the failure here.
            first = host_collectives.with_timeout(self._first_failure, _LEAVE_SECONDS)
            if first and first != failure:
                self._log(f"the first error: {first}")
            self._exit(exit_codes.FAILED)

    # The thread that handles signals. It never waits for the network.

    def _handle_signals(self) -> None:
        while not self._ended.is_set():
            select.select([self._signals], [], [], _TICK_SECONDS)
            for number in self._signals.read():
                self._handle_signal(number)
            self._check_coordinator()
            self._check_progress()

    def _handle_signal(self, number: signal.Signals) -> None:
        self._is_told_to_stop.set()
        if self._awaits_cause:
            return
        where = ""
        if self._count > 1:
            where = f" on {self._name(self._index)}"
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                self._log("interrupted; checkpoints that were saved before are kept")
                exits.exit_now(exit_codes.INTERRUPTED)
            self._stop(f"SIGINT{where}", exit_codes.INTERRUPTED)
            self._log(
                "SIGINT: saving after this step; a second SIGINT ends the run at once."
            )
        elif number not in self._numbers and not self._sync_point.stop_reason:
            # Some signals come repeatedly: SIGTERM to every host of a job, SIGXCPU
            # every second.
            self._numbers.add(number)
            self._stop(f"{number.name}{where}")
            self._log(f"{number.name}: saving after this step.")

    def _stop(self, why: str, code: int = exit_codes.PREEMPTED) -> None:
        self.ask(request_lib.Request(request_lib.STOP, why, code))

    def _check_coordinator(self) -> None:
        seconds = self._heartbeat.unanswered()
        if seconds and self._index:
            self._log(
                f"error: {self._name(0)}, which coordinates, has not answered for "
                f"{seconds:.0f} s: the process, its host or the network is down. "
                f"{_GO_ON}"
            )
            exits.exit_now(exit_codes.FAILED)

    def _check_progress(self) -> None:
        phase, step = self._status.now()
        seconds = self._stall.stalled(phase)
        if not seconds:
            return
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        where = f"in {phase}"
        if step is not None:
            where += f" at step {step}"
        cause = "a device, a collective, the data or a function on the host is blocked"
        if phase in (status.READING, status.READING_EVALUATION):
            cause = (
                "the stream yields no batch; it may reject every example, or have none "
                "for this process"
            )
        message = (
            f"{_NO_PROGRESS} {seconds:.0f} s, since {since}, {where}: {cause} "
            f"(--step_timeout_seconds={self._timeouts.step}). {_GO_ON}"
        )
        self._log(f"error: {self._name(self._index)}: {message}")
        self._print_stacks()
        self.fail(message)

    def _print_stacks(self) -> None:
        # stderr may be replaced by an object without a file descriptor, which
        # faulthandler needs.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print("The stack of each thread:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr)

    # The thread that talks to the other processes.

    def _exchange_messages(self) -> None:
        while not self._ended.is_set():
            self._sync_point.wait(_TICK_SECONDS)
            try:
                self._check_stop_requests()
                for action in self._in_each_tick:
                    action()
                self._exchange_status()
                if self._sync_point.is_due():
                    self._agree()
            except _EndedError:
                return
            except jax.errors.JaxRuntimeError:
                # Process 0 cannot be reached now. The other thread checks for how long.
                continue
            except Exception as e:
                # Without this thread the run could neither be stopped nor learn of a
                # failure elsewhere.
                traceback.print_exc()
                self.fail(f"the watch over the run has failed: {type(e).__name__}: {e}")

    def _check_stop_requests(self) -> None:
        if self._sync_point.stop_reason:
            return
        if time.monotonic() >= self._stop_at:
            self._stop(request_lib.TIME_IS_OVER)
            return
        file = self._directory / workdir.STOP_FILE
        # If a shared disk does not answer for a moment, the next look finds the file.
        if os.path.exists(file):
            self._stop(f"there is a file {file}")

    def _exchange_status(self) -> None:
        """Writes this process's status and reads the others', at most once per tick."""
        if self._ended.is_set():
            # A request after the last poll finds no process left to agree with, so its
            # wait must end here.
            raise _EndedError
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + 0.9 * _TICK_SECONDS
        self._post_status()
        failure = self._first_failure()
        if failure:
            with self._exit_lock:
                self._report(failure)
                self._exit(exit_codes.FAILED)
        if self._index == 0:
            self._check_heartbeats()
        self._heartbeat.answered()

    def _report(self, failure: str) -> None:
        self._log(f"error: {failure}")
        # The process that detects a stall first is rarely the one that causes it.
        if _NO_PROGRESS in failure:
            self._print_stacks()

    def _first_failure(self) -> str:
        failures = self._board.read(_FAILED)
        if not failures:
            return ""
        return failures[min(failures)]

    def _post_status(self) -> None:
        self._board.write(_ALIVE, jsonfile.dumps(self._status.row()))

    def _check_heartbeats(self) -> None:
        texts = self._board.read(_ALIVE)
        seconds = self._heartbeat.update(texts)
        self._write_status(texts)
        if not seconds:
            return
        names = ", ".join(map(self._name, sorted(self._heartbeat.lost)))
        message = (
            f"{names}: not heard from for {seconds:.0f} s; the process, its host or "
            f"the network is down. {_GO_ON}"
        )
        with self._exit_lock:
            self._fail_all(message)
            self._exit(exit_codes.FAILED, f"error: {message}")

    def _agree(self) -> None:
        request, poll = self._sync_point.gather(self._exchange_status)
        if request.kind == request_lib.STOP and poll == 1:
            self.set_phase(status.last_phase(request.code, request.why))
            with self._exit_lock:
                self._exit(
                    request.code, f"{request.why}: stopped before the first step."
                )
        self._sync_point.decide(request, poll)

    # Leaving.

    def _before_abort(self) -> None:
        # JAX aborts with its client locked. If the board answers, the abort has another
        # cause: often that a process which has failed is gone, in the middle of a
        # collective.
        failure = host_collectives.with_timeout(
            self._first_failure, exits.SHORT_SECONDS
        )
        if failure:
            with self._exit_lock:
                self._report(failure)
                self._exit(exit_codes.FAILED)
        if failure is not None:
            return
        who = "another process"
        if self._index:
            who = f"{self._name(0)}, which coordinates,"
        with self._exit_lock:
            self._log(
                f"error: {who} cannot be reached; see the messages of JAX above. "
                f"{_GO_ON}"
            )
            exits.exit_now(exit_codes.FAILED)

    def _fail_all(self, message: str) -> None:
        host_collectives.with_timeout(
            lambda: self._board.append(_FAILED, message), _LEAVE_SECONDS
        )

    def _exit(self, code: int, message: str = "") -> NoReturn:
        """Ends this process; process 0 last, because the others read its board."""
        if message:
            self._log(message)
        patience = _LEAVE_SECONDS
        if self._index == 0:
            # JAX aborts the processes that are left when process 0 ends.
            patience = self._timeouts.heartbeat
        host_collectives.with_timeout(self._announce_exit, patience)
        host_collectives.with_timeout(self._write_status, _LEAVE_SECONDS)
        exits.exit_now(code)

    def _announce_exit(self) -> None:
        self._post_status()
        if self._index:
            self._board.write(_GONE, "")
            return
        others = set(range(1, self._count)) - self._heartbeat.lost
        while not others <= self._board.read(_GONE).keys():
            time.sleep(_LEAVE_SECONDS / 100)

    def _write_status(self, texts: Mapping[int, str] | None = None) -> None:
        """Writes the status of all processes, on process 0.

        Args:
          texts: what they have written on the board, for a write that waits until one
            is due; None to read it, and to write at once.
        """
        is_own = self._index == 0 and self._is_published
        if not is_own or not self._may_write():
            return
        now = time.monotonic()
        if texts is None:
            texts = self._board.read(_ALIVE)
        elif now < self._write_due:
            return
        self._write_due = now + status.seconds_between_writes(self._count) - 0.1
        # The texts are JSON already. With a single process the board stays empty.
        rows = [texts[index] for index in sorted(texts)]
        status.write_texts(
            self._directory, rows or [jsonfile.dumps(self._status.row())]
        )

    def _may_write(self) -> bool:
        """Returns whether the status in the directory is this process's to write, and
        not that of a process which has taken the directory over.
        """
        # A disk that is away answers by an error, which must not end this watch.
        with contextlib.suppress(OSError, ValueError):
            if claim.holder(self._directory) == self._holder:
                return True
            # The run has ended and freed the directory, or lost it.
            for row in status.read_if_exists(self._directory) or ():
                own = self._status.row()
                return (row["host"], row["pid"]) == (own["host"], own["pid"])
        return True

    def _name(self, index: int) -> str:
        return f"process {index} on {self._hosts[index]}"

    def _log(self, message: str) -> None:
        for stream in (sys.stderr, self._console):
            # A standard stream that was closed when Python started is None.
            if stream is not None:
                # The terminal may be gone. An error of printing must not keep a run
                # from saving.
                with contextlib.suppress(OSError, ValueError):
                    print(message, file=stream, flush=True)
