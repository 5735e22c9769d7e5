"""Lists what each test of a run of the suite took: `python -m tests.durations LOGS
FILE` reads the JUnit XML files below the folder LOGS, writes FILE with a line a test,
the slowest first, and prints the slowest tests and test files.
"""

import collections
import pathlib
import sys
import xml.etree.ElementTree as ElementTree

SHOWN = 20


def read(logs: pathlib.Path) -> dict[str, float]:
    """Returns the seconds of each test below a folder, its set-up included. The name of
    a test is its module and its name: tests.mesh_test.test_sizes[2].
    """
    seconds = {}
    for path in sorted(logs.rglob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}"
            seconds[name] = float(case.get("time", 0))
    return seconds


def by_file(seconds: dict[str, float]) -> dict[str, float]:
    """Returns the seconds of each test file."""
    sums: dict[str, float] = collections.defaultdict(float)
    for name, value in seconds.items():
        file = name[: name.index("_test.") + len("_test")]
        sums[file] += value
    return dict(sums)


def lines(seconds: dict[str, float]) -> list[str]:
    """Returns a line for each name, the slowest first."""
    slowest = sorted(seconds.items(), key=lambda item: -item[1])
    return [f"{value:8.2f} {name}" for name, value in slowest]


def main() -> None:
    logs, kept = map(pathlib.Path, sys.argv[1:])
    seconds = read(logs)
    kept.write_text("\n".join(lines(seconds)) + "\n")
    total = sum(seconds.values())
    print(f"{len(seconds)} tests took {total:.0f} s, one after the other; all: {kept}")
    print(f"the {SHOWN} slowest files, in seconds:")
    print("\n".join(lines(by_file(seconds))[:SHOWN]))
    print(f"the {SHOWN} slowest tests, in seconds:")
    print("\n".join(lines(seconds)[:SHOWN]))


if __name__ == "__main__":
    main()
