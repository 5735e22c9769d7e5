"""What the tests of pods and engines share."""

import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np

from tests import pace, rows
from tests.checkpoint import harness as system
from xshard.checkpoint import __main__ as tool

environment, free_port, FOREVER = system.environment, system.free_port, system.FOREVER

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# The same, for a run: where nobody is to be missed nobody is to seem lost.
PATIENT = [
    f"--start_timeout_seconds={FOREVER}", f"--heartbeat_timeout_seconds={FOREVER}",
    f"--shutdown_timeout_seconds={FOREVER}",
]  # fmt: skip
# Divided by the replicas of 1 to 4 processes of two devices each.
TOY = [
    sys.executable, "-m", "xshard.main", "--config=tests/toy.py", "--config.batch_size=48",
    "--config.eval_batch_size=24", *PATIENT,
]  # fmt: skip


def start(command, env=None, **options):
    """Starts a program; its output is a pipe."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env or environment(),
        **options,
    )


def launch(*arguments, command=(), **options):
    """Starts the launcher; its output is a pipe."""
    words = [*arguments, "--", *command] if command else arguments
    return start([sys.executable, "-m", "launch", *map(str, words)], **options)


def finish(process):
    """The exit code and what was printed."""
    try:
        output = process.communicate(timeout=FOREVER)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"not ended after {FOREVER} s: {process.communicate()[0]}") from None
    return process.returncode, output


def read_until(process, text):
    """Reads what it prints up to a line with this text; that line."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} was not printed; exit code {process.wait()}: {''.join(lines)}")


def wait_until(condition):
    """Waits for something that has no event to wait for."""
    end = time.monotonic() + FOREVER
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {FOREVER} s"
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def running(process):
    """Does not leave it behind."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def final_state(directory, step):
    """The arrays of a checkpoint, by name."""
    file = pathlib.Path(directory) / "final.npz"
    file.unlink(missing_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):
        arguments = ["export", str(pathlib.Path(directory) / "checkpoints"), str(step), str(file)]
        assert tool.main(arguments) == 0
    with np.load(file) as arrays:
        return dict(arrays)


def assert_same_end(directory, other, step):
    left, right = final_state(directory, step), final_state(other, step)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []
    assert rows.same_bits(directory) == rows.same_bits(other)
    assert rows.results(directory) == rows.results(other)


def kill_at(step, steps, folder, start):
    """Kills a run, and its launcher, when it has logged a step.

    Args:
      step: the step.
      steps: of the run.
      folder: where there may be a file for `tests.pace`.
      start: `start` or `launch` with a command.
    """
    with pace.slow(folder / "slow", step) as variables:
        process = start(env=environment(**variables), start_new_session=True)
        with running(process):
            read_until(process, f"step {step:>{len(str(steps))}}/{steps}")
            os.killpg(process.pid, signal.SIGKILL)


def status(directory):
    return json.loads((directory / "status.json").read_bytes())


def stand_in(tmp_path, name, program):
    """A program of this name on PATH: records its arguments, a line each time, and runs `program`."""
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
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
