"""The meeting of a run's processes before JAX connects them.

If a peer does not come, JAX's own start ends a process from C++, whatever the reason.
So the processes meet first, at the address of JAX's future coordinator. Each of the
others connects to process 0, which compares what must be equal, and answers all of them
once all have come. Whatever does not fit is reported by name on every process that has
connected.

A connection begins with the challenges of `multiprocessing.connection`, in which each
side proves that it knows the token of the launch. After them come two messages: the
hello of a process, and the answer of process 0. A process on which a signal arrives in
between sends a third one. Messages are JSON of bounded size. They are never pickled,
because unpickling runs what the sender wants.
"""

import contextlib
import errno
import hashlib
import ipaddress
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import connection as mp_connection
from typing import Annotated, Any, NamedTuple

import msgspec

from xshard import errors
from xshard.base import formatting
from xshard.files import jsonfile
from xshard.pod import links, signals

# The environment variable in which the launcher passes the token to the processes of a
# launch.
TOKEN_VARIABLE = "XSHARD_LAUNCH_TOKEN"
# How long a process may take to show the token and send its hello, and how long all may
# take to read the answer of process 0. A process that has just started on a busy host
# needs some seconds; but it is also how long a stranger that says nothing keeps process
# 0 from the next in line.
_ANSWER_SECONDS = 10.0
# How long process 0 waits for the right process after a wrong one has connected; and
# how long another process tries again if something else than process 0 answers. The
# port may belong to an earlier run that is about to end.
_PATIENCE_SECONDS = 10.0
# After how long process 0 says for whom it waits.
_TELL_SECONDS = 10.0
_RETRY_SECONDS = 0.2
_MAX_NAME_CHARACTERS = 255
# At most this many differences are listed, because different code may differ in many
# files.
_MAX_SHOWN = 5
_MAX_SHOWN_CHARACTERS = 300


class Timeouts(NamedTuple):
    """The times that processes wait for one another, in seconds.

    Attributes:
      start: the time until all processes have connected.
      heartbeat: the time after which a silent process is treated as lost; a run
        survives a shorter outage.
      shutdown: the time until all processes have reached the end of the run.
      step: the time without progress in training or evaluation after which a process
        ends the run; 0 for no limit.
    """

    start: int = 300
    heartbeat: int = 30
    shutdown: int = 60
    step: int = 0


class StartError(errors.UserError):
    """The processes cannot start together. The message names the process at fault, and
    what to do.
    """


class MismatchError(StartError):
    """A process that connected does not fit the others. The message names all
    differences, with values.

    Attributes:
      without_values: the message without any value of a config.
    """

    def __init__(self, message: str, without_values: str = ""):
        super().__init__(message)
        self.without_values = without_values or message


class StoppedError(Exception):
    """A process received a signal, which stops all of them. The message names the
    signal and the process.

    Attributes:
      signal: the signal.
      code: the exit code.
    """

    def __init__(self, message: str, number: signal.Signals):
        super().__init__(message)
        self.signal = number
        self.code = signals.CODES[number]


class ProcessSpec(NamedTuple):
    """The place of a process in its run.

    Attributes:
      address: the host and port of process 0.
      num_processes: the number of processes.
      process_id: this process's index, from 0.
      local_device_ids: the indices of the host's devices that this process uses; None
        for all.
    """

    address: str
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None = None


def meet(
    spec: ProcessSpec,
    seconds: float,
    facts: Mapping[str, str],
    token: str,
    signal_receiver: signals.SignalReceiver,
) -> list[str]:
    """Meets the other processes.

    Args:
      spec: this process's place.
      seconds: how long to wait until all processes have connected.
      facts: names and texts that must be equal on all processes, such as the config.
      token: the token of the launch, which all of its processes have; empty if they
        were started by hand.
      signal_receiver: the signals; any of them ends the meeting for all processes.

    Returns:
      The host name of each process.

    Raises:
      StartError: on all processes that connected, if one does not connect in time or
        does not fit.
      StoppedError: on all processes that connected, if one of them receives a signal.
    """
    hello = _Hello(
        process_id=spec.process_id,
        num_processes=spec.num_processes,
        host=socket.gethostname(),
        pid=os.getpid(),
        facts=dict(facts),
    )
    key = token.encode(errors="surrogateescape")
    if spec.process_id == 0:
        return _Server(spec, hello, key, signal_receiver).run(seconds)
    return _Client(spec, hello, key, signal_receiver).run(seconds)


