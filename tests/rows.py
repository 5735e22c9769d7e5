"""What tests compare runs by: rows, results and state; and ways to stop a run."""

import json

from xshard import checkpoint
from xshard import experiment as experiment_lib
from xshard.metrics import rows as rows_lib
from xshard.pod import request
from xshard.run import preflight
from xshard.training import state as state_lib


class Killed(BaseException):
    """Ends a run at an instant that a test chooses, as if its process were killed."""


def kill_after(run, step):
    """Lets an opened run be killed where it would train beyond a step.

    Args:
      run: an `xshard.loop.Run` with one step a dispatch.
      step: the last step that it makes.
    """
    step_of_run = run.train_step

    def train_step(state, *rest):
        if int(state.step) == step:
            raise Killed
        return step_of_run(state, *rest)

    run.train_step = train_step


class ScriptedWatch:
    """A stand-in for a run's watch, with one request at the poll of a given number."""

    def __init__(self, at, kind):
        self._at = at
        self._kind = kind
        self.polls = 0

    def poll(self):
        self.polls += 1
        if self.polls == self._at:
            return request.Request(self._kind, "scripted")
        return None

    def set_phase(self, phase, **more):
        pass

    def publish(self):
        pass

    def in_each_tick(self, action):
        pass


def read(directory):
    """Returns the rows of a work directory."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def same_bits(directory):
    """Returns the rows as text, without what differs between runs of equal bits."""
    return [json.dumps(rows_lib.reproducible(row)) for row in read(directory)]


def results(directory):
    """Returns the results of a work directory, without the ID of the run."""
    content = json.loads((directory / "results.json").read_text())
    assert content.pop("run")
    return content


def final_state(directory, config):
    """Returns the state in the newest checkpoint of a work directory."""
    experiment = experiment_lib.load(config.experiment)(config)
    mesh = experiment_lib.mesh_of(config)
    example = preflight.train_batches(experiment, mesh).example
    target = state_lib.abstract_state(experiment, mesh, config.seed, example)
    manager = checkpoint.Manager(directory / "checkpoints", checkpoint.Keep(1))
    return manager.restore(target).state
