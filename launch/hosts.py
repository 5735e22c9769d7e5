"""Processes of a run on several hosts, started by a program that a command of the user
runs there, such as srun or mpirun.

    python -m launch.hosts ADDRESS...

This *agent* connects to the launcher, starts one process at a time as it is told to,
and says how it has ended. The command starts as many agents as there may be processes.

A process that cannot be reached may go on. So agents and processes hold leases: they
end unless the launcher answers them. The launcher takes a process for ended if it
knows that it is, or once the leases of both are over.
"""

import contextlib
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

import msgspec

from launch import engine, meeting, processes
from xshard import cli
from xshard.files import jsonfile
from xshard.pod import generations, links, rendezvous, signals

# The program that the user's command runs.
COMMAND = (sys.executable, "-m", "launch.hosts")
# How much longer than a lease the launcher waits: for kills, and for slow threads.
_MARGIN_SECONDS = 2.0
_ALIVE_SECONDS = 1.0
_RETRY_SECONDS = 0.1
# In this time a signal comes to all agents.
_ONE_SIGNAL_SECONDS = 1.0
# How long the command may take to end after the agents were told to.
_END_SECONDS = 15.0


class Alive(generations.Tagged):
    """An agent sends this now and then, and has it back.

    Attributes:
      time: the agent's time, in seconds of any origin.
    """

    time: float


class Start(generations.Tagged):
    """An agent is to start a process.

    Attributes:
      number: the number of the process.
      command: its program and arguments.
      lease_seconds: how long it may go on without an answer of the launcher.
    """

    number: int
    command: list[str]
    lease_seconds: float


class Signal(generations.Tagged):
    """An agent is to send a signal to its process."""

    number: int
    signal: int


class Ended(generations.Tagged):
    """A process of an agent has ended.

    Attributes:
      number: the number of the process.
      code: its exit code, negative if a signal ended it.
      error: the last line in which it reported an error.
    """

    number: int
    code: int
    error: str


class Told(generations.Tagged):
    """An agent was told to stop."""

    signal: int


class End(generations.Tagged):
    """An agent is to end."""


_Message = Alive | Start | Signal | Ended | Told | End


class Process:
    """A process on another host, as `processes.Process`.

    Attributes:
      error: the last line in which it reported an error.
    """

    def __init__(self, number: int, command: Sequence[str], send: Callable[..., None]):
        self.number = number
        self.command = command
        self.error = ""
        # The agent's number, once it has one.
        self.agent: int | None = None
        # Whether it was told to end at once.
        self.is_killed = False
        self._send = send
        self._code: int | None = None
        self._has_ended = threading.Event()

    def poll(self) -> int | None:
        """Returns its exit code, negative if a signal ended it; None while it runs."""
        return self._code

    def wait(self) -> int:
        """Waits for its end; returns the exit code."""
        self._has_ended.wait()
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        """Sends it a signal."""
        if self._code is None:
            self._send(self, number)

    def read_to_end(self) -> None:
        """Does nothing: its agent forwards its output."""

    def end(self, code: int, error: str = "") -> None:
        """Notes that it has ended."""
        if self._code is None:
            self.error = error
            self._code = code
            self._has_ended.set()


