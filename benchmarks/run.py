"""Runs all parts, and prints one table: each measurement beside its peers, the targets,
and the machine.

    python -m benchmarks.run [--quick] [--only=step,loop] [--json=FILE]

Each part runs in its own processes, one at a time. If JAX finds an accelerator, they
run on it in half precision, and also report their memory. Otherwise, or with
JAX_PLATFORMS=cpu, they run on the CPU, with 1 and with 8 virtual devices. A measurement
that is not possible becomes a row with the reason. Exit codes: 0; 1 if a part failed;
130 after Ctrl-C, which prints the rows measured until then.
"""

import dataclasses
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags

from benchmarks import measure, processes
from xshard.base import formatting as formatting_lib
from xshard.files import disk, jsonfile

Commands = list[list[str]]


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the benchmarks.

    Attributes:
      commands: returns the commands to run, each a module and its flags, given whether
        to be quick and whether there is an accelerator.
      left_out: the measurements that --quick leaves out.
    """

    commands: Callable[[bool, bool], Commands]
    left_out: str = ""


def _step(quick: bool, accelerator: bool) -> Commands:
    rounds = f"--rounds={3 if quick else 41}"
    if not accelerator:
        small = ["--size=1 ms"] if quick else []
        return [
            ["step", rounds, "--devices=1"],
            ["step", rounds, "--devices=8", *small],
        ]
    # A process has one peak of memory, so each side gets its own process.
    return [
        ["step", f"--precision={precision}", *more]
        for precision in ("float16", "bfloat16")
        for more in (
            [rounds],
            *([f"--memory={side}", "--size=20 ms"] for side in ("rules", "hand")),
        )
    ]


def _precision(quick: bool, accelerator: bool) -> Commands:
    del accelerator
    return [["precision", *(("--rounds=3",) if quick else ())]]


def _memory(quick: bool, accelerator: bool) -> Commands:
    del accelerator
    return [["memory", *(("--rounds=1",) if quick else ())]]


def _loop(quick: bool, accelerator: bool) -> Commands:
    del accelerator
    small = ("--rounds=1", "--steps=300", "--size=1 ms", "--arrays=10")
    return [["loop", *(small if quick else ())]]


def _fingerprint(quick: bool, accelerator: bool) -> Commands:
    del accelerator
    return [
        ["fingerprint", *(("--rounds=3", "--steps=5", "--size=1 ms") if quick else ())]
    ]


def _start(quick: bool, accelerator: bool) -> Commands:
    del accelerator
    return [["start", f"--rounds={1 if quick else 5}"]]


def _compile(quick: bool, accelerator: bool) -> Commands:
    del accelerator
    return [["compile_time", *(("--rounds=1", "--leaves=10,30") if quick else ())]]


def _checkpoint(quick: bool, accelerator: bool) -> Commands:
    del accelerator
    small = ("--rounds=1", "--megabytes=64", "--arrays=24")
    return [["checkpoint", *(small if quick else ())]]


def _dry_run(quick: bool, accelerator: bool) -> Commands:
    del accelerator
    return [
        ["dry_run", *(("--topology=v5e:16x16", "--loss_scale=no") if quick else ())]
    ]


def _norms(quick: bool, accelerator: bool) -> Commands:
    small = ("--rounds=3", "--steps=5", "--size=1 ms") if quick else ()
    commands = [["norms", *small]]
    if not accelerator:
        commands.append(["norms", "--devices=8", *small])
    return commands


PARTS = {
    "step": Part(_step, "20 ms model on 8 devices"),
    "precision": Part(_precision),
    "memory": Part(_memory),
    "loop": Part(_loop, "the loop's steps of 20 ms and a model of 500 arrays"),
    "fingerprint": Part(_fingerprint, "fingerprints of the 20 ms model"),
    "norms": Part(_norms, "norms of the 20 ms model"),
    "start": Part(_start),
    "compile": Part(_compile, "compilation with 100, 300 and 1000 leaves"),
    "dry_run": Part(_dry_run, "dry run for a v5p:8x8x16, nor with a loss scale"),
    "checkpoint": Part(
        _checkpoint,
        "checkpoints of 1 GiB or in 2000 arrays, nor a second round of those of 64 MiB",
    ),
}

_QUICK = flags.DEFINE_bool(
    "quick", False, "Fewer rounds and smaller sizes: about three minutes."
)
_ONLY = flags.DEFINE_list(
    "only", [], f"The parts to run, of {', '.join(PARTS)}; all by default."
)
_JSON = flags.DEFINE_string("json", None, "A file for all that is printed, as JSON.")


def measured(command: Sequence[str], directory: str) -> list[measure.Row]:
    """Returns the rows of one command.

    Raises:
      RuntimeError: if the command fails; its stderr is printed then.
    """
    name, *arguments = command
    module = [f"benchmarks.{name}", *arguments, "--json"]
    return measure.parse(
        processes.output_of(module, directory, processes.LIMIT_SECONDS)
    )


def run(names: Sequence[str], quick: bool, accelerator: bool) -> Iterator[measure.Row]:
    """Yields the rows of the parts, each as soon as its command has ended."""
    for name in names:
        for command in PARTS[name].commands(quick, accelerator):
            begin = time.monotonic()
            shown = " ".join(command)
            print(f"{shown} ...", file=sys.stderr, end=" ", flush=True)
            try:
                with tempfile.TemporaryDirectory() as directory:
                    yield from measured(command, directory)
            except RuntimeError as e:
                yield measure.Row(shown, "its peers", missing=f"FAILED: {e}")
            print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def show(
    machine: dict[str, Any], rows: Sequence[measure.Row], notes: Sequence[str]
) -> str:
    """Returns the text of the tables, the machine, the targets met, and the notes."""
    lines = [{"machine": name, "": value} for name, value in machine.items()]
    judged = [row for row in rows if row.at_most is not None and row.median is not None]
    met = sum(row.median <= row.at_most for row in judged)
    summary = (
        f"{met} of {len(judged)} targets met"
        if judged
        else "nothing with a target was measured"
    )
    missing = sum(row.median is None for row in rows)
    if missing:
        summary += f"; not measured: {missing}"
    parts = [
        "Time, or bytes, of the first over those of the second: the median of the "
        "rounds, and their middle half."
    ]
    if rows:
        parts.append(measure.show(rows))
    parts.append(formatting_lib.table(lines))
    parts.append("\n".join([summary, *notes]))
    return "\n\n".join(parts)


def main(argv: list[str]) -> int:
    """Runs the parts and prints their rows; returns the exit code."""
    if argv[1:]:
        raise app.UsageError(f"{' '.join(argv[1:])}: arguments begin with '--'.")
    names = _ONLY.value or list(PARTS)
    rows: list[measure.Row] = []
    code = 0
    load = os.getloadavg()[0]
    notes = []
    for name in names:
        if _QUICK.value and PARTS[name].left_out:
            notes.append(f"--quick: no {PARTS[name].left_out}")
    machine: dict[str, Any] = {}
    # SIGTERM is handled as Ctrl-C, so that the processes that are being measured end
    # too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory() as directory:
            machine = processes.described(directory, processes.LIMIT_SECONDS)
        for row in run(names, _QUICK.value, machine["backend"] != "cpu"):
            rows.append(row)
            code |= row.missing.startswith("FAILED")
    except RuntimeError as e:
        print(f"error: JAX does not start here: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        notes.append("interrupted: not all has been measured")
        code = 130
    machine["load before, after"] = f"{load:.2f}, {os.getloadavg()[0]:.2f}"
    if load > 0.3:
        notes.append(
            "the machine was not idle: ratios scatter more than they would, times are "
            "too long"
        )
    print(f"\n{show(machine, rows, notes)}")
    if _JSON.value:
        content = {
            "machine": machine,
            "rows": list(map(dataclasses.asdict, rows)),
            "notes": notes,
        }
        disk.replace(pathlib.Path(_JSON.value), jsonfile.dumps(content, 1).encode())
    return code


@flags.validator("only", message=f"there are {', '.join(PARTS)}")
def _are_parts(names: list[str]) -> bool:
    return set(names) <= PARTS.keys()


@flags.validator("json", message="its directory must be there")
def _can_be_written(path: str | None) -> bool:
    return path is None or pathlib.Path(path).absolute().parent.is_dir()


if __name__ == "__main__":
    app.run(main)
