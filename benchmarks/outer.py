"""Measures how well slices train that exchange parameters only now and then.

    python -m benchmarks.outer --workdir=DIR [--steps=600] [--seeds=3] [--json]

Trains `configs/lm_tiny.py`, on half its window and in float32, with sums in each step;
and on 2 and 4 slices with exchanges every 10, 50 and 200 steps, all on the same
batches. Prints the bits per byte of held-out text. A run that is there already is not
trained again, so the benchmark can be stopped and started again.
"""

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from absl import app, flags

from benchmarks import measure

_WORKDIR = flags.DEFINE_string("workdir", None, "The directory of the runs.")
_STEPS = flags.DEFINE_integer("steps", 600, "Of each run.", 1)
_SEEDS = flags.DEFINE_integer("seeds", 3, "The number of runs of each side.", 1)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")

_EVERY_STEPS = (10, 50, 200)
_SLICES = (2, 4)
# Changes that make a run shorter.
_SHORTER = (
    "--config.text.length=64",
    "--config.precision=params=float32,compute=float32,output=float32",
    "--config.loss_scale.kind=none",
)
# The mean of the slices' parameters, without momentum.
_MEAN = {"learning_rate": 1.0, "momentum": 0.0}
# Other forms of an exchange, which are compared for two slices and one seed.
_FORMS: dict[str, dict[str, object]] = {
    "every 10 steps, Nesterov's momentum": {"every_steps": 10},
    "every 50 steps, Nesterov's momentum": {"every_steps": 50},
    "every 200 steps, Nesterov's momentum": {"every_steps": 200},
    "every 50 steps, int8": {"every_steps": 50, "dtype": "int8", **_MEAN},
    "every 50 steps, int4": {"every_steps": 50, "dtype": "int4", **_MEAN},
    "every 50 steps, 3 fragments, 1 step later, int4": {
        "every_steps": 50,
        "dtype": "int4",
        "fragments": 3,
        "delay_steps": 1,
        **_MEAN,
    },
}


def main(argv: list[str]) -> None:
    """Trains what is not there yet, and prints the rows."""
    del argv
    measure.emit(compare(), _JSON.value)


def compare() -> Iterator[measure.Row]:
    """Yields the rows: for each side, a figure with a value for each seed."""
    values: dict[str, list[float]] = {}
    # One seed after the other, so that a benchmark that is stopped has all sides.
    for seed in range(_SEEDS.value):
        for name, outer, slices in sides(has_forms=seed == 0):
            value = train(name, outer, slices, seed)
            print(f"{name}, seed {seed}: {value:.4f}", file=sys.stderr, flush=True)
            values.setdefault(name, []).append(value)
    for name, of_seeds in values.items():
        yield measure.figure(name, of_seeds, "bits per byte")


def sides(has_forms: bool) -> Iterator[tuple[str, dict[str, object], int]]:
    """Yields the sides: a name, keys of `config.outer`, and the number of slices."""
    yield "sums in each step", {}, 1
    for slices in _SLICES:
        for steps in _EVERY_STEPS:
            name = f"{slices} slices, every {steps} steps"
            yield name, {"every_steps": steps, **_MEAN}, slices
    if has_forms:
        for form, options in _FORMS.items():
            yield f"2 slices, {form}", options, 2


def train(name: str, outer: dict[str, object], slices: int, seed: int) -> float:
    """Trains a run to its end, unless it has ended, and returns its bits per byte."""
    folder = f"{name}, seed {seed}".replace(" ", "_").replace(",", "").replace("'", "")
    directory = pathlib.Path(_WORKDIR.value) / folder
    results = directory / "results.json"
    if not results.exists():
        keys = [f"--config.outer.{key}={value}" for key, value in outer.items()]
        command = [
            sys.executable,
            "-m",
            "xshard.main",
            "--config=configs/lm_tiny.py",
            f"--workdir={directory}",
            f"--cpu_devices={max(2, slices)}",
            f"--config.slices={slices}",
            f"--config.steps={_STEPS.value}",
            f"--config.seed={seed}",
            "--config.eval_every_steps=0",
            "--config.samples_every_steps=0",
            "--config.sample.length=0",
            "--quiet",
            *_SHORTER,
            *keys,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return float(json.loads(results.read_text())["eval"]["bits_per_byte"])


if __name__ == "__main__":
    flags.mark_flag_as_required("workdir")
    app.run(main)