class Hosts:
    """The launcher's connections to its agents."""

    def __init__(
        self,
        starter: Sequence[str],
        count: int,
        token: str,
        lease_seconds: float,
        told: Callable[[int], None],
        answered: Callable[[int], float],
        out: IO[str],
    ):
        """Runs the command that starts the agents.

        Args:
          starter: the command.
          count: how many agents it starts.
          token: the token of the launch.
          lease_seconds: how long a process may go on without an answer.
          told: called with a signal by which an agent was told to stop.
          answered: returns when a process was last answered, in the seconds of
            `time.monotonic`.
          out: the stream for the output of the command.
        """
        self._count = count
        self._lease_seconds = lease_seconds
        self._told = told
        self._answered = answered
        self._links: dict[int, links.Link] = {}
        self._heard: dict[int, float] = {}
        self._names: dict[int, str] = {}
        # By the signal that agents have received, when it was passed on, and which of
        # them have told of it.
        self._tolds: dict[int, tuple[float, set[int]]] = {}
        # The loop's thread changes what follows, and the links; others read them.
        self._lock = threading.Lock()
        self._processes: list[Process] = []
        self._waiting: list[Process] = []
        # Why no process can be started any more; empty if one can.
        self._failure = ""
        listener = links.open_listener("")
        port = listener.getsockname()[1]
        self._loop = links.Loop(self._receive, self._lost, self._tick, self._fail)
        self._loop.listen(
            listener,
            token.encode(errors="surrogateescape"),
            lambda _: "",
            self._accepted,
            lease_seconds,
        )
        self._loop.start()
        addresses = [f"{_bracketed(host)}:{port}" for host in own_hosts()]
        command = [*starter, *COMMAND, *addresses]
        self._starter = processes.Process(command, token, out, keeps_children=True)
        threading.Thread(target=self._watch_starter, daemon=True).start()

    # In the launcher's thread.

    def start(self, number: int, command: Sequence[str]) -> Process:
        """Starts a process through an agent that has none, or the next that comes.

        Raises:
          OSError: if all agents have come and none is free.
        """
        process = Process(number, command, self._signal)
        with self._lock:
            if self._failure:
                raise OSError(0, self._failure)
            if len(self._names) >= self._count and not self._free():
                raise OSError(0, "no host is free")
            self._processes.append(process)
            self._waiting.append(process)
        self._loop.call(self._assign)
        return process

    def close(self) -> None:
        """Ends the agents, and the command that started them."""

        def end() -> None:
            for link in self._links.values():
                self._loop.send(link, msgspec.to_builtins(End()))

        self._loop.call(end)
        deadline = time.monotonic() + _END_SECONDS
        while self._starter.poll() is None and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS)
        self._starter.send_signal(signal.SIGKILL)
        self._starter.wait()
        self._starter.read_to_end()
        self._loop.end()

    # In the loop's thread.

    def _accepted(self, hello: links.Hello, sock: socket.socket) -> None:
        with self._lock:
            self._links[hello.number] = self._loop.add(hello.number, sock)
            self._heard[hello.number] = time.monotonic()
            self._names[hello.number] = hello.host
        self._assign()

    def _free(self) -> list[int]:
        """Returns the agents that have no process, those on idle hosts first."""
        used = [each.agent for each in self._processes if each.poll() is None]
        busy = [self._names[agent] for agent in used if agent in self._names]
        free = [agent for agent in self._links if agent not in used]
        return sorted(free, key=lambda agent: busy.count(self._names[agent]))

    def _assign(self) -> None:
        with self._lock:
            while self._waiting and (free := self._free()):
                process = self._waiting.pop(0)
                if process.poll() is None:
                    process.agent = free[0]
                    self._send(
                        free[0],
                        Start(
                            process.number, list(process.command), self._lease_seconds
                        ),
                    )

    def _send(self, agent: int, message: Any) -> None:
        if agent in self._links:
            self._loop.send(self._links[agent], msgspec.to_builtins(message))

    def _signal(self, process: Process, number: int) -> None:
        def send() -> None:
            if process.agent is None:
                # It was not started.
                process.end(-number)
                return
            if number == signal.SIGKILL:
                process.is_killed = True
            self._send(process.agent, Signal(process.number, number))

        self._loop.call(send)

    def _receive(self, link: links.Link, header: dict[str, Any], arrays: Any) -> None:
        del arrays
        message = jsonfile.parse(header, _Message)
        if self._links.get(link.number) is not link:
            return
        self._heard[link.number] = time.monotonic()
        match message:
            case Alive():
                self._loop.send(link, msgspec.to_builtins(message))
            case Told():
                self._hear(link.number, message.signal)
            case Ended():
                for process in self._processes:
                    if process.number == message.number:
                        process.end(message.code, message.error)
                self._assign()

    def _hear(self, agent: int, number: int) -> None:
        """Passes a signal on that an agent has received. One that comes to all agents
        is one signal, and another one if it comes again.
        """
        now = time.monotonic()
        last, agents = self._tolds.get(number, (0.0, set()))
        if now < last + _ONE_SIGNAL_SECONDS and agent not in agents:
            agents.add(agent)
            return
        self._tolds[number] = (now, {agent})
        self._told(number)

    def _lost(self, link: links.Link) -> None:
        with self._lock:
            if self._links.get(link.number) is link:
                del self._links[link.number]

    def _tick(self) -> None:
        """Takes processes for ended that were killed, or whose agents are lost, and
        whose leases are over.
        """
        now = time.monotonic()
        for process in self._processes:
            if process.agent is None or process.poll() is not None:
                continue
            seconds = self._lease_seconds + _MARGIN_SECONDS
            if not process.is_killed:
                if process.agent in self._links:
                    continue
                # The meeting kills it earlier, unless the run has ended.
                seconds += self._lease_seconds
            last = max(self._heard[process.agent], self._answered(process.number))
            if now > last + seconds:
                process.end(-signal.SIGKILL)

    def _fail(self, why: str) -> None:
        with self._lock:
            self._failure = why
        for process in self._processes:
            process.end(1, f"error: {why}")

    def _watch_starter(self) -> None:
        """Ends what has no agent when the command ends."""
        code = engine.shell_code(self._starter.wait())
        why = f"the command that starts processes ended with exit code {code}"

        def end() -> None:
            with self._lock:
                self._failure = why
            for process in self._processes:
                if process.agent is None:
                    process.end(1, f"error: {why}")

        self._loop.call(end)


