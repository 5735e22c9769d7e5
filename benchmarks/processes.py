"""Runs the parts of the benchmarks in processes of their own."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Longer than any part takes: XLA's CPU collectives can deadlock, and the other parts
# are still worth running.
LIMIT_SECONDS = 3600


class LateError(RuntimeError):
    """Says that a program was not done in time."""


def output_of(command: Sequence[str], directory: str, limit_seconds: float) -> str:
    """Returns the output of a module and its arguments; its temporary files are in
    `directory`.

    Raises:
      RuntimeError: if it fails; the message has the first line of its error.
      LateError: if it takes longer than the limit.
    """
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": directory},
        # A process group of its own, so that it can be killed together with its
        # children.
        start_new_session=True,
    ) as process:
        try:
            output, said = process.communicate(timeout=limit_seconds)
        except BaseException as e:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(e, subprocess.TimeoutExpired):
                raise LateError(f"not done after {limit_seconds:.0f} s") from e
            raise
    if process.returncode:
        print(said, file=sys.stderr)
        said = first_line(said or output)
        raise RuntimeError(f"exit code {process.returncode}: {said[:400]}")
    return output


def first_line(said: str) -> str:
    """Returns the first line of the error with which a program ended."""
    lines = [line for line in said.splitlines() if line.strip()]
    header = "Traceback (most recent call last):"
    if header in lines:
        # The last traceback is that of the error; its calls are indented.
        last = len(lines) - 1 - lines[::-1].index(header)
        lines = [line for line in lines[last + 1 :] if not line.startswith(" ")]
        return (lines or [header])[0]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines[-1:] or ["it said nothing"])[0]


def described(directory: str, limit_seconds: float) -> dict[str, Any]:
    """Returns the description of the machine, by a process of its own, since some
    accelerators serve one process at a time.

    Raises:
      RuntimeError: if JAX does not start, or not in time.
    """
    output = output_of(["benchmarks.machine"], directory, limit_seconds)
    return json.loads(output.splitlines()[-1])
