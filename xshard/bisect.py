"""Finds the first step at which two runs differ, and the arrays that differ: `python -m
xshard.bisect RUN_A RUN_B`.

It compares the state fingerprints in the runs' rows, which identify the arrays that
differ first; rows without fingerprints are compared by all logged values, and so are
evaluations. The runs are only read. Exit codes: 0 if the runs are equal, 1 if they
differ.
"""

import sys
from collections.abc import Sequence

from xshard import cli
from xshard.replay import comparison


@cli.program
def main(argv: Sequence[str]) -> int:
    """Compares the runs that the arguments name; returns the exit code."""
    parser = cli.parser("bisect", __doc__)
    for name in ("RUN_A", "RUN_B"):
        parser.add_argument(name, help="a run's work directory")
    options = parser.parse_args(argv)
    first = comparison.read(options.RUN_A)
    second = comparison.read(options.RUN_B)
    text, are_equal = comparison.report(first, second)
    print(text)
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
