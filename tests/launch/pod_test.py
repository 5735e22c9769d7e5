"""Tests of runs of several processes on this machine: they stop and fail together, and
resume to the same bits.
"""

import contextlib
import gzip
import json
import os
import random
import re
import signal
import socket

import numpy as np
import pytest

from tests import guests, pace, rows
from tests.launch import harness
from xshard.pod import status

COUNT = 3
# The run is long enough for a test to interrupt it.
OPTIONS = [
    "--config.steps=100",
    "--config.log_every_steps=5",
    "--config.eval_every_steps=25",
    "--config.checkpoint.every_steps=20",
    "--config.overflow_above=2.0",
]


def start(directory, *options, count=COUNT, flags=(), devices=2, **variables):
    command = [*harness.TOY, f"--workdir={directory}", *OPTIONS, *options]
    return harness.launch(
        f"--num_processes={count}",
        f"--cpu_devices={devices}",
        *flags,
        command=command,
        env=harness.environment(**variables),
    )


@contextlib.contextmanager
def slowed(tmp_path, *options):
    """Yields the launcher of a run that has logged a step and is slow from step 15 on
    until the context ends.
    """
    with pace.slow(tmp_path / "slow", 15) as variables:
        process = start(tmp_path / "run", *options, **variables)
        harness.read_until(process, "/100 ")
        yield process


