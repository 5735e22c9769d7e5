"""The meeting of a run's processes before they start: all connect to process 0, which
compares and answers them.
"""

import asyncio
import dataclasses
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from xshard.pod import handshake, process_spec, rendezvous_server, signals

# How long an answer may take, in addition to the time that process 0 waits for the
# others.
_ANSWER_SECONDS = 5.0
# How long to retry after a wrong answer: the port may belong to an earlier run that is
# about to end.
_PATIENCE_SECONDS = 10.0
_RETRY_SECONDS = 0.2
_LONGEST_TEXT = 1 << 14


class _RefusedError(Exception):
    """An answer by something that is not process 0 of this run, or not yet. The message
    describes the answer.
    """


def meet(
    at: process_spec.ProcessSpec,
    seconds: float,
    facts: Mapping[str, str],
    token: str,
    signal_receiver: signals.SignalReceiver,
) -> list[str]:
    """Meets the other processes.

    Args:
      at: this process's place.
      seconds: how long to wait until all processes have connected.
      facts: names and short texts that must be equal on all processes, such as the
        config.
      token: the token of the launch; empty if there is none.
      signal_receiver: the signals; any of them ends the meeting for all processes.

    Returns:
      The host name of each process.

    Raises:
      StartError: on all processes that connected, if one does not connect in time or
        does not fit.
      StoppedError: on all processes that connected, if one of them receives a signal.
    """
    host, short = socket.gethostname(), handshake.shortened(facts)
    own = handshake.Hello(at.index, at.count, host, os.getpid(), short)
    if at.index == 0:
        return asyncio.run(
            rendezvous_server.Server(at, own, token, signal_receiver).run(seconds)
        )
    return _Client(at, own, token, signal_receiver).run(seconds)


