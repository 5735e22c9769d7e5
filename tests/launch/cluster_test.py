"""Tests with real cluster launchers from Debian's packages: mpirun, and Slurm with one
node on loopback.
"""

import contextlib
import os
import pathlib
import signal
import sys

import numpy as np
import pytest

from tests import pace
from tests.launch import cluster, harness

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


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield cluster.on_loopback(stack, tmp_path_factory.mktemp("slurm"))


def command(directory, *options):
    return [*harness.TOY, f"--workdir={directory}", *OPTIONS, *options]


def submit(slurm, directory, *options, flags=(), **variables):
    return slurm.submit(
        f"--num_processes={COUNT}",
        "--cpu_devices=2",
        *flags,
        command=command(directory, *options),
        **variables,
    )


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
    cluster.need("mpirun")
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


@pytest.mark.sample(0.4)
def test_a_run_under_mpirun_goes_on_without_a_process(tmp_path):
    cluster.need("mpirun")
    options = [*harness.EXACT, "--config.steps=60", "--config.checkpoint.every_steps=3"]
    directory = tmp_path / "run"

    def start(variables):
        return harness.launch(
            "--engine=mpi",
            "--num_processes=2",
            "--spares=1",
            "--cpu_devices=1",
            f"--mpirun={MPIRUN}",
            command=[*options, f"--workdir={directory}"],
            env=harness.environment(**variables),
        )

    def disturb(process):
        os.kill(harness.status(directory)[0]["pid"], signal.SIGKILL)
        # First without it, then with the spare.
        harness.read_until(process, "generation 3: ")

    code, output = harness.run_disturbed(tmp_path, start, 60, disturb)
    assert code == 0, output
    words = [*options, f"--workdir={tmp_path / 'whole'}", "--cpu_devices=1"]
    code, output = harness.finish(harness.start(words))
    assert code == 0, output
    harness.assert_same_end(directory, tmp_path / "whole", 60)


@pytest.mark.sample(2, of="Slurm")
def test_slurm_requeues_a_stopped_job_which_ends_in_the_same_bits(
    tmp_path, reference, slurm
):
    directory = tmp_path / "run"
    with pace.slow(tmp_path / "slow", 20) as variables:
        job = submit(slurm, directory, **variables)
        harness.wait_until(lambda: "step  20/160" in read(directory / "launch.log"))
        # At the time limit, too, Slurm sends the signal to the processes and not to the
        # script.
        slurm.ask("scancel", "--signal=TERM", job)
        harness.wait_until(lambda: "Restarts=1" in slurm.show(job))
    slurm.wait_for_requeue(job)
    slurm.wait_for(job)
    assert "SIGTERM on process" in read(directory / "launch.log")
    assert "resumed from the checkpoint of step" in read(directory / "launch.log")
    harness.assert_same_end(directory, reference, 160)


@pytest.mark.sample(2, of="Slurm")
def test_slurm_lists_and_kills_a_job(tmp_path, slurm):
    directory = tmp_path / "run"
    job = submit(slurm, directory, "--config.steps=100000", flags=["--name=endless"])
    harness.wait_until(lambda: "20/100000" in read(directory / "launch.log"))
    output = slurm.launch("list", "--engine=slurm")
    assert "endless" in output and "RUNNING" in output
    slurm.launch("kill", "endless", "--engine=slurm")
    slurm.wait_for(job, "FAILED")
    shown = slurm.show(job)
    assert "ExitCode=42:0" in shown and "Restarts=0" in shown
    assert "stopped at step" in read(directory / "launch.log")


@pytest.mark.sample(2, of="Slurm")
def test_slurm_reports_a_failed_run(tmp_path, slurm):
    job = submit(slurm, tmp_path / "run", "--config.experiment=tests.toy.FailsOnOne")
    slurm.wait_for(job, "FAILED")
    assert "error: process 1 on" in read(tmp_path / "run" / "launch.log")


def test_an_elastic_job_runs_one_process_on_each_available_node(tmp_path, slurm):
    # The job asks for one to three nodes, and the cluster has one.
    show = (
        "from os import environ as e; "
        "print('tasks', e['SLURM_NTASKS'], e['SLURM_STEP_NUM_NODES'])"
    )
    job = slurm.submit(
        "--elastic=1:3",
        command=[sys.executable, "-c", show, f"--workdir={tmp_path / 'run'}"],
    )
    slurm.wait_for(job)
    assert read(tmp_path / "run" / "launch.log") == "tasks 1 1\n"


@pytest.mark.sample(2, of="Slurm")
def test_a_sweep_is_submitted_as_a_job_array(tmp_path, slurm):
    sweep = tmp_path / "sweep.py"
    sweep.write_text("def get_sweep(): return [{'seed': 0}, {'seed': 1}]")
    job = slurm.submit(
        "--cpu_devices=2",
        f"--sweep={sweep}",
        "--parallel=2",
        command=command(tmp_path / "runs"),
    )
    slurm.wait_for(job)
    assert [
        (tmp_path / "runs" / name / "results.json").exists() for name in ("000", "001")
    ] == [True] * 2


def read(path):
    return pathlib.Path(path).read_text() if pathlib.Path(path).exists() else ""
