"""What exact sums over logical replicas cost a step, beside float sums in one program.

    JAX_PLATFORMS=cpu python -m benchmarks.exact [--rounds=11] [--steps=5] [--devices=8] [--replicas=8]

The model is that of `benchmarks.step`, of two sizes. With fewer devices than replicas a device computes those
that it holds one after the other.
"""

import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from absl import app, flags

from benchmarks import measure, models
from tests import toy
from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.run import preflight

_ROUNDS = flags.DEFINE_integer("rounds", 11, "How often each side is timed.", 1)
_STEPS = flags.DEFINE_integer("steps", 5, "Of a turn.", 1)
_DEVICES = flags.DEFINE_integer("devices", 8, "Virtual devices of a CPU.", 1)
_REPLICAS = flags.DEFINE_integer("replicas", 8, "Logical replicas.", 1)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")

_AT_MOST = 1.15
_SIZES = {"20 ms": models.Size(512, 4, 512), "200 ms": models.Size(1024, 4, 2048)}


class Side:
    """A run's step."""

    def __init__(self, size: models.Size, changes: Mapping[str, Any]):
        """Compiles, with these changes of the config."""
        config = toy.get_config()
        config.update({"width": size.width, "layers": size.layers, "examples": 4 * size.batch})
        config.update({"batch_size": size.batch, "fingerprint_every_steps": 0})
        config.update_from_flattened_dict(dict(changes))
        experiment, mesh = models.Wide(config), experiment_lib.mesh_of(config)
        train = preflight.train_batches(experiment, mesh)
        self._batch = next(train)
        self._step = preflight.jitted_step(experiment, mesh)
        self._state = state_lib.init(experiment, mesh, 0, train.example)
        self.first = self.seconds(1)

    def seconds(self, steps: int) -> float:
        """Those of a step; the host waits for the last one alone."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._state = self._step(self._state, self._batch).state
        jax.block_until_ready(self._state)
        return (time.perf_counter() - begin) / steps


def compare() -> Iterator[measure.Row]:
    """The rows."""
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    of_replicas = {"logical_replicas": _REPLICAS.value}
    peers = {"float": {}, "float of as many replicas": of_replicas}
    exact = {**of_replicas, "reduction.arithmetic": "exact"}
    for name, size in _SIZES.items():
        sides = {title: Side(size, of) for title, of in {**peers, "exact": exact}.items()}
        timed = {
            title: functools.partial(side.seconds, _STEPS.value) for title, side in sides.items()
        }
        seconds = measure.in_turn(timed, _ROUNDS.value)
        what = (
            f"exact sums of {_REPLICAS.value} replicas on {_DEVICES.value} device(s); {name} model"
        )
        for peer in peers:
            yield measure.ratio(what, peer, seconds["exact"], seconds[peer], _AT_MOST)
        first = [[sides[title].first] for title in ("exact", "float")]
        yield measure.ratio(f"first step, compiled; {name} model, exact", "float", *first)
        for title, values in seconds.items():
            figure = f"a step with {title} sums; {name} model"
            yield measure.figure(figure, [1e3 * value for value in values], "ms")


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    measure.emit(compare(), _JSON.value)


if __name__ == "__main__":
    app.run(main)
