"""How long the step takes to trace, lower and compile as the leaves grow, by the rules and by hand.

    JAX_PLATFORMS=cpu python -m benchmarks.compile_time [--leaves=10,30,100,300,1000] [--rounds=3]

The model is a perceptron with a weight and a bias a layer, eight wide: nothing to compute, much to compile.
Both steps scale losses dynamically and reduce over the devices, as in benchmarks/sides.py.
"""

import functools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks import measure, models, sides

_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each side is timed.", 1)
_LEAVES = flags.DEFINE_list("leaves", ["10", "30", "100", "300", "1000"], "Of the parameters.")
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")
# XLA for CPUs fuses the selections of all leaves with one another.
_MOST_FOR_WHERE = 100
_TOO_SLOW = "by hand with jnp.where 300 leaves compile for two minutes on a CPU, and more for many times that"


def timed(side: str, size: models.Size) -> tuple[float, float]:
    """The seconds to trace and lower, and those to compile."""
    loss, params = models.make(size, jnp.float32)
    init, local = sides.SIDES[side](loss)
    state = jax.eval_shape(lambda: init(params()))
    x = jnp.ones((jax.device_count(), size.width))
    begin = time.perf_counter()
    lowered = sides.jitted(local).lower(state, x)
    middle = time.perf_counter()
    lowered.compile()
    return middle - begin, time.perf_counter() - middle


def compare(leaves: int, rounds: int) -> Iterator[measure.Row]:
    """The rows of one number of leaves."""
    size = models.Size(width=8, layers=leaves // 2 - 1, batch=1)
    peers = {"hand": "by hand, lax.cond", "hand, where": "by hand, jnp.where"}
    measured = ["rules", *(peer for peer in peers if peer == "hand" or leaves <= _MOST_FOR_WHERE)]
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
    # What is imported and traced once in a process is not the first one's to pay.
    list(compare(4, 1))
    rows = [row for leaves in counts for row in compare(leaves, _ROUNDS.value)]
    measure.emit(rows, _JSON.value)


if __name__ == "__main__":
    app.run(main)
