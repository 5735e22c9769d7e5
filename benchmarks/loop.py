"""Measures the cost of the training loop against a bare `for` over the same jitted
step.

    JAX_PLATFORMS=cpu python -m benchmarks.loop [--rounds=7] [--steps=1500] [--size="1
    ms"] [--arrays=10,500] [--steps_per_dispatch=32]

`--size` also takes two configs of configs/, on all devices: lm_tiny, and digits, whose
convolutions keep the plain step on CPUs.

The loop is the one that `python -m xshard.main` runs: with a watch for signals, a log,
hooks, and checkpoints in the background. The bare loops log nothing. One waits for each
step. Another keeps two in flight, as the loop does. Both use the run's batches. The
third, also with two in flight, makes batches as one would by hand, without checks.

Timed is the steady state: the first steps, up to the first row and the first save, are
not. What a run does only once in these steps has its own row.

The host's time is the CPU time of the main thread for each part of a step, in a run of
its own. It contains no waits and nothing that other threads compute, but the caches are
as the computation of the steps leaves them.
"""

import collections
import contextlib
import functools
import importlib.util
import io
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import app, flags

from benchmarks import keras_fit as keras_lib
from benchmarks import measure, models
from configs import digits, lm_tiny
from tests import toy
from xshard import loop
from xshard import mesh as mesh_lib
from xshard.pod import watchdog
from xshard.training import state as state_lib
from xshard.training import step

_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each side is timed.", 1)
_STEPS = flags.DEFINE_integer("steps", 1500, "Of a turn, for steps of 1 ms.", 200)
_CONFIGS = {"lm_tiny": lm_tiny, "digits": digits}
_SIZES = flags.DEFINE_multi_enum(
    "size",
    ["1 ms", "20 ms"],
    ["1 ms", "20 ms", *_CONFIGS],
    "The models; again for each.",
)
_ARRAYS = flags.DEFINE_list(
    "arrays",
    ["10", "500"],
    "The numbers of parameter arrays for which the host is timed.",
)
_PER_DISPATCH = flags.DEFINE_integer(
    "steps_per_dispatch", 0, "The loop's key of this name; 0: the run chooses.", 0
)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")

_SAVE_EVERY = 500
# The first steps that are not timed: up to the first save, and some more.
_UNTIMED = _SAVE_EVERY + 50
# The bare loops do nothing for the first time but compile.
_BARE_UNTIMED = 20
# The timed share of the steps of --steps, and the largest ratio to a bare loop, by
# size.
_SHARES = {"1 ms": 1.0, "20 ms": 0.2, "lm_tiny": 0.2, "digits": 1.0}
_TARGETS = {"1 ms": 0.8, "20 ms": 1.0, "lm_tiny": 0.85, "digits": 1.01}
_WITH_TARGETS = (
    "bare for, two steps in flight",
    "bare for, two in flight, batches by hand",
)
_NO_KERAS = "keras is not installed: pip install '.[bench]'"
# The steps for which the host's time is measured.
_HOST_STEPS = 1000


class Clock(watchdog.Watchdog):
    """A run's watch that also records when the first step has been made, and when the
    timed steps begin.
    """

    first = 0.0
    first_step = 0
    begin = 0.0
    begin_step = 0
    begin_cpu = 0.0
    end_time = 0.0

    def set_phase(self, phase: str, **more: Any) -> None:
        """Sets the status as `Watchdog.set_phase` does, and starts the clock at the
        first timed step.
        """
        if phase == "training" and not self.first:
            self.first = time.perf_counter()
            self.first_step = more["step"]
        # Several steps are dispatched at once, so the number itself may not come.
        if phase == "training" and not self.begin and more["step"] >= _UNTIMED:
            self.begin = time.perf_counter()
            self.begin_cpu = time.thread_time()
            self.begin_step = more["step"]
        super().set_phase(phase, **more)


def make_config(size: models.Size, steps: int) -> Any:
    """Returns the config of a run with this many timed steps, a row every 100 steps and
    a checkpoint every 500.
    """
    config = toy.get_config()
    config.experiment = "benchmarks.models.Wide"
    config.update(
        {"width": size.width, "layers": size.layers, "examples": 100 * size.batch}
    )
    config.batch_size = size.batch
    # The default of runs, which the toy's config changes.
    config.fingerprint_every_steps = 10
    return _for_timing(config, steps)


