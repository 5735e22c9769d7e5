"""Makes the file operations of a run fail, each once, and judges how it ends.

    python -m tests.faults.campaign --results=FILE [--parts=resume,eval] [--faults=EIO,kill] [--sample=30 --seed=0]

A point is a part of the run's life (see scenario.py), a kind of call, the number of one of them, and what is done to
it. What has been tried is in the results, a line each; the same command goes on with what has not. It prints a
table, and ends with 1 if a point is bad.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import sys
import tempfile
import time
from typing import NamedTuple

from tests.faults import power
from tests.faults import shim as shim_lib

# What a kernel may answer to a call.
FAULTS = {
    "open": ("EIO", "ESTALE", "EACCES", "ENOENT", "ENOSPC", "EINTR"),
    "opendir": ("EIO", "ESTALE", "EACCES", "ENOENT", "EINTR"),
    "readdir": ("EIO", "ESTALE", "EACCES", "ENOENT", "EINTR"),
    "stat": ("EIO", "ESTALE", "EACCES", "ENOENT"),
    "read": ("EIO", "ESTALE", "EINTR", shim_lib.SHORT),
    "write": ("EIO", "ESTALE", "ENOSPC", "EINTR", shim_lib.SHORT, shim_lib.TORN),
    "fsync": ("EIO", "ESTALE", "ENOSPC", "EINTR"),
    "rename": ("EIO", "ESTALE", "EACCES", "ENOENT", "ENOSPC"),
    "unlink": ("EIO", "ESTALE", "EACCES", "ENOENT"),
    "mkdir": ("EIO", "ESTALE", "EACCES", "ENOENT", "ENOSPC"),
    "link": ("EIO", "ESTALE", "EACCES", "ENOENT", "ENOSPC"),
    "truncate": ("EIO", "ESTALE", "ENOSPC", "EINTR"),
    "lock": ("EIO", "ESTALE", "EINTR"),
    shim_lib.CHANGES: (shim_lib.KILL, shim_lib.CUT),
}
# After which a process has nothing to say.
ENDS = (shim_lib.KILL, shim_lib.TORN, shim_lib.CUT)
# Of a kind with more calls than that in a part, so many faults are drawn for each of them.
_MANY, _DRAWN = 40, 2
# How a point may end; the last one is found bad.
SAME, THEN_SAME, NOT_MET, BAD = "same", "error, then same", "not met", "BAD"


class Point(NamedTuple):
    """Something to be tried."""

    part: str
    kind: str
    at: int
    fault: str

    def __str__(self):
        return f"{self.part}: {self.fault} at {self.kind} {self.at}"


class Campaign:
    """The points, and what they are compared with."""

    def __init__(self, scratch, disk=None):
        """Makes an undisturbed run, and counts the calls of its parts.

        Args:
          scratch: a folder for what is kept.
          disk: one that loses power, to try this on.
        """
        # With tensorboard and all that a run imports: once, and not where this process only starts another.
        from tests.faults import judge, scenario

        self._judge, self._scenario = judge, scenario
        self._scratch, self._disk = pathlib.Path(scratch), disk
        self._place = scenario.Place(scratch, disk=disk and disk.folder)
        self._shim = shim_lib.Shim(self._place.disk)
        self.calls, self._wanted, self._said = {}, {}, {}
        for name in ("new", "resume", "again", "eval", "ls", "verify"):
            self._record(name)

    def points(self, parts, faults, seed):
        """All points of some parts and faults, in an order."""
        found = []
        for part in parts:
            calls = self.calls[part]
            counts = collections.Counter(kind for kind, _, _ in calls)
            counts[shim_lib.CHANGES] = sum(changes for _, changes, _ in calls)
            for kind, possible in FAULTS.items():
                possible = [fault for fault in possible if fault in faults]
                for at in range(1, counts[kind] + 1):
                    found += [Point(part, kind, at, fault) for fault in self._drawn(part, kind, at, possible, seed)]  # fmt: skip
        return found

    def try_point(self, point):
        """Tries one; what came of it."""
        part = self._scenario.PARTS[point.part]
        self._begin(part.start)
        self._shim.plan(point.kind, point.at, point.fault)
        ended = self._place.start(point.part, self._shim.watch)
        hit = self._shim.hit()
        if point.fault == shim_lib.CUT:
            self._disk.power_up()
        if hit is None:
            return {**point._asdict(), "outcome": NOT_MET, "path": "", "why": []}
        judged = self._judge_reading if part.only_reads else self._judge_run
        outcome, why = judged(point, ended, hit[1])
        found = {"outcome": BAD if why else outcome, "why": why, "code": ended.code}
        if why:
            found["said"] = ended.output[-1500:]
        where = shim_lib.anyone(hit[1]).removeprefix(str(self._place.disk))
        return {**point._asdict(), "path": f"{hit[0]} {where}", **found}

    def _drawn(self, part, kind, at, faults, seed):
        calls = sum(one == kind for one, _, _ in self.calls[part])
        if calls <= _MANY or len(faults) <= _DRAWN or kind == shim_lib.CHANGES:
            return faults
        return random.Random(f"{seed}/{part}/{kind}/{at}").sample(faults, _DRAWN)

    def _begin(self, start):
        self._place.begin(start)
        if self._disk is not None:
            self._disk.settle()

    def _record(self, name):
        start = self._scenario.PARTS[name].start
        if start == self._scenario.STOPPED:
            self._place.begin(self._scenario.NEW)
            self._place.stop_half_way()
            self._place.keep(start)
        self._begin(start)
        before = self._look()
        self._shim.plan()
        ended = self._place.start(name, self._shim.watch)
        assert ended.code == 0, ended.output
        self.calls[name] = self._shim.calls()
        self._wanted[name] = before, self._look()
        self._said[name] = _words(ended.output)
        if name == "new":
            self._place.keep(self._scenario.FINISHED)

    def _look(self):
        """What is there."""
        found = self._scratch / "found.json"
        look = lambda: found.write_text(
            json.dumps(self._judge.look(self._place.run, self._place.checkpoints))
        )
        ended = self._place.fork(lambda: look() and 0)
        return json.loads(found.read_text()) if ended.code == 0 else ended.output[-400:]

    def _judge_reading(self, point, ended, path):
        if ended.code == 0 and _words(ended.output) == self._said[point.part]:
            return SAME, []
        why = self._judge.unclear(ended, path, point.fault)
        if "damaged" in ended.output.lower() or "is not what was written" in ended.output:
            why.append("says that a checkpoint is damaged")
        return THEN_SAME, why

    def _judge_run(self, point, ended, path):
        before, wanted = self._wanted[point.part]
        killed = point.fault in ENDS
        after = self._look()
        if isinstance(after, str):
            return BAD, [f"cannot be read: {after}"]
        why = self._judge.broken(before, after, self._wanted["new"][1], ended.output)
        if ended.code is None:
            return BAD, [*why, "hangs"]
        if ended.code == 0:
            why += self._judge.differences(after, wanted, clean=False)
            if not self._judge.differences(after, wanted):
                return SAME, why
        elif not killed:
            why += self._judge.unclear(ended, path, point.fault)
        return THEN_SAME, why + self._again(point, wanted)

    def _again(self, point, wanted):
        """What is wrong when the same command is given again, without a fault."""
        self._shim.plan()
        ended = self._place.start(point.part)
        if ended.code != 0:
            return [f"again: exit code {ended.code}: {ended.output[-300:]}"]
        after = self._look()
        if isinstance(after, str):
            return [f"again: cannot be read: {after}"]
        return [f"again: {text}" for text in self._judge.differences(after, wanted)]


def table(found):
    """Kinds of calls against faults, with how many points of each there were and how they ended."""
    cells = collections.defaultdict(collections.Counter)
    for one in found:
        cells[one["kind"], one["fault"]][one["outcome"]] += 1
    lines = [
        f"{'call':10} {'fault':8} {'points':>7} {SAME:>7} {THEN_SAME:>17} {NOT_MET:>8} {BAD:>5}"
    ]
    for (kind, fault), counts in cells.items():
        lines.append(
            f"{kind:10} {fault:8} {counts.total():7} {counts[SAME]:7} {counts[THEN_SAME]:17} "
            f"{counts[NOT_MET]:8} {counts[BAD]:5}"
        )
    totals = collections.Counter(one["outcome"] for one in found)
    said = ", ".join(f"{count} {outcome}" for outcome, count in totals.items())
    return "\n".join([*lines, f"{len(found)} points: {said}"])


def _words(output):
    """What a tool prints, without how long ago something was."""
    return [line for line in output.splitlines() if '"age"' not in line]


def main(argv):
    """Tries what has not been tried."""
    everything = dict.fromkeys(fault for faults in FAULTS.values() for fault in faults)
    del everything[shim_lib.CUT]
    names = ("new", "resume", "again", "eval", "ls", "verify")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--parts", default=",".join(names))
    parser.add_argument("--faults", default=",".join(everything))
    parser.add_argument("--sample", type=int, default=0, help="how many points to draw; 0: all")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--power", action="store_true", help="instead, the power goes")
    parser.add_argument("--share", default="0/1", help="INDEX/COUNT, of several at once")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="faults") as scratch:
        if "LD_PRELOAD" not in os.environ:
            variables = shim_lib.preloaded(scratch)
            command = [sys.executable, "-m", "tests.faults.campaign", *argv]
            return os.spawnve(os.P_WAIT, sys.executable, command, {**os.environ, **variables})
        if not options.power:
            return _try_all(Campaign(scratch), options.faults.split(","), options)
        with power.Disk(scratch) as disk:
            return _try_all(Campaign(scratch, disk), [shim_lib.CUT], options)


def _try_all(campaign, faults, options):
    points = campaign.points(options.parts.split(","), faults, options.seed)
    if options.sample:
        points = random.Random(options.seed).sample(points, min(options.sample, len(points)))
    index, count = map(int, options.share.split("/"))
    points, results, found = points[index::count], options.results, []
    if results.exists():
        found = [json.loads(line) for line in results.read_text().splitlines()]
    tried = {Point(one["part"], one["kind"], one["at"], one["fault"]) for one in found}
    todo = [point for point in points if point not in tried]
    print(f"{len(points)} points, of which {len(points) - len(todo)} have been tried", flush=True)
    begin = time.monotonic()
    with results.open("a") as file:
        for number, point in enumerate(todo, 1):
            one = campaign.try_point(point)
            found.append(one)
            print(json.dumps(one), file=file, flush=True)
            if one["outcome"] == BAD:
                print(f"BAD {point}, {one['path']}: {'; '.join(one['why'])}", flush=True)
            if number % 100 == 0:
                print(
                    f"{number} of {len(todo)}, {(time.monotonic() - begin) / number:.2f} s each",
                    flush=True,
                )
    print(table(found))
    return int(any(one["outcome"] == BAD for one in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
