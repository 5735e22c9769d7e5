"""Measures the cost per step of exact sums over logical replicas, against float sums in
one program.

    JAX_PLATFORMS=cpu python -m benchmarks.exact [--rounds=11] [--steps=5] [--devices=8]
    [--replicas=8]

The model is a perceptron of two sizes. With fewer devices than replicas, a device
computes its replicas one after the other. Float sums of as many micro-batches do the
same, and are then a third peer.
"""

from collections.abc import Iterator

import jax
from absl import app, flags

from benchmarks import measure, models

_ROUNDS = flags.DEFINE_integer("rounds", 11, "How often each side is timed.", 1)
_STEPS = flags.DEFINE_integer("steps", 5, "Of a turn.", 1)
_DEVICES = flags.DEFINE_integer("devices", 8, "Virtual devices of a CPU.", 1)
_REPLICAS = flags.DEFINE_integer("replicas", 8, "Logical replicas.", 1)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")

_AT_MOST = 1.15
_SIZES = {"20 ms": models.Size(512, 4, 512), "200 ms": models.Size(1024, 4, 2048)}


def compare() -> Iterator[measure.Row]:
    """Yields the rows."""
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    of_replicas = {"logical_replicas": _REPLICAS.value}
    peers = {"float": {}, "float of as many replicas": of_replicas}
    held = _REPLICAS.value // _DEVICES.value
    if held > 1:
        peers["float of as many micro-batches"] = {"micro_batches": held}
    exact = {**of_replicas, "reduction.arithmetic": "exact"}
    for name, size in _SIZES.items():
        sides = {
            title: models.RunStep(models.Wide, size, of)
            for title, of in {**peers, "exact": exact}.items()
        }
        seconds = models.in_turn(sides, _STEPS.value, _ROUNDS.value)
        what = (
            f"exact sums of {_REPLICAS.value} replicas on {_DEVICES.value} device(s); "
            f"{name} model"
        )
        for peer in peers:
            yield measure.ratio(what, peer, seconds["exact"], seconds[peer], _AT_MOST)
        first = [[sides[title].first] for title in ("exact", "float")]
        yield measure.ratio(
            f"first step, compiled; {name} model, exact", "float", *first
        )
        step = f"a step of the {name} model, sums"
        yield from models.absolute(seconds, lambda title, step=step: f"{step} {title}")


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    measure.emit(compare(), _JSON.value)


if __name__ == "__main__":
    app.run(main)
