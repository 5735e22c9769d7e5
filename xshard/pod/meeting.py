"""The meeting of a run's processes, at the address of process 0: the others come, and are told."""

import asyncio
import dataclasses
import os
import select
import signal
import socket
import time
from collections.abc import Mapping

from xshard.pod import handshake, places, reception, signals

# How long an answer may take beside what it waits for.
_ANSWER_SECONDS = 5.0
# How long what answers wrongly is tried again: it may be a run that has not quite ended.
_PATIENCE_SECONDS = 10.0
_RETRY_SECONDS = 0.2
_LONGEST_TEXT = 1 << 14


class _RefusedError(Exception):
    """An answer by something that is not process 0 of this run, or not now. The message says what it did."""


def meet(
    at: places.Place,
    seconds: float,
    facts: Mapping[str, str],
    token: str,
    heard: signals.Heard,
) -> list[str]:
    """Meets the other processes.

    Args:
      at: this process's place.
      seconds: until all have come.
      facts: what must be equal on all processes, such as the config; short texts.
      token: of the launch; empty if there is none.
      heard: the signals, of which one ends the meeting for all.

    Returns:
      The host name of each process.

    Raises:
      StartError: if some process does not come in time, or does not fit; on all processes that came.
      StoppedError: if a signal has come to one of them; on all processes that came.
    """
    host, short = socket.gethostname(), handshake.shortened(facts)
    own = handshake.Hello(at.index, at.count, host, os.getpid(), short)
    if at.index == 0:
        return asyncio.run(reception.Host(at, own, token, heard).attend(seconds))
    return _Guest(at, own, token, heard).attend(seconds)


