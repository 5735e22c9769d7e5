"""Says at which step two runs part, and in what they differ: `python -m xshard.bisect RUN_A RUN_B`.

By the fingerprints of the state in their rows it tells which arrays differ first; by all logged values where rows have none.
The runs are only read. Exit codes: 0 if they are alike, 1 if they part.
"""

import sys
from collections.abc import Sequence

from xshard import cli
from xshard.replay import bisecting


def main(argv: Sequence[str]) -> int:
    """Compares the runs that the arguments name; returns the exit code."""
    return cli.run(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    parser = cli.parser("bisect", __doc__)
    for name in ("RUN_A", "RUN_B"):
        parser.add_argument(name, help="a run's work directory")
    options = vars(parser.parse_args(argv))
    text, are_alike = bisecting.report(
        *(bisecting.read(directory) for directory in options.values())
    )
    print(text)
    return 0 if are_alike else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
