"""How the processes of a run find one another: before JAX connects them, so that what does not fit is said.

JAX's own start ends a process from C++ when a peer does not come, whatever the reason. So the processes meet
here first, at the address where JAX's coordinator will be: process 0 hears each one out, and tells all of them
who has come, or what is wrong.
"""

import contextlib
import dataclasses
import errno
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax._src import clusters

from xshard import errors

# How long a single connection may take; the meeting as a whole has its own limit.
_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = 0.2
# A message holds a config and a checksum of each file.
_LONGEST = 1 << 20
# What differs is listed up to here: other code differs in many files.
_SHOWN = 5


class StartError(errors.UserError):
    """The processes cannot begin together. The message says which one it is, and what to do."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process stands among those of its run.

    Attributes:
      address: host and port of process 0.
      count: the number of processes.
      index: this process's number, from 0.
      devices: the numbers of the host's devices that are this process's; None: all.
    """

    address: str
    count: int
    index: int
    devices: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """How long processes wait for one another, in seconds.

    Attributes:
      start: until all have come.
      heartbeat: until a process that is not heard of counts as lost. A shorter outage is survived.
      shutdown: until all have left.
    """

    start: int = 300
    heartbeat: int = 30
    shutdown: int = 60


def place(
    address: str | None, count: int | None, index: int | None, seconds: int = 300
) -> Place | None:
    """Where this process stands: as said, else as JAX detects it (Slurm, Open MPI, GKE, GCE).

    Args:
      address: host:port of process 0; all three are given, or none. A count of 1 may stand alone.
      count: the number of processes.
      index: this process's number.
      seconds: how long what JAX asks of a cloud may take.

    Returns:
      The place, or None for a run of one process.

    Raises:
      StartError: if what is said does not make sense, or JAX cannot find out.
    """
    if address is None and count == 1 and index in (None, 0):
        return None
    said = {"coordinator_address": address, "num_processes": count, "process_id": index}
    missing = [f"--{name}" for name, value in said.items() if value is None]
    if len(missing) == len(said):
        return _detect(seconds)
    if missing or address is None or count is None or index is None:
        raise StartError(
            f"{' and '.join(missing)} must be given too: --coordinator_address, --num_processes and "
            "--process_id go together, and without them what JAX detects decides."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise StartError(f"--coordinator_address={address} must be HOST:PORT, as in h0:8476.")
    if not 0 <= index < count:
        raise StartError(
            f"--process_id={index} must be from 0 to {count - 1}, one less than --num_processes={count}."
        )
    return None if count == 1 else Place(address, count, index)


def _detect(seconds: int) -> Place | None:
    try:
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(*(None,) * 5, seconds)
    except (RuntimeError, OSError) as e:
        raise StartError(
            f"JAX finds a cluster around this process, but not its place in it ({e}): give "
            "--coordinator_address, --num_processes and --process_id; --num_processes=1 for a run alone."
        ) from e
    address, count, index, devices = found
    if address is None or not count or count == 1 or index is None:
        return None
    return Place(address, count, index, devices)


def join(at: Place, timeouts: Timeouts, facts: Mapping[str, str]) -> list[str]:
    """Meets the other processes and connects JAX; before the first use of a device.

    Args:
      at: this process's place.
      timeouts: how long to wait.
      facts: what must be equal on all processes, such as the config; short texts.

    Returns:
      The host name of each process.

    Raises:
      StartError: if some process does not come in time, or does not fit; on all processes that came.
    """
    hosts = meet(at, timeouts.start, facts)
    # SIGTERM is xshard's own to handle: JAX would take it, and act only where its own function is polled.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        at.address,
        at.count,
        at.index,
        at.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=timeouts.start,
        # xshard notices first, and says who it is. This is for when it cannot. JAX counts seconds, and
        # xshard ticks, which pass slowly on a machine that has other work to do.
        heartbeat_timeout_seconds=10 * timeouts.heartbeat + 60,
        shutdown_timeout_seconds=timeouts.shutdown,
    )
    return hosts


def meet(at: Place, seconds: float, facts: Mapping[str, str]) -> list[str]:
    """Meets the other processes; as `join`, which connects JAX then."""
    hello = {
        "index": at.index,
        "count": at.count,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "facts": dict(facts),
    }
    attend = _gather if at.index == 0 else _visit
    return attend(at, hello, seconds)


