"""Measures the memory and the time of a run's step by what it keeps, and where.

    JAX_PLATFORMS=cpu python -m benchmarks.memory [--rounds=3] [--steps=10]
    [--side="keep all, state not donated"]

The step is that of configs/lm.py, at a larger size on accelerators. Each side runs in
fresh processes, because a process has one peak of memory; the sides alternate. Donation
is compared with the same step jitted without it: a donated state's buffers become the
new state's, which is checked by their addresses.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import app, flags

from benchmarks import measure
from configs import lm
from xshard import experiment as experiment_lib
from xshard.run import preflight
from xshard.training import state as state_lib
from xshard.training import step as step_lib

_PLAIN = "keep all"
_UNDONATED = "keep all, state not donated"
# The changes of the config by side.
SIDES: dict[str, dict[str, Any]] = {
    _PLAIN: {},
    _UNDONATED: {},
    "model.remat=True": {"model.remat": True},
    "the products kept": {"model.remat": "dots_with_no_batch_dims_saveable"},
    "the products on the host": {"model.remat": "offload_dot_with_no_batch_dims"},
    "slots on the host": {"slots_memory": "pinned_host"},
}
_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each side is measured.", 1)
_STEPS = flags.DEFINE_integer("steps", 10, "The timed steps of a round.", 1)
_SIDES = flags.DEFINE_multi_enum(
    "side",
    list(SIDES),
    list(SIDES),
    f"The sides; again for each. {_PLAIN!r}, which the others are divided by, is one.",
)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")
_CHILD = flags.DEFINE_string("child", None, "For the processes that this one starts.")

_SMALL = {
    "batch_size": 4,
    "text.length": 128,
    "model.layers": 4,
    "model.width": 64,
    "model.heads": 2,
    "model.feed_forward": 128,
}
_LARGE = {
    "batch_size": 16,
    "text.length": 2048,
    "model.layers": 16,
    "model.width": 1536,
    "model.heads": 12,
    "model.feed_forward": 4096,
}


def child(side: str, steps: int) -> dict[str, float]:
    """Returns the figures of one side, measured in this process."""
    config = lm.get_config()
    small = jax.default_backend() == "cpu"
    sizes = _SMALL if small else _LARGE
    config.update_from_flattened_dict({**sizes, **SIDES[side]})
    # Some of Python's own sources suffice for a few batches.
    config.text.held_out = 0.05
    experiment = experiment_lib.load(config.experiment)(config)
    mesh = experiment_lib.mesh_of(config)
    train = preflight.train_batches(experiment, mesh)
    batch = next(train)
    program = preflight.jitted_step(experiment, mesh)
    if side == _UNDONATED:
        program = jax.jit(step_lib.make_watched_step(experiment, mesh))
    state = state_lib.init(experiment, mesh, 0, train.example)
    jax.block_until_ready(state)
    compiled = program.lower(state, batch).compile()
    before = _addresses(state)
    stepped = compiled(state, batch)
    state = stepped.state
    figures = {"reused": len(before & _addresses(state)) / len(before)}
    jax.block_until_ready(stepped)
    begin = time.perf_counter()
    for _ in range(steps):
        stepped = compiled(state, batch)
        state = stepped.state
    jax.block_until_ready(stepped)
    figures["seconds"] = (time.perf_counter() - begin) / steps
    analysis: Any = compiled.memory_analysis()
    # On CPUs the compiler's own peak lacks the temporaries.
    figures["compiled"] = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    figures["host"] = analysis.host_temp_size_in_bytes
    figures["host"] += analysis.host_argument_size_in_bytes
    stats = jax.local_devices()[0].memory_stats() or {}
    for name in ("peak_bytes_in_use", "bytes_in_use"):
        if name in stats:
            figures[name] = stats[name]
    return figures


def _addresses(state: Any) -> set[int]:
    """Returns the addresses of a state's arrays on the first device."""
    found = set()
    for x in jax.tree.leaves(state.experiment):
        shard = x.addressable_shards[0].data
        # Arrays of a few bytes need not be reused.
        if shard.nbytes > 1024:
            found.add(shard.unsafe_buffer_pointer())
    return found


def in_child(side: str) -> dict[str, float]:
    """Returns the figures of one side, measured in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.memory", f"--child={side}"]
    command.append(f"--steps={_STEPS.value}")
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(rounds: int, sides: Sequence[str]) -> Iterator[measure.Row]:
    """Yields the rows of some sides, beside the step that keeps all."""
    calls = {}
    for side in dict.fromkeys([_PLAIN, *sides]):
        calls[side] = lambda side=side: in_child(side)
    measured = measure.in_turn(calls, rounds, warm_up=False)
    plain = measured[_PLAIN]
    # What is measured where the backend reports it, and else what the compiler says.
    peak = "compiled"
    if "peak_bytes_in_use" in plain[0]:
        peak = "peak_bytes_in_use"
    for side, figures in measured.items():
        if side == _PLAIN:
            continue
        for what, name in (("peak memory", peak), ("time", "seconds")):
            ours = [figure[name] for figure in figures]
            theirs = [figure[name] for figure in plain]
            yield measure.ratio(f"{what} of a step: {side}", _PLAIN, ours, theirs)
    units = {
        peak: ("peak", "MB", 1e-6),
        "bytes_in_use": ("between steps", "MB", 1e-6),
        "host": ("of it on the host", "MB", 1e-6),
        "seconds": ("a step", "ms", 1e3),
        "reused": ("buffers of the state that the next state has", "%", 100),
    }
    for side, figures in measured.items():
        for name, (what, unit, factor) in units.items():
            if name in figures[0]:
                values = [factor * figure[name] for figure in figures]
                yield measure.figure(f"{side}: {what}", values, unit)


def main(argv: list[str]) -> None:
    """Prints the rows; with --child, measures one side in this process."""
    del argv
    if _CHILD.value:
        print(json.dumps(child(_CHILD.value, _STEPS.value)))
        return
    measure.emit(compare(_ROUNDS.value, _SIDES.value), _JSON.value)


if __name__ == "__main__":
    app.run(main)
