"""Kills runs with exact sums at random steps, resumes them on other numbers of
processes and devices, and compares.

    python -m benchmarks.trajectory [--schedules=200] [--seed=0]

Each schedule is 2 to 6 starts of the toy experiment, in float16 with steps that the
loss scale skips. Its arrays, rows and results must equal an undisturbed run's on one
device, bit by bit. Exit code 1: a schedule differed.
"""

import functools
import pathlib
import random
import tempfile

from absl import app, flags

from tests.launch import harness

_SCHEDULES = flags.DEFINE_integer("schedules", 200, "How many.", 1)
_SEED = flags.DEFINE_integer("seed", 0, "Of what is drawn.")

_STEPS = 40
_COMMAND = [
    *harness.TOY,
    f"--config.steps={_STEPS}",
    "--config.logical_replicas=6",
    "--config.reduction.arithmetic=exact",
    "--config.precision=params=float32,compute=float16,output=float32",
    "--config.overflow_above=1.98",
    "--config.log_every_steps=1",
]
# The numbers of processes, and of devices per process.
_SIZES = [
    (1, 1),
    (1, 2),
    (1, 3),
    (1, 5),
    (1, 6),
    (1, 8),
    (2, 1),
    (2, 2),
    (2, 3),
    (3, 1),
    (3, 2),
    (4, 1),
]


def start(directory: pathlib.Path, processes: int, devices: int) -> functools.partial:
    """Returns the function that starts a run."""
    command = [*_COMMAND, f"--workdir={directory}"]
    if processes == 1:
        return functools.partial(harness.start, [*command, f"--cpu_devices={devices}"])
    options = [f"--num_processes={processes}", f"--cpu_devices={devices}"]
    return functools.partial(harness.launch, *options, command=command)


def differs(whole: pathlib.Path, folder: pathlib.Path, draw: random.Random) -> str:
    """Runs a random schedule; returns a description of the failure, empty if there is
    none.
    """
    directory = folder / "run"
    # The steps are at least five apart, so that no start has already passed the step at
    # which it must be killed.
    steps = sorted(draw.sample(range(1, _STEPS - 5, 5), draw.randint(1, 5)))
    sizes = [draw.choice(_SIZES) for _ in [*steps, _STEPS]]
    for step, size in zip(steps, sizes, strict=False):
        harness.kill_at(step, _STEPS, folder, start(directory, *size))
    code, output = harness.finish(start(directory, *sizes[-1])())
    try:
        assert code == 0, output
        harness.assert_same_end(directory, whole, _STEPS)
    except AssertionError as e:
        return f"{steps} {sizes}: {e}"
    return ""


def main(argv: list[str]) -> int:
    """Runs all schedules; returns the exit code."""
    del argv
    draw = random.Random(_SEED.value)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = pathlib.Path(folder, "whole")
        code, output = harness.finish(start(whole, 1, 1)())
        assert code == 0, output
        for number in range(_SCHEDULES.value):
            with tempfile.TemporaryDirectory(dir=folder) as own:
                wrong = differs(whole, pathlib.Path(own), draw)
            bad += bool(wrong)
            print(f"{number + 1} schedules, {bad} differ {wrong}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    app.run(main)
