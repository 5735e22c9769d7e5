"""Tests with real cluster launchers from Debian's packages: mpirun, and Slurm with one
node on loopback.
"""

import contextlib
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests import pace
from tests.launch import harness

COUNT = 4
OPTIONS = [
    "--config.steps=160",
    "--config.log_every_steps=10",
    "--config.eval_every_steps=80",
    "--config.checkpoint.every_steps=80",
    "--config.overflow_above=2.0",
]
MPIRUN = (
    "--allow-run-as-root --oversubscribe --mca btl self,tcp "
    "--mca oob_tcp_if_include lo --mca btl_tcp_if_include lo"
)
IDLE = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
CONF = """\
ClusterName=xshard
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={state}/munge/socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={state}/state
SlurmdSpoolDir={state}/spool
SlurmctldPidFile={state}/controller.pid
SlurmdPidFile={state}/node.pid
SlurmctldLogFile={state}/controller.log
SlurmdLogFile={state}/node.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
FirstJobId={first}
BatchStartTimeout=600
MessageTimeout=600
TCPTimeout=600
ReturnToService=2
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=INFINITE State=UP \
  OverSubscribe=FORCE:4
"""


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


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A Slurm cluster of one node; the value is the environment variables that its
    clients need.
    """
    need("munged", "slurmctld", "slurmd", "sbatch")
    state = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool", "munge"):
        (state / name).mkdir()
    key = state / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    # munged requires that every user may traverse the path to its socket.
    for folder in (state / "munge", state, *list(state.parents)[:2]):
        folder.chmod(0o755)
    ports = [harness.free_port(), harness.free_port()]
    conf = state / "slurm.conf"
    # The port on which a job's processes meet is derived from the job's number, so
    # clusters start at random numbers.
    first = random.SystemRandom().randrange(1, 4000)
    values = {
        "host": socket.gethostname(),
        "ports": ports,
        "state": state,
        "first": first,
    }
    conf.write_text(CONF.format(user="root", **values))
    variables = {"SLURM_CONF": str(conf)}
    files = {
        "socket": "socket",
        "key-file": "key",
        "pid-file": "pid",
        "log-file": "log",
        "seed-file": "seed",
    }
    munge = [f"--{name}={state}/munge/{file}" for name, file in files.items()]
    commands = (
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    )
    with contextlib.ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.enter_context(harness.running(process))
            if command[0] == "munged":
                harness.wait_until((state / "munge" / "socket").exists)
        harness.wait_until(lambda: ask(variables, *IDLE) == "1")
        yield variables
        # Jobs that a test left running would outlive the cluster and occupy ports that
        # the next cluster needs.
        ask(variables, "scancel", "--me", "--full", "--signal=KILL")
        ask(variables, "scancel", "--me")
        harness.wait_until(lambda: ask(variables, "squeue", "--noheader") == "")


def ask(variables, *command):
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True
    ).stdout.strip()


def command(directory, *options):
    return [*harness.TOY, f"--workdir={directory}", *OPTIONS, *options]


def submit(directory, variables, *options, flags=()):
    process = harness.launch(
        "--engine=slurm",
        f"--num_processes={COUNT}",
        "--cpu_devices=2",
        *flags,
        command=command(directory, *options),
        env=harness.environment(**variables),
    )
    code, output = harness.finish(process)
    assert code == 0, output
    return re.search(r"Submitted batch job (\d+)", output)[1]


def wait_for(job, variables, state="COMPLETED"):
    """Waits until a job, or each task of a job array, is in a state, as Slurm says."""

    def states():
        shown = ask(variables, "scontrol", "--oneliner", "show", "job", job)
        reported = set(re.findall(r"JobState=(\w+)", shown))
        assert reported <= {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", state}, (
            shown
        )
        return reported == {state}

    harness.wait_until(states)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The work directory of the same run under the local engine."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    process = harness.launch(
        f"--num_processes={COUNT}", "--cpu_devices=2", command=command(directory)
    )
    code, output = harness.finish(process)
    assert code == 0, output
    return directory


@pytest.mark.sample(0.4)
def test_one_process_with_all_devices_ends_within_the_tolerance(tmp_path, reference):
    code, output = harness.finish(
        harness.launch("--cpu_devices=8", command=command(tmp_path / "run"))
    )
    assert code == 0, output
    left, right = (harness.final_state(d, 160) for d in (tmp_path / "run", reference))
    for name, array in left.items():
        # The bits differ, because gloo adds the replicas' gradients in another order
        # between processes.
        np.testing.assert_allclose(
            array, right[name], rtol=1e-4, atol=1e-6, err_msg=name
        )


@pytest.mark.sample(0.4)
def test_mpirun_ends_in_the_same_bits(tmp_path, reference):
    need("mpirun")
    process = harness.launch(
        "--engine=mpi",
        f"--num_processes={COUNT}",
        "--cpu_devices=2",
        f"--mpirun={MPIRUN}",
        command=command(tmp_path / "run"),
    )
    code, output = harness.finish(process)
    assert code == 0, output
    harness.assert_same_end(tmp_path / "run", reference, 160)


@pytest.mark.sample(2, of="Slurm")
def test_slurm_requeues_a_stopped_job_which_ends_in_the_same_bits(
    tmp_path, reference, slurm
):
    directory = tmp_path / "run"
    with pace.slow(tmp_path / "slow", 20) as variables:
        job = submit(directory, {**slurm, **variables})
        harness.wait_until(lambda: "step  20/160" in read(directory / "launch.log"))
        # At the time limit, too, Slurm sends the signal to the processes and not to the
        # script.
        ask(slurm, "scancel", "--signal=TERM", job)
        harness.wait_until(
            lambda: "Restarts=1" in ask(slurm, "scontrol", "show", "job", job)
        )
    harness.wait_until(
        lambda: "JobState=PENDING" in ask(slurm, "scontrol", "show", "job", job)
    )
    # Slurm waits two minutes by default. It cannot start the job at once, because the
    # node still cleans up.
    harness.wait_until(lambda: ask(slurm, *IDLE) == "1")
    ask(slurm, "scontrol", "update", f"JobId={job}", "StartTime=now+8")
    wait_for(job, slurm)
    assert "SIGTERM on process" in read(directory / "launch.log")
    assert "resumed from the checkpoint of step" in read(directory / "launch.log")
    harness.assert_same_end(directory, reference, 160)


@pytest.mark.sample(2, of="Slurm")
def test_slurm_lists_and_kills_a_job(tmp_path, slurm):
    directory = tmp_path / "run"
    job = submit(directory, slurm, "--config.steps=100000", flags=["--name=endless"])
    harness.wait_until(lambda: "20/100000" in read(directory / "launch.log"))
    code, output = harness.finish(
        harness.launch("list", "--engine=slurm", env=harness.environment(**slurm))
    )
    assert code == 0 and "endless" in output and "RUNNING" in output
    code, output = harness.finish(
        harness.launch(
            "kill", "endless", "--engine=slurm", env=harness.environment(**slurm)
        )
    )
    assert code == 0, output
    wait_for(job, slurm, "FAILED")
    shown = ask(slurm, "scontrol", "show", "job", job)
    assert "ExitCode=42:0" in shown and "Restarts=0" in shown
    assert "stopped at step" in read(directory / "launch.log")


@pytest.mark.sample(2, of="Slurm")
def test_slurm_reports_a_failed_run(tmp_path, slurm):
    job = submit(tmp_path / "run", slurm, "--config.experiment=tests.toy.FailsOnOne")
    wait_for(job, slurm, "FAILED")
    assert "error: process 1 on" in read(tmp_path / "run" / "launch.log")


def test_an_elastic_job_runs_one_process_on_each_available_node(tmp_path, slurm):
    # The job asks for one to three nodes, and the cluster has one.
    show = (
        "from os import environ as e; "
        "print('tasks', e['SLURM_NTASKS'], e['SLURM_STEP_NUM_NODES'])"
    )
    process = harness.launch(
        "--engine=slurm",
        "--elastic=1:3",
        command=[sys.executable, "-c", show, f"--workdir={tmp_path / 'run'}"],
        env=harness.environment(**slurm),
    )
    code, output = harness.finish(process)
    assert code == 0, output
    wait_for(re.search(r"Submitted batch job (\d+)", output)[1], slurm)
    assert read(tmp_path / "run" / "launch.log") == "tasks 1 1\n"


@pytest.mark.sample(2, of="Slurm")
def test_a_sweep_is_submitted_as_a_job_array(tmp_path, slurm):
    sweep = tmp_path / "sweep.py"
    sweep.write_text("def get_sweep(): return [{'seed': 0}, {'seed': 1}]")
    process = harness.launch(
        "--engine=slurm",
        "--cpu_devices=2",
        f"--sweep={sweep}",
        "--parallel=2",
        command=command(tmp_path / "runs"),
        env=harness.environment(**slurm),
    )
    code, output = harness.finish(process)
    assert code == 0, output
    wait_for(re.search(r"Submitted batch job (\d+)", output)[1], slurm)
    assert [
        (tmp_path / "runs" / name / "results.json").exists() for name in ("000", "001")
    ] == [True] * 2


def read(path):
    return pathlib.Path(path).read_text() if pathlib.Path(path).exists() else ""