# The messages, and the connections that carry them.


_Name = Annotated[str, msgspec.Meta(max_length=_MAX_NAME_CHARACTERS)]


def _check_printable(*texts: str) -> None:
    """Raises ValueError if a text that is printed later has other characters.

    Without a token anybody may have sent it, with what a terminal would obey.
    """
    for text in texts:
        if not text.isprintable():
            raise ValueError(f"{text!r} is not printable")


class _Hello(msgspec.Struct, frozen=True):
    """The description that a process sends of itself.

    Attributes:
      process_id: the process's index.
      num_processes: the number of processes that it was started with.
      host: the name of its host.
      pid: its process ID on that host.
      facts: names and values that must be equal on all processes.
    """

    process_id: int
    num_processes: int
    host: _Name
    pid: int
    facts: dict[str, str]

    def __post_init__(self) -> None:
        _check_printable(self.host)

    @property
    def name(self) -> str:
        """The process, as messages name it."""
        return f"process {self.process_id} on {self.host}"


class _Leaving(msgspec.Struct, frozen=True):
    """The message of a process on which a signal arrives while it waits.

    Attributes:
      signal: the signal's name.
    """

    signal: str


class _Answer(msgspec.Struct, frozen=True):
    """The answer of process 0, which has one of three forms.

    Attributes:
      hosts: the host name of each process, if the run can start.
      error: the message of the StartError that ends the meeting.
      stopped: the message of the StoppedError that ends the meeting.
      signal: the name of that error's signal.
    """

    hosts: tuple[_Name, ...] = ()
    error: str = ""
    stopped: str = ""
    signal: str = ""

    def __post_init__(self) -> None:
        _check_printable(*self.hosts, self.error, self.stopped)


# Process 0.


class _Guest(NamedTuple):
    """A process that has been accepted."""

    hello: _Hello
    connection: links.Connection


