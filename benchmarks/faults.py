"""Makes each file operation of a run fail once, and ends the run before each one: the
long form of tests/faults.

    python -m benchmarks.faults [--where=disk] [--results=FOLDER]
    [--jobs=2]

The commands are a short run, its resuming, its last start, an evaluation job, and the
checkpoint tool's `ls` and `verify`. Each of their file operations, and each request to
a stand-in for GCS or S3 (moto), fails once. Each command is also ended before every
operation that changes something, by SIGKILL and by a loss of power. The loss of power
needs root and a loop device.

A point is good in two cases: the result has the same bits and rows as without the
fault; or one message names the failure, nothing has changed, and the same command given
again produces the same bits and rows. The folder of results records the points that
were tried, so that the same command continues. Exit code 1: a point was bad.
"""

import os
import pathlib

from absl import app, flags

from tests.faults import campaign, power, shim

_WHERE = flags.DEFINE_multi_enum(
    "where", campaign.WHERE, campaign.WHERE, "What fails; again for each."
)
_RESULTS = flags.DEFINE_string("results", "faults", "A folder for what has been tried.")
_JOBS = flags.DEFINE_integer(
    "jobs", os.cpu_count(), "How many points are tried at once.", 1
)
_SAMPLE = flags.DEFINE_integer(
    "sample", 0, "So many points of each are drawn; 0: all.", 0
)
_CUTS = flags.DEFINE_integer(
    "cuts", 200, "How often the power is cut; 0: before each call.", 0
)
_SEED = flags.DEFINE_integer("seed", 0, "The seed of what is drawn.")


def main(argv: list[str]) -> int:
    """Tries all points of each kind of fault, and prints a table; returns the exit
    code.
    """
    del argv
    folder = pathlib.Path(_RESULTS.value)
    folder.mkdir(parents=True, exist_ok=True)
    bad = False
    for where in _WHERE.value:
        lacking = missing(where)
        if lacking:
            print(f"{where}: not tried, {lacking}")
            bad = True
            continue
        sample = _CUTS.value if where == "power" else _SAMPLE.value
        options = [f"--sample={sample}", f"--seed={_SEED.value}"]
        found = campaign.tried(where, folder, _JOBS.value, options)
        print(f"\n{where}\n{campaign.table(found)}", flush=True)
        bad |= any(one["outcome"] == campaign.BAD for one in found)
    return int(bad)


def missing(where: str) -> str:
    """Returns the requirements for a kind of fault that are missing on this machine, in
    words; empty if none.
    """
    if where not in ("disk", "power"):
        return ""
    if not shim.compiler():
        return "needs a C compiler (Debian: gcc, libc6-dev)"
    return power.missing() if where == "power" else ""


if __name__ == "__main__":
    app.run(main)
