"""Helpers that the tests of pods and engines share."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

from tests import forks, pace, rows
from tests.checkpoint import harness as system

environment, free_port, FOREVER = system.environment, system.free_port, system.FOREVER

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# With these timeouts, no live process of a run counts as lost, however slow the machine
# is.
PATIENT = [
    f"--start_timeout_seconds={FOREVER}",
    f"--heartbeat_timeout_seconds={FOREVER}",
    f"--shutdown_timeout_seconds={FOREVER}",
]
# The replicas of 1 to 4 processes with two devices each divide both batch sizes.
TOY = [
    sys.executable,
    "-m",
    "xshard.main",
    "--config=tests/toy.py",
    "--config.batch_size=48",
    "--config.eval_batch_size=24",
    *PATIENT,
]

# Six logical replicas do not divide evenly among 8 devices or 4.
EXACT = [
    *TOY,
    "--config.logical_replicas=6",
    "--config.reduction.arithmetic=exact",
    "--config.log_every_steps=1",
]


def whole_run(tmp_path_factory, command):
    """Returns the work directory of a run of one process without interruptions."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    words = [*command, f"--workdir={directory}", "--cpu_devices=1"]
    code, output = finish(start(words))
    assert code == 0, output
    return directory


def start(command, env=None, **options):
    """Starts a program with its output in a pipe."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env or environment(),
        **options,
    )


def launch(*arguments, command=(), **options):
    """Starts the launcher with its output in a pipe."""
    words = [*arguments, "--", *command] if command else arguments
    options.setdefault("env", environment())
    return forks.program("launch", *words, **options)


def finish(process):
    """Waits for a process to end; returns its exit code and its output."""
    try:
        output = process.communicate(timeout=FOREVER)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(
            f"the process did not end within {FOREVER} s: {process.communicate()[0]}"
        ) from None
    return process.returncode, output


def read_until(process, text):
    """Reads the output of a process up to a line that contains a text; returns that
    line.
    """
    lines = []
    # The output ends with the process.
    timer = threading.Timer(FOREVER, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if text in line:
                return line
    finally:
        timer.cancel()
    raise AssertionError(
        f"{text!r} was not printed; exit code {process.wait()}: {''.join(lines)}"
    )


def wait_until(condition):
    """Polls a condition until it is true; returns its value."""
    end = time.monotonic() + FOREVER
    while not (value := condition()):
        assert time.monotonic() < end, (
            f"the condition did not become true within {FOREVER} s"
        )
        time.sleep(0.05)
    return value


@contextlib.contextmanager
def running(process):
    """Kills the process at the end of the context."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_disturbed(folder, start, steps, disturb):
    """Runs a run, which is slow from step 5 until it has been disturbed.

    Args:
      folder: a folder.
      start: starts the run, given the environment variables that it needs for that.
      steps: how many steps it makes.
      disturb: called with the process after step 5.

    Returns:
      The exit code, and the output from where `disturb` has read it.
    """
    with contextlib.ExitStack() as stack:
        with pace.slow(folder / "slow", 5) as variables:
            process = start(variables)
            stack.enter_context(running(process))
            read_until(process, f"step  5/{steps}")
            disturb(process)
        return finish(process)


def assert_same_end(directory, other, step):
    """Asserts that two runs have the same final arrays, logged rows and results, bit
    for bit.
    """
    left = system.read_all(directory, step)
    right = system.read_all(other, step)
    assert left.keys() == right.keys()
    assert [
        name for name in left if left[name].tobytes() != right[name].tobytes()
    ] == []
    assert rows.same_bits(directory) == rows.same_bits(other)
    assert rows.results(directory) == rows.results(other)


def kill_at(step, steps, folder, start):
    """Kills a run and its launcher after the run has logged a step.

    Args:
      step: the step.
      steps: the number of steps of the run.
      folder: the folder for the file of `tests.pace`.
      start: `start` or `launch`, with the command bound.
    """
    with pace.slow(folder / "slow", step) as variables:
        process = start(env=environment(**variables), start_new_session=True)
        with running(process):
            read_until(process, f"step {step:>{len(str(steps))}}/{steps}")
            os.killpg(process.pid, signal.SIGKILL)


def status(directory):
    """Returns the rows of a run's status, one for each process."""
    return json.loads((directory / "status.json").read_bytes())


def process_state(pid):
    """Returns the letter by which Linux calls a process's state: T if it is suspended,
    Z if it has ended and its parent has not asked about it; here also Z if it is gone.
    """
    try:
        line = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "Z"
    return line.rpartition(")")[2].split()[0]


def members(launcher):
    """Returns the process IDs of the processes that a launcher has started, itself or
    through other programs, by their number, and runs now; as Linux lists them.
    """
    pids = {}
    waiting = [launcher.pid]
    while waiting:
        children = pathlib.Path(f"/proc/{waiting.pop()}/task").glob("*/children")
        for file in children:
            with contextlib.suppress(OSError):
                waiting += map(int, file.read_text().split())
        for pid in waiting:
            with contextlib.suppress(OSError):
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                for word in words:
                    if word.startswith("--process_id="):
                        pids[int(word.partition("=")[2])] = pid
    return pids


def stand_in(tmp_path, name, program):
    """Creates a program that records each call in a file and runs `program`; returns a
    PATH that begins with it.
    """
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(
        f"#!{sys.executable}\nimport json, os, subprocess, sys\n"
        f"with open({str(tmp_path / 'calls')!r}, 'a') as file:\n"
        f"    print(json.dumps([{name!r}, *sys.argv[1:]]), file=file)\n{program}\n"
    )
    path.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def calls(tmp_path):
    """Returns the recorded calls of all stand-ins, each a list of the name and the
    arguments.
    """
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
