"""Measures the cost of xshard's rules against the same step written by hand, in one
process.

    JAX_PLATFORMS=cpu python -m benchmarks.step [--devices=8] [--rounds=41] [--size="1
    ms"]

benchmarks/sides.py defines the sides. A CPU computes slowly in half precision, which
would hide the cost of the rules. Use float32 on a CPU, and --precision=float16 or
bfloat16 on accelerators.
"""

from collections.abc import Iterator

import jax
import numpy as np
from absl import app, flags

from benchmarks import measure, models
from benchmarks import sides as sides_lib

_ROUNDS = flags.DEFINE_integer("rounds", 41, "How often each side is timed.", 1)
_DEVICES = flags.DEFINE_integer("devices", 1, "Virtual devices, on a CPU.", 1)
_PRECISION = flags.DEFINE_enum(
    "precision",
    "float32",
    ["float32", "bfloat16", "float16"],
    "What the model computes in.",
)
_SIZES = flags.DEFINE_multi_enum(
    "size", ["1 ms", "20 ms"], ["1 ms", "20 ms"], "The models; again for each."
)
_MEMORY = flags.DEFINE_enum(
    "memory",
    None,
    list(sides_lib.SIDES),
    "Makes steps of this side only, for the peak of the process's memory: give one "
    "--size.",
)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")


def compare(name: str, size: models.Size) -> Iterator[measure.Row]:
    """Yields the rows of one model."""
    sides = {side: _timed(side, size) for side in sides_lib.SIDES}
    rtol = 1e-4 if _PRECISION.value == "float32" else 0.02
    most = max(timed.count for timed in sides.values())
    for side, timed in sides.items():
        # The times are comparable only if all sides do the same work.
        np.testing.assert_allclose(timed.loss, sides["hand"].loss, rtol, err_msg=side)
        timed.count = most
    turns = {side: timed.turn for side, timed in sides.items()}
    seconds = measure.in_turn(turns, _ROUNDS.value)
    where = _where(name)
    for what, against, peer in (
        ("step with both rules", "by hand, lax.cond", "hand"),
        ("step with both rules", "by hand, jnp.where", "hand, where"),
        ("dynamic loss scale", "none", "rules, unscaled"),
    ):
        ours = seconds["rules"]
        yield measure.ratio(f"{what}{where}", against, ours, seconds[peer], 1.02)
    for side, values in seconds.items():
        yield measure.figure(f"step: {side}{where}", values, "ms")


def memory(side: str, name: str, size: models.Size) -> measure.Row:
    """Returns the row of the peak memory of this process, which makes steps of one side
    only.
    """
    what = f"peak memory a device: {side}{_where(name)}"
    _timed(side, size).steps(3)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [
        each["peak_bytes_in_use"] / 1e6 for each in stats if "peak_bytes_in_use" in each
    ]
    if not peaks:
        return measure.Row(
            what, missing=f"the {jax.default_backend()} backend does not say"
        )
    return measure.figure(what, [max(peaks)], "MB")


def _timed(side: str, size: models.Size) -> sides_lib.Timed:
    """Returns a side for the perceptron of a size."""
    loss, params = models.make(size, _PRECISION.value)
    batch = -(-size.batch // jax.device_count()) * jax.device_count()
    x = jax.random.normal(jax.random.key(1), (batch, size.width))
    return sides_lib.Timed(side, loss, params, x)


def _where(name: str) -> str:
    count = jax.device_count()
    precision = "" if _PRECISION.value == "float32" else f", {_PRECISION.value}"
    return f", {name} model{precision}, {count} device{'s' if count > 1 else ''}"


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    sizes = {name: models.sizes()[name] for name in _SIZES.value}
    if _MEMORY.value:
        rows = [memory(_MEMORY.value, *item) for item in sizes.items()]
    else:
        rows = [row for item in sizes.items() for row in compare(*item)]
    measure.emit(rows, _JSON.value)


if __name__ == "__main__":
    app.run(main)
