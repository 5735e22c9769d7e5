"""Messages between the processes of a run: stop, save, heartbeat and failure.

A thread on the host exchanges them beside the training. It goes on while a step is
computed or compiled, and while a step never ends because a peer is gone.
"""

import contextlib
import faulthandler
import json
import os
import pathlib
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

import jax

from xshard import errors
from xshard.pod import (
    attempts,
    exits,
    heartbeat,
    host_collectives,
    signals,
    startup,
    status,
    sync_point,
)
from xshard.pod import notice as notice_lib

_TICK_SECONDS = 0.5
# How long a process that leaves waits for the others to read the reason.
_LEAVE_SECONDS = 5.0
_NO_PROGRESS = "no progress for"
_GO_ON = "The same command resumes from the last checkpoint."
_TIMEOUTS = startup.Timeouts()


class _EndedError(Exception):
    """The context was left, so the talking thread ends."""


class Watchdog:
    """One process's watch over a run. It is a context for the main thread, because it
    takes the signals.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        hosts: Sequence[str] = (),
        *,
        stop_after_seconds: float = 0,
        timeouts: startup.Timeouts = _TIMEOUTS,
        console: TextIO | None = None,
        signal_receiver: signals.SignalReceiver | None = None,
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
        """
        self._directory = pathlib.Path(directory)
        self._hosts = list(hosts) or [socket.gethostname()]
        self._index = jax.process_index() if len(self._hosts) > 1 else 0
        self._timeouts = timeouts
        self._stop_at = (
            time.monotonic() + stop_after_seconds if stop_after_seconds else None
        )
        self._console = console
        self._signal_receiver = signal_receiver
        self._board = host_collectives.Board(self._index, len(self._hosts))
        self._end = host_collectives.Exchange("the end of the run", timeouts.shutdown)
        self._ended = threading.Event()
        self._published = False
        self._sync_point = sync_point.SyncPoint(self._board)
        self._heartbeat = heartbeat.Heartbeat(len(self._hosts), timeouts, _TICK_SECONDS)
        self._progress = heartbeat.StallDetector(timeouts.step, _TICK_SECONDS)
        self._status = status.Status(self._hosts[self._index])
        # When the next exchange with the other processes is due.
        self._due = 0.0
        # Held by the thread that ends this process, so that no other thread reports a
        # second reason.
        self._exit_lock = threading.Lock()
        self._interrupts = 0
        self._numbers: set[signal.Signals] = set()
        # Restores the handlers of signals and of aborts when the context ends.
        self._exit_stack = contextlib.ExitStack()

    def __enter__(self) -> "Watchdog":
        if len(self._hosts) > 1:
            self._exit_stack.enter_context(exits.before_abort(self._before_abort))
        self._signals = self._signal_receiver or self._exit_stack.enter_context(
            signals.SignalReceiver()
        )
        self._threads = []
        for run in (self._handle_signals, self._exchange_messages):
            thread = threading.Thread(target=run, daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._sync_point.nudge()
        self._signals.wake()
        for thread in self._threads:
            thread.join(_LEAVE_SECONDS)
        self._exit_stack.close()

    def poll(self) -> notice_lib.Notice | None:
        """Returns the notice to act on now, if any: the same on all processes, which
        poll at the same steps.
        """
        self._progress.note_progress()
        return self._sync_point.poll()

    def ask(self, notice: notice_lib.Notice) -> None:
        """Asks all processes to act on a notice, at the next poll that all can still
        reach.
        """
        self._sync_point.ask(notice)

    def doing(self, what: str, **more: Any) -> None:
        """Sets the status of this process, as `Status.doing` does, and counts as
        progress.
        """
        self._progress.note_progress()
        self._status.doing(what, **more)

    def publish(self) -> None:
        """Starts to write the status of the processes into the directory, once it
        belongs to this run.
        """
        if self._index == 0:
            attempts.preserve_previous(self._directory)
        self._published = True

    def end(self, what: str) -> None:
        """Meets all processes for the last time; raises UserError if one of them does
        not come.
        """
        self.doing(what)
        self._post_status()
        try:
            self._end.gather()
        except host_collectives.LostError as e:
            raise errors.UserError(str(e)) from e
        self._write_status()

    def await_cause(self) -> None:
        """Waits, after an error, for a report that another process failed first; that
        ends this process too.
        """
        self._ended.wait(self._timeouts.heartbeat + 2)

    def fail(self, message: str) -> NoReturn:
        """Ends all processes because this one has failed."""
        self.doing(f"failed: {message.partition(chr(10))[0]}")
        own = f"{self._name(self._index)}: {message}"
        with self._exit_lock:
            self._fail_all(own)
            # Another process may have failed earlier, and caused the failure here.
            first = (
                host_collectives.with_timeout(self._first_failure, _LEAVE_SECONDS)
                or own
            )
            if first != own:
                self._say(f"the first error: {first}")
            self._exit(notice_lib.FAILED)

    # The thread that handles signals. It never waits for the network.

    def _handle_signals(self) -> None:
        while not self._ended.is_set():
            select.select([self._signals], [], [], _TICK_SECONDS)
            for number in self._signals.read():
                self._handle_signal(number)
            self._check_coordinator()
            self._check_progress()

    def _handle_signal(self, number: signal.Signals) -> None:
        where = ""
        if len(self._hosts) > 1:
            where = f" on {self._name(self._index)}"
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                self._say("interrupted; checkpoints that were saved before are kept")
                exits.exit_now(notice_lib.INTERRUPTED)
            self._stop(f"SIGINT{where}", notice_lib.INTERRUPTED)
            self._say(
                "SIGINT: saving after this step; a second SIGINT ends the run at once."
            )
        elif number not in self._numbers and not self._sync_point.is_stopping:
            # Some signals come repeatedly: SIGTERM to every host of a job, SIGXCPU
            # every second.
            self._numbers.add(number)
            self._stop(f"{number.name}{where}")
            self._say(f"{number.name}: saving after this step.")

    def _stop(self, why: str, code: int = notice_lib.PREEMPTED) -> None:
        self.ask(notice_lib.Notice(notice_lib.STOP, why, code))

    def _check_coordinator(self) -> None:
        silent = self._heartbeat.unanswered()
        if silent and self._index:
            self._say(
                f"error: {self._name(0)}, which coordinates, has not answered for {silent:.0f} s: the "
                f"process, its host or the network is down. {_GO_ON}"
            )
            exits.exit_now(notice_lib.FAILED)

    def _check_progress(self) -> None:
        doing, step = self._status.now()
        seconds = self._progress.stalled(doing)
        if not seconds:
            return
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        where = f"in {doing}"
        if step is not None:
            where += f" at step {step}"
        cause = "a device, a collective, the data or a function on the host is blocked"
        if doing in (status.READING, status.READING_EVALUATION):
            cause = "the stream yields no batch; it may reject every example, or have none for this process"
        message = (
            f"{_NO_PROGRESS} {seconds:.0f} s, since {since}, {where}: {cause} (--step_timeout_seconds="
            f"{self._timeouts.step})"
        )
        self._say(f"error: {self._name(self._index)}: {message}. {_GO_ON}")
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
        if self._sync_point.is_stopping:
            return
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self._stop("the time of --stop_after has passed")
            return
        file = self._directory / notice_lib.STOP_FILE
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
                self._say(f"error: {failure}")
                # The process that detects a stall first is rarely the one that causes
                # it.
                if _NO_PROGRESS in failure:
                    self._print_stacks()
                self._exit(notice_lib.FAILED)
        if self._index == 0:
            self._check_heartbeats()
        self._heartbeat.answered()

    def _first_failure(self) -> str:
        failures = self._board.read("failed")
        if not failures:
            return ""
        return failures[min(failures)]

    def _post_status(self) -> None:
        self._board.write("alive", json.dumps(self._status.row()))

    def _check_heartbeats(self) -> None:
        silent = self._heartbeat.update(self._board.read("alive"))
        self._write_status()
        if silent:
            names = ", ".join(map(self._name, sorted(self._heartbeat.lost)))
            message = f"{names}: not heard from for {silent:.0f} s; the process, its host or the network is down. {_GO_ON}"
            with self._exit_lock:
                self._fail_all(message)
                self._exit(notice_lib.FAILED, f"error: {message}")

    def _agree(self) -> None:
        notice, point = self._sync_point.gather(self._exchange_status)
        if notice.kind == notice_lib.STOP and point == 1:
            self.doing("stopped")
            with self._exit_lock:
                self._exit(notice.code, f"{notice.why}: stopped before the first step.")
        self._sync_point.decide(notice, point)

    # Leaving.

    def _before_abort(self) -> None:
        # JAX aborts with its client locked. If the board answers, the abort has another
        # cause.
        if (
            host_collectives.with_timeout(
                lambda: self._board.read("failed"), exits.SHORT_SECONDS
            )
            is not None
        ):
            return
        who = "another process"
        if self._index:
            who = f"{self._name(0)}, which coordinates,"
        with self._exit_lock:
            self._say(
                f"error: {who} cannot be reached; see the messages of JAX above. {_GO_ON}"
            )
            exits.exit_now(notice_lib.FAILED)

    def _fail_all(self, message: str) -> None:
        host_collectives.with_timeout(
            lambda: self._board.append("failed", message), _LEAVE_SECONDS
        )

    def _exit(self, code: int, message: str = "") -> NoReturn:
        """Ends this process; process 0 leaves last, because the others read its board."""
        if message:
            self._say(message)
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
            self._board.write("gone", "")
            return
        others = set(range(1, len(self._hosts))) - self._heartbeat.lost
        while not others <= self._board.read("gone").keys():
            time.sleep(_LEAVE_SECONDS / 100)

    def _write_status(self) -> None:
        if self._index == 0 and self._published:
            texts = self._board.read("alive")
            rows = [json.loads(texts[index]) for index in sorted(texts)]
            # With a single process the board stays empty.
            status.write(self._directory, rows or [self._status.row()])

    def _name(self, index: int) -> str:
        return f"process {index} on {self._hosts[index]}"

    def _say(self, message: str) -> None:
        for stream in (sys.stderr, self._console):
            # A standard stream that was closed when Python started is None.
            if stream is not None:
                # The terminal may be gone. An error of printing must not keep a run
                # from saving.
                with contextlib.suppress(OSError, ValueError):
                    print(message, file=stream, flush=True)
