"""Checks and measures xshard on whatever JAX finds here, in ten minutes.

    python -m benchmarks.accelerator [--minutes=10] [--only=rules,step] [--output=DIR]

The parts come in the order of their worth, and each runs in processes of its own, one
at a time. A part that fails does not end the others; one that does not fit into the
time is reported as "no time left". Each row is PASS, FAIL, a figure, or the reason why
nothing was measured. On a CPU the sizes are small, and most figures say only that all
runs. JAX_PLATFORMS=cpu keeps the command there.

It writes two files, named after the chip, its number and JAX's version: a JSON file
with everything, and a Markdown file to read. README lists those in benchmarks/results.
Exit codes: 0; 1 if a row is FAIL; 130 after Ctrl-C, which writes the rows until then.
"""

import dataclasses
import datetime
import os
import pathlib
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags

from benchmarks import measure, processes
from xshard.files import disk, jsonfile

RESULTS = processes.ROOT / "benchmarks" / "results"

PASS = "PASS"
FAIL = "FAIL"
FIGURE = "figure"
NOT_MEASURED = "not measured"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the parts run.

    Attributes:
      is_cpu: whether JAX found only a CPU.
      folder: a folder for files, which the parts share.
    """

    is_cpu: bool
    folder: pathlib.Path

    @property
    def run(self) -> pathlib.Path:
        """The work directory of the run that several parts read."""
        return self.folder / "run"

    def devices(self, flag: str) -> list[str]:
        """Returns a flag with the number of virtual devices, if they are a CPU's."""
        return [f"--{flag}=4"] if self.is_cpu else []


@dataclasses.dataclass(frozen=True)
class Part:
    """One or more rows, which fail together.

    Attributes:
      name: its name, for --only.
      what: what a check promises; empty if the part measures.
      limit_seconds: the longest that it may take.
      command: returns a module and its arguments.
      needs: the name of the part without which it cannot run, if any.
    """

    name: str
    what: str
    limit_seconds: float
    command: Callable[[Place], list[str]]
    needs: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """A row of the results.

    Attributes:
      part: the name of its part.
      what: what was checked or measured.
      outcome: PASS, FAIL, 'figure' or 'not measured'.
      detail: what was found, or the reason.
      figure: the numbers of a figure.
    """

    part: str
    what: str
    outcome: str
    detail: str
    figure: dict[str, Any] | None = None


def _check(name: str) -> Callable[[Place], list[str]]:
    return lambda place: ["benchmarks.checks", name, *place.devices("devices")]


def _resume(place: Place) -> list[str]:
    flags_of_run = ["--config=configs/digits.py", *place.devices("cpu_devices")]
    return ["xshard.replay", "--verify_resume=6", *flags_of_run]


def _train(place: Place) -> list[str]:
    return [
        "xshard.main",
        "--config=configs/digits.py",
        f"--workdir={place.run}",
        *place.devices("cpu_devices"),
        "--config.steps=8",
        "--config.log_every_steps=1",
    ]


def _replay(place: Place) -> list[str]:
    return ["xshard.replay", str(place.run), "--step=6", *place.devices("cpu_devices")]


def _export(place: Place) -> list[str]:
    return ["benchmarks.checks", "export", f"--run={place.run}"]