def pid_of(directory, index):
    return harness.status(directory)[index]["pid"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    code, output = harness.finish(start(directory))
    assert code == 0, output
    return directory


@pytest.mark.sample(0.4)
def test_an_uninterrupted_pod_ends_with_status_and_logs(uninterrupted):
    rows = harness.status(uninterrupted)
    assert [(row["doing"], row["step"]) for row in rows] == [("done", 100)] * COUNT
    # Process 0 prints for all. The output of the others is in their log files.
    for index in range(1, COUNT):
        assert (
            "step 100/100"
            in (uninterrupted / "logs" / f"process_{index}.log").read_text()
        )


@pytest.mark.sample(3, of="ends")
def test_sigterm_stops_all_processes_at_one_step_and_sigkill_ends_all(
    tmp_path, uninterrupted
):
    index = random.Random(0).randrange(1, COUNT)
    with slowed(tmp_path) as process:
        os.kill(pid_of(tmp_path / "run", 1), signal.SIGTERM)
        line = harness.read_until(process, "stopped at step")
        assert line.startswith("[0] SIGTERM on process 1 on ")
        assert "starting it again" in harness.read_until(process, "launch: ")
        step = line.split("stopped at step ")[1].split(",")[0]
        harness.read_until(process, f"resumed from the checkpoint of step {step}")
        harness.read_until(process, "/100 ")
        os.kill(pid_of(tmp_path / "run", index), signal.SIGKILL)
        line = harness.read_until(process, "launch: ")
    assert (
        f"process {index} of 3 was ended by SIGKILL" in line
        and "failure 1 of 3" in line
    )
    code, output = harness.finish(process)
    assert code == 0 and "resumed from the checkpoint of step" in output
    harness.assert_same_end(tmp_path / "run", uninterrupted, 100)


@pytest.mark.sample(3, of="ends")
def test_a_file_makes_all_processes_trace_the_same_steps(tmp_path, uninterrupted):
    file = tmp_path / "run" / "PROFILE"
    with slowed(tmp_path, "--config.steps_per_dispatch=1") as process:
        file.write_text("2")
        line = harness.read_until(process, "traced steps")
        assert f"on {COUNT} processes: " in line and not file.exists()
    code, output = harness.finish(process)
    assert code == 0, output
    (folder,) = tmp_path.glob("run/profile/plugins/profile/*")
    steps = []
    for index in range(COUNT):
        with gzip.open(folder / f"process_{index}.trace.json.gz") as trace:
            events = json.load(trace)["traceEvents"]
        named = [event for event in events if event.get("name") == "train"]
        steps.append({int(event["args"]["step_num"]) for event in named})
    first = min(steps[0])
    assert steps == [{first, first + 1}] * COUNT
    assert folder.name == f"steps_{first}_to_{first + 1}"
    assert not list(folder.glob("../../../.*"))
    harness.assert_same_end(tmp_path / "run", uninterrupted, 100)


SHARDED = [
    "--config.experiment=tests.toy.Wide",
    "--config.hidden=20",
    "--config.slices=2",
    "--config.reduction.shard_update=True",
    "--config.reduction.slice_dtype=bfloat16",
]


@pytest.mark.sample(1, of="pods")
def test_a_pod_with_a_sharded_update_and_slices_resumes_to_the_same_bits(tmp_path):
    uninterrupted = tmp_path / "uninterrupted"
    code, output = harness.finish(start(uninterrupted, *SHARDED))
    assert code == 0, output
    with slowed(tmp_path, *SHARDED) as process:
        os.kill(pid_of(tmp_path / "run", 2), signal.SIGHUP)
        line = harness.read_until(process, "stopped at step")
    assert line.startswith("[0] SIGHUP on process 2 on ")
    code, output = harness.finish(process)
    assert code == 0 and "resumed from the checkpoint of step" in output
    harness.assert_same_end(tmp_path / "run", uninterrupted, 100)


def shows_token(port, token):
    """Returns whether process 0, which waits for the others on this port, accepts a
    token and shows that it knows it, too.
    """
    with guests.OPEN, socket.create_connection(("127.0.0.1", port)) as sock:
        return guests.Stranger(sock, token).show_token()


def test_a_waiting_process_checks_the_token_and_handles_signals(tmp_path):
    port = harness.free_port()
    pod_flags = [
        f"--coordinator_address=127.0.0.1:{port}",
        "--num_processes=2",
        "--process_id=0",
    ]
    environment = harness.environment(XSHARD_LAUNCH_TOKEN="of the launch")
    command = [*harness.TOY, *pod_flags, f"--workdir={tmp_path / 'run'}"]
    with harness.running(harness.start(command, environment)) as process:

        def is_waiting():
            assert process.poll() is None
            with contextlib.suppress(ConnectionRefusedError):
                return shows_token(port, "of the launch")
            return False

        harness.wait_until(is_waiting)
        assert not shows_token(port, "of another") and not shows_token(port, "")
        process.send_signal(signal.SIGUSR1)
        code, output = harness.finish(process)
    assert code == 42 and "SIGUSR1 on process 0 on" in output
    assert "nothing was trained" in output and not (tmp_path / "run").exists()


@pytest.mark.sample(3, of="ends")
def test_the_other_processes_report_the_loss_of_process_0(tmp_path):
    address = f"127.0.0.1:{harness.free_port()}"
    pod_flags = [
        f"--coordinator_address={address}",
        f"--num_processes={COUNT}",
        "--cpu_devices=2",
    ]
    command = [*harness.TOY, *OPTIONS, "--config.steps=1000000", *pod_flags]
    directory = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                harness.running(
                    harness.start(
                        [*command, f"--workdir={directory}", f"--process_id={index}"]
                    )
                )
            )
            for index in range(COUNT)
        ]
        harness.read_until(processes[0], "step      30/1000000")
        processes[0].kill()
        for process in processes[1:]:
            code, output = harness.finish(process)
            message = r"^error: process 0 on \S+, which coordinates, cannot be reached"
            assert code == 1 and re.search(message, output, re.MULTILINE), output