def of_shipped(name: str, steps: int) -> Any:
    """Returns a config of configs/, as a run with this many timed steps."""
    return _for_timing(_CONFIGS[name].get_config(), steps)


def _for_timing(config: Any, steps: int) -> Any:
    config.update({"log_every_steps": 100, "eval_every_steps": 10**6})
    config.steps_per_dispatch = _PER_DISPATCH.value
    config.steps = _UNTIMED + steps
    config.checkpoint.every_steps = _SAVE_EVERY
    return config


def make_run(
    config: Any, prepare: Callable[[loop.Run], None] = lambda run: None
) -> Clock:
    """Makes a run, in a new directory; returns its watch when the last step has been
    made.

    Args:
      config: the run's config.
      prepare: called with the run before its steps.
    """
    with tempfile.TemporaryDirectory() as directory, Clock(directory) as clock:
        run = loop.Run(config, directory, watch=clock)
        prepare(run)
        with contextlib.redirect_stdout(io.StringIO()), run.opened():
            state, stop = run.train()
            jax.block_until_ready(state)
            clock.end_time = time.perf_counter()
    if stop is not None:
        # The watch takes Ctrl-C, so that the run saves and returns; this raises it
        # again.
        raise KeyboardInterrupt
    return clock


def of_the_loop(config: Any) -> tuple[float, float]:
    """Returns the seconds per step of the loop, and the seconds that the steps before
    took longer than these.
    """
    clock = make_run(config)
    seconds = (clock.end_time - clock.begin) / (config.steps - clock.begin_step)
    num_before = clock.begin_step - clock.first_step
    return seconds, clock.begin - clock.first - num_before * seconds


class Bare:
    """The same step in a bare `for`."""

    def __init__(self, config: Any, steps: int):
        """Prepares the step and the batches of a run."""
        with tempfile.TemporaryDirectory() as directory:
            self._run = loop.Run(config, str(pathlib.Path(directory) / "unused"))
        self._steps = steps
        made = step.make_train_step(self._run.experiment, self._run.mesh)
        self._step = jax.jit(made, donate_argnums=0)

    def by_hand(self) -> Iterator[Any]:
        """Yields batches as one would make them by hand: each epoch in a new order."""
        data = self._run.experiment.train_data()
        size = self._run.config.batch_size
        sharding = mesh_lib.sharding(self._run.mesh, mesh_lib.BATCH)
        count = len(next(iter(data.values())))
        order = np.random.default_rng(0)
        while True:
            shuffled = order.permutation(count)
            for begin in range(0, count - size + 1, size):
                rows = shuffled[begin : begin + size]
                yield jax.device_put(
                    {name: x[rows] for name, x in data.items()}, sharding
                )

    def seconds(self, in_flight: int, *, by_hand: bool = False) -> float:
        """Returns the seconds per step, if after each dispatch at most `in_flight`
        steps may be in flight.
        """
        run = self._run
        batches = self.by_hand() if by_hand else run.batches
        state = state_lib.init(run.experiment, run.mesh, 0, run.batches.example)
        pending: collections.deque[Any] = collections.deque()
        for number in range(_BARE_UNTIMED + self._steps):
            if number == _BARE_UNTIMED:
                jax.block_until_ready(state)
                begin = time.perf_counter()
            state, values = self._step(state, next(batches))
            pending.append(values)
            if len(pending) > in_flight:
                jax.block_until_ready(pending.popleft())
        jax.block_until_ready(state)
        return (time.perf_counter() - begin) / self._steps


def _keras(steps_per_execution: int) -> str:
    return f"Keras' fit, steps_per_execution={steps_per_execution}"


