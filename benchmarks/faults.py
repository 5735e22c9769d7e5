"""Makes each file operation of a run fail once, kills it before each, and cuts the disk's power: the long form of tests/faults.

    python -m benchmarks.faults [--where=disk,power,gcs,s3] [--results=FOLDER] [--jobs=2]

A short run, its resuming, its last start, an evaluation job, and the tool's `ls` and `verify` are tried with each of
their calls on files, or requests to a stand-in for GCS or S3 (moto), failing once; and are ended before each call
that changes something, by SIGKILL and by a loss of power (root and a loop device are needed). What is there
afterwards is judged: the same bits and rows, or one message that names what failed, everything as it was, and the
same bits and rows when the command is given again. What has been tried is kept in the folder of results: the same
command goes on. Exit code 1: a point was bad.
"""

import os
import pathlib

from absl import app, flags

from tests.faults import campaign, power, shim

_WHERE = flags.DEFINE_list("where", list(campaign.WHERE), "What fails.")
_RESULTS = flags.DEFINE_string("results", "faults", "A folder for what has been tried.")
_JOBS = flags.DEFINE_integer("jobs", os.cpu_count(), "How many points are tried at once.", 1)
_SAMPLE = flags.DEFINE_integer("sample", 0, "So many points of each are drawn; 0: all.", 0)
_CUTS = flags.DEFINE_integer("cuts", 200, "How often the power is cut; 0: before each call.", 0)
_SEED = flags.DEFINE_integer("seed", 0, "The seed of what is drawn.")


def main(argv: list[str]) -> int:
    """Tries all points of each, and prints a table."""
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
    """What there would have to be to try something, in words; empty if it is there."""
    if where not in ("disk", "power"):
        return ""
    if not shim.compiler():
        return "needs a C compiler (Debian: gcc, libc6-dev)"
    return power.missing() if where == "power" else ""


if __name__ == "__main__":
    app.run(main)