class _Server:
    """Process 0's part in the meeting.

    It serves one connection after another, each for some seconds at most. One that does
    not show the token, or breaks the protocol, is dropped, and does not end the
    meeting.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        hello: _Hello,
        key: bytes,
        signal_receiver: signals.SignalReceiver,
    ):
        self._spec = spec
        self._hello = hello
        self._key = key
        self._signal_receiver = signal_receiver
        self._guests: dict[int, _Guest] = {}
        self._deadline = 0.0
        # The error of the first process that does not fit, which ends the meeting if
        # the right one does not come soon.
        self._mismatch: MismatchError | None = None
        self._num_rejected = 0
        self._last_rejected = ""
        self._num_broken = 0
        self._last_broken = ""
        self._last_gone = ""

    def run(self, seconds: float) -> list[str]:
        """Meets the other processes, as `meet` does."""
        self._deadline = time.monotonic() + seconds
        try:
            # When this returns, JAX's coordinator can listen at the port.
            with _listen(self._spec) as listener:
                self._wait_for_all(listener)
        except StoppedError as e:
            self._answer(_Answer(stopped=str(e), signal=e.signal.name))
            raise
        except StartError as e:
            self._answer(_Answer(error=self._text_for_others(e)))
            raise
        hosts = [self._hello.host]
        for index in sorted(self._guests):
            hosts.append(self._guests[index].hello.host)
        self._answer(_Answer(hosts=tuple(hosts)))
        return hosts

    def _wait_for_all(self, listener: socket.socket) -> None:
        """Accepts connections until every process has come."""
        tells_at = time.monotonic() + _TELL_SECONDS
        while True:
            guests = list(self._guests.values())
            sources: list[Any] = [self._signal_receiver]
            sources += [guest.connection for guest in guests]
            if len(guests) == self._spec.num_processes - 1:
                # A last look, since one of them may have left meanwhile.
                ready = mp_connection.wait(sources, 0)
                if not ready:
                    return
            else:
                now = time.monotonic()
                if now >= self._deadline:
                    raise self._mismatch or StartError(self._missing_message())
                if now >= tells_at:
                    tells_at = float("inf")
                    self._tell_missing(self._deadline - now)
                until = min(self._deadline, tells_at)
                ready = mp_connection.wait([*sources, listener], until - now)
            for number in self._signal_receiver.read():
                raise stopped(self._hello.name, number)
            # The accepted ones come first: one that has left frees its index for the
            # process that replaces it.
            for guest in guests:
                if guest.connection in ready:
                    self._hear(guest)
            if listener in ready:
                self._accept(listener)

    def _hear(self, guest: _Guest) -> None:
        """Reads what an accepted process says: a signal stops it, or it has left.

        Raises:
          StoppedError: if a signal stops it.
        """
        try:
            with links.time_limit(_ANSWER_SECONDS, guest.connection):
                leaving = jsonfile.parse(guest.connection.recv(), _Leaving)
            number = _stop_signal(leaving.signal)
        except links.BROKEN:
            guest.connection.close()
            del self._guests[guest.hello.process_id]
            self._last_gone = f"{guest.hello.name} (pid {guest.hello.pid})"
            return
        raise stopped(guest.hello.name, number)

    def _accept(self, listener: socket.socket) -> None:
        """Accepts a connection, and the process that it comes from if that fits."""
        try:
            sock, address = listener.accept()
        except OSError:
            # The peer has left already, or the system allows no further connection now.
            time.sleep(_RETRY_SECONDS)
            return
        connection = links.Connection(sock)
        hello = self._identify(connection, str(address[0]))
        if hello is None:
            connection.close()
            return
        present = self._guests.get(hello.process_id)
        mismatch = _mismatch(self._hello, hello, present)
        if mismatch is None:
            # The facts have been compared, and may be large.
            known = msgspec.structs.replace(hello, facts={})
            self._guests[hello.process_id] = _Guest(known, connection)
            return
        with connection, contextlib.suppress(OSError):
            connection.send(_Answer(error=self._text_for_others(mismatch)))
        if self._mismatch is None:
            self._mismatch = mismatch
            patient_until = time.monotonic() + _PATIENCE_SECONDS
            self._deadline = min(self._deadline, patient_until)

    def _identify(self, connection: links.Connection, peer: str) -> _Hello | None:
        """Returns the hello of a process of this launch; None for anybody else."""
        remaining = max(0.0, self._deadline - time.monotonic())
        try:
            with links.time_limit(min(_ANSWER_SECONDS, remaining), connection):
                mp_connection.deliver_challenge(connection, self._key)
                mp_connection.answer_challenge(connection, self._key)
                hello = jsonfile.parse(connection.recv(), _Hello)
        except multiprocessing.AuthenticationError:
            self._num_rejected += 1
            self._last_rejected = peer
            return None
        except links.BROKEN:
            self._num_broken += 1
            self._last_broken = peer
            return None
        if not 0 < hello.process_id < hello.num_processes:
            return None
        return hello

    def _text_for_others(self, e: StartError) -> str:
        """Returns the message that the others receive: with values of a config only if
        they have shown a token.
        """
        if isinstance(e, MismatchError) and not self._key:
            return e.without_values
        return str(e)

    def _answer(self, answer: _Answer) -> None:
        """Sends the answer to all that were accepted, and closes their connections."""
        connections = [guest.connection for guest in self._guests.values()]
        with links.time_limit(_ANSWER_SECONDS, *connections):
            for connection in connections:
                with connection, contextlib.suppress(OSError):
                    connection.send(answer)

    def _tell_missing(self, seconds: float) -> None:
        """Prints which processes are awaited, and for how long still."""
        print(
            f"waiting {seconds:.0f} s more for process {', '.join(self._missing())} of "
            f"{self._spec.num_processes} to connect to {self._spec.address}; a run of "
            "one process needs --num_processes=1",
            file=sys.stderr,
            flush=True,
        )

    def _missing(self) -> list[str]:
        count = self._spec.num_processes
        return [str(i) for i in range(1, count) if i not in self._guests]

    def _missing_message(self) -> str:
        count = self._spec.num_processes
        missing = self._missing()
        their = "their"
        if len(missing) == 1:
            their = "its"
        text = (
            f"process {', '.join(missing)} of {count} did not connect to "
            f"{self._spec.address} within the start timeout. See {their} output, and "
            f"check that --num_processes={count} is right."
        )
        if self._last_gone:
            text += (
                f" {self._last_gone} connected, but left before the others connected."
            )
        if self._num_rejected:
            text += (
                f" {self._num_rejected} that connected, the last from "
                f"{self._last_rejected}, did not have this launch's token "
                f"({TOKEN_VARIABLE}): start all processes by one launch."
            )
        if self._num_broken:
            text += (
                f" {self._num_broken} that connected, the last from "
                f"{self._last_broken}, said nothing that a process of a launch says; "
                f"each may have taken {_ANSWER_SECONDS:g} s of the time."
            )
        return text


# The other processes.


class _RefusedError(Exception):
    """An answer by something that is not process 0 of this run, or not yet. The message
    describes it.
    """


class _Client:
    """The part that each process other than 0 plays in the meeting."""

    def __init__(
        self,
        spec: ProcessSpec,
        hello: _Hello,
        key: bytes,
        signal_receiver: signals.SignalReceiver,
    ):
        self._spec = spec
        self._hello = hello
        self._key = key
        self._signal_receiver = signal_receiver

    def run(self, seconds: float) -> list[str]:
        """Meets the other processes, as `meet` does."""
        deadline = time.monotonic() + seconds
        patient_until = float("inf")
        while True:
            try:
                with self._connect(deadline) as connection:
                    self._introduce(connection, seconds)
                    return self._await_answer(connection, seconds)
            except _RefusedError as e:
                refusal = str(e)
            now = time.monotonic()
            # The time for retries starts with the first refusal.
            patient_until = min(patient_until, now + _PATIENCE_SECONDS)
            if now >= min(patient_until, deadline):
                raise StartError(
                    f"{self._spec.address} accepted the connection of process "
                    f"{self._spec.process_id}, but did not answer as process 0 of this "
                    f"run: {refusal}"
                )
            self._pause()

    def _connect(self, deadline: float) -> links.Connection:
        """Connects to process 0 as soon as it listens."""
        host, _, port = self._spec.address.rpartition(":")
        place = (host.strip("[]"), int(port))
        while True:
            try:
                return links.Connection(
                    socket.create_connection(place, _ANSWER_SECONDS)
                )
            except (OSError, UnicodeError) as e:
                if time.monotonic() >= deadline:
                    reason = getattr(e, "strerror", None) or e
                    raise StartError(
                        f"{self._hello.name} cannot reach process 0 at "
                        f"{self._spec.address} ({reason}): check "
                        "--coordinator_address, the network between the hosts, and "
                        "whether process 0 has started."
                    ) from e
            self._pause()

    def _pause(self) -> None:
        """Waits before the next try."""
        with contextlib.suppress(TimeoutError):
            self._wait(None, _RETRY_SECONDS)

    def _wait(self, connection: links.Connection | None, seconds: float) -> None:
        """Waits for data on a connection.

        Raises:
          StoppedError: if a signal comes first.
          TimeoutError: if nothing comes in time.
        """
        deadline = time.monotonic() + seconds
        sources: list[Any] = [self._signal_receiver]
        if connection is not None:
            sources.append(connection)
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            ready = mp_connection.wait(sources, remaining)
            if not ready:
                raise TimeoutError
            # If the data is here already, a signal is left for the run to read.
            if connection in ready:
                return
            for number in self._signal_receiver.read():
                raise stopped(self._hello.name, number)

    def _introduce(self, connection: links.Connection, seconds: float) -> None:
        """Sends this process's hello, once process 0 has shown that it knows the token.

        Raises:
          _RefusedError: if it does not; another try may succeed.
          StoppedError: if a signal comes before process 0 says anything.
        """
        try:
            # Another program may accept the connection and then say nothing.
            self._wait(connection, seconds + _ANSWER_SECONDS)
            with links.time_limit(_ANSWER_SECONDS, connection):
                mp_connection.answer_challenge(connection, self._key)
                mp_connection.deliver_challenge(connection, self._key)
                connection.send(self._hello)
        except multiprocessing.AuthenticationError as e:
            raise _RefusedError(
                f"it has a different launch token ({TOKEN_VARIABLE}). Start all "
                "processes by one launch, or all by hand; if you did, another run uses "
                "that port."
            ) from e
        except links.BROKEN as e:
            raise _RefusedError(
                "either it has ended (see its output), or another program uses that "
                "port."
            ) from e

    def _await_answer(self, connection: links.Connection, seconds: float) -> list[str]:
        """Returns the host names that process 0 sends when all have come.

        Raises:
          StartError: if process 0 reports one, or is gone.
          StoppedError: if process 0 reports one; or if this process receives a signal,
            which process 0 then reports to all.
        """
        stop = None
        try:
            try:
                # Process 0 ends the meeting at its own deadline, and it may have
                # started to wait only now.
                self._wait(connection, seconds + _ANSWER_SECONDS)
            except StoppedError as e:
                stop = e
                connection.send(_Leaving(e.signal.name))
            with links.time_limit(_ANSWER_SECONDS, connection):
                answer = jsonfile.parse(connection.recv(), _Answer)
            if answer.stopped:
                # Of several signals, this is the one that process 0 heard of first.
                stop = StoppedError(answer.stopped, _stop_signal(answer.signal))
            elif not answer.error and len(answer.hosts) != self._spec.num_processes:
                raise ValueError(f"{len(answer.hosts)} hosts")
        except links.BROKEN as e:
            if stop is None:
                raise StartError(
                    f"process 0, to which process {self._spec.process_id} was "
                    "connected, has ended or can no longer be reached: see its output."
                ) from e
        if stop is not None:
            raise stop
        if answer.error:
            raise StartError(answer.error)
        return list(answer.hosts)


# What does not fit.


def _mismatch(
    first: _Hello, other: _Hello, present: _Guest | None
) -> MismatchError | None:
    """Returns the error for a process that does not fit; None if it fits.

    Args:
      first: the hello of process 0.
      other: the hello of the process that connected.
      present: the accepted process with the same index; None if there is none.
    """
    if other.num_processes != first.num_processes:
        return MismatchError(
            f"{other.name} was started with --num_processes={other.num_processes}, "
            f"{first.name} with {first.num_processes}: start all with the same number."
        )
    if present is not None:
        return MismatchError(
            f"two processes have --process_id={other.process_id}: on "
            f"{present.hello.host} (pid {present.hello.pid}) and on {other.host} "
            f"(pid {other.pid}). Give each another number."
        )
    differing = differences(first.facts, other.facts, first.host)
    if not differing:
        return None
    begin = f"{other.name} has different code or a different config"
    end = "give all hosts the same code and config."
    return MismatchError(
        f"{begin} ({listed(differing.values())}): {end}",
        f"{begin} ({listed(differing)}): {end} {first.name} prints the values.",
    )


def differences(
    first: Mapping[str, str], other: Mapping[str, str], host: str
) -> dict[str, str]:
    """Returns each fact that is not the same on another process, by its name, as a text
    with both values.

    Args:
      first: the facts of the first process.
      other: the facts of the other one.
      host: the host of the first process.
    """
    differing = {}
    for fact in sorted(first.keys() | other.keys()):
        here = first.get(fact)
        there = other.get(fact)
        if here != there:
            name = _shown(fact)
            differing[name] = (
                f"{name}: {_shown(there or 'none')} there, {_shown(here or 'none')} on "
                f"{host}"
            )
    return differing


def listed(differing: Iterable[str]) -> str:
    """Returns some of what differs, as a message lists it."""
    return formatting.listed(list(differing), _MAX_SHOWN, "; ")


def _shown(text: str) -> str:
    """Returns a text that is safe to print on a terminal, whoever sent it: with
    escapes, and cut; a cut text ends with the checksum of the whole text.
    """
    shown = text
    if len(text) > _MAX_SHOWN_CHARACTERS:
        checksum = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
        shown = (
            f"{text[:_MAX_SHOWN_CHARACTERS]}... ({len(text)} characters, "
            f"SHA-256 {checksum[:16]}...)"
        )
    if shown.isprintable():
        return shown
    return shown.encode("unicode_escape").decode()


def stopped(who: str, number: signal.Signals) -> StoppedError:
    """Returns the error for a signal that a process received.

    Args:
      who: the process, as messages name it.
      number: the signal.
    """
    return StoppedError(
        f"{number.name} on {who}: stopped before the run began; nothing was trained.",
        number,
    )


def _stop_signal(name: str) -> signal.Signals:
    """Returns the signal with a name; raises ValueError if it stops no process."""
    for number in signals.CODES:
        if number.name == name:
            return number
    raise ValueError(f"{name} stops no process")


# Where process 0 listens.


def interface(address: str) -> str:
    """Returns the IP address at which process 0 listens for connections to HOST:PORT;
    empty for all addresses.

    Process 0 listens at all addresses in two cases. The host may not be an address of
    this machine: a Kubernetes service has its own. Or its name may resolve to loopback
    on this machine only: Debian gives a machine's own name 127.0.1.1, which other
    machines cannot use.
    """
    host = address.rpartition(":")[0]
    may_be_loopback = host.endswith("localhost") or is_number(host)
    for family, *_, local in resolved(host):
        ip = str(local[0])
        if ipaddress.ip_address(ip).is_loopback and not may_be_loopback:
            continue
        # Only an address of this machine can be bound, so the attempt shows whether it
        # is one.
        with contextlib.suppress(OSError), socket.socket(family) as trial:
            trial.bind(local)
            return ip
    return ""


def resolved(host: str, flags: int = 0) -> list[Any]:
    """Returns what the name of a host or a number resolves to, as `socket.getaddrinfo`
    does; empty if to nothing.
    """
    with contextlib.suppress(OSError, UnicodeError):
        return socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_STREAM, flags=flags
        )
    return []


def is_number(host: str, family: int | None = None) -> bool:
    """Returns whether a host is given by its number, of a family of addresses or of
    any.
    """
    found = resolved(host, socket.AI_NUMERICHOST)
    return bool(found) and family in (None, found[0][0])


def _listen(spec: ProcessSpec) -> socket.socket:
    """Returns the listening socket of process 0; raises StartError if it cannot be
    opened.
    """
    port = int(spec.address.rpartition(":")[2])
    ip = interface(spec.address)
    # To listen at all addresses means IPv4 and IPv6, if the system has both.
    is_both = not ip and socket.has_dualstack_ipv6()
    family = socket.AF_INET
    if is_both or ":" in ip:
        family = socket.AF_INET6
    try:
        listener = socket.create_server(
            (ip, port), family=family, dualstack_ipv6=is_both, backlog=1024
        )
    except OSError as e:
        why = f"({e.strerror})"
        if e.errno == errno.EADDRINUSE:
            why = "is taken by another program"
        raise StartError(
            f"process 0 on {socket.gethostname()} cannot listen for the others at "
            f"{spec.address}: port {port} {why}. Give another port to all processes, "
            "or end the other program."
        ) from e
    # A peer may leave between its arrival and `accept`, which would then wait.
    listener.setblocking(False)
    return listener
