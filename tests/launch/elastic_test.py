"""Tests of `--elastic`: its values, its refusals, and pods that lose hosts.
trajectory_test.py compares the bits.
"""

import dataclasses
import io
import json
import os
import subprocess
import sys
import tempfile

import pytest

from launch import elastic, engine, gke, local, mpi, processes, slurm, sweep
from tests.launch import harness

# ml_collections emits this warning when it reads the config of a job.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

LOGICAL = "--config.logical_replicas=6"
EXACT = "--config.reduction.arithmetic=exact"


def toy(tmp_path, *options):
    command = (*harness.TOY, f"--workdir={tmp_path / 'run'}", *options)
    return engine.Job("job", command, 4, least=2)


@pytest.mark.parametrize(
    ("text", "hosts"), [("2:4", (2, 4)), ("1:1", (1, 1)), ("08:16", (8, 16))]
)
def test_a_range_of_hosts_is_parsed(text, hosts):
    assert elastic.parse(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "3", "4:2", "0:2", "-1:2", "a:b", "1:2:3", "1.5:2", " 1:2"]
)
def test_a_malformed_range_of_hosts_is_refused(text):
    with pytest.raises(
        engine.LaunchError, match=f"--elastic={text} must be MIN:MAX.*1 <= MIN <= M"
    ):
        elastic.parse(text)


def test_a_run_whose_trajectory_depends_on_its_hosts_is_refused(tmp_path):
    with pytest.raises(
        engine.LaunchError, match="--elastic=2:4 is for .* has logical_replicas=0: a"
    ):
        elastic.check([toy(tmp_path)])
    points = [{"seed": 0}, {"logical_replicas": 0}]
    with pytest.raises(
        engine.LaunchError, match="the config of job-001 has logical_replicas=0"
    ):
        elastic.check(sweep.jobs(toy(tmp_path, LOGICAL, EXACT), points))


def test_a_refused_run_starts_nothing(tmp_path):
    code, output = harness.finish(
        harness.launch("--elastic=1:2", command=toy(tmp_path).command)
    )
    assert code == 1 and output.startswith(
        "error: --elastic=1:2 is for runs whose trajectory"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ((LOGICAL, EXACT), ""),
        ((LOGICAL,), "rounding depends on the number of hosts"),
        (("--config.no_such_key=1",), "the config of the command cannot be read here"),
    ],
)
def test_a_weaker_guarantee_causes_a_warning(tmp_path, capsys, options, warning):
    elastic.check([toy(tmp_path, *options)])
    out = capsys.readouterr().err
    assert (
        out.startswith("launch: warning: --elastic: ") and warning in out
        if warning
        else not out
    )


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"spares": 5}, (LOGICAL, EXACT), "--spares=5: there are 4 processes.*at most"),
        ({"least": 2}, (LOGICAL, EXACT), "--spares=1 keeps .* which --elastic=2:4 ch"),
        ({}, (LOGICAL,), "the config of job needs .*reduction.arithmetic=exact"),
        ({}, (), "the config of job needs --config.logical_replicas=N"),
    ],
)
def test_spares_that_do_not_fit_are_refused(tmp_path, changes, options, message):
    job = dataclasses.replace(toy(tmp_path, *options), least=0, spares=1)
    with pytest.raises(engine.LaunchError, match=message):
        elastic.check_spares([dataclasses.replace(job, **changes)], local.Local())


def test_spares_are_refused_where_the_system_starts_a_run_again(tmp_path):
    job = dataclasses.replace(toy(tmp_path, LOGICAL, EXACT), least=0, spares=0)
    for chosen in (local.Local(), slurm.Slurm(), mpi.Mpi()):
        elastic.check_spares([job], chosen)
    with pytest.raises(engine.LaunchError, match="for --engine=local, slurm and mpi"):
        elastic.check_spares([job], gke.Gke())


def test_a_way_to_other_hosts_without_spares_is_refused(tmp_path):
    code, output = harness.finish(
        harness.launch("--through=srun", command=toy(tmp_path).command)
    )
    assert code == 1 and "error: --through=srun is for --spares=K" in output


def test_a_plan_shows_how_processes_come_to_other_hosts(tmp_path):
    job = dataclasses.replace(toy(tmp_path, LOGICAL, EXACT), least=0, spares=1)
    first, *others = local.Local(through="srun --ntasks=5").launch([job]).commands
    assert first[:2] == ["srun", "--ntasks=5"] and first[-2:] == [
        "launch.hosts",
        "ADDRESS",
    ]
    assert len(others) == 5


def test_a_plan_shows_the_members_and_who_joins(tmp_path):
    job = dataclasses.replace(toy(tmp_path, LOGICAL, EXACT), least=0, spares=1)
    commands = local.Local().launch([job]).commands
    assert len(commands) == 5
    for number, command in enumerate(commands):
        assert f"--process_id={number}" in command
        assert "--meeting_address=127.0.0.1:PORT" in command
        assert ("--joins=true" in command) == (number == 4)


# The local engine, with a small program in place of a run.

# The first argument gives the end of each process, by the number of processes and the
# index: an exit code or a negative signal. If it lists any end for this number of
# processes, the others sleep, as a run's processes wait for a lost peer. Those that end
# by a signal do so together, whatever the launcher sends when the first is gone.
PROGRAM = """
import json, os, pathlib, signal, sys, time
values = dict(a[2:].split("=", 1) for a in sys.argv[2:])
index, count = values.get("process_id", "0"), values.get("num_processes", "1")
print("here", index, "of", count, flush=True)
ends = json.loads(sys.argv[1]).get(count, {})
end = ends.get(index, 0)
if end < 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if end != -15 else signal.SIG_DFL)
    folder = pathlib.Path(os.environ["XSHARD_TEST_FOLDER"], count)
    folder.mkdir(exist_ok=True)
    (folder / index).touch()
    while len(list(folder.iterdir())) < sum(other < 0 for other in ends.values()):
        time.sleep(0.01)
    os.kill(os.getpid(), -end)
if ends and not end:
    time.sleep(600)
sys.exit(end)
"""