@pytest.mark.sample(3, of="ends")
def test_stopping_the_launcher_saves_the_run_and_prevents_a_restart(
    tmp_path, uninterrupted
):
    directory = tmp_path / "run"
    for numbers, expected in (
        ((signal.SIGTERM, signal.SIGTERM), 42),
        ((signal.SIGINT,), 130),
    ):
        with slowed(tmp_path) as process:
            for number in numbers:
                process.send_signal(number)
            code, output = harness.finish(process)
        assert code == expected, output
        assert "stopped at step" in output and "launch:" not in output
    with slowed(tmp_path) as process:
        process.kill()
        process.stdout.close()
        process.wait()
        # The processes save and stop although nobody reads their output.
        harness.wait_until(
            lambda: all(map(status.has_ended, harness.status(directory)))
        )
    with slowed(tmp_path) as process:
        (directory / "STOP").touch()
        code, output = harness.finish(process)
    assert code == 42 and f"not started again: {directory / 'STOP'} exists" in output
    # The run does not continue until the file is removed.
    code, output = harness.finish(start(directory))
    assert code == 42 and "stopped before the first step" in output
    (directory / "STOP").unlink()
    code, output = harness.finish(start(directory))
    assert code == 0 and "resumed from the checkpoint" in output, output
    harness.assert_same_end(directory, uninterrupted, 100)


@pytest.mark.sample(3, of="ends")
def test_a_failure_on_one_process_ends_all_and_is_reported_last(tmp_path):
    process = start(
        tmp_path / "run",
        "--config.experiment=tests.toy.FailsOnOne",
        flags=["--max_failures=1"],
    )
    code, output = harness.finish(process)
    assert code == 1, output
    last = output.strip().splitlines()[-1]
    assert last.startswith("launch: giving up after failure 1")
    assert "error: process 1 on" in last and "no data on process 1" in last


@pytest.mark.sample(3, of="ends")
@pytest.mark.parametrize(
    "options, where",
    [
        # First, process 0 has the only NaN example. Second, process 1 has it, and
        # process 0 has only the other group.
        (["--config.poisoned=((0,31),)"], ""),
        (
            ["--config.poisoned=((1,31),)", "--config.group_assignment=((0,1),(2,3))"],
            "in group 1 of 2 ",
        ),
    ],
    ids=["one replica", "one group"],
)
def test_a_nonfinite_step_on_one_process_ends_all_without_a_restart(
    tmp_path, options, where
):
    experiment = [
        "--config.experiment=tests.toy.Poisoned",
        "--config.overflow_above=1e9",
    ]
    code, output = harness.finish(
        start(tmp_path / "run", *experiment, *options, count=2)
    )
    assert code == 3, output
    assert f"[0] error: step 31: {where}the loss is nan" in output
    assert "newest finite checkpoint is step 20" in output
    assert output.strip().splitlines()[-1].startswith("launch: not started again")
    doing = [row["doing"] for row in harness.status(tmp_path / "run")]
    assert doing == ["failed: not finite"] * 2
    log = (tmp_path / "run/logs/process_1.log").read_text()
    assert f"error: step 31: {where}the loss is nan" in log
    shown = harness.finish(harness.launch("status", tmp_path / "run"))[1]
    assert f"not finite: step 31: {where}the loss is nan" in shown


@pytest.mark.sample(0.4)
def test_two_processes_roll_back_even_if_one_is_killed_meanwhile(tmp_path):
    options = [
        "--config.experiment=tests.toy.Lowered",
        "--config.overflow_above=1e9",
        "--config.roll_back.learning_rate_factor=0.5",
        "--config.poisoned=((0,31),)",
        "--config.on_nonfinite=roll_back",
        "--config.steps=50",
    ]
    code, output = harness.finish(start(tmp_path / "whole", *options, count=2))
    assert code == 0, output
    message = "rolled back to step 20, skipping batches 21 to 31 of the data"
    assert message in output and (tmp_path / "whole/roll_backs.json").exists()
    scales = {
        row["step"]: row["update_scale"]
        for row in rows.read(tmp_path / "whole")
        if "loss" in row
    }
    assert scales == {step: 1.0 if step <= 20 else 0.5 for step in range(5, 51, 5)}
    with pace.slow(tmp_path / "slow", 31) as variables:
        process = start(tmp_path / "run", *options, count=2, **variables)
        harness.read_until(process, message)
        os.kill(pid_of(tmp_path / "run", 1), signal.SIGKILL)
        harness.read_until(process, "resumed from the checkpoint of step 20")
    code, output = harness.finish(process)
    assert code == 0, output
    harness.assert_same_end(tmp_path / "run", tmp_path / "whole", 50)


