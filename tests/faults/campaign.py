"""Makes each file operation of a run fail once, and judges how the run ends.

    python -m tests.faults.campaign --results=FILE [--where=disk] [--parts=resume,eval]
    [--faults=EIO,kill]
        [--sample=30 --seed=0]

A point names a part of the run's life (see scenario.py), a kind of call, the number of
one call of this kind, and the fault that this call meets. `--where=power` cuts the
power of a disk before a call. With `gcs` and `s3`, requests to an object store fail.
The results have one line for each point that was tried, and the same command continues
with the other points. The exit code is 1 if a point is bad, and 2 if the campaign
itself fails.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import NamedTuple

from tests.checkpoint import harness
from tests.faults import power, proxy, shim

# The faults that a kernel may cause in each kind of call.
DISK = {
    "open": ("EIO", "ESTALE", "EACCES", "ENOENT", "ENOSPC", "EINTR"),
    "opendir": ("EIO", "ESTALE", "EACCES", "ENOENT", "EINTR"),
    "readdir": ("EIO", "ESTALE", "EACCES", "ENOENT", "EINTR"),
    "stat": ("EIO", "ESTALE", "EACCES", "ENOENT"),
    "read": ("EIO", "ESTALE", "EINTR", shim.SHORT),
    "write": ("EIO", "ESTALE", "ENOSPC", "EINTR", shim.SHORT, shim.TORN),
    "fsync": ("EIO", "ESTALE", "ENOSPC", "EINTR"),
    "rename": ("EIO", "ESTALE", "EACCES", "ENOENT", "ENOSPC"),
    "unlink": ("EIO", "ESTALE", "EACCES", "ENOENT"),
    "mkdir": ("EIO", "ESTALE", "EACCES", "ENOENT", "ENOSPC"),
    "link": ("EIO", "ESTALE", "EACCES", "ENOENT", "ENOSPC"),
    "truncate": ("EIO", "ESTALE", "ENOSPC", "EINTR"),
    "lock": ("EIO", "ESTALE", "EINTR"),
    shim.CHANGES: (shim.KILL,),
}
POWER = {shim.CHANGES: (shim.CUT,)}
OBJECTS = {kind: ("403", "404", "429", "500", "503") for kind in proxy.KINDS}
OBJECTS["write"] += (proxy.DONE_ALREADY,)
# A listing lacks the objects that the last so many requests created.
_LAGS = (1, 3, 10, 30, 100, 1000)
# A process that meets one of these faults is killed, so it prints no message.
_ENDS = (shim.KILL, shim.TORN, shim.CUT)
# If a part has more calls of a kind than this, each call gets only one fault, drawn by
# the seed.
_MANY = 40
PARTS = ("new", "resume", "again", "eval", "ls", "verify")
WHERE = ("disk", "power", "gcs", "s3")
# The outcomes of a point, in this order: the part ends as without a fault; it does so
# after the same command is given again; likewise, but with a checkpoint that the rules
# would not have kept; the call did not occur; the point is bad.
SAME, THEN_SAME, MORE, NOT_MET, BAD = (
    "same",
    "then same",
    "keeps more",
    "not met",
    "BAD",
)
_OUTCOMES = (SAME, THEN_SAME, MORE, NOT_MET, BAD)
# Log lines of libraries, for example about their search for credentials.
_LOGGED = re.compile(r"[EWI]\d{4} ")


class Point(NamedTuple):
    """One fault to try.

    Attributes:
      part: one of PARTS.
      kind: the kind of call.
      at: the number of the call of this kind, from 1; for `proxy.LAG`, the number of
        recent requests.
      fault: the fault that the call meets.
    """

    part: str
    kind: str
    at: int
    fault: str

    def __str__(self):
        return f"{self.part}: {self.fault} at {self.kind} {self.at}"


class Campaign:
    """The points of one place, and the results of the undisturbed run that they are
    compared with.
    """

    def __init__(self, scratch, parts, place, seam, faults, judge):
        """Runs the parts without faults, and counts their calls.

        Args:
          scratch: a folder for temporary files.
          parts: the parts to try, from PARTS.
          place: the `scenario.Place` where the parts run.
          seam: the object that injects faults: a `shim.Shim` or a `proxy.Proxy`.
          faults: the faults to try, by kind of call.
          judge: the module `tests.faults.judge`.
        """
        self._found = scratch / "found.json"
        self._place, self._seam, self._faults, self._judge = place, seam, faults, judge
        self._calls, self._wanted, self._printed = {}, {}, {}
        for part in dict.fromkeys(("new", *parts)):
            self._record(part)
        self._parts = parts

    def points(self, faults, seed):
        """Lists the points of the named faults in a fixed order; of all faults if none
        is named.
        """
        found = []
        for part in self._parts:
            counts = collections.Counter(kind for kind, _, _ in self._calls[part])
            counts[shim.CHANGES] = sum(changes for _, changes, _ in self._calls[part])
            for kind, possible in self._faults.items():
                wanted = [fault for fault in possible if not faults or fault in faults]
                for at in range(1, counts[kind] + 1):
                    drawn = wanted
                    if counts[kind] > _MANY and wanted:
                        drawn = [
                            random.Random(f"{seed}/{part}/{kind}/{at}").choice(wanted)
                        ]
                    found += [Point(part, kind, at, fault) for fault in drawn]
            if "list" in self._faults and (not faults or proxy.LAG in faults):
                found += [Point(part, "list", lag, proxy.LAG) for lag in _LAGS]
        return found

    def try_point(self, point):
        """Tries one point; returns its row of the results."""
        begin = time.monotonic()
        start, only_reads = self._place.describe(point.part)
        self._place.begin(start)
        self._seam.plan(point.kind, point.at, point.fault)
        ended = self._place.start(point.part, self._seam.watch)
        hit = self._seam.hit()
        self._seam.plan()
        if point.fault == shim.CUT:
            self._place.power_up()
        found = {
            **point._asdict(),
            "outcome": NOT_MET,
            "path": "",
            "why": [],
            "code": ended.code,
        }
        if hit is None and ended.code != 0:
            found |= {"outcome": BAD, "why": ["failed without a fault"]}
        if hit is not None:
            judged = self._judge_reading if only_reads else self._judge_run
            outcome, why = judged(point, ended, hit[1])
            where = shim.mask_random_names(hit[1]).removeprefix(str(self._place.disk))
            found |= {
                "outcome": BAD if why else outcome,
                "path": f"{hit[0]} {where}",
                "why": why,
            }
        if found["why"]:
            found["said"] = ended.output[-1500:]
        return {**found, "seconds": round(time.monotonic() - begin, 1)}

    def _record(self, part):
        start, _ = self._place.describe(part)
        if part == "resume":
            self._place.begin("new")
            self._place.stop_half_way()
            self._place.keep(start)
        self._place.begin(start)
        before = self._look()
        self._seam.plan()
        ended = self._place.start(part, self._seam.watch)
        assert ended.code == 0, ended.output
        self._calls[part] = self._seam.calls()
        self._wanted[part] = before, self._look()
        self._printed[part] = _words(ended.output)
        if part == "new":
            self._place.keep("finished")

    def _look(self):
        """Returns what `judge.look` returns; an error text if the files cannot be
        read.
        """

        def look():
            found = self._judge.look(self._place.run, self._place.checkpoints)
            self._found.write_text(json.dumps(found))

        ended = self._place.fork(look)
        return (
            json.loads(self._found.read_text())
            if ended.code == 0
            else ended.output[-400:]
        )

    def _unclear(self, point, ended, name):
        on_disk = name.startswith("/")
        names = (self._judge.names_of_file if on_disk else self._judge.names_of_object)(
            name
        )
        # For a failed listing, tensorstore prints the code in the answer's body, not
        # the status.
        reason = self._judge.reason(point.fault)
        reasons = [reason, proxy.CODES.get(point.fault, reason)]
        return self._judge.unclear(ended, names, reasons)

    def _judge_reading(self, point, ended, name):
        if ended.code == 0 and _words(ended.output) == self._printed[point.part]:
            return SAME, []
        why = self._unclear(point, ended, name)
        if (
            "damaged" in ended.output.lower()
            or "is not what was written" in ended.output
        ):
            why.append("reports that a checkpoint is damaged")
        return THEN_SAME, why

    def _judge_run(self, point, ended, name):
        before, wanted = self._wanted[point.part]
        after = self._look()
        if isinstance(after, str):
            return BAD, [f"cannot be read: {after}"]
        why = self._judge.broken(before, after, self._wanted["new"][1], ended.output)
        if ended.code is None:
            return BAD, [*why, "hangs"]
        if ended.code == 0:
            why += self._judge.differences(after, wanted)
            if not why and not self._leftovers(after, wanted):
                return SAME, why
        elif point.fault not in _ENDS:
            why += self._unclear(point, ended, name)
        outcome, again = self._again(point, wanted)
        return outcome, why + [f"again: {text}" for text in again]

    def _leftovers(self, after, wanted):
        return self._judge.left_behind(after) or self._judge.more_checkpoints(
            after, wanted
        )

    def _again(self, point, wanted):
        """Runs the same command again without a fault; returns the outcome and what is
        wrong with it.
        """
        ended = self._place.start(point.part)
        if ended.code != 0:
            return BAD, [f"exit code {ended.code}: {ended.output[-300:]}"]
        after = self._look()
        if isinstance(after, str):
            return BAD, [f"cannot be read: {after}"]
        why = self._judge.differences(after, wanted) + self._judge.left_behind(after)
        return MORE if self._judge.more_checkpoints(after, wanted) else THEN_SAME, why


@contextlib.contextmanager
def campaign(where, parts, scratch):
    """Opens a campaign of some parts at one of WHERE."""
    # These modules import everything that a run imports. A process that only restarts
    # itself with the shim skips them.
    from tests.faults import judge, scenario

    with contextlib.ExitStack() as stack:
        if where == "disk":
            place, faults = scenario.Place(scratch), DISK
            seam = shim.Shim(place.disk)
        elif where == "power":
            place, faults = (
                scenario.Place(scratch, disk=stack.enter_context(power.Disk(scratch))),
                POWER,
            )
            seam = shim.Shim(place.disk)
        else:
            store = stack.enter_context(
                harness.gcs() if where == "gcs" else harness.s3()
            )
            seam, faults = stack.enter_context(proxy.Proxy(store)), OBJECTS
            place = scenario.Place(
                scratch, directory=seam.directory(where), objects=seam
            )
        yield Campaign(scratch, parts, place, seam, faults, judge)


def tried(where, folder, jobs, options=()):
    """Tries points in several processes at once; returns their rows of the results.

    Args:
      where: one of WHERE.
      folder: the folder of the results; points that have a row there are not tried
        again.
      jobs: the number of processes.
      options: additional options for the command of each process.
    """
    files = [folder / f"{where}.{index}of{jobs}.jsonl" for index in range(jobs)]
    command = [
        sys.executable,
        "-m",
        "tests.faults.campaign",
        f"--where={where}",
        *options,
    ]
    shares = [
        [f"--results={file}", f"--share={i}/{jobs}"] for i, file in enumerate(files)
    ]
    # A cache, since all points compile the same few programs.
    caching = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    caching = {name: os.environ.get(name, value) for name, value in caching.items()}
    environment = harness.environment(**caching)
    processes = [
        subprocess.Popen([*command, *share], env=environment) for share in shares
    ]
    codes = [process.wait() for process in processes]
    assert set(codes) <= {0, 1}, f"a process failed; exit codes: {codes}"
    return [
        json.loads(line) for file in files for line in file.read_text().splitlines()
    ]


def table(found):
    """Returns a table of the number of points and their outcomes, by kind of call and
    fault.
    """
    cells = collections.defaultdict(collections.Counter)
    for row in found:
        cells[row["kind"], row["fault"]][row["outcome"]] += 1
    lines = [
        f"{'call':8} {'fault':7} {'points':>7}" + "".join(f"{o:>11}" for o in _OUTCOMES)
    ]
    for (kind, fault), counts in sorted(cells.items()):
        numbers = "".join(f"{counts[outcome]:11}" for outcome in _OUTCOMES)
        lines.append(f"{kind:8} {fault:7} {counts.total():7}{numbers}")
    totals = collections.Counter(row["outcome"] for row in found)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in totals.items())
    return "\n".join([*lines, f"{len(found)} points: {summary}"])


def _words(output):
    """Returns the lines that a tool prints, without ages and the log lines of
    libraries.
    """
    lines = output.splitlines()
    return [line for line in lines if '"age"' not in line and not _LOGGED.match(line)]


def main(argv):
    """Tries the points without a result; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--where", choices=WHERE, default="disk")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument(
        "--faults", default="", help="the faults to try; by default all"
    )
    parser.add_argument(
        "--sample", type=int, default=0, help="how many points to draw; 0: all"
    )
    parser.add_argument("--seed", default="0")
    parser.add_argument(
        "--share", default="0/1", help="INDEX/COUNT: this process's share of the points"
    )
    options = parser.parse_args(argv)
    # SIGTERM acts like Ctrl-C, so that disks are unmounted and child processes are
    # ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        scratch = pathlib.Path(folder)
        if options.where in ("disk", "power") and "LD_PRELOAD" not in os.environ:
            variables = {**os.environ, **shim.preloaded(scratch)}
            command = [sys.executable, "-m", "tests.faults.campaign", *argv]
            return os.spawnve(os.P_WAIT, sys.executable, command, variables)
        with campaign(options.where, options.parts.split(","), scratch) as opened:
            return _try_all(opened, options)


def _try_all(campaign, options):
    faults = options.faults.split(",") if options.faults else []
    points = campaign.points(faults, options.seed)
    if options.sample:
        points = random.Random(options.seed).sample(
            points, min(options.sample, len(points))
        )
    index, count = map(int, options.share.split("/"))
    points, results, found = points[index::count], options.results, []
    if results.exists():
        found = [json.loads(line) for line in results.read_text().splitlines()]
    tried = {Point(row["part"], row["kind"], row["at"], row["fault"]) for row in found}
    todo = [point for point in points if point not in tried]
    print(
        f"{len(points)} points; {len(points) - len(todo)} already have a result",
        flush=True,
    )
    with results.open("a") as file:
        for point in todo:
            row = campaign.try_point(point)
            found.append(row)
            print(json.dumps(row), file=file, flush=True)
            if row["outcome"] == BAD:
                print(
                    f"BAD {point}, {row['path']}: {'; '.join(row['why'])}", flush=True
                )
    return int(any(row["outcome"] == BAD for row in found))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception:
        traceback.print_exc()
        sys.exit(2)