def run(tmp_path, monkeypatch, ends, processes, least, settle=0.1):
    """Runs a pod that the launcher gives up after one failure; returns the exit code
    and the output.
    """
    monkeypatch.setenv("XSHARD_TEST_FOLDER", tempfile.mkdtemp(dir=tmp_path))
    monkeypatch.setattr(local, "_SIGTERM_SECONDS", settle)
    monkeypatch.setattr(local, "_EXIT_SECONDS", settle)
    command = (sys.executable, "-c", PROGRAM, json.dumps(ends), f"--workdir={tmp_path}")
    job, out = engine.Job("job", command, processes, least=least), io.StringIO()
    code = local.Supervisor(job, local.Local(1), out).run()
    return code, out.getvalue()


def test_a_pod_continues_on_the_remaining_hosts_down_to_the_minimum(
    tmp_path, monkeypatch
):
    ends = {4: {1: -9}, 3: {2: -9}}
    code, output = run(tmp_path, monkeypatch, ends, 4, 2)
    # The launcher itself killed the other processes, so they do not count as lost
    # hosts.
    assert (
        code == 0
        and "process 1 of 4 was ended by SIGKILL; 3 of 4 hosts are left" in output
    )
    assert (
        "2 of 3 hosts are left: starting it again" in output and "here 1 of 2" in output
    )
    code, output = run(tmp_path, monkeypatch, ends, 4, 3)
    assert code == 137 and output.splitlines()[-1].startswith(
        "launch: process 2 of 3 was ended by SIGKILL; not started again: 2 of 3 hosts "
        "are left, but --elastic=3:4 requires at least 3"
    )


def test_a_pod_of_two_continues_with_one_host_but_not_with_none(tmp_path, monkeypatch):
    code, output = run(tmp_path, monkeypatch, {2: {0: -9}}, 2, 1)
    assert code == 0 and "here 0 of 1" in output
    both = {2: {0: -9, 1: -9}}
    code, output = run(tmp_path, monkeypatch, both, 2, 1, settle=harness.FOREVER)
    assert (
        code == 137
        and "0 of 2 hosts are left, but --elastic=1:2 requires at least 1" in output
    )


@pytest.mark.parametrize("end", [1, -6, -11, -15])
def test_a_failed_or_terminated_process_is_not_a_lost_host(tmp_path, monkeypatch, end):
    code, output = run(tmp_path, monkeypatch, {2: {1: end}}, 2, 1)
    assert code == (1 if end == 1 else 128 - end)
    assert "giving up after failure 1" in output and "hosts are left" not in output


def test_a_killed_process_is_a_failure_if_the_pod_is_not_elastic(tmp_path, monkeypatch):
    code, output = run(tmp_path, monkeypatch, {2: {1: -9}}, 2, 0)
    assert code == 137 and "giving up after failure 1" in output


@pytest.mark.parametrize("least", [0, 1])
def test_a_process_that_cannot_be_started_counts_as_a_lost_host(
    tmp_path, monkeypatch, least
):
    start, started = processes._start, []

    def limited(command, token, at_end):
        if "--num_processes=3" in command and len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(start(command, token, at_end))
        return started[-1]

    monkeypatch.setattr(processes, "_start", limited)
    code, output = run(tmp_path, monkeypatch, {3: {0: 0}}, 3, least)
    cause = "process 2 of 3 cannot be started: Resource temporarily unavailable"
    if least:
        assert (
            code == 0
            and f"{cause}; 2 of 3 hosts are left" in output
            and "1 of 2" in output
        )
    else:
        assert (
            code == 1
            and f"giving up after failure 1 without a new step: {cause}" in output
        )
    assert None not in [process.poll() for process in started]


# Slurm. cluster_test.py tests these options on a real cluster.


def test_slurm_runs_one_process_on_each_allocated_node(tmp_path):
    (tmp_path / "run").mkdir()
    plan = slurm.Slurm().launch([toy(tmp_path)])
    (content,) = plan.files.values()
    # With a number of tasks Slurm would allocate two nodes, however many are idle.
    assert (
        "#SBATCH --nodes=2-4\n" in content
        and "--ntasks" not in content.partition("cd ")[0]
    )
    path = harness.stand_in(tmp_path, "srun", "")
    for nodes in ("3", "2"):
        # The second number is smaller, as after a requeue on the remaining nodes.
        environment = {**os.environ, "PATH": path, "SLURM_NNODES": nodes}
        subprocess.run(
            ["bash", "-u"], input=content, text=True, check=True, env=environment
        )
    one_each = "--ntasks-per-node=1"
    assert [call[2:4] for call in harness.calls(tmp_path)] == [
        ["--ntasks=3", one_each],
        ["--ntasks=2", one_each],
    ]


@pytest.mark.parametrize("option", ["--nodes=4", "--ntasks=4", "--ntasks-per-node=2"])
def test_slurm_refuses_a_second_size(tmp_path, option):
    with pytest.raises(
        engine.LaunchError,
        match=f"--nodes=2-4 .*--sbatch={option} asks for another size",
    ):
        slurm.Slurm(sbatch=(option,)).launch([toy(tmp_path)])
