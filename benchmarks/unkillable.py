"""Kills members of a run at random instants, and compares it with one that is left
alone.

    python -m benchmarks.unkillable --kills=6 --every=15 --seed=0 [--gates]

Each round trains digits twice with `python -m launch --spares`: undisturbed, and with
kills drawn from the seed: of the member that leads, of another, or of two at once. A
third run, of processes that JAX joins, is killed once, for comparison. Then a step of
members is compared with one of such processes, for two sizes of network. Printed are
the steps a second, the seconds without steps after each kill, and the steps that were
made again. With --gates it prints a table of what must hold, and exits with 1 if
anything does not. The seconds mean something on a machine that does nothing else.
"""

import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from absl import app, flags

from tests.launch import harness

_KILLS = flags.DEFINE_integer("kills", 6, "How many kills in each disturbed run.", 1)
_EVERY = flags.DEFINE_float("every", 15.0, "The mean seconds between two kills.", 0.1)
_ROUNDS = flags.DEFINE_integer("rounds", 1, "How many rounds.", 1)
_MEMBERS = flags.DEFINE_integer("members", 3, "The number of members.", 2)
_SPARES = flags.DEFINE_integer("spares", 1, "The number of spares.", 0)
_STEPS = flags.DEFINE_integer("steps", 4000, "The number of steps of each run.", 100)
_SEED = flags.DEFINE_integer("seed", 0, "The seed of the kills of the first round.")
_RESTART = flags.DEFINE_bool("restart", True, "Whether to time a restart, too.")
_HIDDEN = flags.DEFINE_list(
    "hidden",
    ["96", "4096"],
    "The sizes of the layer with which members are compared with processes that JAX "
    "joins: 0.3 MB and 13 MB of gradients.",
)
_GATES = flags.DEFINE_bool("gates", False, "Whether to check what must hold.")

_MOST_SECONDS_WITHOUT_STEPS = 0.5
_LEAST_SHARE_OF_STEPS = 0.8
_MOST_STEP_RATIO = 1.1
_COMPARED_STEPS = 150
_LIMIT_SECONDS = 3600.0


class Trained(NamedTuple):
    """A run, as its rows and its launcher tell of it.

    Attributes:
      code: the exit code.
      rate: the steps a second, from the first row to the last.
      gaps: the seconds without steps after each kill.
      repeated: how many steps were made again.
      kept: whether the run lost no other processes than those that were killed.
    """

    code: int
    rate: float
    gaps: list[float]
    repeated: int
    kept: bool


class Gate(NamedTuple):
    """What must hold.

    Attributes:
      what: a description.
      measured: what was measured, as text.
      holds: whether it does.
    """

    what: str
    measured: str
    holds: bool


def main(argv: list[str]) -> int:
    """Runs the rounds; returns the exit code."""
    del argv
    gates: list[Gate] = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        for number in range(_ROUNDS.value):
            gates += play_round(scratch / str(number), _SEED.value + number)
        if _RESTART.value:
            restarted = train(scratch / "restart", ["--num_processes=2"], kills=[5.0])
            say("restart of all", restarted)
        for hidden in map(int, _HIDDEN.value):
            gates.append(compare_steps(scratch / f"hidden_{hidden}", hidden))
    if not _GATES.value:
        return 0
    for gate in gates:
        print(f"{'ok  ' if gate.holds else 'FAIL'} {gate.what}: {gate.measured}")
    return 0 if all(gate.holds for gate in gates) else 1


def play_round(scratch: pathlib.Path, seed: int) -> list[Gate]:
    """Trains undisturbed and disturbed; returns what must hold of that."""
    options = [f"--num_processes={_MEMBERS.value}", f"--spares={_SPARES.value}"]
    undisturbed = train(scratch / "undisturbed", options)
    say("undisturbed", undisturbed)
    draw = random.Random(seed)
    kills = [draw.uniform(0.5, 1.5) * _EVERY.value for _ in range(_KILLS.value)]
    disturbed = train(scratch / "disturbed", options, kills, draw)
    say(f"seed {seed}", disturbed)
    is_same = True
    try:
        harness.assert_same_end(
            scratch / "disturbed", scratch / "undisturbed", _STEPS.value
        )
    except AssertionError as e:
        print(e)
        is_same = False
    share = disturbed.rate / undisturbed.rate
    worst = max(disturbed.gaps, default=0.0)
    return [
        Gate("it ends by itself", f"exit code {disturbed.code}", disturbed.code == 0),
        Gate("bits, rows, results", f"equal: {is_same}", is_same),
        Gate("steps made again", f"{disturbed.repeated}", disturbed.repeated == 0),
        Gate(
            f"at most {_MOST_SECONDS_WITHOUT_STEPS} s without steps after each kill",
            f"{worst:.2f} s",
            worst <= _MOST_SECONDS_WITHOUT_STEPS,
        ),
        Gate("survivors stay", f"{disturbed.kept}", disturbed.kept),
        Gate(
            f"at least {_LEAST_SHARE_OF_STEPS:.0%} of the undisturbed steps",
            f"{share:.0%}",
            share >= _LEAST_SHARE_OF_STEPS,
        ),
    ]


