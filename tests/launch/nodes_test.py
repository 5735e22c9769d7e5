"""Tests of docs/slurm.md: Slurm with nodes that are hosts of their own, each with files
for its GPUs.
"""

import contextlib
import json
import os
import re
import shlex
import sys

import pytest

from tests import pace
from tests.launch import cluster, harness

_GPUS = (8, 8, 8, 8, 4)
# What a process can tell of its place, without JAX.
_PROGRAM = """
import errno, json, os, socket
usable = []
for number in range(8):
    try:
        os.open(f"{folder}/gpu{{number}}", os.O_RDONLY)
    except OSError as e:
        if e.errno == errno.ENXIO:
            usable.append(number)
names = [
    "SLURM_PROCID", "SLURM_LOCALID", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE",
    "SLURM_CPUS_PER_TASK", "XSHARD_LAUNCH_TOKEN", "NCCL_SOCKET_IFNAME",
]
place = {{name: os.environ.get(name) for name in names}}
print(json.dumps({{"host": socket.gethostname(), "usable": usable, **place}}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def nodes(folder):
    with contextlib.ExitStack() as stack:
        yield cluster.on_hosts(stack, folder, _GPUS)


@pytest.fixture
def program(tmp_path, folder):
    """A program that prints its place, which takes the flags of a run."""
    path = tmp_path / "place.py"
    path.write_text(_PROGRAM.format(folder=folder))
    return [sys.executable, str(path)]


def places(directory):
    """Returns what the processes of a job have printed, in their order."""
    printed = (directory / "launch.log").read_text().splitlines()
    read = [json.loads(line) for line in printed]
    return sorted(read, key=lambda place: int(place["SLURM_PROCID"]))


def check_confinement(place, usable):
    """Checks which GPUs a process may open, where this machine has cgroups for that."""
    if cluster.confines():
        assert place["usable"] == usable
    else:
        assert place["usable"] == list(range(8))


def test_the_script_of_the_page_starts_a_process_for_each_gpu(tmp_path, nodes, program):
    page = (harness.ROOT / "docs" / "slurm.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    words = shlex.split(blocks[0][1].replace("\\\n", " "))
    (script,) = [text for language, text in blocks if language == "bash"]
    # The page has what the launcher writes.
    shown = nodes.launch("--dry_run", *words[3:])
    here = shlex.quote(os.getcwd())
    written = script.replace("/shared/xshard", here)
    path = "/shared/runs/digits/launch.sbatch"
    assert shown == f"# {path}\n{written}\nsbatch {path}\n"
    # And Slurm takes it.
    program_of_page = ".venv/bin/python -m xshard.main"
    assert program_of_page in written
    written = written.replace(program_of_page, shlex.join(program))
    file = tmp_path / "launch.sbatch"
    file.write_text(written.replace("/shared/runs", str(tmp_path)))
    (tmp_path / "digits").mkdir()
    nodes.wait_for(nodes.ask("sbatch", "--parsable", str(file)))
    started = places(tmp_path / "digits")
    assert [place["host"] for place in started] == [
        f"h{i}" for i in range(1, 5) for _ in range(8)
    ]
    assert [int(place["SLURM_LOCALID"]) for place in started] == [*range(8)] * 4
    assert len({place["XSHARD_LAUNCH_TOKEN"] for place in started}) == 1
    for place in started:
        assert place["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert place["SLURM_GPUS_ON_NODE"] == "8"
        assert place["SLURM_CPUS_PER_TASK"] == "8"


def test_a_process_may_be_alone_on_its_node(tmp_path, nodes, program):
    job = nodes.submit(
        "--num_processes=4",
        "--sbatch=--nodes=4",
        "--sbatch=--gres=gpu:8",
        # As many sites have it. The script still has its own variables.
        "--sbatch=--export=NONE",
        command=[*program, f"--workdir={tmp_path / 'run'}"],
    )
    nodes.wait_for(job)
    started = places(tmp_path / "run")
    assert [place["host"] for place in started] == ["h1", "h2", "h3", "h4"]
    assert len({place["XSHARD_LAUNCH_TOKEN"] for place in started} - {None}) == 1
    for place in started:
        assert place["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert place["NCCL_SOCKET_IFNAME"] is None


def test_a_process_may_see_its_own_gpus_only(tmp_path, nodes, program):
    job = nodes.submit(
        "--num_processes=4",
        "--sbatch=--nodes=2",
        "--sbatch=--ntasks-per-node=2",
        "--sbatch=--gpus-per-task=2",
        command=[*program, f"--workdir={tmp_path / 'run'}"],
        NCCL_SOCKET_IFNAME="eth0",
    )
    nodes.wait_for(job)
    for place in places(tmp_path / "run"):
        # `startup._devices` tells such a process by these from one that shares 2 GPUs.
        assert place["CUDA_VISIBLE_DEVICES"].count(",") == 1
        assert place["SLURM_GPUS_ON_NODE"] == "4"
        first = 2 * int(place["SLURM_LOCALID"])
        check_confinement(place, [first, first + 1])
        assert place["NCCL_SOCKET_IFNAME"] == "eth0"


def toy(directory, *options):
    return [*harness.TOY, f"--workdir={directory}", *options]


def reference(folder, processes, devices, *options):
    """Trains the same run on this machine; returns its work directory."""
    directory = folder / "reference"
    process = harness.launch(
        f"--num_processes={processes}",
        f"--cpu_devices={devices}",
        command=toy(directory, *options),
    )
    code, output = harness.finish(process)
    assert code == 0, output
    return directory


@pytest.mark.long
def test_a_run_passes_three_time_limits_to_the_same_bits(tmp_path, nodes):
    # More steps than a slow run makes in three times two minutes.
    options = ["--config.steps=1000", "--config.log_every_steps=100"]
    directory = tmp_path / "run"
    with pace.slow(tmp_path / "slow", 0) as variables:
        job = nodes.submit(
            "--num_processes=4",
            "--cpu_devices=2",
            "--sbatch=--nodes=4",
            "--slurm_time=2",
            "--grace_seconds=30",
            command=toy(directory, *options),
            **variables,
        )
        for count in range(1, 4):
            nodes.wait_for_requeue(job, count)
    nodes.wait_for(job)
    log = (directory / "launch.log").read_text()
    assert log.count("resumed from the checkpoint of step") == 3
    harness.assert_same_end(directory, reference(tmp_path, 4, 2, *options), 1000)


# A run whose save takes longer than the job has left.
_STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(workdir,) = [flag.split("=")[1] for flag in sys.argv if flag.startswith("--workdir=")]
(pathlib.Path(workdir) / "reached.json").write_text(str(os.getpid()))
print("started", flush=True)
while os.environ.get("SLURM_RESTART_COUNT") != "1":
    time.sleep(1)
"""


