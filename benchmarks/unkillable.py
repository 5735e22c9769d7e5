"""Kills members of a run at many instants, and compares it with one that is left alone.

    python -m benchmarks.unkillable --kills=8 --every=15 --seed=0 [--hosts] [--gates]

Digits is trained with `python -m launch --spares`: undisturbed, and once a round with
kills. The first one of a round is in the first step. The kinds of the others are drawn
from the seed: whom, and whether at any instant, while a checkpoint is half written,
while an evaluation is due, just after a takeover, or by suspending instead of killing.
The last member is never killed: that would end any run.

Then a step of members is compared with one of processes that JAX joins, for two sizes
of network.
Printed are a table of the seconds without steps after the kills of each kind, and the
steps that were made again. With --gates it prints a table of what must hold, and exits
with 1 if anything does not. The seconds mean something on a machine that does nothing
else.
"""

import collections
import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import app, flags

from tests.launch import harness, network

_KILLS = flags.DEFINE_integer("kills", 8, "How many kills in each round.", 1)
_EVERY = flags.DEFINE_float("every", 15.0, "The mean seconds between two kills.", 0.1)
_ROUNDS = flags.DEFINE_integer("rounds", 1, "How many rounds.", 1)
_MEMBERS = flags.DEFINE_integer("members", 3, "The number of members.", 2)
_SPARES = flags.DEFINE_integer("spares", 1, "The number of spares.", 0)
_STEPS = flags.DEFINE_integer("steps", 4000, "The number of steps of each run.", 10)
_SEED = flags.DEFINE_integer("seed", 0, "The seed of the kills of the first round.")
_HIDDEN = flags.DEFINE_list(
    "hidden",
    ["96", "4096"],
    "The sizes of the layer with which members are compared with processes that JAX "
    "joins: 0.3 MB and 13 MB of gradients.",
)
_HOSTS = flags.DEFINE_bool(
    "hosts",
    False,
    "Whether each member and spare is on a host of its own: a network namespace, which "
    "needs root. The launcher is on another one.",
)
_GATES = flags.DEFINE_bool("gates", False, "Whether to check what must hold.")

_MOST_SECONDS_WITHOUT_STEPS = 0.5
_LEAST_SHARE_OF_STEPS = 0.8
_MOST_STEP_RATIO = 1.1
_COMPARED_STEPS = 150
_SAVE_STEPS = 20
_EVALUATION_STEPS = 30
# A suspended process is found in this time, and busy ones are not taken for one.
_HEARTBEAT_SECONDS = 5
# A run that makes no step for so long hangs.
_HANG_SECONDS = 300.0
_ROWS_BEFORE_KILLS = 50
_POLL_SECONDS = 0.002


class Kind(NamedTuple):
    """A kind of kill.

    Attributes:
      who: whom it is to end: a key of `_COUNTS`.
      when: returns whether it is time, from the work directory.
      number: the signal.
      then: whether the one that leads next is killed, too.
    """

    who: str
    when: Callable[[pathlib.Path], bool] = lambda _: True
    number: int = signal.SIGKILL
    then: bool = False


# How many members each needs, one of which is left.
_COUNTS = {"leader": 2, "other": 2, "two": 3, "joiner": 1}


class Killed(NamedTuple):
    """A kill that was made.

    Attributes:
      name: the kind.
      time: when, in seconds since 1970.
      processes: how many processes were killed.
    """

    name: str
    time: float
    processes: int


class Trained(NamedTuple):
    """A run, as its rows and its launcher tell of it.

    Attributes:
      code: the exit code.
      rate: the steps a second, from the first row to the last.
      kills: the kills, and the seconds without steps after each; None if it made no
        step after it.
      joins: the seconds without steps when processes joined.
      repeated: how many steps were made again.
      kept: whether the run lost no other processes than those that were killed.
    """

    code: int
    rate: float
    kills: list[tuple[Killed, float | None]]
    joins: list[float]
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
    if _HOSTS.value and not network.is_allowed():
        sys.exit(f"error: --hosts was not tried, it {network.NEEDED}")
    scratch = pathlib.Path(tempfile.mkdtemp())
    gates: list[Gate] = []
    runs: list[Trained] = []
    options = [f"--num_processes={_MEMBERS.value}", f"--spares={_SPARES.value}"]
    with contextlib.ExitStack() as stack:
        hosts = None
        if _HOSTS.value:
            count = _MEMBERS.value + _SPARES.value
            hosts = network.Hosts(stack, scratch, 1 + count)
            starter = hosts.starter(scratch / "starter", range(1, 1 + count))
            options.append(f"--through={starter}")
        undisturbed = train(scratch / "undisturbed", options, hosts=hosts)
        say("undisturbed", undisturbed)
        for number in range(_ROUNDS.value):
            seed = _SEED.value + number
            directory = scratch / f"seed_{seed}"
            disturbed = train(directory, options, plan(seed), hosts=hosts)
            say(f"seed {seed}", disturbed)
            runs.append(disturbed)
            gates += round_gates(scratch, seed, disturbed, undisturbed)
    for hidden in map(int, _HIDDEN.value):
        gates.append(compare_steps(scratch / f"hidden_{hidden}", hidden))
    print_table(runs)
    failed = [gate for gate in gates if not gate.holds]
    if failed:
        print(f"{scratch} has the runs")
    else:
        shutil.rmtree(scratch)
    if not _GATES.value:
        return 0
    for gate in gates:
        print(f"{'ok  ' if gate.holds else 'FAIL'} {gate.what}: {gate.measured}")
    return 1 if failed else 0