def _gather(at: Place, hello: dict[str, Any], seconds: float) -> list[str]:
    """What process 0 does: it hears all, and answers all alike."""
    deadline = time.monotonic() + seconds
    came = {0: hello}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(at))
        guests: list[socket.socket] = []
        error = ""
        while len(came) < at.count and not error:
            try:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                guest = stack.enter_context(server.accept()[0])
                other = _read(guest, _ANSWER_SECONDS)
            except TimeoutError:
                error = "" if time.monotonic() < deadline else _who_is_missing(at, came)
                continue
            # Whoever else finds this port, such as a scanner, is not of this run.
            if other is None or not hello.keys() <= other.keys():
                guest.close()
                continue
            guests.append(guest)
            error = _mismatch(hello, other, came)
            came[other["index"]] = other
        # Before the answer: JAX's coordinator takes the port over.
        server.close()
        hosts = [came[i]["host"] for i in sorted(came)]
        for guest in guests:
            with contextlib.suppress(OSError):
                guest.sendall(_line({"error": error, "hosts": hosts}))
    if error:
        raise StartError(error)
    return hosts


def _listen(at: Place) -> socket.socket:
    port = int(at.address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
    except OSError as e:
        why = "is taken by another program" if e.errno == errno.EADDRINUSE else f"({e.strerror})"
        raise StartError(
            f"process 0 on {socket.gethostname()} cannot wait for the others at {at.address}: port "
            f"{port} {why}. Give another port to all processes, or end the other program."
        ) from e


def _who_is_missing(at: Place, came: Mapping[int, Any]) -> str:
    missing = [str(i) for i in range(at.count) if i not in came]
    return (
        f"process {', '.join(missing)} of {at.count} did not come to {at.address} within the start "
        f"timeout. See what {'it' if len(missing) == 1 else 'they'} printed, and whether "
        f"--num_processes={at.count} is right."
    )


def _mismatch(own: dict[str, Any], other: dict[str, Any], came: Mapping[int, Any]) -> str:
    """What is wrong with a process that came, or nothing."""
    index = other["index"]
    who = f"process {index} on {other['host']}"
    if other["count"] != own["count"]:
        return (
            f"{who} was started with --num_processes={other['count']}, process 0 on {own['host']} with "
            f"{own['count']}: start all with the same number."
        )
    if index in came:
        first = came[index]
        return (
            f"two processes are --process_id={index}: on {first['host']} (pid {first['pid']}) and on "
            f"{other['host']} (pid {other['pid']}). Each needs a number of its own."
        )
    mine, its = own["facts"], other["facts"]
    differ = [key for key in sorted(mine.keys() | its.keys()) if mine.get(key) != its.get(key)]
    if not differ:
        return ""
    shown = [
        f"{key}: {its.get(key, 'none')} there, {mine.get(key, 'none')} on {own['host']}"
        for key in differ
    ]
    more = f"; and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
    return f"{who} has other code or another config ({'; '.join(shown[:_SHOWN])}{more}): give all hosts the same."


def _visit(at: Place, hello: dict[str, Any], seconds: float) -> list[str]:
    """What the others do."""
    with _connect(at, time.monotonic() + seconds) as connection:
        # Process 0 ends the meeting at its own deadline, which may have begun just now.
        answer = _read(connection, seconds + _ANSWER_SECONDS, _line(hello))
    if answer is None or not {"error", "hosts"} <= answer.keys():
        raise StartError(
            f"{at.address} took the connection of process {at.index}, but did not answer as process 0 of this "
            "run does: either it has ended (see what it printed), or that port is another program's."
        )
    if answer["error"]:
        raise StartError(answer["error"])
    return answer["hosts"]


def _connect(at: Place, deadline: float) -> socket.socket:
    host, _, port = at.address.rpartition(":")
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS)
        except OSError as e:
            if time.monotonic() >= deadline:
                raise StartError(
                    f"process {at.index} on {socket.gethostname()} cannot reach process 0 at {at.address} "
                    f"({e.strerror or e}): check --coordinator_address, the network between the hosts, and "
                    "whether process 0 has started."
                ) from e
        time.sleep(_RETRY_SECONDS)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read(connection: socket.socket, seconds: float, say: bytes = b"") -> dict[str, Any] | None:
    """One message; None if what comes is not one, or nothing comes in time."""
    connection.settimeout(max(seconds, 0.01))
    try:
        connection.sendall(say)
        with connection.makefile("rb") as file:
            message = json.loads(file.readline(_LONGEST))
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None
