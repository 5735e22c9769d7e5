"""The place of a process in its run, and the socket at which process 0 listens for the
others.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import signal
import socket
from collections.abc import Sequence

from xshard import errors
from xshard.pod import signals

# The first probe after 10 s of silence, then one every 5 s; after 4 probes without an
# answer the connection ends.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class StartError(errors.UserError):
    """The processes cannot start together. The message names the process at fault, and
    what to do.
    """


class StoppedError(Exception):
    """A process received a signal, which stops all of them. The message names the
    signal and the process.

    Attributes:
      code: the exit code.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """The place of a process in its run.

    Attributes:
      address: the host and port of process 0.
      count: the number of processes.
      index: this process's index, from 0.
      devices: the indices of the host's devices that this process uses; None for all.
    """

    address: str
    count: int
    index: int
    devices: Sequence[int] | None = None


def stopped(who: str, number: signal.Signals) -> StoppedError:
    """Returns the error for a signal that a process received."""
    message = (
        f"{number.name} on {who}: stopped before the run began; nothing was trained."
    )
    return StoppedError(message, signals.CODES[number])


def interface(address: str) -> str:
    """Returns the IP address at which process 0 listens for connections to HOST:PORT;
    empty for all addresses.

    Process 0 listens at all addresses in two cases. The host may not be an address of
    this machine: a Kubernetes service has its own. Or its name may resolve to loopback
    on this machine only: Debian gives a machine's own name 127.0.1.1, which other
    machines cannot use.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    may_be_loopback = host.endswith("localhost") or _is_number(host)
    for family, *_, own in addresses:
        ip = str(own[0])
        if ipaddress.ip_address(ip).is_loopback and not may_be_loopback:
            continue
        # Only an address of this machine can be bound, so the attempt shows whether it
        # is one.
        with contextlib.suppress(OSError), socket.socket(family) as trial:
            trial.bind(own)
            return ip
    return ""


def _is_number(host: str) -> bool:
    try:
        socket.getaddrinfo(host, 0, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return True


def listen(at: ProcessSpec) -> socket.socket:
    """Returns the listening socket of process 0; raises StartError if it cannot be
    opened.
    """
    port = int(at.address.rpartition(":")[2])
    ip = interface(at.address)
    # To listen at all addresses means IPv4 and IPv6, if the system has both.
    is_both = not ip and socket.has_dualstack_ipv6()
    family = socket.AF_INET
    if is_both or ":" in ip:
        family = socket.AF_INET6
    try:
        return socket.create_server(
            (ip, port), family=family, dualstack_ipv6=is_both, backlog=1024
        )
    except OSError as e:
        why = f"({e.strerror})"
        if e.errno == errno.EADDRINUSE:
            why = "is taken by another program"
        raise StartError(
            f"process 0 on {socket.gethostname()} cannot listen for the others at {at.address}: port "
            f"{port} {why}. Give another port to all processes, or end the other program."
        ) from e


def keep_alive(connection: socket.socket) -> None:
    """Makes a connection end within half a minute after the other side's host or the
    network is gone.
    """
    # If the connection has ended already, the next read reports it.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            # Not every system has all of these options.
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
