"""Makes the file operations of a run fail, each once, and judges how it ends.

    python -m tests.faults.campaign --results=FILE [--where=disk] [--parts=resume,eval] [--faults=EIO,kill]
        [--sample=30 --seed=0]

A point is a part of the run's life (see scenario.py), a kind of call, the number of one of them, and what is done to
it. `--where=power` cuts a disk's power before a call; with `gcs` and `s3` it is the requests to an object store that
fail. What has been tried is in the results, a line each; the same command goes on with what has not. It ends with 1
if a point is bad, and with 2 if it is itself what is.
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

# What a kernel may answer to a call.
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
# What the last so many requests have made is not listed yet.
_LAGS = (1, 3, 10, 30, 100, 1000)
# After these a process has nothing to say.
_ENDS = (shim.KILL, shim.TORN, shim.CUT)
# Of a kind with more calls than that in a part, one fault is drawn for each of them; another seed draws others.
_MANY = 40
PARTS = ("new", "resume", "again", "eval", "ls", "verify")
WHERE = ("disk", "power", "gcs", "s3")
# How a point may end: as undisturbed; so when the command is given again; so, and with a checkpoint that the rules
# would not have kept; without having met its call; badly.
SAME, THEN_SAME, MORE, NOT_MET, BAD = "same", "then same", "keeps more", "not met", "BAD"
_OUTCOMES = (SAME, THEN_SAME, MORE, NOT_MET, BAD)
# What libraries log, such as how they look for credentials.
_LOGGED = re.compile(r"[EWI]\d{4} ")


class Point(NamedTuple):
    """Something to be tried."""

    part: str
    kind: str
    at: int
    fault: str

    def __str__(self):
        return f"{self.part}: {self.fault} at {self.kind} {self.at}"


class Campaign:
    """The points of one place, and what they are compared with."""

    def __init__(self, scratch, parts, place, seam, faults, judge):
        """Makes an undisturbed run, and counts the calls of its parts.

        Args:
          scratch: a folder for what is found.
          parts: of PARTS those that are tried.
          place: where.
          seam: what makes calls fail: a `shim.Shim`, or a `proxy.Proxy`.
          faults: by the kinds of calls, what is tried.
          judge: the module.
        """
        self._found = scratch / "found.json"
        self._place, self._seam, self._faults, self._judge = place, seam, faults, judge
        self._calls, self._wanted, self._said = {}, {}, {}
        for part in dict.fromkeys(("new", *parts)):
            self._record(part)
        self._parts = parts

    def points(self, faults, seed):
        """All points of some faults, in an order; of all faults if none are named."""
        found = []
        for part in self._parts:
            counts = collections.Counter(kind for kind, _, _ in self._calls[part])
            counts[shim.CHANGES] = sum(changes for _, changes, _ in self._calls[part])
            for kind, possible in self._faults.items():
                wanted = [fault for fault in possible if not faults or fault in faults]
                for at in range(1, counts[kind] + 1):
                    drawn = wanted
                    if counts[kind] > _MANY and wanted:
                        drawn = [random.Random(f"{seed}/{part}/{kind}/{at}").choice(wanted)]
                    found += [Point(part, kind, at, fault) for fault in drawn]
            if "list" in self._faults and (not faults or proxy.LAG in faults):
                found += [Point(part, "list", lag, proxy.LAG) for lag in _LAGS]
        return found

    def try_point(self, point):
        """Tries one; what came of it."""
        begin = time.monotonic()
        start, only_reads = self._place.describe(point.part)
        self._place.begin(start)
        self._seam.plan(point.kind, point.at, point.fault)
        ended = self._place.start(point.part, self._seam.watch)
        hit = self._seam.hit()
        self._seam.plan()
        if point.fault == shim.CUT:
            self._place.power_up()
        found = {**point._asdict(), "outcome": NOT_MET, "path": "", "why": [], "code": ended.code}
        if hit is None and ended.code != 0:
            found |= {"outcome": BAD, "why": ["failed without a fault"]}
        if hit is not None:
            judged = self._judge_reading if only_reads else self._judge_run
            outcome, why = judged(point, ended, hit[1])
            where = shim.anyone(hit[1]).removeprefix(str(self._place.disk))
            found |= {"outcome": BAD if why else outcome, "path": f"{hit[0]} {where}", "why": why}
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
        self._said[part] = _words(ended.output)
        if part == "new":
            self._place.keep("finished")

    def _look(self):
        """What is there; a text if it cannot be read."""

        def look():
            found = self._judge.look(self._place.run, self._place.checkpoints)
            self._found.write_text(json.dumps(found))

        ended = self._place.fork(look)
        return json.loads(self._found.read_text()) if ended.code == 0 else ended.output[-400:]

    def _unclear(self, point, ended, name):
        on_disk = name.startswith("/")
        names = (self._judge.names_of_file if on_disk else self._judge.names_of_object)(name)
        # Tensorstore says of a listing what the answer says, and not its status.
        reason = self._judge.reason(point.fault)
        reasons = [reason, proxy.CODES.get(point.fault, reason)]
        return self._judge.unclear(ended, names, reasons)

    def _judge_reading(self, point, ended, name):
        if ended.code == 0 and _words(ended.output) == self._said[point.part]:
            return SAME, []
        why = self._unclear(point, ended, name)
        if "damaged" in ended.output.lower() or "is not what was written" in ended.output:
            why.append("says that a checkpoint is damaged")
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
        return self._judge.left_behind(after) or self._judge.more_checkpoints(after, wanted)

    def _again(self, point, wanted):
        """How it ends when the same command is given again, without a fault; and what is wrong with that."""
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
    """A campaign of some parts at one of WHERE."""
    # With all that a run imports: once, and not in the process that only starts the one with the shim.
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
            store = stack.enter_context(harness.gcs() if where == "gcs" else harness.s3())
            seam, faults = stack.enter_context(proxy.Proxy(store)), OBJECTS
            place = scenario.Place(scratch, directory=seam.directory(where), objects=seam)
        yield Campaign(scratch, parts, place, seam, faults, judge)


def tried(where, folder, jobs, options=()):
    """What came of the points at one of WHERE, tried by several processes at once.

    Args:
      where: what fails.
      folder: for their results: what is there has been tried.
      jobs: the number of processes.
      options: more of theirs.
    """
    files = [folder / f"{where}.{index}of{jobs}.jsonl" for index in range(jobs)]
    command = [sys.executable, "-m", "tests.faults.campaign", f"--where={where}", *options]
    shares = [[f"--results={file}", f"--share={i}/{jobs}"] for i, file in enumerate(files)]
    # The same few programs are compiled over and over.
    caching = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    caching = {name: os.environ.get(name, value) for name, value in caching.items()}
    environment = harness.environment(**caching)
    processes = [subprocess.Popen([*command, *share], env=environment) for share in shares]
    codes = [process.wait() for process in processes]
    assert set(codes) <= {0, 1}, f"a process has failed: {codes}"
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def table(found):
    """Kinds of calls against faults, with how many points of each there were and how they ended."""
    cells = collections.defaultdict(collections.Counter)
    for one in found:
        cells[one["kind"], one["fault"]][one["outcome"]] += 1
    lines = [f"{'call':8} {'fault':7} {'points':>7}" + "".join(f"{o:>11}" for o in _OUTCOMES)]
    for (kind, fault), counts in sorted(cells.items()):
        numbers = "".join(f"{counts[outcome]:11}" for outcome in _OUTCOMES)
        lines.append(f"{kind:8} {fault:7} {counts.total():7}{numbers}")
    totals = collections.Counter(one["outcome"] for one in found)
    said = ", ".join(f"{count} {outcome}" for outcome, count in totals.items())
    return "\n".join([*lines, f"{len(found)} points: {said}"])


def _words(output):
    """What a tool prints, without how long ago something was."""
    lines = output.splitlines()
    return [line for line in lines if '"age"' not in line and not _LOGGED.match(line)]


def main(argv):
    """Tries what has not been tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--where", choices=WHERE, default="disk")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--faults", default="", help="by default all that there are")
    parser.add_argument("--sample", type=int, default=0, help="how many points to draw; 0: all")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--share", default="0/1", help="INDEX/COUNT, of several at once")
    options = parser.parse_args(argv)
    # As Ctrl-C: what is mounted is unmounted, what was started is ended.
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
        points = random.Random(options.seed).sample(points, min(options.sample, len(points)))
    index, count = map(int, options.share.split("/"))
    points, results, found = points[index::count], options.results, []
    if results.exists():
        found = [json.loads(line) for line in results.read_text().splitlines()]
    tried = {Point(one["part"], one["kind"], one["at"], one["fault"]) for one in found}
    todo = [point for point in points if point not in tried]
    print(f"{len(points)} points, of which {len(points) - len(todo)} have been tried", flush=True)
    with results.open("a") as file:
        for point in todo:
            one = campaign.try_point(point)
            found.append(one)
            print(json.dumps(one), file=file, flush=True)
            if one["outcome"] == BAD:
                print(f"BAD {point}, {one['path']}: {'; '.join(one['why'])}", flush=True)
    return int(any(one["outcome"] == BAD for one in found))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception:
        traceback.print_exc()
        sys.exit(2)