def test_different_data_on_one_process_is_refused_before_its_use(tmp_path):
    options = ("--config.experiment=tests.toy.Uneven",)
    code, output = harness.finish(
        start(tmp_path / "run", *options, flags=["--max_failures=1"])
    )
    assert code == 1 and "the data: evaluation differs between the processes" in output
    assert re.search(
        r"Process 0: 10 examples.*; process 1: 9 examples, .*same files", output
    )
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.sample(3, of="ends")
def test_all_processes_save_when_the_time_for_a_save_has_come(tmp_path):
    process = start(
        tmp_path / "run",
        "--config.steps=100000",
        "--config.checkpoint.every_steps=100000",
        "--config.checkpoint.every_minutes=0.02",
        "--config.eval_every_steps=100000",
    )
    with harness.running(process):
        checkpoints = tmp_path / "run" / "checkpoints"
        harness.wait_until(lambda: len(list(checkpoints.glob("*/COMMIT"))) > 1)


@pytest.mark.sample(1, of="pods")
def test_a_killed_pod_stops_early_and_samples_as_if_uninterrupted(tmp_path):
    options = [
        "--config.experiment=tests.stopping.Showing",
        "--config.steps=60",
        "--config.eval_every_steps=10",
        "--config.samples_every_steps=10",
        "--config.checkpoint.every_steps=15",
        "--config.examples=100",
        "--config.overflow_above=1e9",
    ]
    code, output = harness.finish(start(tmp_path / "whole", *options, count=2))
    assert code == 0, output
    ended = rows.results(tmp_path / "whole")
    assert (
        "error has not improved in 2 evaluations" in ended["ended"]
        and ended["step"] < 60
    )
    with pace.slow(tmp_path / "slow", 12) as variables:
        process = start(tmp_path / "run", *options, count=2, **variables)
        harness.read_until(process, "step 15: saved")
        os.kill(pid_of(tmp_path / "run", 1), signal.SIGKILL)
        harness.read_until(process, "again at once")
    code, output = harness.finish(process)
    assert code == 0, output
    assert rows.results(tmp_path / "run") == ended
    assert rows.same_bits(tmp_path / "run") == rows.same_bits(tmp_path / "whole")
    shown = [
        (tmp_path / name / "samples.jsonl").read_text() for name in ("run", "whole")
    ]
    assert shown[0] == shown[1] and shown[0].count("\n") == ended["step"] // 10
    # Another start has nothing to train, and both processes learn that.
    code, output = harness.finish(start(tmp_path / "run", *options, count=2))
    assert (
        code == 0
        and f"nothing to train: the run has ended at step {ended['step']}" in output
    )
    assert rows.results(tmp_path / "run") == ended


@pytest.mark.sample(1, of="pods")
def test_groups_with_sharded_parameters_run_on_several_processes(tmp_path):
    """A pod that shards the parameters of two learners ends close to one process that
    does not shard them.
    """
    options = [
        "--config.experiment=tests.turns.Turns",
        "--config.hidden=1024",
        "--config.steps=30",
        "--config.group_assignment=((0,1,2,3),(4,5,6,7))",
    ]
    sharding = "--config.reduction.shard_params=True"
    code, output = harness.finish(start(tmp_path / "pod", *options, sharding, count=4))
    assert code == 0, output
    code, output = harness.finish(start(tmp_path / "one", *options, count=1, devices=8))
    assert code == 0, output
    left, right = (
        harness.final_state(tmp_path / "pod", 30),
        harness.final_state(tmp_path / "one", 30),
    )
    for name, array in left.items():
        # The float32 sums over replicas have another order.
        np.testing.assert_allclose(
            array, right[name], rtol=1e-4, atol=1e-6, err_msg=name
        )
    rows = [
        json.loads(line)
        for line in (tmp_path / "pod" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [row["guess/loss"] for row in rows if "guess/loss" in row]
    assert losses and all(len(loss) == 2 for loss in losses)
