"""What happens every n steps or every n seconds of a run."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import ml_collections


class Hook(Protocol):
    """Called after every step, in the order of the list."""

    def __call__(self, step: int, state: Any, /) -> None:
        """Acts, or not.

        Args:
          step: the number of steps made.
          state: the `TrainState` after them. The next step donates it: keep no reference.
        """


class EverySteps:
    """Calls `action(step, state)` every n steps, and at the last step or not, as said."""

    def __init__(self, action: Hook, every: int, *, last: int, at_last: bool):
        self._action = action
        self._every = every
        self._last = last
        self._at_last = at_last

    def __call__(self, step: int, state: Any) -> None:
        """As `Hook`."""
        if self._at_last if step == self._last else step % self._every == 0:
            self._action(step, state)


class EverySeconds:
    """Calls `action(step, state)` at the first step after each n seconds."""

    def __init__(self, action: Hook, every: float, clock: Callable[[], float] = time.monotonic):
        self._action = action
        self._every = every
        self._clock = clock
        self._due = clock() + every

    def __call__(self, step: int, state: Any) -> None:
        """As `Hook`."""
        if self._clock() >= self._due:
            self._due = self._clock() + self._every
            self._action(step, state)


def schedule(
    config: ml_collections.ConfigDict, evaluate: Hook, save: Hook, by_clock: Hook | None
) -> list[Hook]:
    """The hooks that a run's config asks for: the evaluation, and then what saves.

    Args:
      config: the run's config.
      evaluate: judges a state.
      save: saves it.
      by_clock: is called every `checkpoint.every_minutes`; None where that is another process's.
    """
    last, options = config.steps, config.checkpoint
    best = options.keep_best > 0
    hooks: list[Hook] = [
        EverySteps(evaluate, config.eval_every_steps, last=last, at_last=True),
        EverySteps(save, options.every_steps, last=last, at_last=True),
    ]
    if best:
        hooks.append(EverySteps(save, config.eval_every_steps, last=last, at_last=False))
    if options.every_minutes and by_clock is not None:
        hooks.append(EverySeconds(by_clock, 60 * options.every_minutes))
    return hooks
