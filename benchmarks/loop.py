"""Measures the cost of the training loop against a bare `for` over the same jitted step.

    JAX_PLATFORMS=cpu python -m benchmarks.loop [--rounds=7] [--steps=1500]

The loop is the one that `python -m xshard.main` runs: with a watch for signals, a log, hooks, and checkpoints in the
background. The bare loops make the same batches and log nothing. One waits for each step; the other keeps two in
flight, as the loop does. The first steps are not timed.
"""

import collections
import contextlib
import functools
import io
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
from absl import app, flags

from benchmarks import measure, models
from tests import toy
from xshard import loop, step
from xshard import state as state_lib
from xshard.pod import monitor

_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each side is timed.", 1)
_STEPS = flags.DEFINE_integer("steps", 1500, "Of a turn.", 200)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")

# Compilation and this many first steps are not timed.
_UNTIMED = 550


class Clock(monitor.PodMonitor):
    """A run's watch that also records when the timed steps begin."""

    begin = 0.0

    def doing(self, what: str, **more: int) -> None:
        """Sets the status as `PodMonitor.doing` does, and starts the clock at the first timed step."""
        if what == "training" and more["step"] == _UNTIMED:
            self.begin = time.perf_counter()
        super().doing(what, **more)


def make_config() -> Any:
    """Returns the config of a run with steps of about 1 ms, a row every 100 steps and a checkpoint every 500."""
    config, size = toy.get_config(), models.sizes()["1 ms"]
    config.experiment = "benchmarks.models.Wide"
    config.update({"width": size.width, "layers": size.layers, "examples": 100 * size.batch})
    config.update({"batch_size": size.batch, "steps": _UNTIMED + _STEPS.value})
    config.update({"log_every_steps": 100, "eval_every_steps": 10**6})
    # The default of runs, which the toy's config changes.
    config.fingerprint_every_steps = 10
    config.checkpoint.every_steps = 500
    return config


def of_the_loop(config: Any) -> float:
    """Returns the seconds per step of the loop."""
    with tempfile.TemporaryDirectory() as directory, Clock(directory) as clock:
        run = loop.Run(config, directory, watch=clock)
        with contextlib.redirect_stdout(io.StringIO()), run.opened():
            state, stop = run.train()
            jax.block_until_ready(state)
            seconds = time.perf_counter() - clock.begin
    if stop is not None:
        # The watch takes Ctrl-C, so that the run saves and returns; this raises it again.
        raise KeyboardInterrupt
    return seconds / _STEPS.value


class Bare:
    """The same step and batches in a bare `for`."""

    def __init__(self, config: Any):
        """Prepares the step and the batches of a run."""
        with tempfile.TemporaryDirectory() as directory:
            self._run = loop.Run(config, str(pathlib.Path(directory) / "unused"))
        made = step.make_train_step(self._run.experiment, self._run.mesh)
        self._step = jax.jit(made, donate_argnums=0)

    def seconds(self, in_flight: int) -> float:
        """Returns the seconds per step, if after each dispatch at most `in_flight` steps may be in flight."""
        run = self._run
        state = state_lib.init(run.experiment, run.mesh, 0, run.batches.example)
        pending: collections.deque[Any] = collections.deque()
        for number in range(_UNTIMED + _STEPS.value):
            if number == _UNTIMED:
                jax.block_until_ready(state)
                begin = time.perf_counter()
            state, values = self._step(state, next(run.batches))
            pending.append(values)
            if len(pending) > in_flight:
                jax.block_until_ready(pending.popleft())
        jax.block_until_ready(state)
        return (time.perf_counter() - begin) / _STEPS.value


def compare() -> Iterator[measure.Row]:
    """Yields the rows."""
    config = make_config()
    bare = Bare(config)
    sides = {
        "loop": functools.partial(of_the_loop, config),
        "waits": functools.partial(bare.seconds, 0),
        "in flight": functools.partial(bare.seconds, 2),
    }
    seconds = measure.in_turn(sides, _ROUNDS.value)
    what = "loop with watch, log, hooks, checkpoints; 1 ms steps"
    peers = {"waits": "bare for, waits for each step", "in flight": "bare for, two steps in flight"}
    for side, title in peers.items():
        yield measure.ratio(what, title, seconds["loop"], seconds[side], 1.05)
    for side, title in {"loop": "the loop", **peers}.items():
        yield measure.figure(f"a step in {title}", [1e3 * value for value in seconds[side]], "ms")


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    measure.emit(compare(), _JSON.value)


if __name__ == "__main__":
    app.run(main)