def own_hosts() -> list[str]:
    """Returns by which names and numbers other hosts may reach this one."""
    name = socket.gethostname()
    hosts = []
    for *_, place in rendezvous.resolved(name):
        hosts.append(str(place[0]))
    # Without that program, the numbers of this host's name must do.
    with contextlib.suppress(OSError):
        listed = subprocess.run(
            ["hostname", "-I"], capture_output=True, text=True, check=False
        )
        hosts += listed.stdout.split()
    # Loopback comes last, for agents on this host.
    hosts.sort(key=lambda host: host.startswith("127.") or host == "::1")
    return list(dict.fromkeys([*hosts, name, "127.0.0.1"]))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Agent:
    """Starts processes as the launcher tells it."""

    def __init__(self, addresses: Sequence[str], token: str):
        self._token = token
        self._process: processes.Process | None = None
        self._number = -1
        self._lease_seconds = float("inf")
        self._answered = time.monotonic()
        self._next_alive = 0.0
        # Whether the connection to the launcher has ended.
        self._is_lost = False
        self._ended = threading.Event()
        self.code = 0
        hello = links.Hello(
            secrets.randbelow(1 << 31), socket.gethostname(), os.getpid(), {}
        )
        address, sock = _reach(addresses, token, hello)
        self._host = address.rpartition(":")[0]
        self._loop = links.Loop(self._receive, self._lost, self._tick, self._fail)
        self._link = self._loop.add(0, sock)
        self._loop.start()

    def run(self) -> int:
        """Waits until the launcher ends this program; returns the exit code."""
        self._ended.wait()
        self._loop.end()
        return self.code

    def tell(self, number: int) -> None:
        """Passes a signal on to the launcher, which tells all processes. A signal
        handler may call it.
        """

        def tell() -> None:
            if not self._is_lost:
                self._loop.send(self._link, msgspec.to_builtins(Told(number)))
            elif self._process is not None:
                self._process.send_signal(number)

        self._loop.call(tell)

    def _receive(self, link: links.Link, header: dict[str, Any], arrays: Any) -> None:
        del link, arrays
        message = jsonfile.parse(header, _Message)
        match message:
            case Alive():
                self._answered = message.time
            case Start():
                self._start(message)
            case Signal():
                if self._process is not None and message.number == self._number:
                    self._process.send_signal(message.signal)
            case End():
                self._kill()
                self._ended.set()

    def _start(self, message: Start) -> None:
        command = [word.replace(meeting.HOST, self._host) for word in message.command]
        self._number = message.number
        self._lease_seconds = message.lease_seconds
        try:
            # Not TERM, at which the whole run would save and stop.
            process = processes.Process(
                command, self._token, sys.stdout, f"[{message.number}] ", "KILL"
            )
        except (OSError, engine.LaunchError) as e:
            ended = Ended(message.number, 1, f"error: {e}")
            self._loop.send(self._link, msgspec.to_builtins(ended))
            return
        self._process = process

        def watch() -> None:
            code = process.wait()
            process.read_to_end()
            ended = Ended(message.number, code, process.error)
            self._loop.call(
                lambda: self._loop.send(self._link, msgspec.to_builtins(ended))
            )

        threading.Thread(target=watch, daemon=True).start()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    def _lost(self, link: links.Link) -> None:
        self._is_lost = True
        if link.is_ended_by_peer and self._process is not None:
            # The launcher has ended: the run saves and stops, within the lease.
            self._process.send_signal(signal.SIGTERM)
            threading.Thread(target=self._wait_and_end, daemon=True).start()
            return
        self._give_up("has lost its connection to the launcher")

    def _wait_and_end(self) -> None:
        assert self._process is not None
        self._process.wait()
        self._process.read_to_end()
        self._ended.set()

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_alive and not self._is_lost:
            self._next_alive = now + _ALIVE_SECONDS
            self._loop.send(self._link, msgspec.to_builtins(Alive(now)))
        if now > self._answered + self._lease_seconds:
            self._give_up(
                f"has had no answer of the launcher for {self._lease_seconds:g} s"
            )

    def _fail(self, why: str) -> None:
        self._give_up(why)

    def _give_up(self, why: str) -> None:
        """Ends the process, which the launcher takes for ended soon."""
        self._kill()
        print(f"launch: {socket.gethostname()} {why}", file=sys.stderr, flush=True)
        self.code = 1
        self._ended.set()


def _reach(
    addresses: Sequence[str], token: str, hello: links.Hello
) -> tuple[str, socket.socket]:
    """Returns the first address at which the launcher answers, and the connection."""
    deadline = time.monotonic() + rendezvous.Timeouts().start
    key = token.encode(errors="surrogateescape")
    errors = {}
    for address in itertools.cycle(addresses):
        try:
            return address, links.connect(address, key, hello, links.ANSWER_SECONDS)
        except (OSError, links.RefusedError) as e:
            errors[address] = str(e)
        if time.monotonic() > deadline:
            break
        time.sleep(_RETRY_SECONDS)
    listed = "; ".join(f"{address}: {why}" for address, why in errors.items())
    raise engine.LaunchError(
        f"{hello.host} cannot reach the launcher ({listed}). Has it ended?"
    )


def main(argv: Sequence[str]) -> int:
    """Runs an agent to its end; returns the exit code."""
    token = os.environ.pop(rendezvous.TOKEN_VARIABLE, "")
    agent = _Agent(argv[1:], token)
    for number in signals.stop_signals():
        signal.signal(number, lambda received, _: agent.tell(received))
    return agent.run()


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv)))
