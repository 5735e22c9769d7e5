"""Hosts of their own networks on one machine, and a link that is cut between them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess

import pytest

from tests.launch import harness

COUNT = 3
# No longer than needed, as it passes; and long enough for those who are there to be heard.
HEARTBEAT = 20
OPTIONS = ["--config.log_every_steps=20", "--config.eval_every_steps=100000",
           "--config.checkpoint.every_steps=50", "--cpu_devices=2", f"--num_processes={COUNT}",
           "--coordinator_address=h0:8476", "--config.steps=1000000"]  # fmt: skip


class Hosts:
    """Network namespaces on one bridge; host i is hI at 10.77.0.(I+1)."""

    def __init__(self, stack, folder):
        self._tag = f"x{os.getpid() % 10000}"
        self._hosts = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"10.77.0.{i + 1} h{i}" for i in range(COUNT))]
        self._hosts.write_text("\n".join(lines) + "\n")
        self._switch = self._namespace(stack, f"{self._tag}sw")
        self._ip(self._switch, "link add br0 type bridge")
        self._ip(self._switch, "link set br0 up")
        for i in range(COUNT):
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
            [
                "nsenter",
                network,
                "unshare",
                "--uts",
                "--mount",
                "bash",
                "-c",
                inside,
                "--",
                *command,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=harness.environment(PYTHONUNBUFFERED="1"),
        )

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


@pytest.fixture
def hosts(tmp_path):
    allowed = os.geteuid() == 0 and shutil.which("ip") and subprocess.run(
        ["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode == 0  # fmt: skip
    if not allowed:
        pytest.skip("needs root, network namespaces, and Debian's iproute2")
    with contextlib.ExitStack() as stack:
        yield Hosts(stack, tmp_path)


@contextlib.contextmanager
def pod(hosts, directory, *options):
    with contextlib.ExitStack() as stack:
        command = [*harness.TOY, f"--workdir={directory}", *OPTIONS, *options]
        yield [
            stack.enter_context(harness.running(hosts.start(i, *command, f"--process_id={i}")))
            for i in range(COUNT)
        ]


def step(directory):
    with contextlib.suppress(OSError, ValueError):
        return json.loads((directory / "status.json").read_bytes())[0]["step"] or 0
    return 0


def reach(directory, wanted):
    harness.wait_until(lambda: step(directory) >= wanted)


@pytest.mark.parametrize("lost", [2, 0])
def test_a_cut_that_lasts_ends_all_and_names_the_host(hosts, tmp_path, lost):
    directory = tmp_path / "run"
    with pod(hosts, directory, f"--heartbeat_timeout_seconds={HEARTBEAT}") as processes:
        reach(directory, 120)
        hosts.cut(lost)
        ends = [harness.finish(process) for process in processes]
    assert [code for code, _ in ends] == [1] * COUNT, ends
    there, cut_off = ends[1][1], ends[lost][1]
    if lost:
        # Process 0 says so for all; the one that is cut off sees nobody.
        assert f"process {lost} on h{lost} has not been heard of for {HEARTBEAT} s" in ends[0][1]
        assert "process 0 on h0, which coordinates, has not answered" in cut_off
    else:
        assert "process 0 on h0, which coordinates, has not answered" in there
        assert "process 1 on h1 has not been heard of" in cut_off
    hosts.join(lost)
    with pod(hosts, directory, f"--config.steps={step(directory) + 200}") as processes:
        (first, output), *others = [harness.finish(process) for process in processes]
        assert first == 0 and "resumed from the checkpoint of step" in output, output
        assert [code for code, _ in others] == [0] * (COUNT - 1)


def silent(directory, index):
    """For how many seconds process 0 has not heard of another one, while it is heard of itself."""
    rows = harness.status(directory)
    return rows[0]["time"] - rows[index]["time"]


def test_a_cut_shorter_than_the_heartbeat_is_survived(hosts, tmp_path):
    directory = tmp_path / "run"
    with pod(hosts, directory) as processes:
        reach(directory, 100)
        hosts.cut(2)
        harness.wait_until(lambda: silent(directory, 2) > 2)
        hosts.join(2)
        harness.wait_until(lambda: silent(directory, 2) < 2)
        reach(directory, step(directory) + 100)
        processes[1].send_signal(signal.SIGTERM)
        ends = [harness.finish(process) for process in processes]
        assert [code for code, _ in ends] == [42] * COUNT, ends
