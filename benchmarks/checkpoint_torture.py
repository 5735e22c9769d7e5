"""Kills pods while they save, and injects faults into an object store: the long form of
the tests.

    python -m benchmarks.checkpoint_torture --trials=500 --seed=0 [--store=disk]
    python -m benchmarks.checkpoint_torture --trials=0 --saves=500

A trial is a pod of 1 to 4 real JAX processes that saves one step after the other, on a
disk, on S3 (moto) or on a stand-in for GCS. At a random instant one of its processes is
killed with SIGKILL, and then the others. Every committed checkpoint is then read in
full and compared bit by bit, and the next trial continues from there. `--saves` is the
number of saves to the stand-in for each kind of fault, which affects 30 % of all
requests.
"""

import pathlib
import sys
import tempfile

from absl import app, flags

from tests.checkpoint import torture

_TRIALS = flags.DEFINE_integer("trials", 500, "How often a pod is killed.", 0)
_SEED = flags.DEFINE_integer("seed", 0, "The seed of the instants.")
_STORE = flags.DEFINE_multi_enum(
    "store", torture.STORES, torture.STORES, "Where to save; again for each."
)
_SAVES = flags.DEFINE_integer(
    "saves", 0, "How often to save with each kind of fault.", 0
)
_SHARE = 0.3


def main(argv: list[str]) -> None:
    """Runs the saves and the trials; the exit code is 1 if a trial left a bad
    checkpoint.
    """
    del argv
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        for fault in ("forget", "refuse", "throttle") if _SAVES.value else ():
            place = scratch / fault
            place.mkdir()
            report = torture.save_with_faults(
                place, _SAVES.value, _SHARE, fault, _SEED.value
            )
            print(
                f"{_SAVES.value} saves with {_SHARE:.0%} of the requests a '{fault}': "
                f"none failed; {len(report['steps'])} kept and read, "
                f"{len(report['bad'])} bad"
            )
        if _TRIALS.value:
            counts = torture.run(
                scratch, _TRIALS.value, _SEED.value, tuple(_STORE.value)
            )
            print(f"done: {counts}")
            sys.exit(bool(counts.bad))


if __name__ == "__main__":
    app.run(main)
