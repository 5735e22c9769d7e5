"""Measures the time from the command to the first step, against the time of the imports
that every program needs.

    JAX_PLATFORMS=cpu python -m benchmarks.start [--rounds=5]

Each side runs in a fresh process: `python -c "import jax, haiku, optax"`, and `python
-m xshard.main` with configs/digits.py until it prints its first step. The latter also
yields the time until it prints that training begins, when everything is checked and the
state is created.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from absl import app, flags

from benchmarks import measure, processes

_ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each side is timed.", 1)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")


def of_a_run() -> list[float]:
    """Returns the seconds from the command to the end of the checks, and to the first
    step.
    """
    with tempfile.TemporaryDirectory() as folder:
        return seconds_until(
            ["training from step", "step 1/1"],
            "-m",
            "xshard.main",
            "--config=configs/digits.py",
            f"--workdir={folder}/run",
            "--config.steps=1",
            "--config.log_every_steps=1",
        )


def seconds_until(texts: list[str], *arguments: str) -> list[float]:
    """Returns the seconds from the start of a Python process to the first line with
    each of the texts, in their order.

    Raises:
      RuntimeError: with the last lines of output, if the process fails or ends without
        printing all of the texts.
    """
    begin = time.perf_counter()
    seconds: list[float] = []
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=processes.ROOT,
    ) as process:
        for line in process.stdout:
            lines.append(line)
            if len(seconds) < len(texts) and texts[len(seconds)] in line:
                seconds.append(time.perf_counter() - begin)
    if process.returncode or len(seconds) < len(texts):
        said = " ".join(map(str.strip, lines[-3:]))
        raise RuntimeError(f"exit code {process.returncode}: {said}")
    return seconds


def of_imports() -> list[float]:
    """Returns the seconds of a Python process that imports what every program needs, as
    a list of one.
    """
    code = "import jax, haiku, optax; print('done', flush=True)"
    return seconds_until(["done"], "-c", code)


def compare() -> Iterator[measure.Row]:
    """Yields the rows."""
    sides = {"run": of_a_run, "imports": of_imports}
    seconds = measure.in_turn(sides, _ROUNDS.value, warm_up=False)
    checked, made = zip(*seconds["run"], strict=True)
    bare = [each for (each,) in seconds["imports"]]
    yield measure.ratio(
        "from the command to the first step, digits", "imports alone", made, bare
    )
    yield measure.figure("Python, import jax, haiku, optax", bare, "s")
    yield measure.figure(
        "from the command until all is checked and the state is made", checked, "s"
    )
    yield measure.figure("from the command until the first step is made", made, "s")


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    measure.emit(compare(), _JSON.value)


if __name__ == "__main__":
    app.run(main)
