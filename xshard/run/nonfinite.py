"""Detection of steps that are not finite: when they end the run, and how they are
reported.

A step is in trouble when its update was applied although its loss or a gradient was not
finite. A step that a dynamic loss scale skips in order to lower the scale is not in
trouble: the scale finds its level by such skips.
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
from xshard.learners.state import FINE, NONFINITE, SKIPPED_AT_MIN_SCALE
from xshard.metrics import deferred, formatting
from xshard.optimizers import trees
from xshard.run import loss_jumps

_ADVICE = (
    "Check the learning rate, the data for NaN and infinities, and the loss for divisions by 0 and logarithms or square "
    "roots of 0; see docs/half_precision.md."
)
# A run that ends with this many SKIPPED_AT_MIN_SCALE steps in a row did not end well, even if
# max_skips_in_a_row tolerates more.
_STUCK_AT_THE_END = 10
# A run that warns reports this many stretches of bad steps. Later ones are silent, so
# that the log stays readable.
_STRETCHES = 10


class NonfiniteError(Exception):
    """A step that ends the run or makes it roll back. The message names the step and
    what was wrong with it.

    It is raised on all processes after the same step. A run with
    on_nonfinite='roll_back' catches it and rolls back.

    Attributes:
      step: the step in trouble.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


# The observations of each learner, by name. With several groups each array has a
# leading dimension of groups.
Observed = Mapping[str, learner_lib.Observed]


