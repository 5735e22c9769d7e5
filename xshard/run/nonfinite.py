"""Steps of a run that are not finite: what ends the run, and what is said of them.

A step is in trouble when it was applied and its loss or a gradient was not finite. A step that a dynamic loss
scale skips, to lower the scale, is not: that is how such a scale finds its level.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from xshard import config as config_lib
from xshard import mesh as mesh_lib
from xshard.learners import state as learner_lib
from xshard.learners.state import FINE, STUCK, TROUBLE
from xshard.metrics import deferred, show
from xshard.optimizers import trees
from xshard.run import jumps

_LOOK_AT = (
    "Look at the learning rate, at NaN and infinities in the data, and at what in the loss divides by 0 or takes "
    "a logarithm or a square root of it; docs/half_precision.md has more."
)
# A run whose last steps are STUCK, so many of them, has not ended well, whatever it tolerates before its end.
_STUCK_AT_THE_END = 10
_STRETCHES = 10


class NonfiniteError(Exception):
    """A step after which a run does not go on as it is. The message says which, and what was wrong with it.

    Whatever finds such a step raises it, on all processes after the same step: a run whose config says so rolls back.

    Attributes:
      step: the step.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


# Of each learner by name; with several groups each array has a leading dimension of groups.
Observed = Mapping[str, learner_lib.Observed]


