"""Tests that a run gives the devices one program for each step and batch.

It never waits for the newest one.
"""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import dispatches, toy, winged
from xshard import experiment as experiment_lib
from xshard.metrics import deferred
from xshard.run import evaluation
from xshard.training import state as state_lib

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
# The steps that are recorded: from the one after the first row was written, which
# counts the step's FLOPs in a trace.
FIRST = 7
LAST = 11
JUMPS = {
    "on_nonfinite": "roll_back",
    "roll_back.loss_factor": 1e6,
    "roll_back.loss_steps": 2,
}


def make_config(**changes):
    config = toy.get_config()
    config.update({"log_every_steps": 4, "eval_every_steps": 100, "steps": 12})
    config.steps_per_dispatch = 1
    config.checkpoint.every_steps = 100
    config.update_from_flattened_dict(changes)
    return config.lock()


def test_a_recording_has_the_names_of_all_programs(tmp_path):
    @jax.jit
    def double(x):
        return 2 * x

    x = double(jnp.arange(6))
    with dispatches.recorded(tmp_path / "one") as names:
        x = double(x)
    assert names == {"double"}
    with dispatches.recorded(tmp_path / "two") as names:
        np.reshape(double(x), (2, 3))
    assert names == {"double", "reshape"}
    # Moving arrays from and to the host runs no program.
    with dispatches.recorded(tmp_path / "none") as names:
        np.asarray(jax.device_put(np.asarray(x)))
    assert names == set()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"group_assignment": HALVES},
        {"fingerprint_every_steps": 3, "log_every_steps": 2},
        pytest.param(JUMPS, marks=winged.marks_of(JUMPS)),
    ],
)
def test_the_loop_runs_nothing_besides_the_step(tmp_path, changes):
    run = winged.Run(make_config(**changes), str(tmp_path / "run"))
    step = run.train_step
    calls = []
    recording = contextlib.ExitStack()
    names = None

    def train_step(*args):
        nonlocal names
        calls.append(1)
        if len(calls) == FIRST:
            names = recording.enter_context(dispatches.recorded(tmp_path / "trace"))
        if len(calls) == LAST:
            recording.close()
        return step(*args)

    run.train_step = train_step
    with run.opened():
        run.train()
    assert names == {"train_steps"}


class Output:
    """Stands in for an output of a program.

    It records how many later programs were called before it is waited for.
    """

    # What does not wait for the value.
    FREE = (
        "shape",
        "dtype",
        "ndim",
        "sharding",
        "is_fully_addressable",
        "is_fully_replicated",
        "is_ready",
        "copy_to_host_async",
        "addressable_shards",
    )

    def __init__(self, array, calls, waits):
        self.array = array
        self._call = len(calls)
        self._calls = calls
        self._waits = waits

    def _wait(self):
        # The clock waits in a thread of its own for the moment at which the devices
        # become idle.
        if threading.current_thread() is threading.main_thread():
            self._waits.append(len(self._calls) - self._call)
        return self.array

    def block_until_ready(self):
        self._wait().block_until_ready()
        return self

    def __array__(self, *args, **kwargs):
        return np.asarray(self._wait()).__array__(*args, **kwargs)

    def __getattr__(self, name):
        # Whatever else is asked for may wait.
        return getattr(self.array if name in self.FREE else self._wait(), name)


def recorded_waits(function, is_last):
    """Wraps a program so that its outputs are `Output`s.

    Args:
      function: the program. It may receive `Output`s too.
      is_last: takes the number of calls; from the call for which it is True on, the
        outputs are as they are.

    Returns:
      The wrapped program; and, for each wait until then, the number of programs that
      were called after the one that is waited for.
    """
    calls = []
    waits = []

    def call(*args):
        args = jax.tree.map(lambda x: x.array if isinstance(x, Output) else x, args)
        outputs = function(*args)
        calls.append(1)
        if is_last(len(calls)):
            return outputs
        return jax.tree.map(lambda x: Output(x, calls, waits), outputs)

    return call, waits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fingerprint_every_steps": 3},
        pytest.param(JUMPS, marks=winged.marks_of(JUMPS)),
    ],
)
def test_the_loop_waits_only_for_steps_before_those_in_flight(tmp_path, changes):
    run = winged.Run(make_config(**changes), str(tmp_path))
    seen = []

    def is_last(count):
        # The run ends with a save, which waits for everything.
        if count == run.config.steps:
            seen.extend(waits)
        return count == run.config.steps

    run.train_step, waits = recorded_waits(run.train_step, is_last)
    # The compilation of the fingerprints takes the state's shapes, which are not arrays
    # here.
    run._replica_check.compile_ahead = lambda state: None
    with run.opened():
        run.train()
    assert len(seen) >= run.config.steps - deferred.IN_FLIGHT
    assert min(seen) == deferred.IN_FLIGHT


class Examined(toy.Toy):
    """Is evaluated on all 50 examples, in 7 batches."""

    def eval_data(self):
        return self.train_data()


def make_evaluation(**changes):
    config = make_config(**changes)
    experiment = Examined(config)
    mesh = experiment_lib.mesh_of(config)
    state = state_lib.init(experiment, mesh, 0, experiment.train_data())
    return evaluation.Evaluation(experiment, mesh, config.eval_batch_size), state


@pytest.mark.parametrize("groups", [(), HALVES])
def test_an_evaluation_runs_nothing_besides_its_program(tmp_path, groups):
    evaluate, state = make_evaluation(group_assignment=groups)
    expected = evaluate(state)
    with dispatches.recorded(tmp_path) as names:
        assert evaluate(state) == expected
    assert names == {"eval_step"}


def test_an_evaluation_waits_only_for_batches_before_those_in_flight():
    evaluate, state = make_evaluation()
    expected = evaluate(state)
    evaluate._step, waits = recorded_waits(evaluate._step, lambda count: False)
    assert evaluate(state) == expected
    # Nothing comes after the last batches.
    in_flight = [*range(deferred.IN_FLIGHT)]
    assert sorted(set(waits)) == [*in_flight, deferred.IN_FLIGHT]
    assert waits.count(0) == waits.count(deferred.IN_FLIGHT) / 5
