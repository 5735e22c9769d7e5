"""Steps of a run that are not finite: what ends the run, and what is said of them.

A step is in trouble when it was applied and its loss or a gradient was not finite. A step that a dynamic loss
scale skips, to lower the scale, is not: that is how such a scale finds its level.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from xshard import config as config_lib
from xshard import mesh as mesh_lib
from xshard.metrics import deferred, show
from xshard.optimizers import trees

STOP, SKIP, WARN = config_lib.ON_NONFINITE
# What can be said of a step. STUCK: it was skipped, and no loss scale was lowered for the next one.
FINE, STUCK, TROUBLE = 0, 1, 2
_LOOK_AT = (
    "Look at the learning rate, at NaN and infinities in the data, and at what in the loss divides by 0 or takes "
    "a logarithm or a square root of it; docs/half_precision.md has more."
)
# A run whose last steps are STUCK, so many of them, has not ended well, whatever it tolerates before its end.
_STUCK_AT_THE_END = 10
_STRETCHES, _PATHS = 10, 8


class NonfiniteError(Exception):
    """A step after which a run does not go on. The message says which, and what in it was not finite."""


class Observed(NamedTuple):
    """The observations of a step; with several groups each has a leading dimension of groups.

    Attributes:
      verdict: FINE, STUCK or TROUBLE, an int32 scalar.
      loss: the mean over the replicas.
      gradients: for each parameter whether its gradient, as the update is given it, was not finite.
    """

    verdict: Any
    loss: Any
    gradients: Any


class Watch:
    """Sees to it that a run's steps are finite, without holding the steps up: it looks at each a little later.

    All processes see the same numbers of a step, after the same number of later ones, so that all decide alike.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        mesh: jax.sharding.Mesh,
        params: Any,
        say: Callable[[str], None],
        *,
        in_flight: int = deferred.IN_FLIGHT,
    ):
        """Begins.

        Args:
          config: the run's config.
          mesh: the run's mesh.
          params: the parameters, of which only the paths count.
          say: takes what is said of steps after which the run goes on.
          in_flight: how many steps may be looked at later.
        """
        self._policy = config.on_nonfinite
        self._patience = config.max_skips_in_a_row
        self._mesh = mesh
        # In the order of `Observed.gradients`.
        self._paths = list(trees.leaves_by_path(params))
        self._say = say
        self._in_flight = in_flight
        self._pending: collections.deque[tuple[int, Observed]] = collections.deque()
        self._stuck = np.zeros(mesh_lib.num_groups(mesh), np.int64)
        self._last = np.full(mesh_lib.num_groups(mesh), FINE)
        self._begin: int | None = None
        self._stretches = 0
        self._bad: tuple[int, np.ndarray, Observed] | None = None

    def push(self, step: int, observed: Observed) -> None:
        """Takes what a step says of itself, and looks at an earlier one.

        Raises:
          NonfiniteError: if the run is not to go on.
        """
        # What is replicated already is left as it is: all but the verdicts of groups on other processes.
        verdict = mesh_lib.replicate(self._mesh, observed.verdict)
        verdict.copy_to_host_async()
        self._pending.append((step, observed._replace(verdict=verdict)))
        self._look(self._in_flight)

    def flush(self) -> None:
        """Looks at all steps that have been taken; NonfiniteError as for `push`."""
        self._look(0)

    def at_end(self) -> str:
        """Returns why the last steps were none that a run should end with; empty if they were."""
        if np.any(self._last == TROUBLE):
            return self._describe()
        if np.max(self._stuck) >= min(_STUCK_AT_THE_END, self._patience):
            return self._skipped(int(np.max(self._stuck)))
        return ""

    def _look(self, remain: int) -> None:
        while len(self._pending) > remain:
            step, observed = self._pending.popleft()
            verdicts = np.asarray(observed.verdict).reshape(-1)
            if self._last.any() or verdicts.any():
                self._judge(step, verdicts, observed)

    def _judge(self, step: int, verdicts: np.ndarray, observed: Observed) -> None:
        self._last = verdicts
        self._stuck = np.where(verdicts == STUCK, self._stuck + 1, 0)
        if verdicts.any():
            self._bad = step, verdicts, observed
        if np.max(self._stuck) >= self._patience:
            raise NonfiniteError(self._skipped(int(np.max(self._stuck))))
        if np.any(verdicts == TROUBLE):
            if self._policy == STOP:
                raise NonfiniteError(self._describe())
            self._warn(step)
        elif self._begin is not None and not verdicts.any():
            self._recover(step)

    def _warn(self, step: int) -> None:
        if self._begin is not None:
            return
        self._begin = step
        self._stretches += 1
        if self._stretches > _STRETCHES:
            return
        more = "" if self._stretches < _STRETCHES else "; of further ones nothing is said"
        self._say(f"{self._describe()}; going on, as on_nonfinite={self._policy} says{more}")

    def _recover(self, step: int) -> None:
        begin, self._begin = self._begin, None
        if self._stretches <= _STRETCHES:
            self._say(f"step {step}: finite again, as it was before step {begin}")

    def _skipped(self, count: int) -> str:
        return (
            f"{count} steps in a row were skipped, and no loss scale is left to be lowered; the last, "
            f"{self._describe()}"
        )

    def _describe(self) -> str:
        """The last step that was not as it should be, whose numbers come to the host now; on all processes alike."""
        if self._bad is None:
            return ""
        step, verdicts, observed = self._bad
        observed = mesh_lib.replicate(self._mesh, observed)
        losses = np.asarray(observed.loss).reshape(len(verdicts))
        bad = np.asarray(observed.gradients).reshape(len(verdicts), -1)
        said = []
        for group in np.flatnonzero(verdicts):
            where = f"in group {group} of {len(verdicts)} " if len(verdicts) > 1 else ""
            said.append(where + self._describe_group(losses[group], bad[group]))
        return f"step {step}: {'; '.join(said)}"

    def _describe_group(self, loss: Any, bad: np.ndarray) -> str:
        numbers = f"the loss is {show.number(float(loss))}"
        paths = [self._paths[index] for index in np.flatnonzero(bad).tolist()]
        if not paths:
            return numbers
        link = ", but" if np.isfinite(loss) else ", and"
        count = f"{len(paths)} of {len(self._paths)} gradients"
        return f"{numbers}{link} {count} are not finite: {listed(paths)}"


def of_state(step: int, paths: Sequence[str]) -> str:
    """Says that a step has left a state that is not finite."""
    return f"step {step}: what it leaves is not finite: {listed(paths)}"


def message(why: str) -> str:
    """The error of a run that has not ended finite, for the reason given, with what a person may do."""
    return f"error: {why}. {_LOOK_AT}"


def listed(paths: Sequence[str]) -> str:
    """Some names; of many the first, and how many more there are."""
    more = [f"and {len(paths) - _PATHS} more"] if len(paths) > _PATHS else []
    return ", ".join([*paths[:_PATHS], *more])