def compare(name: str) -> Iterator[measure.Row]:
    """Yields the rows of the loop and the bare loops, for one size."""
    steps = round(_STEPS.value * _SHARES[name])
    is_shipped = name in _CONFIGS
    if is_shipped:
        config = of_shipped(name, steps)
    else:
        config = make_config(models.sizes()[name], steps)
    bare = Bare(config, steps)
    peers = {
        "bare for, waits for each step": functools.partial(bare.seconds, 0),
        "bare for, two steps in flight": functools.partial(bare.seconds, 2),
    }
    if not is_shipped:
        peers["bare for, two in flight, batches by hand"] = functools.partial(
            bare.seconds, 2, by_hand=True
        )
    if not is_shipped and importlib.util.find_spec("keras"):
        for count in (1, 8):
            keras_fit = keras_lib.Timed(models.sizes()[name], steps, count)
            peers[_keras(count)] = keras_fit.seconds
    sides = {"loop": functools.partial(of_the_loop, config), **peers}
    results = measure.in_turn(sides, _ROUNDS.value)
    ours, once = zip(*results.pop("loop"), strict=True)
    what = f"loop with watch, log, hooks, checkpoints; {name} steps"
    if _PER_DISPATCH.value:
        what += f", {_PER_DISPATCH.value} a dispatch"
    for title, seconds in results.items():
        target = _TARGETS[name] if title in _WITH_TARGETS else None
        if title == _keras(8):
            target = 1.0
        yield measure.ratio(what, title, ours, seconds, target)
    if not is_shipped and _keras(8) not in results:
        yield measure.Row(what, _keras(8), missing=_NO_KERAS)
    for title, seconds in {"the loop": ours, **results}.items():
        yield measure.figure(
            f"a {name} step in {title}", [1e3 * value for value in seconds], "ms"
        )
    first = f"only once, in the first {_UNTIMED} {name} steps"
    yield measure.figure(first, [1e3 * value for value in once], "ms")


class HostTime:
    """The CPU time of the main thread in parts of a run's steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._run: Any = None

    def prepare(self, run: loop.Run) -> None:
        """Lets the parts of a run be timed."""
        self._run = run
        begin = run._begin

        def begin_and_time() -> Any:
            begun = begin()
            # The check exists only now.
            for name in ("fetch", "read"):
                self._time(run._nonfinite_check, name, "finite checks")
            return begun

        run._begin = begin_and_time
        for name in ("fetch", "read"):
            self._time(run.log, name, "log")
        for name in ("fetch", "read"):
            self._time(run._replica_check, name, "copies of replicas")
        self._time(run.batches, "_take_next", "data")
        self._time(run.batches._iterator, "next_batches", "data")
        for name in ("to_devices", "stack_on_devices"):
            self._time(run.batches._rows, name, "place")
        self._time(run, "train_step", "dispatch")
        self._time(run, "set_phase", "status")
        self._time(run, "_take_request", "poll")
        self._time(run, "_save", "save")

    def _time(self, owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)
        self.seconds.setdefault(part, 0.0)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                if self._run.step >= _UNTIMED:
                    self.seconds[part] += time.thread_time() - begin

        setattr(owner, name, timed)


def of_the_host(config: Any) -> dict[str, float]:
    """Returns the microseconds per step of the host, by part."""
    host = HostTime()
    clock = make_run(config, host.prepare)
    # `make_run` returns in the thread that made the steps.
    host.seconds["rest"] = (
        time.thread_time() - clock.begin_cpu - sum(host.seconds.values())
    )
    count = config.steps - clock.begin_step
    return {part: 1e6 * seconds / count for part, seconds in host.seconds.items()}


def of_hosts(arrays: int) -> Iterator[measure.Row]:
    """Yields the rows of the host's time, for a model of this many parameter arrays."""
    size = models.sizes()["1 ms"]
    if arrays != 2 * (size.layers + 1):
        size = models.Size(8, arrays // 2 - 1, size.batch)
    config = make_config(size, _HOST_STEPS)
    rounds = [of_the_host(config) for _ in range(max(1, _ROUNDS.value // 3))]
    where = f"the host in a step, {arrays} arrays"
    totals = [sum(parts.values()) for parts in rounds]
    ours = [sum(parts.values()) - parts["dispatch"] for parts in rounds]
    yield measure.figure(f"{where}: all", totals, "us")
    yield measure.figure(f"{where}: all but JAX's call of the step", ours, "us")
    for part in rounds[0]:
        yield measure.figure(
            f"{where}: {part}", [parts[part] for parts in rounds], "us"
        )


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    rows = [row for name in _SIZES.value for row in compare(name)]
    rows += [row for arrays in _ARRAYS.value for row in of_hosts(int(arrays))]
    measure.emit(rows, _JSON.value)


if __name__ == "__main__":
    app.run(main)
