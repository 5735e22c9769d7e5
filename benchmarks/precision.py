"""Measures a step in half precision against float32 and against the step by hand.

    JAX_PLATFORMS=cpu python -m benchmarks.precision [--rounds=7]

The models are a transformer and a convolutional network; benchmarks/sides.py defines
the sides. float16 has a dynamic loss scale, which bfloat16 and float32 do not need. A
CPU computes in half precision slowly, and there the table shows only that all runs.
"""

from collections.abc import Iterator

import jax
import numpy as np
from absl import app, flags

from benchmarks import measure, models
from benchmarks import sides as sides_lib

_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each side is timed.", 1)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")

# The sides by precision: ours, and the same by hand.
_SIDES = {
    "float32": ("rules, unscaled", "hand, unscaled"),
    "bfloat16": ("rules, unscaled", "hand, unscaled"),
    "float16": ("rules", "hand"),
}


def compare(name: str, network: models.Network) -> Iterator[measure.Row]:
    """Yields the rows of one network."""
    sides: dict[tuple[str, str], sides_lib.Timed] = {}
    for precision, names in _SIDES.items():
        loss, params = models.made(network, precision)
        for side in names:
            sides[precision, side] = sides_lib.Timed(
                side, loss, params, network.input()
            )
            # The times are comparable only if both sides do the same work.
            ours = sides[precision, names[0]]
            np.testing.assert_allclose(
                sides[precision, side].loss, ours.loss, rtol=0.02, err_msg=side
            )
    turns = {" ".join(key): timed.turn for key, timed in sides.items()}
    seconds = measure.in_turn(turns, _ROUNDS.value)
    where = f"{name}, {jax.device_count()} {jax.devices()[0].platform}"
    wide = seconds[" ".join(("float32", _SIDES["float32"][0]))]
    for precision, (ours, by_hand) in _SIDES.items():
        mine = seconds[f"{precision} {ours}"]
        yield measure.ratio(
            f"step in {precision}, {where}",
            "the same by hand",
            mine,
            seconds[f"{precision} {by_hand}"],
            1.02,
        )
        if precision != "float32":
            yield measure.ratio(f"step in {precision}, {where}", "float32", mine, wide)
    for side, values in seconds.items():
        milliseconds = [1e3 * value for value in values]
        yield measure.figure(f"{side}, {where}", milliseconds, "ms")


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    rows = [row for item in models.networks().items() for row in compare(*item)]
    measure.emit(rows, _JSON.value)


if __name__ == "__main__":
    app.run(main)
