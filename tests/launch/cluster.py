"""Slurm clusters of Debian's packages: one node on loopback, or several nodes that are
hosts with networks of their own. They need root.
"""

import functools
import os
import random
import re
import shutil
import socket
import subprocess
import sys

import pytest

from tests.launch import harness, network

_CONF = """\
ClusterName=xshard
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={state}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={state}/state
SlurmdSpoolDir={state}/spool-%n
SlurmctldPidFile={state}/controller.pid
SlurmdPidFile={state}/node-%n.pid
SlurmctldLogFile={state}/controller.log
SlurmdLogFile={state}/node-%n.log
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
FirstJobId={first}
BatchStartTimeout=600
MessageTimeout=600
TCPTimeout=600
ReturnToService=1
MailProg=/bin/true
"""
_CONFINED = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
"""
_UNCONFINED = """\
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
"""
# A number of devices for experiments, which has no driver: a task that may open one
# learns that there is no such device, and any other that it may not.
_DEVICE = "240"
_IDLE = ("sinfo", "--noheader", "--states=idle", "--format=%D")


def confines():
    """Returns whether Slurm can confine tasks to their devices on this machine."""
    groups = ("devices", "freezer")
    return all(os.access(f"/sys/fs/cgroup/{name}", os.W_OK) for name in groups)


def need(*programs):
    """Skips the test if a program is missing or the user is not root; .ci/run installs
    Debian's packages.
    """
    os.environ["PATH"] += os.pathsep + "/usr/sbin"
    missing = [program for program in programs if not shutil.which(program)]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"needs root and {', '.join(programs)} (Debian: slurm-wlm, munge, "
            "openmpi-bin)"
        )


class Cluster:
    """A Slurm cluster, which runs until the end of a stack of contexts.

    Attributes:
      variables: the environment variables that its clients need.
    """

    def __init__(self, stack, state, lines, hosts):
        """Starts the cluster.

        Args:
          stack: the stack of contexts.
          state: an empty folder for its files.
          lines: the lines of slurm.conf that say which nodes there are.
          hosts: for each host the function that starts a program there, as
            `network.Hosts.start` does. The first has the controller, and each of the
            others is a node; one alone is both.
        """
        need("munged", "slurmctld", "slurmd", "sbatch")
        for name in ("state", "munge"):
            (state / name).mkdir()
        key = state / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        # munged requires that every user may traverse the path to its socket.
        for folder in (state / "munge", state, *list(state.parents)[:2]):
            folder.chmod(0o755)
        conf = state / "slurm.conf"
        ports = [harness.free_port(), harness.free_port()]
        # The port on which a job's processes meet is derived from the job's number, so
        # clusters start at random numbers.
        first = random.SystemRandom().randrange(1, 4000)
        conf.write_text(_CONF.format(ports=ports, state=state, first=first) + lines)
        self.variables = {"SLURM_CONF": str(conf)}
        self._start = hosts[0]
        files = {
            "socket": "socket",
            "key-file": "key",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        munge = [f"--{name}={state}/munge/{file}" for name, file in files.items()]
        self._serve(stack, hosts[0], "munged", "--foreground", "--force", *munge)
        harness.wait_until((state / "munge" / "socket").exists)
        self._serve(stack, hosts[0], "slurmctld", "-D")
        nodes = hosts[1:] or hosts
        for node in nodes:
            self._serve(stack, node, "slurmd", "-D")
        self._num_nodes = len(nodes)
        self.wait_for_nodes()
        # Jobs that a test left running would outlive the cluster and occupy ports that
        # the next cluster needs.
        stack.callback(self._end_jobs)

    def start(self, *command, **variables):
        """Starts a program on the controller's host, with its output in a pipe."""
        return self._start(*command, **self.variables, **variables)

    def ask(self, *command):
        """Runs a program to its end; returns what it prints."""
        return harness.finish(self.start(*command))[1].strip()

    def launch(self, *arguments, command=(), **variables):
        """Runs the launcher; returns its output."""
        words = [sys.executable, "-m", "launch", *arguments]
        if command:
            words += ["--", *command]
        code, output = harness.finish(self.start(*words, **variables))
        assert code == 0, output
        return output

    def submit(self, *arguments, command, **variables):
        """Launches a job; returns its number."""
        output = self.launch("--engine=slurm", *arguments, command=command, **variables)
        return re.search(r"Submitted batch job (\d+)", output)[1]

    def show(self, job):
        """Returns what Slurm says about a job, or each task of a job array."""
        return self.ask("scontrol", "--oneliner", "show", "job", job)

    def wait_for(self, job, state="COMPLETED"):
        """Waits until a job, or each task of a job array, is in a state."""

        def states():
            shown = self.show(job)
            reported = set(re.findall(r"JobState=(\w+)", shown))
            expected = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", state}
            assert reported <= expected, shown
            return reported == {state}

        harness.wait_until(states)

    def wait_for_requeue(self, job, count=1, nodes=None):
        """Waits until a job has been queued again a number of times, and starts it.

        Args:
          job: the number of the job.
          count: how often it has been queued again.
          nodes: the number of nodes that are left; by default all.
        """
        harness.wait_until(
            lambda: re.search(rf"JobState=PENDING .* Restarts={count} ", self.show(job))
        )
        # Slurm waits two minutes by default. It cannot start the job at once, because
        # the nodes still clean up.
        self.wait_for_nodes(nodes)
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now+8")

    def wait_for_nodes(self, count=None):
        """Waits until a number of nodes are idle; by default all."""
        wanted = str(count or self._num_nodes)
        harness.wait_until(lambda: self.ask(*_IDLE) == wanted)

    def _serve(self, stack, host, *command):
        """Runs a daemon on a host, which keeps logs of its own."""
        quietly = ["bash", "-c", 'exec "$@" >/dev/null 2>&1', "--"]
        process = host(*quietly, *command, **self.variables)
        stack.enter_context(harness.running(process))

    def _end_jobs(self):
        self.ask("scancel", "--me", "--full", "--signal=KILL")
        self.ask("scancel", "--me")
        harness.wait_until(lambda: self.ask("squeue", "--noheader") == "")