class NonfiniteCheck:
    """Checks that a run's steps are finite. It looks at each step some steps later, so
    that the device never waits.

    All processes see the same numbers of a step at the same later step, so they all
    make the same decision.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        mesh: jax.sharding.Mesh,
        learners: Mapping[str, learner_lib.LearnerState],
        say: Callable[[str], None],
        known: Mapping[str, Any] | None = None,
    ):
        """Prepares a watch for a new run or a resumed one.

        Args:
          config: the run's config.
          mesh: the run's mesh.
          learners: the states of the learners by name; only the paths of their
            parameters are used.
          say: called with a line about bad steps after which the run goes on.
          known: the value of `get_state` that was saved with the checkpoint; None for a
            new run, or if none was saved.
        """
        self._policy = config.on_nonfinite
        self._patience = config.max_skips_in_a_row
        # A jump of the loss only ever causes a roll-back, so no other policy looks for
        # jumps.
        factor, steps = 0.0, 1
        if self._policy == config_lib.ROLL_BACK:
            factor, steps = config.roll_back.loss_factor, config.roll_back.loss_steps
        self._jumps = loss_jumps.JumpDetector(factor, steps)
        # The observations that the host reads of each step.
        self._read = ("verdict", "loss") if factor else ("verdict",)
        self._mesh = mesh
        # The paths have the order of `Observed.gradients`.
        self._paths = {
            name: list(trees.leaves_by_path(x.params)) for name, x in learners.items()
        }
        self._say = say
        self._pending: collections.deque[tuple[int, Observed]] = collections.deque()
        # For each learner in each group: how many of its last steps in a row were
        # stuck, and its last verdict.
        size = len(learners), mesh_lib.num_groups(mesh)
        self._stuck = np.zeros(size, np.int64)
        self._last = np.full(size, FINE)
        # Whether all the last verdicts are FINE.
        self._is_fine = True
        if known is not None:
            self._stuck = np.reshape(np.asarray(known["stuck"], np.int64), size)
            # The last verdicts are not saved. A count above 0 means that the last step
            # was stuck.
            self._last = np.where(self._stuck > 0, SKIPPED_AT_MIN_SCALE, FINE)
            self._is_fine = not self._last.any()
            self._jumps.set_state(known["losses"])
        # The first step of the current stretch of steps in trouble, and the number of
        # stretches so far.
        self._begin: int | None = None
        self._stretches = 0
        # The last bad step. Its arrays stay on the devices, and are copied only if a
        # message needs them.
        self._bad: tuple[int, np.ndarray, Observed] | None = None

    def push(self, step: int, observed: Observed) -> None:
        """Takes the observations of a step, and judges the earlier steps that are due.

        Raises:
          NonfiniteError: if the run must stop or roll back.
        """
        names = self._read
        if self._last.shape[1] > 1:
            # Other processes hold the values of some groups. Without groups the arrays
            # are replicated already.
            gathered = {}
            for learner, x in observed.items():
                fields = {
                    name: mesh_lib.replicate(self._mesh, getattr(x, name))
                    for name in names
                }
                gathered[learner] = x._replace(**fields)
            observed = gathered
        for name in names:
            deferred.to_host(getattr(x, name) for x in observed.values())
        self._pending.append((step, observed))
        self._look(deferred.IN_FLIGHT)

    def flush(self) -> None:
        """Judges all pending steps; raises NonfiniteError as `push` does."""
        self._look(0)

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the watch after all judged steps, as JSON values, for a
        run that resumes.
        """
        return {"stuck": self._stuck.tolist(), "losses": self._jumps.get_state()}

    def failure(self) -> str:
        """Returns why the run did not end well, judged by its last steps; empty if it
        did.
        """
        if np.any(self._last == NONFINITE):
            return self._describe()
        if self._most_stuck() >= min(_STUCK_AT_THE_END, self._patience):
            return self._skipped()
        return ""

    def _most_stuck(self) -> int:
        return int(np.max(self._stuck, initial=0))

    def _look(self, remain: int) -> None:
        while len(self._pending) > remain:
            step, observed = self._pending.popleft()
            # NumPy's functions would hand an array of JAX back to it, which runs a
            # program on the devices.
            counts = [
                np.count_nonzero(np.asarray(x.verdict)) for x in observed.values()
            ]
            # A fine step after a fine step changes no counter, so it needs no judgment.
            if not self._is_fine or any(counts):
                self._judge(step, self._of_all(observed, "verdict"), observed)
            if self._jumps.factor:
                self._compare(step, observed)

    def _of_all(self, observed: Observed, field: str) -> np.ndarray:
        """Returns one observed field of all learners and groups, with shape (learners,
        groups).
        """
        # A learner that the step does not update, such as a teacher, has no
        # observations. Its 0 is FINE, and no jump.
        values = np.zeros(self._last.shape, np.float64)
        for row, name in enumerate(self._paths):
            if name in observed:
                values[row] = np.asarray(getattr(observed[name], field)).reshape(-1)
        return values

    def _judge(self, step: int, verdicts: np.ndarray, observed: Observed) -> None:
        self._last = verdicts
        self._is_fine = not verdicts.any()
        self._stuck = np.where(verdicts == SKIPPED_AT_MIN_SCALE, self._stuck + 1, 0)
        if verdicts.any():
            self._bad = step, verdicts, observed
        if self._most_stuck() >= self._patience:
            raise NonfiniteError(self._skipped(), step)
        if np.any(verdicts == NONFINITE):
            if self._policy in (config_lib.STOP, config_lib.ROLL_BACK):
                raise NonfiniteError(self._describe(), step)
            self._warn(step)
        elif self._begin is not None and not verdicts.any():
            if self._stretches <= _STRETCHES:
                self._say(
                    f"step {step}: finite again (not finite since step {self._begin})"
                )
            self._begin = None

    def _compare(self, step: int, observed: Observed) -> None:
        """Raises NonfiniteError if a loss has jumped."""
        losses = self._of_all(observed, "loss")
        medians = self._jumps.add(losses)
        descriptions = []
        for learner, group in np.argwhere(np.isfinite(medians)):
            loss = formatting.number(losses[learner, group])
            median = formatting.number(medians[learner, group])
            factor = formatting.number(self._jumps.factor)
            description = (
                f"the loss is {loss}, above {factor} times the earlier median, {median}"
            )
            descriptions.append(self._whose(learner, group) + description)
        if descriptions:
            raise NonfiniteError(f"step {step}: {'; '.join(descriptions)}", step)

    def _whose(self, learner: int, group: int) -> str:
        """Returns a prefix that names the learner and the group, each only if there are
        several.
        """
        name, groups = list(self._paths)[learner], self._last.shape[1]
        of_learner = f"for learner {name} " if name else ""
        return of_learner + (f"in group {group} of {groups} " if groups > 1 else "")

    def _warn(self, step: int) -> None:
        if self._begin is not None:
            return
        self._begin = step
        self._stretches += 1
        if self._stretches > _STRETCHES:
            return
        warning = f"{self._describe()}; the run continues, because on_nonfinite={self._policy}"
        if self._stretches == _STRETCHES:
            warning += "; later ones are not reported"
        self._say(warning)

    def _skipped(self) -> str:
        skipped = f"{self._most_stuck()} steps in a row were skipped without lowering a loss scale"
        # A run that was resumed at its last step knows the count from the checkpoint,
        # but saw none of the steps.
        return f"{skipped}; the last, {self._describe()}" if self._bad else skipped

    def _describe(self) -> str:
        """Describes the last bad step. It gathers the step's numbers, so all processes
        must call it.
        """
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
            description = f"the loss is {formatting.number(float(loss))}"
            paths = self._paths[name]
            nonfinite = [paths[index] for index in np.flatnonzero(bad).tolist()]
            if nonfinite:
                link = "but" if np.isfinite(loss) else "and"
                count = f"{len(nonfinite)} of {len(paths)} gradients"
                description += (
                    f", {link} {count} are not finite: {formatting.listed(nonfinite)}"
                )
            descriptions.append(self._whose(learner, group) + description)
        return f"step {step}: {'; '.join(descriptions)}"


def of_state(step: int, paths: Sequence[str]) -> str:
    """Describes a state that is not finite after a step, by the paths of its arrays."""
    return f"step {step}: the resulting state is not finite: {formatting.listed(paths)}"


def message(why: str) -> str:
    """Returns the error message of a run that did not end finite, with the reason and
    advice.
    """
    return f"error: {why}. {_ADVICE}"
