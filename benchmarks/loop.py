"""Measures the cost of the training loop against a bare `for` over the same jitted
step.

    JAX_PLATFORMS=cpu python -m benchmarks.loop [--rounds=7] [--steps=1500] [--size="1
    ms"] [--steps_per_dispatch=32]

`--size` also takes two configs of configs/, on all devices: lm_tiny, and digits, whose
convolutions keep the plain step on CPUs.

The loop is the one that `python -m xshard.main` runs: with a watch for signals, a log,
hooks, wings, and checkpoints in the background. The bare loops log nothing, and use a
run's batches. One waits for each step. The other keeps two in flight, as the loop does.

Timed is the steady state: the first steps, up to the first row and the first save, are
not. What a run does only once in these steps has its own row.

The host's time is the CPU time of the loop's thread. It contains no waits, and nothing
that other threads compute.
"""

import collections
import contextlib
import functools
import importlib.util
import io
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from absl import app, flags

from benchmarks import keras_fit as keras_lib
from benchmarks import measure, models
from configs import digits, lm_tiny
from xshard import experiment as experiment_lib
from xshard import loop
from xshard.pod import watchdog
from xshard.run import preflight
from xshard.training import state as state_lib
from xshard.training import step
from xshard.wings import installed

_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each side is timed.", 1)
_STEPS = flags.DEFINE_integer("steps", 1500, "Of a turn, for steps of 1 ms.", 200)
_SAVE_EVERY = flags.DEFINE_integer(
    "save_every", 500, "The steps between two checkpoints of the loop.", 5
)
_CONFIGS = {"lm_tiny": lm_tiny, "digits": digits}
_SIZES = flags.DEFINE_multi_enum(
    "size",
    ["1 ms", "20 ms"],
    ["1 ms", "20 ms", *_CONFIGS],
    "The models; again for each.",
)
_PER_DISPATCH = flags.DEFINE_integer(
    "steps_per_dispatch", 0, "The loop's key of this name; 0: the run chooses.", 0
)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")

# The bare loops do nothing for the first time but compile.
_BARE_UNTIMED = 20
# By size: the timed share of --steps, and the largest ratio to a bare loop.
_EXPECTED = {
    "1 ms": (1.0, 0.8),
    "20 ms": (0.2, 1.0),
    "lm_tiny": (0.05, 0.85),
    "digits": (1.0, 1.01),
}
_IN_FLIGHT = "bare for, two steps in flight"
_NO_KERAS = "keras is not installed: pip install '.[bench]'"


def _untimed() -> int:
    """Returns the number of the loop's first steps, which are not timed: up to the
    first save, and some more.
    """
    return _SAVE_EVERY.value + _SAVE_EVERY.value // 10


class Clock(watchdog.Watchdog):
    """A run's watch that also records when the first step has been made, and when the
    timed steps begin.
    """

    first = 0.0
    first_step = 0
    begin = 0.0
    begin_step = 0
    begin_cpu = 0.0

    def set_phase(self, phase: str, **more: Any) -> None:
        """Sets the status as `Watchdog.set_phase` does, and starts the clock at the
        first timed step.
        """
        if phase == "training" and not self.first:
            self.first = time.perf_counter()
            self.first_step = more["step"]
        # Several steps are dispatched at once, so the number itself may not come.
        if phase == "training" and not self.begin and more["step"] >= _untimed():
            self.begin = time.perf_counter()
            self.begin_cpu = time.thread_time()
            self.begin_step = more["step"]
        super().set_phase(phase, **more)


def make_config(name: str, steps: int) -> Any:
    """Returns the config of a run, which logs a row every 100 steps.

    Args:
      name: a size of `models`, or a config of configs/.
      steps: the number of timed steps.
    """
    if name in _CONFIGS:
        config = _CONFIGS[name].get_config()
    else:
        config = models.make_config(models.sizes()[name], 100)
    config.update({"log_every_steps": 100, "eval_every_steps": 10**6})
    config.steps_per_dispatch = _PER_DISPATCH.value
    config.steps = _untimed() + steps
    config.checkpoint.every_steps = _SAVE_EVERY.value
    return config


class Figures(NamedTuple):
    """What was measured of a run.

    Attributes:
      seconds: the seconds per timed step.
      once: the seconds that the steps before took longer than these.
      host: the CPU seconds of the loop's thread per timed step.
    """

    seconds: float
    once: float
    host: float


