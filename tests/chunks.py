"""Tries that runs have equal bits and rows however many steps are dispatched at once.

Run it with `python -m tests.chunks`; it takes some minutes, and with `--all`, which
tries every config in configs/ and pods of two processes, most of an hour. Each run is
compared with one that dispatches one step at a time: with several steps a dispatch, and
killed at a random step and resumed with another number.
"""

import argparse
import os
import pathlib
import random
import signal
import sys
import tempfile

from tests import forks, rows
from tests.launch import harness

STEPS = 24
_TOY = ("tests/toy.py", "experiment=tests.toy.Wide", "optimizer.learning_rate=0.01")
# What each number is tried with: a config and its keys.
RUNS = {
    "toy": ("tests/toy.py",),
    "every hook": (
        "tests/toy.py",
        "log_every_steps=1",
        "fingerprint_every_steps=2",
        "log_norms_every_steps=3",
        "eval_every_steps=7",
        "samples_every_steps=9",
        "checkpoint.every_steps=5",
        "experiment=tests.toy.Talking",
    ),
    "micro-batches": (*_TOY, "micro_batches=2"),
    "noise scale": (*_TOY, "noise_scale_steps=4"),
    "groups": (*_TOY, "group_assignment=((0, 1), (2, 3))"),
    "slices apart": (*_TOY, "slices=2", "outer.every_steps=5"),
    "shard_update": (*_TOY, "reduction.shard_update=True"),
    "shard_params": (
        *_TOY,
        "reduction.shard_update=True",
        "reduction.shard_params=True",
    ),
}
_SMALL_LM = (
    "text.files=('docs/*.md',)",
    "text.held_out=0.3",
    "text.length=16",
    "text.eval_windows=16",
    "model.width=8",
    "model.heads=2",
    "model.feed_forward=8",
    "model.layers=2",
    "batch_size=8",
    "eval_batch_size=8",
    "eval_every_steps=12",
    "sample.length=4",
)
_SMALL_WORDS = (*_SMALL_LM, "text.vocabulary=270")
_SMALL_DIGITS = ("model.channels=2", "model.hidden=8")
# The configs in configs/, as small as they can be, but for the sweep, whose points are
# those of digits.
CONFIGS = {
    "digits": ("configs/digits.py", *_SMALL_DIGITS),
    "digits_groups": (
        "configs/digits_groups.py",
        *_SMALL_DIGITS,
        "group_assignment=((0, 1), (2, 3))",
    ),
    "gan": ("configs/gan.py",),
    "ssl": ("configs/ssl.py",),
    "rl": ("configs/rl.py",),
    "rl_host": ("configs/rl_host.py",),
    "lm": ("configs/lm.py", *_SMALL_LM),
    "lm_gpt2": (
        "configs/lm_gpt2.py",
        *_SMALL_WORDS,
        "model.positions=16",
        "text.tokenizer=",
    ),
    "lm_lora": (
        "configs/lm_lora.py",
        *_SMALL_WORDS,
        "text.base_files=('docs/*.md',)",
        "text.base_held_out=0.3",
        "lora.rank=2",
        "lora.train=norm",
    ),
    "lm_pod": (
        "configs/lm_pod.py",
        *_SMALL_LM,
        "model_parallel=2",
        "micro_batches=2",
    ),
    "lm_tiny": ("configs/lm_tiny.py", *_SMALL_LM),
    "lm_words": ("configs/lm_words.py", *_SMALL_WORDS),
}


class Trial:
    """Runs of one config, which must all be equal."""

    def __init__(self, arguments, folder, *, processes=1):
        """Takes a config and its keys, and the folder for the runs."""
        self._arguments = arguments
        self._folder = pathlib.Path(folder)
        self._processes = processes

    def reference(self):
        """Makes the run with which others are compared."""
        self._finish(self._start("single", 1))

    def whole(self, size):
        """Compares a run that dispatches up to `size` steps at once."""
        name = f"whole_{size}"
        self._finish(self._start(name, size))
        self._compare(name)

    def killed(self, size, other, step):
        """Compares a run that is killed after it has logged a step, and resumed with
        another number of steps a dispatch.
        """
        name = f"killed_{size}"
        process = self._start(name, size)
        metrics = self._folder / name / "metrics.jsonl"

        def has_reached():
            ended = process.poll() is not None
            return ended or (
                metrics.exists() and f'"step": {step}' in metrics.read_text()
            )

        harness.wait_until(has_reached)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        self._finish(self._start(name, other))
        self._compare(name)

    def _start(self, name, size):
        config, *keys = self._arguments
        options = [
            f"--workdir={self._folder / name}",
            f"--config={config}",
            f"--config.steps={STEPS}",
            f"--config.steps_per_dispatch={size}",
            "--config.writers=('jsonl',)",
            "--config.log_every_steps=1",
            "--config.checkpoint.every_steps=5",
            *(f"--config.{key}" for key in keys),
        ]
        # Compiled as users do: other tests compile without optimizations.
        environment = harness.environment(XLA_FLAGS="")
        if self._processes == 1:
            return forks.program(
                "xshard.main", "--cpu_devices=4", *options, env=environment
            )
        devices = f"--cpu_devices={4 // self._processes}"
        command = [sys.executable, "-m", "xshard.main", *options]
        return harness.launch(
            f"--num_processes={self._processes}",
            devices,
            command=command,
            env=environment,
        )

    def _finish(self, process):
        code, output = harness.finish(process)
        assert code == 0, output

    def _compare(self, name):
        single = self._folder / "single"
        other = self._folder / name
        assert rows.same_bits(other) == rows.same_bits(single)
        harness.assert_same_end(other, single, STEPS)


def main():
    """Prints a line for each trial, and raises the first failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="Every config, and pods.")
    parser.add_argument("--only", help="The name of one trial.")
    parser.add_argument("--seed", type=int, default=0, help="Draws the kills.")
    options = parser.parse_args()
    runs = {**RUNS, **CONFIGS} if options.all else RUNS
    drawn = random.Random(options.seed)
    for name, arguments in runs.items():
        for processes in (1, 2) if options.all else (1,):
            if options.only not in (None, name):
                continue
            with tempfile.TemporaryDirectory() as folder:
                trial = Trial(arguments, folder, processes=processes)
                trial.reference()
                for size in (3, 8):
                    trial.whole(size)
                    step = drawn.randrange(3, STEPS - 3)
                    trial.killed(size, 11 - size, step)
            print(f"{name}, {processes} process(es): equal", flush=True)


if __name__ == "__main__":
    main()
