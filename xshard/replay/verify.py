"""Checks that an experiment resumes to the same bits: compares an undisturbed run with
one that is killed and resumed.

If they differ, further runs determine the kind of cause: whether two undisturbed runs
differ as well, whether they differ only by Python's hash seed, or whether the batches
after a restore are others.
"""

import hashlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xshard import errors
from xshard.base import flag_words, formatting
from xshard.files import jsonfile
from xshard.metrics import writers
from xshard.replay import comparison, replayer
from xshard.training import fingerprint

# The number of checkpoints: one after each third of the steps.
_NUM_SAVES = 3
_POLL_SECONDS = 0.05
# The name of the run that is neither killed nor resumed.
_UNDISTURBED = "whole"
# Flags of `xshard.main` for anything but training in one process.
_REFUSED = (
    "coordinator_address",
    "num_processes",
    "process_id",
    "mode",
    "restart_from_scratch",
)


def kill(config: dict[str, Any]) -> tuple[int, int]:
    """Returns the step at whose row a run is killed, drawn from its seed, and the step
    of the checkpoint before it.
    """
    every = config["checkpoint"]["every_steps"]
    step = random.Random(config["seed"]).randrange(every + 1, config["steps"])
    return step, (step - 1) // every * every


class Killer(writers.Writer):
    """A writer that kills its own process at a random step, once the checkpoint before
    that step is complete.
    """

    def __init__(self, part: writers.Part):
        self._directory = part.directory
        self._step, self._saved = kill(part.config)

    def write(self, row: writers.Row) -> None:
        """Kills the process at the row of the chosen step, without cleanup, as when a
        machine fails.
        """
        if row["step"] < self._step:
            return
        # Checkpoints are saved in the background.
        while self._saved not in comparison.checkpoints(self._directory):
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)


def verify(flags: Sequence[str], steps: int, say: Callable[[str], None]) -> bool:
    """Runs an experiment undisturbed and interrupted, in child processes, and compares
    rows, results and arrays.

    Values under 'perf/' are not compared.

    Args:
      flags: the flags of `xshard.main`; a work directory among them is not touched.
      steps: the number of steps of each run.
      say: takes texts to print.

    Returns:
      Whether everything is equal.

    Raises:
      UserError: if a run fails, or if the flags ask for anything but training in one
        process.
    """
    _check(flags, steps)
    runs = _Runs(flags, steps)
    undisturbed = runs.train(_UNDISTURBED)
    step, saved = kill(jsonfile.read(undisturbed / "config.json"))
    before_kill = comparison.rows_of(runs.train("resumed", is_killed=True))
    # Runs that differ before the kill are impure, whatever the resume does.
    row = comparison.first_row(
        comparison.rows_of(undisturbed)[: len(before_kill)], before_kill
    )
    if row is not None:
        compared = comparison.Comparison(row)
        what = f"two runs of {steps} steps, up to a kill at step {step}"
    else:
        compared = comparison.compare(undisturbed, runs.train("resumed"))
        what = (
            f"{steps} undisturbed steps, and {steps} killed at step {step} and resumed "
            f"from step {saved}"
        )
    differences = compared.lines()
    if not differences:
        shutil.rmtree(runs.folder)
        say(f"the same bits: {what}; {compared.size} and the results are equal")
        return True
    say("\n".join([f"not the same bits: {what}", *differences]))
    if row is not None:
        kind = runs.diagnose_nondeterminism()
    else:
        kind = runs.diagnose_resume(saved, compared)
    say(f"kind         {kind}")
    say(f"runs         {runs.folder}")
    return False


def _check(flags: Sequence[str], steps: int) -> None:
    """Raises UserError if the flags or the number of steps are not possible."""
    if steps < _NUM_SAVES:
        raise errors.UserError(
            f"--verify_resume={steps} must be a number of steps from {_NUM_SAVES}."
        )
    if len(flag_words.without_flags(flags, _REFUSED)) < len(flags):
        raise errors.UserError(
            "--verify_resume trains in one process: leave out "
            f"--{', --'.join(_REFUSED)}."
        )
    if len(flag_words.without_flags(flags, ["config"])) == len(flags):
        raise errors.UserError(
            "--verify_resume needs the flags of the run: add at least --config=FILE.py."
        )


