"""Measures the cost per step of what a run can log of its gradients: the norms of each
parameter, and the noise scale.

    JAX_PLATFORMS=cpu python -m benchmarks.norms [--rounds=21] [--steps=40]
    [--devices=4] [--size="1 ms"]

The model is that of benchmarks/fingerprint.py: much state for few examples. With one
device, the noise scale is that of four micro-batches, which both sides have.
"""

from collections.abc import Iterator

import jax
from absl import app, flags

from benchmarks import fingerprint, measure, models

FLAGS = flags.FLAGS


def compare() -> Iterator[measure.Row]:
    """Yields the rows."""
    jax.config.update("jax_num_cpu_devices", FLAGS.devices)
    # With several devices, the small batches are those of the replicas.
    micro_batches = 4 if jax.device_count() == 1 else 1
    sides_of = {
        "none": {},
        "norms of each parameter": {"log_norms_every_steps": 50},
        "noise scale": {"noise_scale_steps": 100},
    }
    for name in FLAGS.size:
        size = models.sizes()[name]
        sides = {}
        for title, changes in sides_of.items():
            changes = {"micro_batches": micro_batches, **changes}
            sides[title] = models.RunStep(fingerprint.Wide, size, changes)
        seconds = models.in_turn(sides, FLAGS.steps, FLAGS.rounds)
        for title in ("norms of each parameter", "noise scale"):
            what = f"{title}; {name} model"
            yield measure.ratio(what, "none", seconds[title], seconds["none"], 1.01)
        step = f"a step of the {name} model"
        yield from models.absolute(seconds, lambda title, step=step: f"{step}: {title}")


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    measure.emit(compare(), FLAGS.json)


if __name__ == "__main__":
    app.run(main)
