"""The place of a process among those of its run, and their start: they meet before JAX connects them.

JAX's own start ends a process from C++ when a peer does not come, whatever the reason. So the processes meet
first, at the address where JAX's coordinator will be, and what does not fit is said.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax._src import clusters

from xshard.pod import meeting, places, signals


class Timeouts(NamedTuple):
    """The times that processes wait for one another, in seconds.

    Attributes:
      start: until all have come.
      heartbeat: until a process that is not heard of counts as lost. A shorter outage is survived.
      shutdown: until all have left.
      step: until a process that trains or evaluates, and does not come on, ends the run; 0: for ever.
    """

    start: int = 300
    heartbeat: int = 30
    shutdown: int = 60
    step: int = 0


def place(
    address: str | None, count: int | None, index: int | None, seconds: int = 300
) -> places.Place | None:
    """Finds this process's place: as said, else as JAX detects it (Slurm, Open MPI, GKE, GCE).

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
    if address is None and count is None and index is None:
        return _detect(seconds)
    if address is None or count is None or index is None:
        flags = {"coordinator_address": address, "num_processes": count, "process_id": index}
        missing = [f"--{name}" for name, value in flags.items() if value is None]
        raise places.StartError(
            f"{' and '.join(missing)} must be given too: --coordinator_address, --num_processes and "
            "--process_id go together, and without them what JAX detects decides."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise places.StartError(
            f"--coordinator_address={address} must be HOST:PORT, as in h0:8476."
        )
    if not 0 <= index < count:
        raise places.StartError(
            f"--process_id={index} must be from 0 to {count - 1}, one less than --num_processes={count}."
        )
    if count == 1:
        return None
    return places.Place(address, count, index)


def _detect(seconds: int) -> places.Place | None:
    try:
        # Nothing is said of the address, the count, the index, the devices and the method of detection.
        address, count, index, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, seconds
        )
    except (RuntimeError, OSError) as e:
        raise places.StartError(
            f"JAX finds a cluster around this process, but not its place in it ({e}): give "
            "--coordinator_address, --num_processes and --process_id; --num_processes=1 for a run alone."
        ) from e
    if address is None or not count or count == 1 or index is None:
        return None
    return places.Place(address, count, index, devices)


def join(
    at: places.Place,
    timeouts: Timeouts,
    facts: Mapping[str, str],
    token: str,
    heard: signals.Heard,
) -> list[str]:
    """Meets the other processes and connects JAX; before the first use of a device.

    Args:
      at: this process's place.
      timeouts: how long to wait.
      facts: what must be equal on all processes, such as the config; short texts.
      token: of the launch, which all of its processes have; empty if they were started by hand.
      heard: the signals, of which one ends the meeting for all.

    Returns:
      The host name of each process.

    Raises:
      StartError: if some process does not come in time, or does not fit; on all processes that came.
      StoppedError: if a signal has come to one of them; on all processes that came.
    """
    hosts = meeting.meet(at, timeouts.start, facts, token, heard)
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
        coordinator_bind_address=_bind_address(at.address),
    )
    return hosts


def _bind_address(address: str) -> str | None:
    """Returns where JAX's coordinator listens: as process 0 did in the meeting; None has JAX listen everywhere."""
    ip = places.interface(address)
    if not ip:
        return None
    if ":" in ip:
        ip = f"[{ip}]"
    port = address.rpartition(":")[2]
    return f"{ip}:{port}"