def of_the_loop(config: Any) -> Figures:
    """Makes a run in a new directory, as `xshard.main` does, and measures it."""
    with tempfile.TemporaryDirectory() as directory, Clock(directory) as clock:
        run = loop.Run(config, directory, watch=clock, wings=installed.WINGS)
        with contextlib.redirect_stdout(io.StringIO()), run.opened():
            state, stop = run.train()
            jax.block_until_ready(state)
            end = time.perf_counter()
            # The run has made its steps in this thread.
            cpu = time.thread_time() - clock.begin_cpu
    if stop is not None:
        # The watch takes Ctrl-C, so that the run saves and returns; this raises it
        # again.
        raise KeyboardInterrupt
    count = config.steps - clock.begin_step
    seconds = (end - clock.begin) / count
    num_before = clock.begin_step - clock.first_step
    once = clock.begin - clock.first - num_before * seconds
    return Figures(seconds, once, cpu / count)


class Bare:
    """The same step in a bare `for`."""

    def __init__(self, config: Any, steps: int):
        """Prepares the step and the batches of a run with a config."""
        self._experiment = experiment_lib.of_config(config)
        self._mesh = experiment_lib.mesh_of(config)
        self._batches = preflight.train_batches(self._experiment, self._mesh)
        self._steps = steps
        made = step.make_train_step(self._experiment, self._mesh)
        self._step = jax.jit(made, donate_argnums=0)

    def seconds(self, in_flight: int) -> float:
        """Returns the seconds per step, if after each dispatch at most `in_flight`
        steps may be in flight.
        """
        state = state_lib.init(self._experiment, self._mesh, 0, self._batches.example)
        pending: collections.deque[Any] = collections.deque()
        for number in range(_BARE_UNTIMED + self._steps):
            if number == _BARE_UNTIMED:
                jax.block_until_ready(state)
                begin = time.perf_counter()
            state, values = self._step(state, next(self._batches))
            pending.append(values)
            if len(pending) > in_flight:
                jax.block_until_ready(pending.popleft())
        jax.block_until_ready(state)
        return (time.perf_counter() - begin) / self._steps


def _keras(steps_per_execution: int) -> str:
    return f"Keras' fit, steps_per_execution={steps_per_execution}"


def compare(name: str) -> Iterator[measure.Row]:
    """Yields the rows of the loop and the bare loops, for one size."""
    share, most = _EXPECTED[name]
    steps = round(_STEPS.value * share)
    is_shipped = name in _CONFIGS
    config = make_config(name, steps)
    bare = Bare(config, steps)
    peers = {
        "bare for, waits for each step": functools.partial(bare.seconds, 0),
        _IN_FLIGHT: functools.partial(bare.seconds, 2),
    }
    if not is_shipped and importlib.util.find_spec("keras"):
        for count in (1, 8):
            keras_fit = keras_lib.Timed(models.sizes()[name], steps, count)
            peers[_keras(count)] = keras_fit.seconds
    sides = {"loop": functools.partial(of_the_loop, config), **peers}
    results = measure.in_turn(sides, _ROUNDS.value, warm_up=False)
    ours, once, host = zip(*results.pop("loop"), strict=True)
    what = f"loop with watch, log, hooks, checkpoints; {name} steps"
    if _PER_DISPATCH.value:
        what += f", {_PER_DISPATCH.value} a dispatch"
    for title, seconds in results.items():
        target = {_IN_FLIGHT: most, _keras(8): 1.0}.get(title)
        yield measure.ratio(what, title, ours, seconds, target)
    if not is_shipped and _keras(8) not in results:
        yield measure.Row(what, _keras(8), missing=_NO_KERAS)
    for title, seconds in {"the loop": ours, **results}.items():
        yield measure.figure(f"a {name} step in {title}", seconds, "ms")
    first = f"only once, in the first {_untimed()} {name} steps"
    yield measure.figure(first, once, "ms")
    yield measure.figure(f"the host in a {name} step of the loop", host, "us")


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    rows = [row for name in _SIZES.value for row in compare(name)]
    measure.emit(rows, _JSON.value)


if __name__ == "__main__":
    app.run(main)
