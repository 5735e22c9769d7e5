"""Measures the time to trace, lower and compile a step by the number of parameter
arrays, with the rules and by hand.

    JAX_PLATFORMS=cpu python -m benchmarks.compile_time [--leaves=10,30,100,300,1000]
    [--rounds=3]

The model is a perceptron of width 8 with a weight and a bias per layer: little to
compute, much to compile. All steps have a dynamic loss scale and reduce over the
devices, as in benchmarks/sides.py.
"""

import functools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks import measure, models, sides

_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each side is timed.", 1)
_LEAVES = flags.DEFINE_list(
    "leaves", ["10", "30", "100", "300", "1000"], "Of the parameters."
)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")
# On CPUs XLA fuses the selections of all leaves with one another, which takes too long
# for more leaves than this.
_MOST_FOR_WHERE = 100
_TOO_SLOW = (
    "by hand with jnp.where 300 leaves compile for two minutes on a CPU, and more for "
    "many times that"
)


def timed(side: str, size: models.Size) -> tuple[float, float]:
    """Returns the seconds to trace and lower a step, and the seconds to compile it."""
    loss, params = models.make(size, jnp.float32)
    init, local = sides.SIDES[side](loss)
    x = jnp.ones((jax.device_count(), size.width))
    state = jax.eval_shape(lambda: init(params(), x[:1]))
    begin = time.perf_counter()
    lowered = sides.jitted(local).lower(state, x)
    middle = time.perf_counter()
    lowered.compile()
    return middle - begin, time.perf_counter() - middle


def compare(leaves: int, rounds: int) -> Iterator[measure.Row]:
    """Yields the rows of one number of leaves."""
    size = models.Size(width=8, layers=leaves // 2 - 1, batch=1)
    peers = {"hand": "by hand, lax.cond", "hand, where": "by hand, jnp.where"}
    measured = [
        "rules",
        *(peer for peer in peers if peer == "hand" or leaves <= _MOST_FOR_WHERE),
    ]
    calls = {side: functools.partial(timed, side, size) for side in measured}
    pairs = measure.in_turn(calls, rounds, warm_up=False)
    for index, what in enumerate(("trace and lower", "compile")):
        seconds = {side: [pair[index] for pair in pairs[side]] for side in calls}
        title = f"{what}, {leaves} leaves"
        for peer, name in peers.items():
            if peer in seconds:
                yield measure.ratio(title, name, seconds["rules"], seconds[peer])
            else:
                yield measure.Row(title, name, missing=_TOO_SLOW)
        for side in calls:
            yield measure.figure(f"{title}, {side}", seconds[side], "s")


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    counts = [int(leaves) for leaves in _LEAVES.value]
    # Warms up, so that imports and traces that happen once per process do not count for
    # the first number of leaves.
    list(compare(4, 1))
    rows = [row for leaves in counts for row in compare(leaves, _ROUNDS.value)]
    measure.emit(rows, _JSON.value)


if __name__ == "__main__":
    app.run(main)
