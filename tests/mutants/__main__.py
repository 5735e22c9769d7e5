"""Draws mutants of the package, and finds the tests that notice them.

    python -m tests.mutants draw [--seed=1] [--count=100] [--table=FILE]
    python -m tests.mutants probe
    python -m tests.mutants run [--only=3,17] [--seconds=300] [--again]
    python -m tests.mutants show

`draw` fills the table, room by room in proportion to the code there, and replaces each
mutant whose code is gone by the next draw of its room. `probe` runs the tests once in a
copy of the repository that notes which of them reach which mutant. `run` tries each
mutant without a verdict in a copy, with the tests that reach it: first the file that
mirrors the mutant's, then its room, then all others, the shortest first, as far as they
fit into the seconds, until one fails. What an import reaches is tried with all tests.
Write the reason why a mutant is missed, or 'equivalent' and why, into the table by
hand. On Linux, as root: the processes of a test end with it.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import pathlib
import queue
import subprocess

from tests.mutants import places, trials
from xshard.base import formatting

VERDICTS = ("found", "missed", "equivalent", "not run")
# Where the copies are, and how many are tried at a time.
_WORK = pathlib.Path("/tmp/mutants")
_WORKERS = 2
_FIELDS = [field.name for field in dataclasses.fields(places.Mutant)]


def mutants_of(table):
    """Returns the mutants of the rows of a table."""
    return [places.Mutant(*map(row.get, _FIELDS)) for row in table["rows"]]


def read(path, seed):
    """Reads a table: the commit that its verdicts hold for, the seed of its draw, and a
    row for each mutant with what it is and its verdict. Without a file it is empty.
    """
    if path.exists():
        return json.loads(path.read_text())
    return {"base": "", "seed": seed, "rows": []}


def write(path, table):
    """Writes a table, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(table, indent=1) + "\n")
    part.replace(path)


def draw(table, count):
    """Fills the table, and replaces the rows whose code is gone."""
    among = places.sources()
    mutants = mutants_of(table)
    found = places.find(mutants, among)
    drawn = {mutant.content for mutant in mutants}
    rooms = collections.defaultdict(list)
    for mutant, row in zip(mutants, table["rows"], strict=True):
        rooms[places.room_of(mutant.path)].append(row if mutant in found else None)
    if not mutants:
        for room, share in places.shares(among, count).items():
            rooms[room] = [None] * share
    table["rows"] = []
    for room, rows in rooms.items():
        others = places.draw(among, room, table["seed"])
        for row in rows:
            while row is None:
                mutant = next(others)
                if mutant.content not in drawn:
                    row = {**dataclasses.asdict(mutant), "verdict": "not run"}
            table["rows"].append(row)


def run(table, numbers, options):
    """Tries mutants, as many at a time as there are workers, and writes each verdict
    when it is there.
    """
    probe = trials.Probe(_WORK / "probed")
    mutants = mutants_of(table)
    found = places.find(mutants, places.sources())
    copies = queue.SimpleQueue()
    for worker in range(_WORKERS):
        copies.put(trials.Copy(_WORK / f"worker_{worker}"))

    def attempt(number):
        source, edit = found[mutants[number]]
        tests, count = probe.choose(number, source.path, options.seconds)
        test = ""
        seconds = 0
        if tests:
            copy = copies.get()
            text = places.changed(source, edit)
            limit = sum(probe.durations[test] for test in tests)
            test, seconds = copy.attempt(source.path, text, tests, limit)
            copies.put(copy)
        return number, test, round(seconds), f"{len(tests)} of {count}"

    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        wanted = [number for number in numbers if mutants[number] in found]
        for ended in concurrent.futures.as_completed(
            pool.submit(attempt, number) for number in wanted
        ):
            number, test, seconds, tests = ended.result()
            row = table["rows"][number]
            row.pop("reason", None)
            row["verdict"] = "found" if test else "missed"
            row |= {"test": test, "seconds": seconds, "tests": tests}
            write(options.table, table)
            print(number, row, flush=True)


def show(table):
    """Prints the verdicts by room, and what was missed or is gone."""
    mutants = mutants_of(table)
    found = places.find(mutants, places.sources())
    rooms = collections.defaultdict(collections.Counter)
    for number, mutant in enumerate(mutants):
        verdict = table["rows"][number]["verdict"] if mutant in found else "gone"
        for room in (places.room_of(mutant.path), "all"):
            rooms[room][verdict] += 1
        if verdict in ("missed", "gone"):
            print(f"{verdict}: {number} {mutant.path} {mutant.function}")
            print(f"- {mutant.old}\n+ {mutant.new}\n")
    rows = []
    for room, counts in sorted(rooms.items()):
        verdicts = {name: counts[name] for name in (*VERDICTS, "gone")}
        rows.append({"room": room, **verdicts})
    print("commit {base}, seed {seed}".format(**table))
    print(formatting.table(rows))


def _parsed():
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("command", choices=("draw", "probe", "run", "show"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="of an empty table")
    parser.add_argument("--only", help="the numbers of some mutants: 3,17")
    parser.add_argument("--again", action="store_true", help="all but the equivalent")
    parser.add_argument("--seconds", type=float, default=300, help="for each mutant")
    default = places.ROOT / "tests/mutants/table.json"
    parser.add_argument("--table", type=pathlib.Path, default=default)
    return parser.parse_args()


def main():
    """Runs a command."""
    options = _parsed()
    table = read(options.table, options.seed)
    if options.command == "draw":
        draw(table, options.count)
    elif options.command == "probe":
        trials.probe(_WORK / "probed", mutants_of(table))
    elif options.command == "run":
        wanted = ("not run", "found", "missed") if options.again else ("not run",)
        numbers = [i for i, row in enumerate(table["rows"]) if row["verdict"] in wanted]
        if options.only:
            numbers = [int(number) for number in options.only.split(",")]
        run(table, numbers, options)
    if options.command == "draw" or options.again:
        # All verdicts are those of the package's newest commit.
        command = ["git", "log", "-1", "--format=%h", "--", "xshard"]
        base = subprocess.check_output(command, cwd=places.ROOT, text=True)
        table["base"] = base.strip()
        write(options.table, table)
    show(table)


if __name__ == "__main__":
    main()
