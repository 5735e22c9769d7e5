"""What a run does beside its steps.

The training loop dispatches several steps at once, up to the next step after which a
hook acts. It reads the results of the steps later, when further ones have been
dispatched, so that the devices are never idle.
"""

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from xshard import errors

# The step of what is never due.
NEVER = sys.maxsize


class Hook:
    """A concern of a run; each method does nothing unless a subclass defines it.

    All processes of a run call the same methods in the same order.

    An experiment may have hooks of its own, see `xshard.Experiment.hooks`. They define
    `next_due` and `act`:

    >>> class PrintsNorm(Hook):
    ...     def next_due(self, step):
    ...         return every(100, step)
    ...
    ...     def act(self, step, state):
    ...         print(step, optax.global_norm(state.experiment.params))
    """

    def next_due(self, step: int) -> int:
        """Returns the first step after a given one, after which the hook acts.

        Nothing else decides when it acts. A run asks when it begins or resumes, and
        after each act. The answer depends on nothing that differs between processes.
        Steps are dispatched together up to the first that is due, so a hook that is due
        often makes small steps slower.
        """
        del step
        return NEVER

    def prepare(self, step: int, state: Any) -> Any:
        """Returns the state that a step, the next to be dispatched, is made of.

        Args:
          step: the number of the step.
          state: the state after the step before.
        """
        del step
        return state

    def fetch(self, chunk: Any) -> Any:
        """Starts to copy to the host what `read` needs of steps just dispatched.

        Args:
          chunk: the steps, a `xshard.training.step.Chunk`.

        Returns:
          Arrays, as `read` takes them; None if it reads none of these steps.
        """
        del chunk

    def read(self, step: int, place: Any, fetched: Any, newest: Any) -> None:
        """Reads the results of a step. All steps are read, in their order.

        Args:
          step: the number of the step.
          place: its index in the arrays of its chunk.
          fetched: what `fetch` returned for the chunk.
          newest: the state after the step that was dispatched last.
        """
        del step, place, fetched, newest

    def act(self, step: int, state: Any) -> None:
        """Acts after the step that `next_due` has named.

        Args:
          step: the number of the step, the last that has been dispatched.
          state: the state after it. The next step donates its arrays, so what is
            needed later is copied. What a hook of an experiment's own writes into its
            containers changes nothing.
        """
        del step, state


class Wing(Hook):
    """What a run may have and may lack: a hook with a say in how the run goes.

    A run receives classes of wings, and makes one object of each. Those of an
    installation are in `xshard.wings.installed`. The keys of a wing are in
    `xshard.config`, under its name.

    Attributes:
      name: its name, that of its folder.
      writers: the writers that it brings, by their names in `config.writers`: classes
        of `xshard.metrics.writer.Writer`, which take a part of a run.
      modes: the modes of `xshard.main` that it brings, by name: functions of the
        config, the work directory, and the keywords `steps`, `watch`, `show` and
        `wings`, which return an exit code.
    """

    name: ClassVar[str]
    writers: ClassVar[Mapping[str, Any]] = types.MappingProxyType({})
    modes: ClassVar[Mapping[str, Callable[..., int]]] = types.MappingProxyType({})

    def __init__(self, run: Any):
        """Checks what a run has, and writes nothing.

        Args:
          run: the `xshard.loop.Run`, whose programs have not been traced yet.

        Raises:
          UserError: if the config does not fit.
        """
        del run

    def predictions(self) -> Sequence[Callable[..., Any]]:
        """Returns functions that the run will call with one that predicts.

        Before the run begins, each is called up to its first prediction.
        """
        return ()

    def opened(self) -> None:
        """Begins what lasts as long as the run holds the work directory."""

    def restored(self, saved: Mapping[str, Any]) -> None:
        """Continues from what `get_state` returned before a checkpoint was saved.

        Args:
          saved: what all wings returned; empty for a new run.
        """
        del saved

    def get_state(self) -> Mapping[str, Any]:
        """Returns what a resumed run needs, as JSON values by names of its own."""
        return {}

    def make_up(self, step: int, state: Any) -> None:
        """Does what a stop left out after the step that the run resumes from."""
        del step, state

    def receive(self, step: int, request: Any) -> None:
        """Takes a request that is neither to stop nor to save.

        Args:
          step: the number of the next step.
          request: a `xshard.pod.request.Request`, the same on all processes.
        """
        del step, request

    def speed(self, step: int, steps_per_second: float) -> Mapping[str, float]:
        """Returns what a step's row has more of the run's speed: numbers by name.

        Args:
          step: the number of the step.
          steps_per_second: the rate of the steps until then.
        """
        del step, steps_per_second
        return {}

    def finish(self, state: Any) -> None:
        """Ends what steps are under, after the last one, on all processes."""
        del state

    def close(self) -> None:
        """Ends what an error or a recovery has cut short; also called at the end."""

    def results(self, step: int, state: Any) -> Mapping[str, Any]:
        """Returns what the wing adds to results.json after the last step."""
        del step, state
        return {}

    def recovers_from(self, error: type[Exception]) -> bool:
        """Returns whether `recover` may help after errors of a type."""
        del error
        return False

    def recover(self, error: Any) -> bool:
        """Prepares another attempt, from an earlier checkpoint, on all processes.

        Args:
          error: a step that is not finite, or after which replicas differ.

        Returns:
          Whether the run is to begin again.

        Raises:
          Exception: the error that ends the run, if more is to be said of it.
        """
        del error
        return False

    def note(self, error: Exception) -> None:
        """Adds notes to an error that ends the run."""
        del error


def check(where: str, returned: Any) -> Sequence[Hook]:
    """Returns an experiment's own hooks.

    Args:
      where: the method that returned them, for the message.
      returned: what it returned.

    Raises:
      UserError: unless these are hooks, and those that act say when.
    """
    is_list = isinstance(returned, Sequence)
    if not is_list or not all(isinstance(hook, Hook) for hook in returned):
        raise errors.UserError(
            f"{where} returned {returned!r}. It must return a list of objects of "
            "xshard.hooks.Hook: return [MyHook()]."
        )
    for hook in returned:
        kind = type(hook)
        if kind.act is not Hook.act and kind.next_due is Hook.next_due:
            raise errors.UserError(
                f"{where} returned a {kind.__name__}, which defines act and not "
                "next_due, so it would never act: let next_due(step) return the step "
                "after which it acts next, such as hooks.every(100, step)."
            )
    return returned


def next_due(hook: Hook, step: int) -> int:
    """Returns the first step after a given one, after which a hook acts.

    Args:
      hook: the hook, which may be an experiment's own.
      step: the number of a step.

    Raises:
      UserError: unless the hook returns the number of a later step.
    """
    due: Any = hook.next_due(step)
    is_number = isinstance(due, (int, np.integer)) and not isinstance(due, bool)
    if not is_number or due <= step:
        raise errors.UserError(
            f"{type(hook).__name__}.next_due({step}) returned {due!r}. It must return "
            "the number of a later step, an int, or xshard.hooks.NEVER: return "
            "hooks.every(100, step)."
        )
    return int(due)


def every(steps: int, step: int) -> int:
    """Returns the first multiple of a number after a step; `NEVER` for 0.

    >>> every(100, 99), every(100, 100)
    (100, 200)
    """
    if not steps:
        return NEVER
    return (step // steps + 1) * steps
