"""Measures what keys of a config cost a step of a run: the same with them and without.

    JAX_PLATFORMS=cpu python -m benchmarks.keys [--rounds=21] [--devices=8] [--size="1
    ms"]

The model is a perceptron with Adam's two slots for each parameter. If a step takes
longer for the same amount of state, the relative cost is smaller. With fewer devices
than replicas, a device computes its replicas one after the other; float sums of as many
micro-batches do the same.
"""

import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from absl import app, flags

from benchmarks import measure, models
from xshard import experiment as experiment_lib
from xshard.run import preflight
from xshard.training import state as state_lib

_ROUNDS = flags.DEFINE_integer("rounds", 21, "How often each side is timed.", 1)
_DEVICES = flags.DEFINE_integer("devices", 1, "Virtual devices, on a CPU.", 1)
_SIZES = flags.DEFINE_multi_enum(
    "size", ["1 ms", "20 ms"], ["1 ms", "20 ms"], "The models; again for each."
)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")

# The steps of a turn.
_STEPS = 20
_REPLICAS = 8


class RunStep:
    """The jitted step of a run, with its state and one batch."""

    def __init__(self, size: models.Size, changes: Mapping[str, Any]):
        """Compiles the step, without fingerprints, and with the given changes of the
        config.
        """
        config = models.make_config(size, batches=4)
        config.fingerprint_every_steps = 0
        config.update_from_flattened_dict(changes)
        experiment = experiment_lib.of_config(config)
        mesh = experiment_lib.mesh_of(config)
        batches = preflight.train_batches(experiment, mesh)
        self._batch = next(batches)
        self._step = preflight.jitted_step(experiment, mesh)
        self._state = state_lib.init(experiment, mesh, 0, batches.example)
        self.seconds(1)

    def seconds(self, steps: int) -> float:
        """Returns the seconds per step of this many steps, including the wait for the
        last one.
        """
        begin = time.perf_counter()
        for _ in range(steps):
            self._state, *rest = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, rest))
        return (time.perf_counter() - begin) / steps


def compare(name: str, size: models.Size) -> Iterator[measure.Row]:
    """Yields the rows of one model."""
    count = jax.device_count()
    held = -(-_REPLICAS // count)
    none = "none"
    split = "float sums of as many micro-batches"
    exact = {"logical_replicas": held * count, "reduction.arithmetic": "exact"}
    # The keys of each side.
    sides: dict[str, dict[str, Any]] = {
        none: {},
        "fingerprint in every tenth step": {"fingerprint_every_steps": 10},
        "norms of each parameter": {"log_norms_every_steps": 50},
        split: {"micro_batches": held},
        f"exact sums of {held * count} replicas": exact,
    }
    steps = {side: RunStep(size, changes) for side, changes in sides.items()}
    turns = {
        side: functools.partial(step.seconds, _STEPS) for side, step in steps.items()
    }
    seconds = measure.in_turn(turns, _ROUNDS.value)
    where = f"{name} model, {count} device{'s' if count > 1 else ''}"
    for side, values in seconds.items():
        peer = split if side.startswith("exact") else none
        most = 1.15 if side.startswith("exact") else 1.01
        if side not in (none, split):
            row = f"{side}, {where}"
            yield measure.ratio(row, peer, values, seconds[peer], most)
        yield measure.figure(f"a step with {side}, {where}", values, "ms")


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    rows = []
    for name in _SIZES.value:
        rows += compare(name, models.sizes()[name])
    measure.emit(rows, _JSON.value)


if __name__ == "__main__":
    app.run(main)
