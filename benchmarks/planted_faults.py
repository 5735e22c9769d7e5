"""Plants faults of random kinds, in random layers and for random examples, and checks
that a replay finds each one.

    python -m benchmarks.planted_faults [--count=300] [--examples=3] [--seed=0]

A fault counts as found if the replay names the step, the line, the replica, the
example, forward or backward, and whether the cause is the loss scale, the precision or
neither. With JAX_COMPILATION_CACHE_DIR a fault is compiled once for all of its
examples. Exit code 1: a fault was not found.
"""

import collections
import contextlib
import io
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np
from absl import app, flags

from tests.replay import planted
from xshard.base import formatting

_COUNT = flags.DEFINE_integer("count", 300, "How many faults.", 1)
_EXAMPLES = flags.DEFINE_integer(
    "examples", 3, "For how many examples each is tried.", 1
)
_SEED = flags.DEFINE_integer("seed", 0, "The seed of what is drawn.")


def main(argv: list[str]) -> int:
    """Tries the faults one after the other, and prints a table by kind; returns the
    exit code.
    """
    del argv
    jax.config.update("jax_num_cpu_devices", 8)
    rng = np.random.default_rng(_SEED.value)
    tried = collections.defaultdict(list)
    faults: list[planted.Fault] = []
    while len(faults) < _COUNT.value:
        faults += planted.draw(rng, _EXAMPLES.value)
    for number, fault in enumerate(faults[: _COUNT.value]):
        wrong, seconds = _try(fault)
        tried[fault.kind].append((not wrong, seconds))
        print(
            f"{number} {'wrong' if wrong else 'named'} {seconds:.1f} s {fault}",
            flush=True,
        )
        for text in wrong:
            print(f"  {text}", flush=True)
    print(
        formatting.table(
            [_row(kind, tried[kind]) for kind in planted.KINDS if tried[kind]]
        )
    )
    return int(
        not all(is_named for of_kind in tried.values() for is_named, _ in of_kind)
    )


def _try(fault: planted.Fault) -> tuple[list[str], float]:
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder)
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            planted.train(fault, directory)
        begin = time.perf_counter()
        wrong = planted.wrong(fault, directory)
        return wrong, time.perf_counter() - begin


def _row(kind: str, tried: list[tuple[bool, float]]) -> dict[str, object]:
    named = sum(is_named for is_named, _ in tried)
    seconds = statistics.median(seconds for _, seconds in tried)
    return {
        "kind": kind,
        "planted": len(tried),
        "named": named,
        "seconds (median)": f"{seconds:.1f}",
    }


if __name__ == "__main__":
    app.run(main)
