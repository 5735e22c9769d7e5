"""Tries each promise that holds for digits on the experiments that are more than a
classifier.

Run it with `python -m tests.matrix`; it takes some minutes for each of EXPERIMENTS.
Each cell of its table has one of two outcomes: it works, or the run is refused with a
message before it creates its directory. Anything else is an error.
"""

import argparse
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile

from tests import forks, rows
from tests.launch import harness

EXPERIMENTS = (
    "configs/gan.py",
    "configs/rl.py",
    "configs/rl_host.py",
    "configs/ssl.py",
    "tests/carried.py",
    "tests/quantized.py",
)
_STEPS = 24
_CHANGES = {
    "groups": ("group_assignment=((0, 1), (2, 3))",),
    "micro-batches": ("micro_batches=2",),
    "slices": ("slices=2",),
    "slices apart": ("slices=2", "outer.every_steps=5"),
    "shard_update": ("reduction.shard_update=True",),
    "shard_params": ("reduction.shard_params=True",),
    "noise scale": ("noise_scale_steps=5",),
    "float16": ("precision=params=float32,compute=float16,output=float32",),
    "on_nonfinite=skip": ("on_nonfinite=skip",),
}
_REFUSED = "refused: "


class Cell:
    """An experiment, and the folder that holds its runs."""

    def __init__(self, config, folder):
        self._config, self._folder = config, pathlib.Path(folder)

    def killed(self, processes, seed):
        """Kills a run at a random step and resumes it; its arrays, rows and results
        must have the same bits.
        """
        self._train("whole", processes=processes)
        step = random.Random(seed).randrange(3, _STEPS - 2)
        with self._start("killed", processes=processes) as running:
            for line in running.stdout:
                if f"step {step}/{_STEPS}" in line:
                    break
            # This kills the launcher and its processes.
            os.killpg(running.pid, signal.SIGKILL)
        assert "resumed from the checkpoint of step" in self._train(
            "killed", processes=processes
        )
        harness.assert_same_end(self._folder / "killed", self._folder / "whole", _STEPS)

    def moved(self):
        """Runs on 1 device, resumes on 8, then on 4; each step must be logged once."""
        for part, devices in enumerate((1, 8, 4), 1):
            output = self._train(
                "moved", f"steps={_STEPS * part // 3}", devices=devices
            )
            assert part == 1 or "resumed from the checkpoint of step" in output
        steps = [
            row["step"]
            for row in rows.read(self._folder / "moved")
            if "eval/" not in str(row)
        ]
        assert steps == [*range(1, _STEPS + 1)], steps

    def changed(self, *changes):
        """Trains with another config."""
        self._train("changed", *changes, devices=4)

    def tools(self):
        """Evaluates a run in another process, builds its report, verifies its
        checkpoints, and loads it in a script.
        """
        self._train("run", devices=4)
        run = str(self._folder / "run")
        self._call(*self._command("run")[2:], "--mode=eval", "--cpu_devices=2")
        page = self._folder / "report.html"
        self._call("xshard.report", run, f"--output={page}")
        assert page.stat().st_size > 10_000
        self._call("xshard.checkpoint", "verify", f"{run}/checkpoints")
        finished = subprocess.run(
            [sys.executable, "-c", f"import xshard; xshard.load({run!r})"],
            capture_output=True,
            text=True,
            env=_environment(),
        )
        assert finished.returncode == 0, finished.stderr

    def sweep(self):
        """Runs a sweep of two seeds."""
        points = self._folder / "sweep.py"
        points.write_text("def get_sweep():\n    return [{'seed': 1}, {'seed': 2}]\n")
        self._call(
            "launch",
            f"--sweep={points}",
            "--parallel=2",
            "--cpu_devices=2",
            "--",
            *self._command("sweep"),
        )
        results = [
            rows.results(self._folder / "sweep" / point) for point in ("000", "001")
        ]
        assert results[0] != results[1] and all(result["finite"] for result in results)

    def dry_run(self):
        """Compiles the step for a TPU slice."""
        self._call(
            "xshard.dryrun", f"--config={self._config}", "--topology=v5e:2x4", "--json"
        )

    def _command(self, directory, *changes):
        options = (
            f"steps={_STEPS}",
            "log_every_steps=1",
            "eval_every_steps=8",
            "writers=('jsonl',)",
            "checkpoint.every_steps=5",
            *changes,
        )
        program = [sys.executable, "-m", "xshard.main", f"--config={self._config}"]
        program += [f"--workdir={self._folder / directory}"]
        return program + [f"--config.{option}" for option in options]

    def _start(self, directory, *changes, processes=1, devices=8):
        command = self._command(directory, *changes)
        share = f"--cpu_devices={devices // processes}"
        if processes > 1:
            launch = [
                sys.executable,
                "-m",
                "launch",
                f"--num_processes={processes}",
                share,
            ]
            command = [*launch, "--", *command]
        else:
            command += [share]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(),
            start_new_session=True,
        )

    def _train(self, directory, *changes, **layout):
        """Returns the output of a successful run; raises RefusedError if the run is
        refused.
        """
        with self._start(directory, *changes, **layout) as running:
            output = running.communicate()[0]
        if running.returncode:
            _raise(output, is_new=not (self._folder / directory).exists())
        assert rows.results(self._folder / directory)["finite"]
        return output

    def _call(self, module, *arguments):
        finished = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(),
        )
        if finished.returncode:
            _raise(finished.stdout, is_new=True)


class RefusedError(Exception):
    """The message of a run that was refused before it created its directory."""


def _raise(output, is_new):
    refusal = output.partition("error: ")[2]
    if not refusal or not is_new or "Traceback" in output:
        raise AssertionError(output[-3000:])
    raise RefusedError(refusal.splitlines()[0])


def _environment():
    return {**os.environ, "PYTHONPATH": forks.python_path(), "JAX_PLATFORMS": "cpu"}


CELLS = {
    "killed, 1 x 8": lambda cell: cell.killed(1, seed=0),
    "killed, 2 x 4": lambda cell: cell.killed(2, seed=1),
    "1 -> 8 -> 4 devices": Cell.moved,
    **{
        name: lambda cell, changes=changes: cell.changed(*changes)
        for name, changes in _CHANGES.items()
    },
    "eval, report, load": Cell.tools,
    "sweep": Cell.sweep,
    "dry run": Cell.dry_run,
}


def attempt(config, name, folder):
    """Returns 'works', or the message of a refusal."""
    try:
        CELLS[name](Cell(config, folder))
    except RefusedError as e:
        return f"{_REFUSED}{e}"
    return "works"


def main():
    """Tries the selected cells, and prints a line for each; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiment", action="append", choices=EXPERIMENTS)
    parser.add_argument("--cell", action="append", choices=CELLS)
    options = parser.parse_args()
    failures = 0
    for config, name in itertools.product(
        options.experiment or EXPERIMENTS, options.cell or CELLS
    ):
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = attempt(config, name, folder)
            except AssertionError as e:
                outcome, failures = f"FAILED: {e}", failures + 1
        print(
            json.dumps({"experiment": config, "cell": name, "outcome": outcome}),
            flush=True,
        )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