@pytest.mark.long
def test_a_save_that_is_too_late_is_no_end_but_a_cancel_is(tmp_path, nodes):
    directory = tmp_path / "run"
    program = [sys.executable, "-c", _STUBBORN, f"--workdir={directory}"]
    job = nodes.submit("--sbatch=--time=1", command=program)
    nodes.wait_for_requeue(job)
    nodes.wait_for(job)
    assert (directory / "launch.log").read_text().count("started") == 2
    cancelled = nodes.submit("--sbatch=--time=10", command=program)
    harness.wait_until(lambda: "JobState=RUNNING" in nodes.show(cancelled))
    log = directory / "launch.log"
    harness.wait_until(lambda: log.read_text().count("started") == 3)
    nodes.ask("scancel", cancelled)
    nodes.wait_for(cancelled, "CANCELLED")
    assert "Restarts=0" in nodes.show(cancelled)


@pytest.mark.long
def test_nodes_may_have_other_numbers_of_gpus(tmp_path, nodes):
    options = [
        "--config.steps=20",
        "--config.logical_replicas=12",
        "--config.reduction.arithmetic=exact",
    ]
    # As many devices of CPUs as the node gives GPUs to the job.
    devices = "--xla_force_host_platform_device_count=$SLURM_GPUS_ON_NODE"
    directory = tmp_path / "run"
    job = nodes.submit(
        "--num_processes=2",
        "--sbatch=--nodes=2",
        "--sbatch=--nodelist=h4,h5",
        "--sbatch=--ntasks-per-node=1",
        "--sbatch=--gpus=12",
        command=[
            "bash",
            "-c",
            f'XLA_FLAGS="$XLA_FLAGS {devices}" exec "$@"',
            "--",
            *toy(directory, *options),
        ],
    )
    nodes.wait_for(job)
    log = (directory / "launch.log").read_text()
    assert "12 replica(s)" in log
    harness.assert_same_end(directory, reference(tmp_path, 1, 12, *options), 20)


