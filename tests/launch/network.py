"""Hosts with separate networks on one machine; they need root, network namespaces and
Debian's iproute2.
"""

import itertools
import os
import shlex
import shutil
import subprocess

from tests.launch import harness

NEEDED = "needs root, network namespaces, and Debian's iproute2"
# A process may have several sets of hosts.
_NUMBERS = itertools.count()
# Each host has its own hostname and its own hosts file.
_PRIVATE = ("unshare", "--uts", "--mount")


def is_allowed():
    """Returns whether this machine can create such hosts."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    attempt = subprocess.run(
        ["unshare", "--net", "true"], stderr=subprocess.DEVNULL, check=False
    )
    return attempt.returncode == 0


class Hosts:
    """Network namespaces on one bridge. Host i has the name h<i>.

    Attributes:
      addresses: the address of each host: 10.77.0.<i + 1>, or fd77::<i + 1>.
    """

    def __init__(self, stack, folder, count, *, has_ipv4=True, knows_names=True):
        """Creates the hosts; a stack of contexts deletes them.

        Args:
          stack: the stack of contexts.
          folder: a folder for their hosts file.
          count: the number of hosts.
          has_ipv4: whether they have IPv4; otherwise they have IPv6 only.
          knows_names: whether the names of the hosts resolve.
        """
        prefix, bits, loopback = "10.77.0.", "24", "127.0.0.1"
        if not has_ipv4:
            prefix, bits, loopback = "fd77::", "64 nodad", "::1"
        self.addresses = [f"{prefix}{i + 1}" for i in range(count)]
        self._tag = f"x{os.getpid() % 10000}-{next(_NUMBERS)}"
        self._hosts = folder / "hosts"
        lines = [f"{loopback} localhost"]
        if knows_names:
            lines += [f"{ip} h{i}" for i, ip in enumerate(self.addresses)]
        self._hosts.write_text("\n".join(lines) + "\n")
        self._switch = self._namespace(stack, f"{self._tag}sw")
        self._ip(self._switch, "link add br0 type bridge")
        self._ip(self._switch, "link set br0 up")
        for i in range(count):
            host = self._namespace(stack, f"{self._tag}h{i}")
            self._ip(
                self._switch, f"link add v{i} type veth peer name eth0 netns {host}"
            )
            self._ip(self._switch, f"link set v{i} master br0 up")
            self._ip(host, f"addr add {self.addresses[i]}/{bits} dev eth0")
            self._ip(host, "link set eth0 up")
            self._ip(host, "link set lo up")

    def start(self, index, *command, **variables):
        """Starts a command on a host, with its network, hostname and hosts file, and
        with environment variables.
        """
        return subprocess.Popen(
            [*self._command(index), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=harness.environment(PYTHONUNBUFFERED="1", **variables),
        )

    def _command(self, index):
        """Returns what runs the words that follow it on a host."""
        # gloo listens on the address that the hostname resolves to.
        inside = f'hostname h{index}; mount --bind {self._hosts} /etc/hosts; exec "$@"'
        network = f"--net=/var/run/netns/{self._tag}h{index}"
        return ["nsenter", network, *_PRIVATE, "bash", "-c", inside, "--"]

    def starter(self, path, indices):
        """Writes a program that starts its arguments on hosts, as srun does.

        Args:
          path: the path of the program.
          indices: the hosts, on each of which the arguments run once.

        Returns:
          The command that runs it.
        """
        lines = ["#!/bin/bash"]
        for index in indices:
            words = shlex.join(self._command(index))
            lines.append(f'{words} "$@" &')
        path.write_text("\n".join([*lines, "wait", ""]))
        path.chmod(0o755)
        return str(path)

    def host(self, pid):
        """Returns the number of the host that a process runs on."""
        name = subprocess.run(
            ["ip", "netns", "identify", str(pid)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        return int(name.removeprefix(f"{self._tag}h"))

    def deafen(self, index, other):
        """Lets what a host sends to another be lost, but not what it receives."""
        host = f"{self._tag}h{index}"
        self._ip(host, f"route add blackhole {self.addresses[other]}")

    def cut(self, index):
        """Cuts the link between a host and the others."""
        self._ip(self._switch, f"link set v{index} down")

    def join(self, index):
        """Restores the link of a host."""
        self._ip(self._switch, f"link set v{index} up")

    def _namespace(self, stack, name):
        subprocess.run(["ip", "netns", "add", name], check=True)
        stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        return name

    def _ip(self, namespace, arguments):
        subprocess.run(["ip", "-n", namespace, *arguments.split()], check=True)