def _step(precision: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        rounds = "--rounds=3" if place.is_cpu else "--rounds=11"
        more = ["--size=1 ms", *place.devices("devices")] if place.is_cpu else []
        return ["benchmarks.step", f"--precision={precision}", rounds, *more]

    return command


def _peak(side: str) -> Callable[[Place], list[str]]:
    more = ["--precision=float16", f"--memory={side}", "--size=20 ms"]
    return lambda place: ["benchmarks.step", *more, *place.devices("devices")]


def _loop(per_dispatch: int) -> Callable[[Place], list[str]]:
    more = ["--size=1 ms", f"--steps_per_dispatch={per_dispatch}"]

    def command(place: Place) -> list[str]:
        size = ["--rounds=1", "--steps=300"] if place.is_cpu else ["--rounds=3"]
        return ["benchmarks.loop", *more, *size]

    return command


def _checkpoint(place: Place) -> list[str]:
    size = "--megabytes=64" if place.is_cpu else "--megabytes=1024"
    return ["benchmarks.checkpoint", "--rounds=1", "--arrays=24", size]


# In the order of worth: first what would make results wrong.
PARTS = [
    Part("rules", "both rules train as the step by hand", 120, _check("rules")),
    Part("skips", "a step that overflows changes no bit", 120, _check("skips")),
    Part("resume", "a killed run resumes to the same bits", 300, _resume),
    Part("exact", "exact sums on one device and on all", 150, _check("exact")),
    Part("run", "digits trains in float16 and evaluates", 150, _train),
    Part("replay", "a replayed step has its row's bits", 240, _replay, "run"),
    Part("export", "an export predicts as its run", 120, _export, "run"),
    Part("step", "", 120, _step("float32")),
    Part("step_float16", "", 120, _step("float16")),
    Part("step_bfloat16", "", 120, _step("bfloat16")),
    Part("loop", "", 120, _loop(32)),
    Part("loop_one", "", 120, _loop(1)),
    Part("checkpoint", "", 150, _checkpoint),
    Part("peak_rules", "", 60, _peak("rules")),
    Part("peak_hand", "", 60, _peak("hand")),
]

_MINUTES = flags.DEFINE_float(
    "minutes", 10, "What does not fit is reported as 'no time left'.", 0.0
)
_ONLY = flags.DEFINE_list(
    "only",
    [],
    f"The parts to run, of {', '.join(part.name for part in PARTS)}; all by default.",
)
_OUTPUT = flags.DEFINE_string("output", str(RESULTS), "The folder for the two files.")


def results_of(parts: Sequence[Part], place: Place, seconds: float) -> Iterator[Result]:
    """Yields the rows of the parts, each as soon as its part has ended.

    Args:
      parts: the parts, in order.
      place: where they run.
      seconds: how long all of them together may take.
    """
    end = time.monotonic() + seconds
    failed = set()
    for part in parts:
        left = end - time.monotonic()
        what = part.what or part.name
        if part.needs in failed:
            yield Result(part.name, what, NOT_MEASURED, f"{part.needs} did not pass")
            failed.add(part.name)
            continue
        if left <= 0:
            yield Result(part.name, what, NOT_MEASURED, "no time left")
            failed.add(part.name)
            continue
        begin = time.monotonic()
        print(f"{part.name} ...", file=sys.stderr, end=" ", flush=True)
        try:
            yield from _run(part, place, min(left, part.limit_seconds))
        except processes.LateError as e:
            failed.add(part.name)
            # A part that is cut off before its own limit proves nothing.
            if left < part.limit_seconds:
                detail = f"no time left: it had {left:.0f} s"
                yield Result(part.name, what, NOT_MEASURED, detail)
            else:
                outcome = FAIL if part.what else NOT_MEASURED
                yield Result(part.name, what, outcome, str(e))
        except RuntimeError as e:
            failed.add(part.name)
            yield Result(part.name, what, FAIL, _without_paths(str(e), place))
        print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def _run(part: Part, place: Place, limit_seconds: float) -> Iterator[Result]:
    command = part.command(place)
    if part.what:
        output = processes.output_of(command, str(place.folder), limit_seconds)
        # Each of the programs says last what it found.
        last = (output.strip().splitlines() or [""])[-1]
        yield Result(part.name, part.what, PASS, _without_paths(last, place))
        return
    command.append("--json")
    output = processes.output_of(command, str(place.folder), limit_seconds)
    for row in measure.parse(output):
        what = f"{row.what} / {row.against}" if row.against else row.what
        if row.median is None:
            yield Result(part.name, what, NOT_MEASURED, row.missing)
            continue
        detail = measure.described(row)
        yield Result(part.name, what, FIGURE, detail, dataclasses.asdict(row))


def _without_paths(message: str, place: Place) -> str:
    """Returns a message without the folders of this machine."""
    message = message.replace(sys.executable, "python")
    message = message.replace(str(place.folder), "DIR")
    return message.replace(f"{processes.ROOT}/", "")


def chip(machine: dict[str, Any]) -> str:
    """Returns what JAX calls the devices here, or what the system calls the CPU."""
    if machine["backend"] == "cpu":
        return machine["CPU"]
    kinds = machine["devices"].split("; ")
    return f"{len(kinds)} x {kinds[0].partition(',')[0]}"


def content_of(
    machine: dict[str, Any], results: Sequence[Result], notes: Sequence[str]
) -> dict[str, Any]:
    """Returns what the JSON file holds."""
    described = {**machine, "system": f"{platform.system()} {platform.machine()}"}
    return {
        "chip": chip(machine),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": described,
        "rows": [dataclasses.asdict(result) for result in results],
        "notes": list(notes),
    }


def name_of(content: dict[str, Any]) -> str:
    """Returns the name of the files, without an ending."""
    versions = f"{content['chip']}, JAX {content['machine']['jax']}"
    return re.sub(r"[^a-z0-9.]+", "_", versions.lower()).strip("_")


def summary(content: dict[str, Any]) -> str:
    """Returns the row of README's table."""
    outcomes = [row["outcome"] for row in content["rows"]]
    checks = outcomes.count(PASS) + outcomes.count(FAIL)
    machine = content["machine"]
    missing = outcomes.count(NOT_MEASURED)
    cells = [
        content["chip"],
        f"{machine['backend']}, JAX {machine['jax']}, Python {machine['Python']}",
        content["date"],
        f"{outcomes.count(PASS)} of {checks}",
        f"{outcomes.count(FIGURE)}, not measured: {missing}",
    ]
    return f"| {' | '.join(cells)} |"


def text(content: dict[str, Any]) -> str:
    """Returns the Markdown file."""
    lines = [f"# {content['chip']}, {content['date']}", ""]
    lines += ["`python -m benchmarks.accelerator` wrote this file.", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in content["machine"].items()]
    lines += ["", "| part | what | outcome | found |", "|---|---|---|---|"]
    for row in content["rows"]:
        # A message may hold what separates the cells.
        cells = [row["part"], row["what"], row["outcome"], row["detail"]]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    lines += ["", *(f"- {note}" for note in content["notes"])]
    return "\n".join(lines).rstrip() + "\n"


def write(content: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """Writes both files; returns the path of the Markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    name = name_of(content)
    disk.replace(folder / f"{name}.json", jsonfile.dumps(content, 1).encode())
    path = folder / f"{name}.md"
    disk.replace(path, text(content).encode())
    return path


def main(argv: list[str]) -> int:
    """Runs the parts and writes the files; returns the exit code."""
    if argv[1:]:
        raise app.UsageError(f"{' '.join(argv[1:])}: arguments begin with '--'.")
    parts = [part for part in PARTS if not _ONLY.value or part.name in _ONLY.value]
    end = time.monotonic() + 60 * _MINUTES.value
    results: list[Result] = []
    notes = []
    code = 0
    load = os.getloadavg()[0]
    # SIGTERM is handled as Ctrl-C, so that the processes of the parts end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        try:
            machine = processes.described(folder, 60 * _MINUTES.value)
        except RuntimeError as e:
            print(f"error: JAX does not start here: {e}", file=sys.stderr)
            return 1
        place = Place(machine["backend"] == "cpu", pathlib.Path(folder))
        try:
            for result in results_of(parts, place, end - time.monotonic()):
                results.append(result)
                code |= result.outcome == FAIL
        except KeyboardInterrupt:
            notes.append("interrupted: the other parts did not run")
            code = 130
    if place.is_cpu:
        notes.append("a CPU: small sizes, whose times say little")
    machine["load before, after"] = f"{load:.2f}, {os.getloadavg()[0]:.2f}"
    if load > 1:
        notes.append("the machine was not idle: times and ratios scatter")
    if _ONLY.value:
        notes.append(f"only the parts {', '.join(part.name for part in parts)}")
    content = content_of(machine, results, notes)
    path = write(content, pathlib.Path(_OUTPUT.value))
    print(f"\n{text(content)}\nwritten to {path}")
    return code


@flags.validator("only", message="see --help for the parts")
def _are_parts(names: list[str]) -> bool:
    return set(names) <= {part.name for part in PARTS}


if __name__ == "__main__":
    app.run(main)
