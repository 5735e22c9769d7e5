"""The place of a process among those of its run, and where process 0 listens for the others."""

import contextlib
import dataclasses
import errno
import ipaddress
import signal
import socket
from collections.abc import Sequence

from xshard import errors
from xshard.pod import signals

# The first question after 10 s of silence, then one every 5 s; after 4 without an answer the connection ends.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class StartError(errors.UserError):
    """The processes cannot begin together. The message says which one it is, and what to do."""


class StoppedError(Exception):
    """A signal has come to one of the processes, which stops all. The message says which.

    Attributes:
      code: the exit code.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process among those of its run.

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


def stopped(who: str, number: signal.Signals) -> StoppedError:
    """The end by a signal to a process."""
    message = f"{number.name} on {who}: stopped before the run began; nothing was trained."
    return StoppedError(message, signals.CODES[number])


def interface(address: str) -> str:
    """The address of this machine that process 0 listens at for who comes to HOST:PORT; empty: all of them.

    All of them where the host is none of this machine's addresses, as a service's on Kubernetes; and where its
    name leads to loopback here, which it may only here: Debian gives a machine's own name 127.0.1.1.
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
        # Only an address of this machine's own can be bound.
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


def listen(at: Place) -> socket.socket:
    """The socket of process 0; StartError if it cannot be had."""
    port = int(at.address.rpartition(":")[2])
    ip = interface(at.address)
    # All interfaces are those of both versions of IP, where the system has both.
    is_both = not ip and socket.has_dualstack_ipv6()
    family = socket.AF_INET
    if is_both or ":" in ip:
        family = socket.AF_INET6
    try:
        return socket.create_server((ip, port), family=family, dualstack_ipv6=is_both, backlog=1024)
    except OSError as e:
        why = f"({e.strerror})"
        if e.errno == errno.EADDRINUSE:
            why = "is taken by another program"
        raise StartError(
            f"process 0 on {socket.gethostname()} cannot wait for the others at {at.address}: port "
            f"{port} {why}. Give another port to all processes, or end the other program."
        ) from e


def keep_alive(connection: socket.socket) -> None:
    """Has a connection end when the other side's host, or the network, is gone: in half a minute."""
    # A connection that has ended already shows at the next read.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            # Not each system has all of them.
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
