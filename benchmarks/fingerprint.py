"""What fingerprints of the state cost a step: with one in each step, with one in each tenth, and with none.

    JAX_PLATFORMS=cpu python -m benchmarks.fingerprint [--rounds=21] [--steps=40] [--devices=1] [--size="1 ms"]

The model is that of `benchmarks.step` with AdamW's two slots for each parameter, which is much state for its few
examples: where a step takes longer for as much state, the part is smaller.
"""

import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
from absl import app, flags

from benchmarks import measure, models
from tests import toy
from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.run import preflight

_ROUNDS = flags.DEFINE_integer("rounds", 21, "How often each side is timed.", 1)
_STEPS = flags.DEFINE_integer("steps", 40, "Of a turn.", 1)
_DEVICES = flags.DEFINE_integer("devices", 1, "Virtual devices of a CPU.", 1)
_SIZES = flags.DEFINE_multi_enum(
    "size", ["1 ms", "20 ms"], ["1 ms", "20 ms"], "The models; again for each."
)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")


class Wide(models.Wide):
    """With as many inputs as the first layer has units."""

    def forward(self, batch: Any, *, is_training: bool) -> jax.Array:
        """The outputs."""
        width = self.config.width
        x = jax.numpy.tile(batch["x"], (1, width // 3 + 1))[:, :width]
        return super().forward({"x": x}, is_training=is_training)


class Side:
    """A run's step, with a fingerprint in each so many steps."""

    def __init__(self, size: models.Size, every: int):
        """Compiles."""
        config = toy.get_config()
        config.update({"width": size.width, "layers": size.layers, "examples": 4 * size.batch})
        config.update({"batch_size": size.batch, "fingerprint_every_steps": every})
        experiment = Wide(config)
        mesh = experiment_lib.mesh_of(config)
        train = preflight.train_batches(experiment, mesh)
        self._batch = next(train)
        self._step = preflight.jitted_step(experiment, mesh)
        self._state = state_lib.init(experiment, mesh, 0, train.example)
        self.seconds(1)

    def seconds(self, steps: int) -> float:
        """Those of a step, each waited for."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._state, *rest = self._step(self._state, self._batch)
            jax.block_until_ready((self._state, rest))
        return (time.perf_counter() - begin) / steps


def compare() -> Iterator[measure.Row]:
    """The rows."""
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    for name in _SIZES.value:
        size = models.sizes()[name]
        names = {0: "none", 1: "each step", 10: "each 10 steps"}
        sides = {
            title: functools.partial(Side(size, every).seconds, _STEPS.value)
            for every, title in names.items()
        }
        seconds = measure.in_turn(sides, _ROUNDS.value)
        for title in ("each step", "each 10 steps"):
            what = f"fingerprint in {title}; {name} model"
            yield measure.ratio(what, "none", seconds[title], seconds["none"], 1.01)
        for title, values in seconds.items():
            figure = f"a step with fingerprints: {title}; {name} model"
            yield measure.figure(figure, [1e3 * value for value in values], "ms")


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    measure.emit(compare(), _JSON.value)


if __name__ == "__main__":
    app.run(main)
