"""What a run leaves, for comparisons; and what stops it on its way."""

import json

from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.pod import notice
from xshard.run import preflight, states


class Killed(BaseException):
    """The end of a run at an instant that a test chooses."""


class ScriptedWatch:
    """Stands in for what comes from outside: a notice at one poll."""

    def __init__(self, at, kind):
        self._at = at
        self._kind = kind
        self.polls = 0

    def poll(self):
        self.polls += 1
        return notice.Notice(self._kind, "scripted") if self.polls == self._at else None

    def doing(self, what, **more):
        pass

    def publish(self):
        pass


def read(directory):
    """The rows of a work directory."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def same_bits(directory):
    """Its rows as text, but for what differs between runs of the same bits."""
    return [
        json.dumps({name: value for name, value in row.items() if not name.startswith("perf/")})
        for row in read(directory)
    ]


def results(directory):
    """Its results, but for the run's own name."""
    found = json.loads((directory / "results.json").read_text())
    assert found.pop("run")
    return found


def final_state(directory, config):
    """The state in its newest checkpoint."""
    experiment = experiment_lib.load(config.experiment)(config)
    mesh = experiment_lib.mesh_of(config)
    example = preflight.train_batches(experiment, mesh).example
    target = state_lib.abstract_state(experiment, mesh, config.seed, example, whole=True)
    return states.manager(config, str(directory / "checkpoints")).restore(target).state
