"""Measures the cost per step of fingerprints of the state: in every step, in every
tenth step, and without any.

    JAX_PLATFORMS=cpu python -m benchmarks.fingerprint [--rounds=21] [--steps=40]
    [--devices=1] [--size="1 ms"]

The model is a perceptron with AdamW's two slots for each parameter, which is much state
for few examples. If a step takes longer for the same amount of state, the relative cost
is smaller.
"""

from collections.abc import Iterator
from typing import Any

import jax
from absl import app, flags

from benchmarks import measure, models

_ROUNDS = flags.DEFINE_integer("rounds", 21, "How often each side is timed.", 1)
_STEPS = flags.DEFINE_integer("steps", 40, "Of a turn.", 1)
_DEVICES = flags.DEFINE_integer("devices", 1, "Virtual devices of a CPU.", 1)
_SIZES = flags.DEFINE_multi_enum(
    "size", ["1 ms", "20 ms"], ["1 ms", "20 ms"], "The models; again for each."
)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")


class Wide(models.Wide):
    """The perceptron with as many inputs as the first layer has units."""

    def forward(self, batch: Any, *, is_training: bool) -> jax.Array:
        """Returns the outputs of the perceptron."""
        width = self.config.width
        x = jax.numpy.tile(batch["x"], (1, width // 3 + 1))[:, :width]
        return super().forward({"x": x}, is_training=is_training)


def compare() -> Iterator[measure.Row]:
    """Yields the rows."""
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    key = "fingerprint_every_steps"
    names = {0: "none", 1: "each step", 10: "each 10 steps"}
    for name in _SIZES.value:
        size = models.sizes()[name]
        sides = {
            title: models.RunStep(Wide, size, {key: every})
            for every, title in names.items()
        }
        seconds = models.in_turn(sides, _STEPS.value, _ROUNDS.value)
        for title in ("each step", "each 10 steps"):
            what = f"fingerprint in {title}; {name} model"
            yield measure.ratio(what, "none", seconds[title], seconds["none"], 1.01)
        step = f"a step of the {name} model with fingerprints"
        yield from models.absolute(seconds, lambda title, step=step: f"{step}: {title}")


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    measure.emit(compare(), _JSON.value)


if __name__ == "__main__":
    app.run(main)
