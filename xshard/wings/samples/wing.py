"""The wing that shows what `Experiment.samples` returns."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from xshard import experiment as experiment_lib
from xshard import hooks, loop, samples
from xshard.base import spans
from xshard.learners import validation
from xshard.training import state as state_lib


class Samples(hooks.Wing):
    """Shows samples every `config.samples_every_steps` steps, and with the results."""

    name = "samples"

    def __init__(self, run: loop.Run):
        """Takes the run."""
        self._run = run
        self._every = run.config.samples_every_steps

    def predictions(self) -> Sequence[Callable[..., Any]]:
        """Returns the experiment's samples, if it has any."""
        if not experiment_lib.overrides(self._run.experiment, "samples"):
            return []
        return [self._named]

    def next_due(self, step: int) -> int:
        """Returns the first step after this one, after which samples are due."""
        due = hooks.every(self._every, step)
        # The samples of the last step belong to the run's results, whatever the
        # schedule.
        return due if due < self._run.config.steps else hooks.NEVER

    def act(self, step: int, state: state_lib.TrainState) -> None:
        """Logs and prints the samples of a state."""
        if self._run.is_over:
            # The next start makes up for them.
            return
        text = self._sample(step, state)
        if text:
            self._run.terminal.say(f"step {step}  samples:\n{text}")

    def make_up(self, step: int, state: state_lib.TrainState) -> None:
        """Makes the samples that are due at the restored step, if there are none."""
        if self.next_due(step - 1) != step:
            return
        if self._run.channel.on_process_0(self._run.log.sampled) < step:
            self.act(step, state)

    def results(self, step: int, state: state_lib.TrainState) -> dict[str, Any]:
        """Returns the samples of the last state as text."""
        # They are printed with the results.
        return {"samples": self._sample(step, state)}

    def _sample(self, step: int, state: state_lib.TrainState) -> str:
        """Logs the samples of a state; returns them as text."""
        # None are shown of a state after a step in trouble.
        self._run.flush(state)
        with spans.Span(spans.EVALUATION):
            named = self._named(functools.partial(self._run.predict, state))
            row = samples.row(self._where(), step, named)
        if named:
            self._run.log.write(row)
        return samples.text(named)

    def _named(self, predict: Callable[..., Any]) -> dict[str, Any]:
        """Returns the experiment's samples by name, given a function that predicts."""
        experiment = self._run.experiment
        returned = experiment.samples(predict, experiment_lib.samples_key(experiment))
        return samples.named(self._where(), returned)

    def _where(self) -> str:
        return validation.describe_method(self._run.experiment.samples)