class _Client:
    """The part that each process other than 0 plays in the meeting."""

    def __init__(
        self,
        at: process_spec.ProcessSpec,
        own: handshake.Hello,
        token: str,
        signal_receiver: signals.SignalReceiver,
    ):
        self._at = at
        self._own = own
        self._token = token
        self._signal_receiver = signal_receiver
        self._signal: signal.Signals | None = None
        # Whether process 0 has been sent this process's hello, and whether the answer
        # that accepts it has been read.
        self._is_introduced = False
        self._is_accepted = False

    def run(self, seconds: float) -> list[str]:
        """Connects to process 0 until it is accepted; returns the host names that
        process 0 sends.
        """
        deadline = time.monotonic() + seconds
        patient_until = float("inf")
        while True:
            with self._connect(deadline) as connection:
                try:
                    return asyncio.run(self._visit(connection, seconds))
                except _RefusedError as e:
                    refusal = str(e)
            now = time.monotonic()
            # The time for retries starts with the first refusal.
            patient_until = min(patient_until, now + _PATIENCE_SECONDS)
            if now >= min(patient_until, deadline):
                raise process_spec.StartError(
                    f"{self._at.address} accepted the connection of process {self._at.index}, but did not answer "
                    f"as process 0 of this run: {refusal}"
                )
            self._pause()

    def _connect(self, deadline: float) -> socket.socket:
        host, _, port = self._at.address.rpartition(":")
        while True:
            try:
                return socket.create_connection(
                    (host.strip("[]"), int(port)), _ANSWER_SECONDS
                )
            except (OSError, UnicodeError) as e:
                if time.monotonic() >= deadline:
                    reason = getattr(e, "strerror", None) or e
                    raise process_spec.StartError(
                        f"process {self._at.index} on {self._own.host} cannot reach process 0 at "
                        f"{self._at.address} ({reason}): check --coordinator_address, the network between "
                        "the hosts, and whether process 0 has started."
                    ) from e
            self._pause()

    def _pause(self) -> None:
        """Waits before the next try; raises StoppedError if a signal comes."""
        select.select([self._signal_receiver], [], [], _RETRY_SECONDS)
        for number in self._signal_receiver.read():
            raise process_spec.stopped(self._own.name, number)

    async def _visit(self, connection: socket.socket, seconds: float) -> list[str]:
        """Returns the host names that process 0 sends; raises _RefusedError if another
        try may succeed.
        """
        process_spec.keep_alive(connection)
        self._reader, self._writer = await asyncio.open_connection(
            sock=connection, limit=handshake.MAX_LINE_BYTES
        )
        try:
            # Process 0 ends the meeting at its own deadline, and it may have started to
            # wait only now.
            return await self._exchange_or_stop(seconds + _ANSWER_SECONDS)
        except (OSError, handshake.DisconnectedError, handshake.MalformedError) as e:
            if self._is_accepted:
                raise process_spec.StartError(
                    f"process 0, to which process {self._own.index} was connected, has ended or can no longer be "
                    "reached: see its output."
                ) from e
            raise _RefusedError(
                "either it has ended (see its output), or another program uses that port."
            ) from e
        finally:
            # Process 0 does not need data that is still unsent, so the connection is
            # closed without waiting.
            self._writer.transport.abort()

    async def _exchange_or_stop(self, seconds: float) -> list[str]:
        """Returns the host names; raises StoppedError if a signal comes first."""
        loop = asyncio.get_running_loop()
        talk = asyncio.create_task(self._exchange())
        loop.add_reader(self._signal_receiver.fileno(), self._on_signal, talk)
        try:
            async with asyncio.timeout(seconds):
                return await talk
        except asyncio.CancelledError:
            if self._signal is None:
                raise
            raise await self._announce_stop(self._signal) from None
        finally:
            loop.remove_reader(self._signal_receiver.fileno())

    def _on_signal(self, talk: asyncio.Task[list[str]]) -> None:
        """Ends the talk if a signal has come. If the talk is over already, the signal
        is left for the run to read.
        """
        if talk.done():
            return
        for number in self._signal_receiver.read():
            self._signal = number
            # This wakes `_exchange_or_stop`, which tells process 0.
            talk.cancel()

    async def _exchange(self) -> list[str]:
        own_nonce = handshake.nonce()
        self._writer.write(handshake.nonce_line(own_nonce))
        its_nonce = handshake.read_nonce(await self._line())
        self._seals = handshake.Seals(
            self._token, handshake.CLIENT, f"{own_nonce} {its_nonce}"
        )
        sealed = await self._line()
        try:
            self._seals.read(sealed)
        except handshake.MalformedError as e:
            raise _RefusedError(
                f"it has a different launch token ({handshake.TOKEN_VARIABLE}). Start all processes by one launch, or all "
                "by hand; if you did, another run uses that port."
            ) from e
        # Process 0 has shown the token, so it may see this process's config. The empty
        # line shows it the token in turn.
        self._writer.write(self._seals.line({}) + self._hello())
        self._is_introduced = True
        return self._take(await self._answer())

    async def _answer(self) -> dict[str, Any]:
        """Returns the message with which process 0 ends the meeting, after the one that
        accepts this process.
        """
        answer = self._seals.read(await self._line())
        if answer.get("welcome") is True:
            self._is_accepted = True
            answer = self._seals.read(await self._line())
        return answer

    def _hello(self) -> bytes:
        line = self._seals.line(dataclasses.asdict(self._own))
        if len(line) > handshake.MAX_LINE_BYTES:
            raise process_spec.StartError(
                f"process {self._own.index} has {len(self._own.facts)} facts to compare with process 0's, the "
                f"config's keys and a checksum of each source file: {len(line)} bytes, but at most "
                f"{handshake.MAX_LINE_BYTES} are allowed. Move the experiment into a smaller package."
            )
        return line

    async def _line(self) -> bytes:
        return await handshake.read_line(self._reader, handshake.MAX_LINE_BYTES)

    def _take(self, answer: Mapping[str, object]) -> list[str]:
        """Returns the host names of an answer; raises the stop or the error that it
        reports instead.
        """
        if "stopped" in answer:
            code = answer.get("code")
            if not isinstance(code, int) or code not in signals.CODES.values():
                raise handshake.MalformedError("code")
            raise process_spec.StoppedError(
                handshake.text(answer, "stopped", _LONGEST_TEXT), code
            )
        if "error" in answer:
            raise process_spec.StartError(
                handshake.text(answer, "error", _LONGEST_TEXT)
            )
        hosts = answer.get("hosts")
        if not isinstance(hosts, list) or len(hosts) != self._own.count:
            raise handshake.MalformedError("hosts")
        return [handshake.text({"host": host}, "host") for host in hosts]

    async def _announce_stop(self, number: signal.Signals) -> process_spec.StoppedError:
        """Asks process 0 to stop all processes, if it knows this one; returns the error
        to raise.

        The error is the one that process 0 answers with, or this process's own if no
        answer comes.
        """
        own = process_spec.stopped(self._own.name, number)
        # Process 0 has not heard of this process yet, and reports it as missing if it
        # does not come again. Once it has, it may have accepted this process although
        # that is not read here, and it would wait for all the others.
        if not self._is_introduced:
            return own
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                self._writer.write(self._seals.line({"leaving": number.name}))
                self._take(await self._answer())
        except process_spec.StoppedError as e:
            return e
        except (
            OSError,
            handshake.DisconnectedError,
            handshake.MalformedError,
            process_spec.StartError,
        ):
            return own
        return own
