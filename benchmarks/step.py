"""Measures the cost of xshard's rules against the same step written by hand, in one
process.

    JAX_PLATFORMS=cpu python -m benchmarks.step [--devices=8] [--rounds=41] [--size="1
    ms"]

benchmarks/sides.py defines the sides. A CPU computes slowly in half precision, which
would hide the cost of the rules. Use float32 on a CPU, and --precision=float16 or
bfloat16 on accelerators.
"""

import importlib.util
import time
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

# The approximate time of one side's turn.
_TURN_SECONDS = 0.05
_NO_FLAX = "flax is not installed: pip install '.[bench]'"


class Side:
    """A step with its state, compiled and executed a few times."""

    def __init__(self, name: str, size: models.Size):
        """Compiles the step, and chooses the number of steps of a turn."""
        loss, params = models.make(size, _PRECISION.value)
        init, local = sides_lib.SIDES[name](loss)
        everywhere = jax.sharding.NamedSharding(sides_lib.mesh(), jax.P())
        # Created in its final place, because a copy that is moved there would count as
        # the step's memory.
        self._state = jax.jit(lambda: init(params()), out_shardings=everywhere)()
        batch = -(-size.batch // jax.device_count()) * jax.device_count()
        x = jax.random.normal(jax.random.key(1), (batch, size.width))
        self._x = jax.device_put(
            x, jax.sharding.NamedSharding(sides_lib.mesh(), jax.P("replica"))
        )
        # Compiled by the first call, because jmp's scale cannot be lowered ahead of
        # time.
        self._step = sides_lib.jitted(local)
        self._wait_for_each = jax.default_backend() == "cpu"
        seconds = min(self.steps(1) for _ in range(3))
        self.count = max(3, round(_TURN_SECONDS / seconds))

    def steps(self, count: int) -> float:
        """Returns the seconds per step of this many steps."""
        begin = time.perf_counter()
        for _ in range(count):
            self._state, self.loss = self._step(self._state, self._x)
            # XLA's CPU collectives deadlock with many steps in flight. On other
            # backends a wait would add to the time.
            if self._wait_for_each:
                jax.block_until_ready(self.loss)
        jax.block_until_ready((self._state, self.loss))
        return (time.perf_counter() - begin) / count

    def turn(self) -> float:
        """Returns the seconds per step of a turn, after one step that refills the
        caches.
        """
        self.steps(1)
        return self.steps(self.count)


def compare(name: str, size: models.Size) -> Iterator[measure.Row]:
    """Yields the rows of one model."""
    names = [
        side
        for side in sides_lib.SIDES
        if side != "flax" or importlib.util.find_spec("flax")
    ]
    sides = {side: Side(side, size) for side in names}
    rtol = 1e-4 if _PRECISION.value == "float32" else 0.02
    for side in names:
        # The times are comparable only if all sides do the same work.
        np.testing.assert_allclose(
            sides[side].loss, sides["hand, unscaled"].loss, rtol, err_msg=side
        )
    most = max(side.count for side in sides.values())
    for side in sides.values():
        side.count = most
    turns = {side: sides[side].turn for side in names}
    seconds = measure.in_turn(turns, _ROUNDS.value)
    where = _where(name)
    for peer, title in (
        ("hand", "by hand, lax.cond"),
        ("hand, where", "by hand, jnp.where"),
    ):
        yield measure.ratio(
            f"step with both rules{where}", title, seconds["rules"], seconds[peer], 1.02
        )
    yield measure.ratio(
        f"dynamic loss scale{where}",
        "none",
        seconds["rules"],
        seconds["rules, unscaled"],
        1.02,
    )
    for peer, title in (
        ("jmp", "jmp's DynamicLossScale"),
        ("flax", "flax's DynamicScale"),
    ):
        if peer in seconds:
            yield measure.ratio(
                f"{title}{where}", "none", seconds[peer], seconds["hand, unscaled"]
            )
        else:
            yield measure.Row(f"{title}{where}", "none", missing=_NO_FLAX)
    for side, values in seconds.items():
        yield measure.figure(
            f"step: {side}{where}", [1e3 * value for value in values], "ms"
        )


def memory(side: str, name: str, size: models.Size) -> measure.Row:
    """Returns the row of the peak memory of this process, which makes steps of one side
    only.
    """
    what = f"peak memory a device: {side}{_where(name)}"
    Side(side, size).steps(3)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [
        each["peak_bytes_in_use"] / 1e6 for each in stats if "peak_bytes_in_use" in each
    ]
    if not peaks:
        return measure.Row(
            what, missing=f"the {jax.default_backend()} backend does not say"
        )
    return measure.figure(what, [max(peaks)], "MB")


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