def plan(seed: int) -> tuple[random.Random, list[tuple[str, float]]]:
    """Returns the draws of a round, and the kind of each kill with the seconds before
    it.
    """
    draw = random.Random(seed)
    kills = [(_FIRST_KIND, draw.uniform(0, 2))]
    for _ in range(_KILLS.value - 1):
        kind = draw.choice(sorted(_KINDS))
        kills.append((kind, draw.uniform(0.5, 1.5) * _EVERY.value))
    return draw, kills


def round_gates(
    scratch: pathlib.Path, seed: int, disturbed: Trained, undisturbed: Trained
) -> list[Gate]:
    """Returns what must hold of a disturbed run."""
    is_same = True
    try:
        harness.assert_same_end(
            scratch / f"seed_{seed}", scratch / "undisturbed", _STEPS.value
        )
    except (AssertionError, OSError) as e:
        print(f"seed {seed}: {e}")
        is_same = False
    late = []
    for kill, gap in disturbed.kills:
        kind = _KINDS.get(kill.name, Kind("leader"))
        most = _MOST_SECONDS_WITHOUT_STEPS * (1 + kind.then)
        if kind.number == signal.SIGSTOP:
            most += _HEARTBEAT_SECONDS
        # The first step compiles.
        if gap is not None and gap > most and kill.name != _FIRST_KIND:
            late.append(f"{kill.name} {gap:.2f} s")
    share = disturbed.rate / undisturbed.rate
    return [
        Gate("it ends by itself", f"exit code {disturbed.code}", disturbed.code == 0),
        Gate("bits, rows, results", f"equal: {is_same}", is_same),
        Gate("steps made again", f"{disturbed.repeated}", disturbed.repeated == 0),
        Gate(
            f"at most {_MOST_SECONDS_WITHOUT_STEPS} s without steps after each kill, "
            "once a suspended process is found",
            ", ".join(late) or "all",
            not late,
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
    kills: tuple[random.Random, Sequence[tuple[str, float]]] = (random.Random(0), ()),
    steps: int = 0,
    config: Sequence[str] = (),
    hosts: network.Hosts | None = None,
) -> Trained:
    """Trains a run, and kills members of it.

    Args:
      directory: the work directory.
      options: the launcher's options.
      kills: the draws, and the kind of each kill with the seconds before it.
      steps: the number of steps; 0: that of the flag.
      config: further arguments of the run.
      hosts: the hosts, of which the first has the launcher; None: this one.
    """
    command = [
        sys.executable,
        "-m",
        "xshard.main",
        "--config=configs/digits.py",
        f"--workdir={directory}",
        f"--heartbeat_timeout_seconds={_HEARTBEAT_SECONDS}",
        "--config.logical_replicas=8",
        "--config.reduction.arithmetic=exact",
        "--config.log_every_steps=1",
        f"--config.eval_every_steps={_EVALUATION_STEPS}",
        f"--config.checkpoint.every_steps={_SAVE_STEPS}",
        f"--config.steps={steps or _STEPS.value}",
        *config,
    ]
    words = [sys.executable, "-m", "launch", *options, "--cpu_devices=1", "--"]
    if hosts is None:
        process = harness.start([*words, *command])
    else:
        process = hosts.start(0, *words, *command)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
    reader.start()
    killer = Killer(process, directory, lines, kills[0])
    try:
        for name, seconds in kills[1]:
            killer.kill(name, seconds)
        wait_for_rows(process, directory, steps or _STEPS.value)
        process.wait(_HANG_SECONDS)
    finally:
        process.kill()
        reader.join(10)
        directory.with_suffix(".log").write_text("".join(lines))
    logged = rows(directory)
    if len(logged) < 2:
        raise RuntimeError(f"{directory} made no steps: {''.join(lines)}")
    stamps = [row["perf/time"] for row in logged]
    span = max(stamps[-1] - stamps[0], 1e-9)
    gaps = gaps_of(logged)
    lost = set(re.findall(r"launch: process (\d+) .*goes on without", "".join(lines)))
    return Trained(
        code=process.returncode,
        rate=(logged[-1]["step"] - logged[0]["step"]) / span,
        kills=[(kill, gap_after(gaps, kill.time)) for kill in killer.kills],
        joins=[gap for _, gap, has_joined in gaps if has_joined],
        repeated=repeated(lines),
        kept=set(map(int, lost)) <= killer.numbers,
    )


class Killer:
    """Kills members of a run.

    Attributes:
      kills: the kills so far.
      numbers: the processes that were killed.
    """

    def __init__(
        self,
        process: "subprocess.Popen[str]",
        directory: pathlib.Path,
        lines: Sequence[str],
        draw: random.Random,
    ):
        """Kills nothing yet.

        Args:
          process: the launcher.
          directory: the work directory.
          lines: the output so far; another thread appends to it.
          draw: draws whom to kill.
        """
        self.kills: list[Killed] = []
        self.numbers: set[int] = set()
        self._process = process
        self._directory = directory
        self._lines = lines
        self._draw = draw

    def kill(self, name: str, seconds: float) -> None:
        """Kills when it is time for it, and waits until the run has made more steps; or
        until it has ended.

        Args:
          name: the kind.
          seconds: how long to wait before.
        """
        is_first = name == _FIRST_KIND
        if is_first:
            kind = Kind(self._draw.choice(("leader", "other", "two")))
            # From then on they are members.
            self._wait(lambda: any("generation 1:" in line for line in self._lines))
        else:
            kind = _KINDS[name]
            wait_for_rows(self._process, self._directory, _ROWS_BEFORE_KILLS)
        time.sleep(seconds)
        self._wait(lambda: self._has_victims(kind) and kind.when(self._directory))
        if self._process.poll() is not None:
            return
        count = count_rows(self._directory)
        victims = self._victims(kind)
        self.kills.append(Killed(name, time.time(), len(victims) + kind.then))
        self._send(kind.number, victims)
        if kind.then:
            self._wait(lambda: self._members()[:1] != victims)
            time.sleep(self._draw.uniform(0, 0.05))
            self._send(kind.number, self._members()[:1])
        if is_first and count:
            # It was too late for that.
            self.kills[-1] = self.kills[-1]._replace(name=kind.who)
        # Each kill has its own gap.
        wait_for_rows(self._process, self._directory, count + _SAVE_STEPS + 10)

    def _send(self, number: int, victims: Sequence[int]) -> None:
        pids = harness.members(self._process)
        for victim in victims:
            self.numbers.add(victim)
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(pids[victim], number)

    def _members(self) -> list[int]:
        """Returns the members' numbers, the leader's first."""
        for line in reversed(list(self._lines)):
            found = re.match(r"launch: generation \d+: processes ([\d, ]+);", line)
            if found:
                return [int(number) for number in found[1].split(", ")]
        return []

    def _outside(self) -> list[int]:
        return sorted(set(harness.members(self._process)) - set(self._members()))

    def _has_victims(self, kind: Kind) -> bool:
        if kind.who == "joiner" and not self._outside():
            return False
        return len(self._members()) >= _COUNTS[kind.who] + kind.then

    def _victims(self, kind: Kind) -> list[int]:
        members = self._members()
        if kind.who == "leader":
            return members[:1]
        if kind.who == "other":
            return [self._draw.choice(members[1:])]
        if kind.who == "two":
            return self._draw.sample(members, 2)
        return [self._draw.choice(self._outside())]

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds, or the run has ended."""
        deadline = time.monotonic() + _HANG_SECONDS
        while self._process.poll() is None and not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._directory}: nobody to kill")
            time.sleep(_POLL_SECONDS)


def is_saving(directory: pathlib.Path) -> bool:
    """Returns whether there is half a checkpoint that is newer than all whole ones."""
    newest = {True: "", False: ""}
    for path in (directory / "checkpoints").glob("step_*"):
        is_whole = (path / "COMMIT").exists()
        newest[is_whole] = max(newest[is_whole], path.name.partition(".")[0])
    return newest[False] > newest[True]


def is_evaluating(directory: pathlib.Path) -> bool:
    """Returns whether the newest row is of a step that is evaluated, and no row of the
    evaluation stands.
    """
    with (directory / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        found = re.search(rb'\{"step": (\d+), "kind": "train"[^\n]*\n$', file.read())
    return found is not None and int(found[1]) % _EVALUATION_STEPS == 0


_FIRST_KIND = "any in the first step"
_JOINED = "(not killed: it joined)"
_KINDS = {
    "leader": Kind("leader"),
    "other": Kind("other"),
    "two at once": Kind("two"),
    "one that joins": Kind("joiner"),
    "leader in a save": Kind("leader", is_saving),
    "other in a save": Kind("other", is_saving),
    "one that joins in a save": Kind("joiner", is_saving),
    "leader in an evaluation": Kind("leader", is_evaluating),
    "other in an evaluation": Kind("other", is_evaluating),
    "leader and its successor": Kind("leader", then=True),
    "leader suspended": Kind("leader", number=signal.SIGSTOP),
    "other suspended": Kind("other", number=signal.SIGSTOP),
}


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


def count_rows(directory: pathlib.Path) -> int:
    """Returns the number of rows of steps so far."""
    with contextlib.suppress(FileNotFoundError):
        return (directory / "metrics.jsonl").read_bytes().count(b'"kind": "train"')
    return 0


def wait_for_rows(
    process: "subprocess.Popen[str]", directory: pathlib.Path, count: int
) -> None:
    """Waits until a run has written so many rows, or has ended."""
    last = -1
    deadline = 0.0
    while (now := count_rows(directory)) < count and process.poll() is None:
        if now != last:
            last = now
            deadline = time.monotonic() + _HANG_SECONDS
        if time.monotonic() > deadline:
            raise TimeoutError(f"{directory} hangs after {now} rows")
        time.sleep(0.1)


def gaps_of(logged: Sequence[dict[str, float]]) -> list[tuple[float, float, bool]]:
    """Returns for each row but the first its time, the seconds since the one before,
    less the usual ones, and whether all that happened between them is that processes
    joined.
    """
    gaps = []
    for earlier, later in itertools.pairwise(logged):
        has_joined = False
        if later.get("perf/generation") != earlier.get("perf/generation"):
            has_joined = later["perf/takeovers"] == earlier["perf/takeovers"]
        gap = later["perf/time"] - earlier["perf/time"]
        gaps.append((later["perf/time"], gap, has_joined))
    usual = statistics.median(gap for _, gap, _ in gaps)
    return [(time, gap - usual, has_joined) for time, gap, has_joined in gaps]


def gap_after(gaps: Sequence[tuple[float, float, bool]], at: float) -> float | None:
    """Returns the longest of the gaps just after an instant in which not only processes
    joined; None if there is no row after it.
    """
    near = []
    for end, gap, has_joined in gaps:
        if end >= at and end - gap <= at + 1 and not has_joined:
            near.append(gap)
    return max(near, default=None)


def repeated(lines: Sequence[str]) -> int:
    """Returns how many steps were made again: those between a checkpoint that was
    restored and the last step that was printed before.
    """
    last = 0
    total = 0
    for line in lines:
        text = line.partition("] ")[2] or line
        made = re.match(r"step +(\d+)/", text)
        restored = re.match(r"resumed from the checkpoint of step ([\d,]+)", text)
        if made:
            last = int(made[1])
        if restored:
            step = int(restored[1].replace(",", ""))
            total += max(0, last - step)
            last = step
    return total


def say(name: str, trained: Trained) -> None:
    """Prints what was measured of a run."""
    print(
        f"{name}: exit code {trained.code}, {trained.rate:.1f} steps/s, "
        f"{sum(kill.processes for kill, _ in trained.kills)} processes killed, steps "
        f"made again {trained.repeated}; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    for kill, gap in trained.kills:
        seconds = "-" if gap is None else f"{gap:.2f}"
        print(f"  {kill.name}: {seconds} s without steps", flush=True)


def print_table(runs: Sequence[Trained]) -> None:
    """Prints how many processes were killed in each way, and the seconds without steps
    after that, and when others joined.
    """
    counts: collections.Counter[str] = collections.Counter()
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    for trained in runs:
        counts[_JOINED] += len(trained.joins)
        seconds[_JOINED] += trained.joins
        for kill, gap in trained.kills:
            counts[kill.name] += kill.processes
            if gap is not None:
                seconds[kill.name].append(gap)
    print(f"{'killed':28}{'processes':>10}{'median s':>10}{'worst s':>10}")
    for name in sorted(counts):
        text = f"{name:28}{counts[name]:10}"
        if seconds[name]:
            text += (
                f"{statistics.median(seconds[name]):10.2f}{max(seconds[name]):10.2f}"
            )
        print(text, flush=True)


if __name__ == "__main__":
    app.run(main)