class _Runs:
    """Runs with the same flags, in a new folder.

    Attributes:
      folder: the folder, in which each run has a work directory of its name.
    """

    def __init__(self, flags: Sequence[str], steps: int):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="xshard_verify_"))
        self._steps = steps
        every = steps // _NUM_SAVES
        # Each step is logged and fingerprinted, and each checkpoint kept, to find the
        # first difference.
        values = {
            "steps": steps,
            "log_every_steps": 1,
            "fingerprint_every_steps": 1,
            "eval_every_steps": every,
            "checkpoint.directory": "",
            "checkpoint.every_steps": every,
            "checkpoint.every_minutes": 0.0,
            "checkpoint.keep_last": steps,
            "checkpoint.keep_best": 0,
        }
        replaced = [f"config.{name}" for name in (*values, "writers")]
        rest = flag_words.without_flags(flags, ["workdir", "stop_after", *replaced])
        self._command = [sys.executable, "-m", "xshard.main", *rest]
        self._command += [f"--config.{name}={value}" for name, value in values.items()]

    def train(
        self, name: str, *, is_killed: bool = False, environment: str = ""
    ) -> pathlib.Path:
        """Starts or resumes a run, waits for it, and returns its directory.

        Args:
          name: the run's name.
          is_killed: whether the run kills itself.
          environment: a variable to set for it, as NAME=VALUE.

        Raises:
          UserError: if the run ends otherwise than it should.
        """
        directory = self.folder / name
        names = ["jsonl"]
        if is_killed:
            names.append(f"{__name__}.{Killer.__name__}")
        command = [
            *self._command,
            f"--config.writers={tuple(names)}",
            f"--workdir={directory}",
        ]
        if environment:
            command = ["env", environment, *command]
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            done = subprocess.run(command, stdout=out, stderr=out, check=False)
        expected = -signal.SIGKILL if is_killed else 0
        if done.returncode != expected:
            print(log.read_text(errors="replace"), file=sys.stderr)
            end = "been killed" if is_killed else "exited with 0"
            raise errors.UserError(
                f"The run in {directory} exited with {done.returncode}; its output is "
                f"above. It should have made {self._steps} steps and {end}."
            )
        return directory

    def diagnose_resume(self, saved: int, compared: comparison.Comparison) -> str:
        """Determines and describes why a resumed run differs.

        Args:
          saved: the step of the checkpoint that it resumed from.
          compared: its differences from the undisturbed run.
        """
        undisturbed = self.folder / _UNDISTURBED
        if comparison.compare(undisturbed, self.train("again")).lines():
            return self.diagnose_nondeterminism()
        only = "two undisturbed runs are equal; after the resume"
        step = self._steps
        column = ""
        if compared.row is not None:
            step = compared.row.step
            column = compared.row.column
        # The fingerprint of step saved + 1 is of the restored state itself.
        if step <= saved + 1 and column.startswith(fingerprint.PREFIX):
            return (
                f"the state: {only} step {step} begins with a different state than "
                "before the kill"
            )
        only_results = compared.row is None and not compared.array
        if column.startswith("eval/") or only_results:
            return (
                f"the evaluation: {only} the same state is evaluated differently; does "
                "an attribute change?"
            )
        first = _batches(undisturbed, range(1, step + 1))
        restored = _batches(undisturbed, range(saved + 1, step + 1))
        for number, batch in restored.items():
            if batch != first[number]:
                return (
                    f"the data: {only} step {number} has a different "
                    f"batch{_examples(undisturbed, number)}; does get_state of the "
                    "iterator return all that determines the next batch?"
                )
        return (
            f"state outside of TrainState: {only} the state and the batches are equal, "
            "but a step differs; does an attribute or a global variable change?"
        )

    def diagnose_nondeterminism(self) -> str:
        """Determines and describes why undisturbed runs differ."""
        # A fixed hash seed makes the order of sets, and hash(), the same in each
        # process.
        first = self.train("hash_0", environment="PYTHONHASHSEED=0")
        second = self.train("hash_1", environment="PYTHONHASHSEED=0")
        if comparison.compare(first, second).lines():
            return (
                "impure: undisturbed runs differ, too, so the resume is not the cause; "
                "does the experiment use the time, Python's random, os.urandom or a "
                "thread?"
            )
        return (
            "hash order: undisturbed runs differ, too, but not with PYTHONHASHSEED=0; "
            "does the experiment use the order of a set, or hash()?"
        )


def _batches(directory: pathlib.Path, steps: range) -> dict[int, dict[str, str]]:
    """Returns the checksums of the batches of repeated steps, by step and name."""
    checksums = {}
    for step in replayer.Replayer(str(directory)).steps(steps):
        checksums[step.number] = {name: _checksum(x) for name, x in step.batch.items()}
    return checksums


def _checksum(x: jax.Array) -> str:
    """Returns the dtype, the shape and the SHA-256 of an array."""
    array = np.asarray(x)
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def _examples(directory: pathlib.Path, step: int) -> str:
    """Describes the examples of a step in the seed's order; empty if the run's data is
    in another order.
    """
    run = replayer.Replayer(str(directory))
    (repeated,) = run.steps(range(step, step + 1))
    num_rows = len(next(iter(repeated.batch.values())))
    numbers = run.examples(step, repeated.batch, list(range(num_rows)))
    if not numbers:
        return ""
    return f" (undisturbed: examples {formatting.listed([str(n) for n in numbers])})"