def on_loopback(stack, state):
    """Returns a cluster of one node, which is this machine."""
    name = socket.gethostname()
    lines = f"""\
SlurmctldHost={name}(127.0.0.1)
NodeName={name} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=debug Nodes={name} Default=YES State=UP OverSubscribe=FORCE:4
"""

    def start(*command, **variables):
        return harness.start(command, env=harness.environment(**variables))

    return Cluster(stack, state, _UNCONFINED + lines, [start])


def on_hosts(stack, state, gpus, **options):
    """Returns a cluster whose nodes are hosts h1, h2, ... with networks of their own.

    Args:
      stack: the stack of contexts that ends it.
      state: an empty folder for its files.
      gpus: the number of GPUs of each node, for which there are files without a device.
      **options: the options of `network.Hosts`.
    """
    if not network.is_allowed():
        pytest.skip(network.NEEDED)
    hosts = network.Hosts(stack, state, 1 + len(gpus), **options)
    lines = [f"SlurmctldHost=h0({hosts.addresses[0]})", "GresTypes=gpu"]
    if ":" in hosts.addresses[0]:
        lines.append("CommunicationParameters=EnableIPv6,DisableIPv4")
    for number in range(max(gpus)):
        path = state / f"gpu{number}"
        subprocess.run(["mknod", path, "c", _DEVICE, str(number)], check=True)
    devices = ["AutoDetect=off"]
    for i, count in enumerate(gpus, start=1):
        lines.append(
            f"NodeName=h{i} NodeAddr={hosts.addresses[i]} CPUs=64 Gres=gpu:{count} "
            "State=UNKNOWN"
        )
        devices.append(
            f"NodeName=h{i} Name=gpu File={state}/gpu[0-{count - 1}] Count={count}"
        )
    lines.append(f"PartitionName=debug Nodes=h[1-{len(gpus)}] Default=YES State=UP")
    (state / "gres.conf").write_text("\n".join(devices) + "\n")
    (state / "cgroup.conf").write_text("ConstrainDevices=yes\n")
    confinement = _CONFINED if confines() else _UNCONFINED
    starts = []
    for i in range(1 + len(gpus)):
        starts.append(functools.partial(hosts.start, i))
    return Cluster(stack, state, confinement + "\n".join(lines) + "\n", starts)