class _Guest:
    """The part of the other processes in the meeting."""

    def __init__(self, at: places.Place, own: handshake.Hello, token: str, heard: signals.Heard):
        self._at = at
        self._own = own
        self._token = token
        self._heard = heard
        self._signal: signal.Signals | None = None
        self._is_welcome = False

    def attend(self, seconds: float) -> list[str]:
        """Goes to process 0 until it is taken in; the hosts that it is told."""
        deadline = time.monotonic() + seconds
        patient_until = float("inf")
        while True:
            with self._connect(deadline) as connection:
                try:
                    return asyncio.run(self._visit(connection, seconds))
                except _RefusedError as e:
                    refusal = str(e)
            now = time.monotonic()
            # The patience is from the first refusal on.
            patient_until = min(patient_until, now + _PATIENCE_SECONDS)
            if now >= min(patient_until, deadline):
                raise places.StartError(
                    f"{self._at.address} took the connection of process {self._at.index}, but did not answer "
                    f"as process 0 of this run does: {refusal}"
                )
            self._pause()

    def _connect(self, deadline: float) -> socket.socket:
        host, _, port = self._at.address.rpartition(":")
        while True:
            try:
                return socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS)
            except (OSError, UnicodeError) as e:
                if time.monotonic() >= deadline:
                    reason = getattr(e, "strerror", None) or e
                    raise places.StartError(
                        f"process {self._at.index} on {self._own.host} cannot reach process 0 at "
                        f"{self._at.address} ({reason}): check --coordinator_address, the network between "
                        "the hosts, and whether process 0 has started."
                    ) from e
            self._pause()

    def _pause(self) -> None:
        """Waits a moment; StoppedError if a signal comes."""
        select.select([self._heard], [], [], _RETRY_SECONDS)
        for number in self._heard.read():
            raise places.stopped(self._own.name, number)

    async def _visit(self, connection: socket.socket, seconds: float) -> list[str]:
        """The hosts that process 0 tells; _RefusedError where another try may do better."""
        places.keep_alive(connection)
        self._reader, self._writer = await asyncio.open_connection(
            sock=connection, limit=handshake.LONGEST
        )
        try:
            # Process 0 ends the meeting at its own deadline, which may have begun just now.
            return await self._talk_or_stop(seconds + _ANSWER_SECONDS)
        except (OSError, handshake.GoneError, handshake.MalformedError) as e:
            if self._is_welcome:
                raise places.StartError(
                    f"process 0, to which process {self._own.index} was connected, has ended or cannot be "
                    "reached any more: see what it printed."
                ) from e
            raise _RefusedError(
                "either it has ended (see what it printed), or that port is another program's."
            ) from e
        finally:
            # Whatever has not been sent by now is of no use to process 0.
            self._writer.transport.abort()

    async def _talk_or_stop(self, seconds: float) -> list[str]:
        """The hosts; StoppedError if a signal comes first."""
        loop = asyncio.get_running_loop()
        talk = asyncio.create_task(self._talk())
        loop.add_reader(self._heard.fileno(), self._hear_signals, talk)
        try:
            async with asyncio.timeout(seconds):
                return await talk
        except asyncio.CancelledError:
            if self._signal is None:
                raise
            raise await self._say_goodbye(self._signal) from None
        finally:
            loop.remove_reader(self._heard.fileno())

    def _hear_signals(self, talk: asyncio.Task[list[str]]) -> None:
        """Ends the talk if a signal has come; where it has ended already, the signal is the run's to read."""
        if talk.done():
            return
        for number in self._heard.read():
            self._signal = number
            # This wakes `_talk_or_stop`, which takes leave.
            talk.cancel()

    async def _talk(self) -> list[str]:
        own_nonce = handshake.nonce()
        self._writer.write(handshake.nonce_line(own_nonce))
        its_nonce = handshake.read_nonce(await self._line())
        self._seals = handshake.Seals(self._token, handshake.GUEST, f"{own_nonce} {its_nonce}")
        sealed = await self._line()
        try:
            self._seals.read(sealed)
        except handshake.MalformedError as e:
            raise _RefusedError(
                f"it has another token of a launch ({handshake.VARIABLE}). Start all processes by one launch, "
                "or all by hand; or that port is another run's."
            ) from e
        # From here on it is known to be of this launch, and may see a config. The empty line shows it the same.
        self._writer.write(self._seals.line({}) + self._hello())
        answer = self._seals.read(await self._line())
        if answer.get("welcome") is True:
            self._is_welcome = True
            answer = self._seals.read(await self._line())
        return self._take(answer)

    def _hello(self) -> bytes:
        line = self._seals.line(dataclasses.asdict(self._own))
        if len(line) > handshake.LONGEST:
            raise places.StartError(
                f"process {self._own.index} has {len(self._own.facts)} facts to compare with process 0's, the "
                f"config's keys and a checksum of each source file: {len(line)} bytes, and {handshake.LONGEST} "
                "are the most. Move the experiment into a smaller package."
            )
        return line

    async def _line(self) -> bytes:
        return await handshake.read_line(self._reader, handshake.LONGEST)

    def _take(self, answer: Mapping[str, object]) -> list[str]:
        """The hosts of an answer; raises what else it says."""
        if "stopped" in answer:
            code = answer.get("code")
            if not isinstance(code, int) or code not in signals.CODES.values():
                raise handshake.MalformedError("code")
            raise places.StoppedError(handshake.text(answer, "stopped", _LONGEST_TEXT), code)
        if "error" in answer:
            raise places.StartError(handshake.text(answer, "error", _LONGEST_TEXT))
        hosts = answer.get("hosts")
        if not isinstance(hosts, list) or len(hosts) != self._own.count:
            raise handshake.MalformedError("hosts")
        return [handshake.text({"host": host}, "host") for host in hosts]

    async def _say_goodbye(self, number: signal.Signals) -> places.StoppedError:
        """Has process 0 stop all, if it counts on this process; returns the end that it tells of, or else the own."""
        own = places.stopped(self._own.name, number)
        # Without a welcome process 0 waits for this process no longer than for any other.
        if not self._is_welcome:
            return own
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                self._writer.write(self._seals.line({"leaving": number.name}))
                self._take(self._seals.read(await self._line()))
        except places.StoppedError as e:
            return e
        except (OSError, handshake.GoneError, handshake.MalformedError, places.StartError):
            return own
        return own