@pytest.mark.long
def test_nodes_need_neither_ipv4_nor_names(tmp_path):
    options = ["--config.steps=20"]
    directory = tmp_path / "run"
    state = tmp_path / "slurm"
    state.mkdir()
    with contextlib.ExitStack() as stack:
        nodes = cluster.on_hosts(
            stack, state, (1, 1), has_ipv4=False, knows_names=False
        )
        job = nodes.submit(
            "--num_processes=2",
            "--cpu_devices=2",
            "--sbatch=--nodes=2",
            command=toy(directory, *options),
        )
        nodes.wait_for(job)
    harness.assert_same_end(directory, reference(tmp_path, 2, 2, *options), 20)


@pytest.mark.long
def test_an_elastic_job_goes_on_without_a_lost_node(tmp_path, nodes):
    options = [
        "--config.steps=60",
        "--config.logical_replicas=12",
        "--config.reduction.arithmetic=exact",
        # Half of it after the node is lost, the others go on.
        "--heartbeat_timeout_seconds=40",
    ]
    directory = tmp_path / "run"
    with pace.slow(tmp_path / "slow", 12) as variables:
        job = nodes.submit(
            "--elastic=2:3",
            "--cpu_devices=2",
            "--sbatch=--exclude=h4,h5",
            command=toy(directory, *options),
            **variables,
        )
        log = directory / "launch.log"
        harness.wait_until(lambda: log.exists() and "step 12/60" in log.read_text())
        # What the controller does when it has not heard of a node for long enough.
        nodes.ask("scontrol", "update", "NodeName=h3", "State=DOWN", "Reason=lost")
        harness.wait_until(lambda: "2 of 3 hosts are left, " in log.read_text())
    nodes.wait_for(job)
    assert "Restarts=0 " in nodes.show(job)
    nodes.ask("scontrol", "update", "NodeName=h3", "State=RESUME")
    nodes.wait_for_nodes()
    harness.assert_same_end(directory, reference(tmp_path, 1, 6, *options), 60)


@pytest.mark.sample(0.4)
def test_a_job_with_spares_goes_on_without_a_lost_node_and_is_told_to_stop(
    tmp_path, nodes
):
    options = [
        "--config.steps=120",
        "--config.logical_replicas=12",
        "--config.reduction.arithmetic=exact",
        "--config.log_every_steps=1",
        "--config.checkpoint.every_steps=6",
        # Half of it after the node is lost, the others go on.
        "--heartbeat_timeout_seconds=40",
    ]
    directory = tmp_path / "run"
    log = directory / "launch.log"
    with pace.slow(tmp_path / "slow", 12) as variables:
        job = nodes.submit(
            "--num_processes=2",
            "--spares=1",
            "--cpu_devices=2",
            "--sbatch=--nodes=3",
            "--sbatch=--exclude=h4,h5",
            command=toy(directory, *options),
            **variables,
        )
        harness.wait_until(lambda: log.exists() and "step  12/120" in log.read_text())
        # The script is on the first node.
        nodes.ask("scontrol", "update", "NodeName=h2", "State=DOWN", "Reason=lost")
        harness.wait_until(lambda: "goes on without it" in log.read_text())
        nodes.ask("scancel", "--signal=TERM", job)
        nodes.wait_for_requeue(job, nodes=4)
        nodes.ask("scontrol", "update", "NodeName=h2", "State=RESUME")
    nodes.wait_for(job)
    nodes.wait_for_nodes()
    harness.assert_same_end(directory, reference(tmp_path, 1, 4, *options), 120)
