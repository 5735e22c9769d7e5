"""The start of a process: its place in the run, and how it joins the others.

The processes meet before JAX connects them, as `xshard.pod.rendezvous` describes.
"""

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence

import jax

from xshard.base.jax_internals import runtime
from xshard.pod import rendezvous, signals

# The environment variables by which gRPC finds a proxy.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
# The variables for the hosts that it reaches without one. It reads the first that is
# set; other programs read the second.
_EXEMPT = "no_grpc_proxy"
_EXEMPT_FOR_ALL = "no_proxy"
# What JAX takes for a sign of mpirun.
_OPEN_MPI = "OMPI_MCA_orte_hnp_uri"


def resolve_process(
    address: str | None,
    num_processes: int | None,
    process_id: int | None,
    seconds: int = 300,
) -> rendezvous.ProcessSpec | None:
    """Returns this process's place: from the arguments, or else as JAX detects it
    (Slurm, Open MPI, GKE, GCE).

    In a cluster that JAX detects, any of the arguments may be given, such as an address
    with another port (JAX also reads one from `JAX_COORDINATOR_PORT`). Elsewhere they
    are given together; a number of 1 process may stand alone.

    Args:
      address: the address of process 0, as host:port.
      num_processes: the number of processes.
      process_id: this process's index.
      seconds: how long JAX's requests to a cloud's metadata may take.

    Returns:
      The place, or None for a run of one process.

    Raises:
      StartError: if the arguments are invalid, or if JAX detects a cluster but not this
        process's place in it.
    """
    if address is None and num_processes == 1 and process_id in (None, 0):
        return None
    given = (address, num_processes, process_id)
    # In an interactive shell of Slurm, a step of one task, JAX would wait for as many
    # processes as the allocation may have tasks. Open MPI may start more than one.
    is_one_task = os.environ.get("SLURM_STEP_NUM_TASKS") == "1"
    if given == (None, None, None) and is_one_task and _OPEN_MPI not in os.environ:
        return None
    devices = None
    if None in given:
        try:
            address, num_processes, process_id, devices = runtime.detect_cluster(
                seconds, *given
            )
        except (RuntimeError, OSError, ValueError) as e:
            raise rendezvous.StartError(
                "JAX detects a cluster, but not the place of this process in it "
                f"({e}): give --coordinator_address, --num_processes and --process_id; "
                "or --num_processes=1 for a run of one process."
            ) from e
        if address is not None and given[0] is None:
            address = _reachable(address)
    flags = {
        "coordinator_address": address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [f"--{name}" for name, value in flags.items() if value is None]
    if given == (None, None, None) and (missing or num_processes in (0, 1)):
        # JAX detects no cluster, or one of a single process.
        return None
    if missing:
        raise rendezvous.StartError(
            f"{' and '.join(missing)} must be given too, because JAX does not detect a "
            "cluster: give --coordinator_address, --num_processes and --process_id "
            "together."
        )
    assert address is not None
    assert num_processes is not None
    assert process_id is not None
    _check_address(address)
    if not 0 <= process_id < num_processes:
        raise rendezvous.StartError(
            f"--process_id={process_id} must be from 0 to {num_processes - 1}, one "
            f"less than --num_processes={num_processes}."
        )
    if num_processes == 1:
        return None
    return rendezvous.ProcessSpec(address, num_processes, process_id, devices)


def _reachable(address: str) -> str:
    """Returns an address, by number if the name in it does not resolve, and if Slurm
    gives the number of the node that started the processes: for a batch script, that
    of process 0.
    """
    host, _, port = address.rpartition(":")
    ip = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if not ip or rendezvous.resolved(host):
        return address
    if ":" in ip:
        ip = f"[{ip}]"
    return f"{ip}:{port}"


def _check_address(address: str) -> None:
    """Raises StartError unless an address is HOST:PORT.

    JAX's coordinator would abort the process.
    """
    host, _, port = address.rpartition(":")
    is_port = re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 2**16
    is_host = re.fullmatch(r"[^\s:/\[\]]+", host) is not None
    if host.startswith("[") and host.endswith("]"):
        is_host = rendezvous.is_number(host, socket.AF_INET6)
    if is_host and is_port:
        return
    hint = ""
    has_brackets = "[" in address or "]" in address
    numbers = [rendezvous.is_number(x, socket.AF_INET6) for x in (host, address)]
    if any(numbers) and not has_brackets:
        hint = " An IPv6 address stands in brackets, as in [fd00::1]:8476."
    raise rendezvous.StartError(
        f"--coordinator_address={address} must be HOST:PORT, as in h0:8476.{hint} A "
        "detected port may be JAX_COORDINATOR_PORT's."
    )


def join(
    spec: rendezvous.ProcessSpec,
    timeouts: rendezvous.Timeouts,
    facts: Mapping[str, str],
    token: str,
    signal_receiver: signals.SignalReceiver,
) -> list[str]:
    """Meets the other processes and connects JAX. It must be called before the first
    use of a device.

    Args:
      spec: this process's place.
      timeouts: how long to wait.
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
    hosts = rendezvous.meet(spec, timeouts.start, facts, token, signal_receiver)
    # xshard handles SIGTERM itself. JAX's handler would replace that, and acts only if
    # JAX's own function is polled.
    jax.config.update("jax_enable_preemption_service", False)
    _bypass_proxies(spec.address)
    _choose_interface(spec.address)
    jax.distributed.initialize(
        spec.address,
        spec.num_processes,
        spec.process_id,
        _devices(spec, hosts),
        cluster_detection_method="deactivate",
        initialization_timeout=timeouts.start,
        # xshard normally detects a lost process first, and names it; JAX's timeout is
        # for when it cannot. It is much longer because JAX counts seconds, while xshard
        # counts ticks, which pass slowly on a busy machine.
        heartbeat_timeout_seconds=10 * timeouts.heartbeat + 60,
        shutdown_timeout_seconds=timeouts.shutdown,
        coordinator_bind_address=_bind_address(spec.address),
    )
    return hosts


def _devices(spec: rendezvous.ProcessSpec, hosts: list[str]) -> Sequence[int] | None:
    """Returns the numbers of the devices that a process uses, among those that it sees;
    None for all of them.

    JAX has one device for each process of a cluster, of the process's number on its
    node: for a process alone on its node, too, and also where Slurm shows each process
    only the devices that are its own.
    """
    detected = spec.local_device_ids
    processes = hosts.count(hosts[spec.process_id])
    if detected is None or processes == 1:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return detected
    count = visible.count(",") + 1
    if count < int(os.environ.get("SLURM_GPUS_ON_NODE", count)):
        return None
    each = max(1, count // processes)
    first = each * detected[0]
    return range(first, first + each)


def _choose_interface(address: str) -> None:
    """Makes the collectives of CPUs listen at the interface that leads to process 0,
    where this host's name does not resolve, or to loopback only.
    """
    for *_, own in rendezvous.resolved(socket.gethostname()):
        if not ipaddress.ip_address(own[0]).is_loopback:
            return
    host = address.rpartition(":")[0]
    for family, *_, place in rendezvous.resolved(host):
        trial = socket.socket(family, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError), trial:
            # Of a datagram socket, this sends nothing.
            trial.connect(place)
            runtime.listen_at(trial.getsockname()[0])
            return


def _bypass_proxies(address: str) -> None:
    """Exempts the address of JAX's coordinator from proxies; gRPC would ask a proxy for
    it, and end the process.

    gRPC reads these variables in lower case only. In `no_grpc_proxy` it reads what
    `no_proxy` has as well, which other programs of the process go on to use as it is.
    """
    if not any(os.environ.get(name) for name in _PROXIES):
        return
    host = address.rpartition(":")[0].strip("[]")
    exempt = os.environ.get(_EXEMPT) or os.environ.get(_EXEMPT_FOR_ALL) or ""
    os.environ[_EXEMPT] = ",".join(filter(None, [exempt, host]))
    # JAX would warn that a start may hang.
    jax.config.update("jax_check_proxy_envs", False)


def _bind_address(address: str) -> str | None:
    """Returns where JAX's coordinator listens, which is where process 0 did in the
    meeting; None for all addresses.
    """
    ip = rendezvous.interface(address)
    if not ip:
        return None
    if ":" in ip:
        ip = f"[{ip}]"
    port = address.rpartition(":")[2]
    return f"{ip}:{port}"
