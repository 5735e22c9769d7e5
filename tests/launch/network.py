"""Hosts of their own networks on one machine: root, network namespaces and Debian's iproute2 are needed."""

import json
import os
import shutil
import subprocess

from tests.launch import harness

NEEDED = "needs root, network namespaces, and Debian's iproute2"
# A host's name and its hosts file are its own.
_PRIVATE = ("unshare", "--uts", "--mount")


def is_allowed():
    """Returns whether hosts can be made here."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    tried = subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL, check=False)
    return tried.returncode == 0


class Hosts:
    """Network namespaces on one bridge; host i is hI at 10.77.0.(I+1)."""

    def __init__(self, stack, folder, count):
        self._tag = f"x{os.getpid() % 10000}"
        self._hosts = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"10.77.0.{i + 1} h{i}" for i in range(count))]
        self._hosts.write_text("\n".join(lines) + "\n")
        self._switch = self._namespace(stack, f"{self._tag}sw")
        self._ip(self._switch, "link add br0 type bridge")
        self._ip(self._switch, "link set br0 up")
        for i in range(count):
            host = self._namespace(stack, f"{self._tag}h{i}")
            self._ip(self._switch, f"link add v{i} type veth peer name eth0 netns {host}")
            self._ip(self._switch, f"link set v{i} master br0 up")
            self._ip(host, f"addr add 10.77.0.{i + 1}/24 dev eth0")
            self._ip(host, "link set eth0 up")
            self._ip(host, "link set lo up")

    def start(self, index, *command):
        """Starts a command on a host: its network, its name, its hosts file."""
        # gloo listens at the address that the host's own name has.
        inside = f'hostname h{index}; mount --bind {self._hosts} /etc/hosts; exec "$@"'
        network = f"--net=/var/run/netns/{self._tag}h{index}"
        return subprocess.Popen(
            ["nsenter", network, *_PRIVATE, "bash", "-c", inside, "--", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=harness.environment(PYTHONUNBUFFERED="1"),
        )

    def limit(self, index, rate):
        """Shapes what a host sends, in words of tc, such as 1gbit."""
        shape = f"tbf rate {rate} burst 64kb latency 400ms"
        command = f"tc -n {self._tag}h{index} qdisc replace dev eth0 root {shape}"
        subprocess.run(command.split(), check=True)

    def bytes_sent(self, index):
        """The bytes that a host has sent since it was made, with what packets need besides."""
        command = f"ip -n {self._tag}h{index} -s -j link show eth0"
        (link,) = json.loads(subprocess.check_output(command.split()))
        return link["stats64"]["tx"]["bytes"]

    def cut(self, index):
        self._ip(self._switch, f"link set v{index} down")

    def join(self, index):
        self._ip(self._switch, f"link set v{index} up")

    def _namespace(self, stack, name):
        subprocess.run(["ip", "netns", "add", name], check=True)
        stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        return name

    def _ip(self, namespace, arguments):
        subprocess.run(["ip", "-n", namespace, *arguments.split()], check=True)
