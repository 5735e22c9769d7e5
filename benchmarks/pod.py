"""Disturbs pods on this machine, and times their starts: the long form of tests/launch.

    python -m benchmarks.pod --trials=20 --seed=0 --processes=4 --counts=2,4,8

A trial trains the toy experiment with `python -m launch`, and at a random instant sends
SIGTERM or SIGKILL to a random process. The launcher starts the pod again. Its final
state must equal an undisturbed run's, bit by bit. Measured is the time from the signal
to the end of the pod; after SIGTERM, until the last process has left with its state
saved.
"""

import os
import pathlib
import random
import signal
import statistics
import subprocess
import tempfile
import time

from absl import app, flags

from tests.launch import harness

_TRIALS = flags.DEFINE_integer(
    "trials", 20, "How often a process is ended by each signal.", 0
)
_SEED = flags.DEFINE_integer("seed", 0, "The seed of the instants.")
_PROCESSES = flags.DEFINE_integer("processes", 4, "Of a pod that is disturbed.", 2)
_COUNTS = flags.DEFINE_list("counts", ["2", "4", "8"], "The pods whose start is timed.")
_STEPS = 300
_OPTIONS = [
    f"--config.steps={_STEPS}",
    "--config.log_every_steps=10",
    "--config.eval_every_steps=25",
    "--config.checkpoint.every_steps=20",
    "--config.overflow_above=2.0",
]


def main(argv: list[str]) -> None:
    """Times the starts, and runs the trials."""
    del argv
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        for count in map(int, _COUNTS.value):
            seconds = [startup(scratch / f"start{count}-{i}", count) for i in range(3)]
            median = statistics.median(seconds)
            print(f"{count} processes: first step after {median:.1f} s", flush=True)
        if _TRIALS.value:
            undisturbed = scratch / "undisturbed"
            code, output = harness.finish(start(undisturbed, _PROCESSES.value))
            assert code == 0, output
            for number in (signal.SIGTERM, signal.SIGKILL):
                disturb(scratch, undisturbed, number)


def start(directory: pathlib.Path, count: int) -> "subprocess.Popen[str]":
    """Starts the pod of a run."""
    command = [*harness.TOY, f"--workdir={directory}", *_OPTIONS]
    return harness.launch(
        f"--num_processes={count}", "--cpu_devices=2", command=command
    )


def startup(directory: pathlib.Path, count: int) -> float:
    """Returns the seconds from the command to the first step's row."""
    begin = time.monotonic()
    command = [*harness.TOY, f"--workdir={directory}", "--config.log_every_steps=1"]
    process = harness.launch(
        f"--num_processes={count}", "--cpu_devices=1", command=command
    )
    with harness.running(process):
        harness.read_until(process, "step  1/12")
        seconds = time.monotonic() - begin
        # Nothing writes to the directory after that.
        code, output = harness.finish(process)
    assert code == 0, output
    return seconds


def disturb(
    scratch: pathlib.Path, undisturbed: pathlib.Path, number: signal.Signals
) -> None:
    """Runs the trials of one signal, and prints their results."""
    choose = random.Random(_SEED.value)
    seconds = []
    for trial in range(_TRIALS.value):
        directory = scratch / f"{number.name}{trial}"
        process = start(directory, _PROCESSES.value)
        with harness.running(process):
            harness.read_until(
                process, f"step {choose.randrange(1, _STEPS // 10 - 5) * 10:>3}/"
            )
            time.sleep(choose.random())
            pid = harness.status(directory)[choose.randrange(_PROCESSES.value)]["pid"]
            os.kill(pid, number)
            begin = time.monotonic()
            harness.read_until(process, "launch: ")
            seconds.append(time.monotonic() - begin)
            line = harness.read_until(process, "resumed from the checkpoint of step ")
            code, output = harness.finish(process)
        assert code == 0, output
        harness.assert_same_end(directory, undisturbed, _STEPS)
        print(
            f"{number.name} {trial}: left after {seconds[-1]:.1f} s; {line.strip()}",
            flush=True,
        )
    print(
        f"{number.name}: {_TRIALS.value} of {_TRIALS.value} ended in the bits of the "
        f"undisturbed run; left after {statistics.median(seconds):.1f} s (at most "
        f"{max(seconds):.1f})"
    )


if __name__ == "__main__":
    app.run(main)