class Watch:
    """Sees to it that a run's steps are finite, without holding the steps up: it looks at each a little later.

    All processes see the same numbers of a step, after the same number of later ones, so that all decide alike.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        mesh: jax.sharding.Mesh,
        learners: Mapping[str, learner_lib.LearnerState],
        say: Callable[[str], None],
        known: Mapping[str, Any] | None = None,
    ):
        """Begins.

        Args:
          config: the run's config.
          mesh: the run's mesh.
          learners: the states of the learners by name, of which only the parameters' paths count.
          say: takes what is said of steps after which the run goes on.
          known: what `get_state` has returned, of a run that goes on, if it was saved.
        """
        self._policy = config.on_nonfinite
        self._patience = config.max_skips_in_a_row
        # Without roll-backs a jump of the loss is no reason to do anything.
        factor, steps = 0.0, 1
        if self._policy == config_lib.ROLL_BACK:
            factor, steps = config.roll_back.loss_factor, config.roll_back.loss_steps
        self._jumps = jumps.Jumps(factor, steps)
        self._mesh = mesh
        # In the order of `Observed.gradients`.
        self._paths = {name: list(trees.leaves_by_path(x.params)) for name, x in learners.items()}
        self._say = say
        self._pending: collections.deque[tuple[int, Observed]] = collections.deque()
        # Of each learner in each group the number of its last steps in a row that were stuck, and the verdict of its
        # last step.
        size = len(learners), mesh_lib.num_groups(mesh)
        self._stuck = np.zeros(size, np.int64)
        self._last = np.full(size, FINE)
        if known is not None:
            self._stuck = np.reshape(np.asarray(known["stuck"], np.int64), size)
            # As the last step must have been where a stretch of them goes on.
            self._last = np.where(self._stuck > 0, STUCK, FINE)
            self._jumps.set_state(known["losses"])
        # The first step of the stretch in trouble that goes on now, and the number of stretches.
        self._begin: int | None = None
        self._stretches = 0
        # The last step that was not as it should be. Its arrays stay on the devices until they are asked for.
        self._bad: tuple[int, np.ndarray, Observed] | None = None

    def push(self, step: int, observed: Observed) -> None:
        """Takes what a step says of itself, and looks at an earlier one.

        Raises:
          NonfiniteError: if the run is not to go on.
        """
        names = ("verdict", "loss") if self._jumps.factor else ("verdict",)
        taken = {}
        for learner, x in observed.items():
            # What is replicated already is left as it is: all but the verdicts of groups on other processes.
            fields = {name: mesh_lib.replicate(self._mesh, getattr(x, name)) for name in names}
            for array in fields.values():
                array.copy_to_host_async()
            taken[learner] = x._replace(**fields)
        self._pending.append((step, taken))
        self._look(deferred.IN_FLIGHT)

    def flush(self) -> None:
        """Looks at all steps that have been taken; NonfiniteError as for `push`."""
        self._look(0)

    def get_state(self) -> dict[str, Any]:
        """The state of the watch, of all steps that it has looked at, as JSON can hold it, for a run that goes on."""
        return {"stuck": self._stuck.tolist(), "losses": self._jumps.get_state()}

    def at_end(self) -> str:
        """Returns why the last steps were none that a run should end with; empty if they were."""
        if np.any(self._last == TROUBLE):
            return self._describe()
        if self._most_stuck() >= min(_STUCK_AT_THE_END, self._patience):
            return self._skipped()
        return ""

    def _most_stuck(self) -> int:
        return int(np.max(self._stuck, initial=0))

    def _look(self, remain: int) -> None:
        while len(self._pending) > remain:
            step, observed = self._pending.popleft()
            verdicts = self._of_all(observed, "verdict")
            # Nothing changes between two steps that were fine.
            if self._last.any() or verdicts.any():
                self._judge(step, verdicts, observed)
            if self._jumps.factor:
                self._compare(step, observed)

    def _of_all(self, observed: Observed, field: str) -> np.ndarray:
        """A field of what is observed, of all learners and groups: of shape (learners, groups)."""
        each = [np.asarray(getattr(observed[name], field)).reshape(-1) for name in self._paths]
        return np.reshape(each, self._last.shape)

    def _judge(self, step: int, verdicts: np.ndarray, observed: Observed) -> None:
        self._last = verdicts
        self._stuck = np.where(verdicts == STUCK, self._stuck + 1, 0)
        if verdicts.any():
            self._bad = step, verdicts, observed
        if self._most_stuck() >= self._patience:
            raise NonfiniteError(self._skipped(), step)
        if np.any(verdicts == TROUBLE):
            if self._policy in (config_lib.STOP, config_lib.ROLL_BACK):
                raise NonfiniteError(self._describe(), step)
            self._warn(step)
        elif self._begin is not None and not verdicts.any():
            self._recover(step)

    def _compare(self, step: int, observed: Observed) -> None:
        """Raises NonfiniteError if a loss has jumped."""
        losses = self._of_all(observed, "loss").astype(np.float64)
        medians = self._jumps.add(losses)
        descriptions = []
        for learner, group in np.argwhere(np.isfinite(medians)):
            loss, median = (show.number(float(x[learner, group])) for x in (losses, medians))
            factor = show.number(self._jumps.factor)
            description = f"the loss is {loss}, above {factor} times the median of before, {median}"
            descriptions.append(self._whose(learner, group) + description)
        if descriptions:
            raise NonfiniteError(f"step {step}: {'; '.join(descriptions)}", step)

    def _whose(self, learner: int, group: int) -> str:
        """Says, before a description, of which learner and group it is, where there are several."""
        name, groups = list(self._paths)[learner], self._last.shape[1]
        of_learner = f"of {name} " if name else ""
        return of_learner + (f"in group {group} of {groups} " if groups > 1 else "")

    def _warn(self, step: int) -> None:
        if self._begin is not None:
            return
        self._begin = step
        self._stretches += 1
        if self._stretches > _STRETCHES:
            return
        warning = f"{self._describe()}; going on, as on_nonfinite={self._policy} says"
        if self._stretches == _STRETCHES:
            warning += "; of further ones nothing is said"
        self._say(warning)

    def _recover(self, step: int) -> None:
        begin, self._begin = self._begin, None
        if self._stretches <= _STRETCHES:
            self._say(f"step {step}: finite again, as it was before step {begin}")

    def _skipped(self) -> str:
        skipped = f"{self._most_stuck()} steps in a row were skipped, and no loss scale is left to be lowered"
        # A run that goes on at its last step has seen none of them.
        return f"{skipped}; the last, {self._describe()}" if self._bad else skipped

    def _describe(self) -> str:
        """The last step that was not as it should be, whose numbers come to the host now; on all processes alike."""
        if self._bad is None:
            return ""
        step, verdicts, observed = self._bad
        observed = mesh_lib.replicate(self._mesh, dict(observed))
        names, groups = list(self._paths), verdicts.shape[1]
        descriptions = []
        for learner, group in np.argwhere(verdicts):
            name = names[learner]
            loss = np.asarray(observed[name].loss).reshape(-1)[group]
            bad = np.asarray(observed[name].gradients).reshape(groups, -1)[group]
            description = _describe_update(loss, bad, self._paths[name])
            descriptions.append(self._whose(learner, group) + description)
        return f"step {step}: {'; '.join(descriptions)}"


def _describe_update(loss: Any, bad: np.ndarray, paths: Sequence[str]) -> str:
    numbers = f"the loss is {show.number(float(loss))}"
    nonfinite = [paths[index] for index in np.flatnonzero(bad).tolist()]
    if not nonfinite:
        return numbers
    link = "but" if np.isfinite(loss) else "and"
    count = f"{len(nonfinite)} of {len(paths)} gradients"
    return f"{numbers}, {link} {count} are not finite: {show.listed(nonfinite)}"


def of_state(step: int, paths: Sequence[str]) -> str:
    """Says that a step has left a state that is not finite."""
    return f"step {step}: what it leaves is not finite: {show.listed(paths)}"


def message(why: str) -> str:
    """The error of a run that has not ended finite, for the reason given, with what a person may do."""
    return f"error: {why}. {_LOOK_AT}"