def train(
    directory: pathlib.Path,
    options: Sequence[str],
    kills: Sequence[float] = (),
    draw: random.Random | None = None,
    steps: int = 0,
    config: Sequence[str] = (),
) -> Trained:
    """Trains a run, and kills members of it.

    Args:
      directory: the work directory.
      options: the launcher's options.
      kills: the seconds before each kill.
      draw: draws whom to kill; None: the process that leads.
      steps: the number of steps; 0: that of the flag.
      config: further arguments of the run.
    """
    command = [
        sys.executable,
        "-m",
        "xshard.main",
        "--config=configs/digits.py",
        f"--workdir={directory}",
        "--config.logical_replicas=8",
        "--config.reduction.arithmetic=exact",
        "--config.log_every_steps=1",
        f"--config.steps={steps or _STEPS.value}",
        *config,
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", *options, "--cpu_devices=1", "--", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=harness.environment(),
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
    reader.start()
    times: list[float] = []
    killed: set[int] = set()
    try:
        wait_for_rows(process, directory, 10)
        for seconds in kills:
            time.sleep(seconds)
            victims = choose(process, directory, draw)
            if process.poll() is not None or not victims:
                break
            times.append(time.time())
            for number, pid in victims.items():
                os.kill(pid, signal.SIGKILL)
                killed.add(number)
            wait_for_rows(process, directory, len(rows(directory)) + 10)
        process.wait(_LIMIT_SECONDS)
    finally:
        process.kill()
        reader.join(10)
    logged = rows(directory)
    stamps = [row["perf/time"] for row in logged]
    span = max(stamps[-1] - stamps[0], 1e-9)
    lost = set(re.findall(r"launch: process (\d+) .*goes on without", "".join(lines)))
    return Trained(
        code=process.returncode,
        rate=(logged[-1]["step"] - logged[0]["step"]) / span,
        gaps=[gap_after(stamps, at) for at in times],
        repeated=repeated(lines),
        kept=set(map(int, lost)) <= killed,
    )


def compare_steps(scratch: pathlib.Path, hidden: int) -> Gate:
    """Compares a step of two members with one of two processes that JAX joins."""
    config = [
        f"--config.model.hidden={hidden}",
        f"--config.eval_every_steps={_COMPARED_STEPS}",
        f"--config.checkpoint.every_steps={_COMPARED_STEPS}",
    ]
    sides: dict[str, list[float]] = {"joined": [], "members": []}
    for number in range(2 * _ROUNDS.value):
        for name, seconds in sides.items():
            options = ["--num_processes=2"]
            if name == "members":
                options.append("--spares=0")
            directory = scratch / f"{name}_{number}"
            trained = train(directory, options, steps=_COMPARED_STEPS, config=config)
            assert trained.code == 0, directory
            stamps = [row["perf/time"] for row in rows(directory)]
            gaps = [later - earlier for earlier, later in itertools.pairwise(stamps)]
            seconds.append(statistics.median(gaps))
    joined, members = (min(seconds) for seconds in sides.values())
    print(
        f"hidden {hidden}: a step of processes that JAX joins {1e3 * joined:.1f} ms, "
        f"of members {1e3 * members:.1f} ms; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    ratio = members / joined
    what = f"a step with a layer of {hidden}: at most {_MOST_STEP_RATIO} of JAX's"
    return Gate(what, f"{ratio:.2f}", ratio <= _MOST_STEP_RATIO)


def choose(
    process: "subprocess.Popen[str]",
    directory: pathlib.Path,
    draw: random.Random | None,
) -> dict[int, int]:
    """Returns the process IDs of the members to kill next, by number; at least one is
    left.
    """
    numbers = {pid: number for number, pid in harness.members(process).items()}
    with contextlib.suppress(OSError, ValueError):
        leader = harness.status(directory)[0]["pid"]
        others = sorted(pid for pid in numbers if pid != leader)
        kind = draw.choice(("leader", "other", "two")) if draw else "leader"
        chosen = []
        if kind != "other" or not others:
            chosen.append(leader)
        if draw and len(others) > (kind == "two") and kind != "leader":
            chosen.append(draw.choice(others))
        return {numbers[pid]: pid for pid in chosen if pid in numbers}
    return {}


def rows(directory: pathlib.Path) -> list[dict[str, float]]:
    """Returns the rows of steps so far."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        return []
    whole = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if row["kind"] == "train":
                whole.append(row)
    return whole


def wait_for_rows(
    process: "subprocess.Popen[str]", directory: pathlib.Path, count: int
) -> None:
    """Waits until a run has written so many rows, or has ended."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while len(rows(directory)) < count and process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{directory} has no {count} rows")
        time.sleep(0.2)


def gap_after(stamps: Sequence[float], at: float) -> float:
    """Returns the longest time between two rows just after an instant, less the usual
    one.
    """
    gaps = [later - earlier for earlier, later in itertools.pairwise(stamps)]
    near = [
        gap
        for gap, later in zip(gaps, stamps[1:], strict=True)
        if at - 0.1 <= later <= at + 60 and later - gap <= at + 1
    ]
    return max(near, default=0.0) - statistics.median(gaps)


def repeated(lines: Sequence[str]) -> int:
    """Returns how many steps were made again: those between a checkpoint that was
    restored and the last step that was printed before.
    """
    last = 0
    total = 0
    for line in lines:
        for prefix in ("step ", "resumed from the checkpoint of step "):
            text = line.partition("] ")[2] or line
            if not text.startswith(prefix):
                continue
            number = text.removeprefix(prefix).split("/")[0].split()[0].strip(":;,.")
            if not number.isdecimal():
                continue
            if prefix != "step ":
                total += max(0, last - int(number))
            last = int(number)
    return total


def say(name: str, trained: Trained) -> None:
    """Prints what was measured of a run."""
    gaps = " ".join(f"{gap:.2f}" for gap in trained.gaps) or "-"
    print(
        f"{name}: exit code {trained.code}, {trained.rate:.1f} steps/s, seconds "
        f"without steps {gaps}, steps made again {trained.repeated}; load "
        f"{os.getloadavg()[0]:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)
