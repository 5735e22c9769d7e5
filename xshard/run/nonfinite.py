"""The check that a run's steps are finite: when a step ends the run, and what is said.

A step is in trouble when its update was applied although its loss or a gradient was not
finite. A step that a dynamic loss scale skips in order to lower the scale is not in
trouble: the scale finds its level by such skips.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from xshard import config as config_lib
from xshard import hooks
from xshard import mesh as mesh_lib
from xshard.base import formatting
from xshard.learners import state as learner_lib
from xshard.learners.state import FINE, NONFINITE, SKIPPED_AT_MIN_SCALE
from xshard.metrics import deferred
from xshard.optimizers import trees
from xshard.training import step as step_lib

_ADVICE = (
    "Check the learning rate, the data for NaN and infinities, and the loss for "
    "divisions by 0 and logarithms or square roots of 0; see docs/half_precision.md."
)
# A run that ends with this many SKIPPED_AT_MIN_SCALE steps in a row did not end well,
# even if max_skips_in_a_row tolerates more.
_MAX_SKIPS_AT_THE_END = 10
# A run that warns reports this many stretches of bad steps. Later ones are silent, so
# that the log stays readable.
_MAX_STRETCHES = 10

# The observations of each learner, by name. With several groups each array has a
# leading dimension of groups.
Observed = Mapping[str, learner_lib.Observed]


class NonfiniteError(Exception):
    """A step that ends the run or makes it roll back.

    It is raised on all processes after the same step. A run with
    on_nonfinite='roll_back' catches it and rolls back. The message names the step and
    what was wrong with it.

    Attributes:
      step: the step in trouble.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class NonfiniteCheck(hooks.Hook):
    """Checks that a run's steps are finite.

    All processes check the same numbers of a step at the same later step, so they all
    make the same decision.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        mesh: jax.sharding.Mesh,
        learners: Mapping[str, learner_lib.LearnerState],
        log: Callable[[str], None],
        saved: Mapping[str, Any] | None = None,
    ):
        """Prepares the check of a new run or a resumed one.

        Args:
          config: the run's config.
          mesh: the run's mesh.
          learners: the states of the learners by name; only the paths of their
            parameters are used.
          log: called with a line about bad steps after which the run goes on.
          saved: the value of `get_state` that was saved with the checkpoint; None for a
            new run, or if none was saved.
        """
        self._policy = config.on_nonfinite
        self._max_skips = config.max_skips_in_a_row
        self._mesh = mesh
        self._num_groups = mesh_lib.num_groups(mesh)
        # The paths have the order of `Observed.gradients`.
        self._paths: dict[str, list[str]] = {}
        for name, learner in learners.items():
            self._paths[name] = list(trees.leaves_by_path(learner.params))
        self._log = log
        # For each learner in each group: how many of its last steps in a row were
        # skipped although no scale was left to lower, and its last verdict.
        shape = (len(learners), self._num_groups)
        self._skips = np.zeros(shape, np.int64)
        self._verdicts = np.full(shape, FINE)
        if saved is not None:
            self._skips = np.reshape(np.asarray(saved["stuck"], np.int64), shape)
            # The last verdicts are not saved. A count above 0 tells the last one.
            self._verdicts = np.where(self._skips > 0, SKIPPED_AT_MIN_SCALE, FINE)
        # Whether any step of the dispatch that is being read has another verdict than
        # FINE.
        self._has_bad = True
        # Whether all the last verdicts are FINE.
        self._is_fine = not self._verdicts.any()
        # The first step of the current stretch of steps in trouble, and the number of
        # stretches so far.
        self._stretch_begin: int | None = None
        self._num_stretches = 0
        # The last bad step. Its arrays stay on the devices, and are copied only if a
        # message needs them.
        self._last_bad: tuple[int, np.ndarray, Observed, Any] | None = None

    def fetch(self, chunk: step_lib.Chunk) -> Observed:
        """Starts to copy to the host what `check` reads of steps.

        All processes must call it.

        Args:
          chunk: steps that have just been dispatched.

        Returns:
          Their observations, as `check` takes them.
        """
        return fetch(self._mesh, chunk, "verdict")

    def read(self, step: int, place: Any, fetched: Observed, newest: Any) -> None:
        """Checks a step."""
        del newest
        if place is ... or place == 0:
            # Looked at once for all steps of a dispatch: almost all are fine.
            verdicts = [np.asarray(x.verdict) for x in fetched.values()]
            self._has_bad = any(map(np.count_nonzero, verdicts))
        if self._has_bad or not self._is_fine:
            self.check(step, fetched, place)

    def check(self, step: int, observed: Observed, place: Any = ...) -> None:
        """Checks a step. All steps are checked in order.

        Args:
          step: the number of the step.
          observed: its observations, as `fetch` returned them.
          place: the step's index in these arrays, if they are of several steps.

        Raises:
          NonfiniteError: if the run must stop or roll back.
        """
        # NumPy's functions would hand an array of JAX back to it, which runs a program
        # on the devices.
        verdicts = [np.asarray(x.verdict)[place] for x in observed.values()]
        # A fine step after a fine step changes no counter. Almost all steps are.
        if not self._is_fine or any(map(np.count_nonzero, verdicts)):
            self._check_verdicts(step, observed, place)

    def get_state(self) -> dict[str, Any]:
        """Returns what a resumed run needs to know of these steps, as JSON values."""
        return {"stuck": self._skips.tolist()}

    def failure(self) -> str:
        """Returns why the run did not end well, by its last steps; empty if it did.

        All processes must call it.
        """
        if np.any(self._verdicts == NONFINITE):
            return self._describe_last_bad()
        if self._most_skips() >= min(_MAX_SKIPS_AT_THE_END, self._max_skips):
            return self._describe_skips()
        return ""

    def _most_skips(self) -> int:
        return int(np.max(self._skips, initial=0))

    def _check_verdicts(self, step: int, observed: Observed, place: Any) -> None:
        """Counts a step's verdicts; warns or raises NonfiniteError if they are bad."""
        verdicts = read(observed, "verdict", place, list(self._paths), self._num_groups)
        self._verdicts = verdicts
        self._is_fine = not verdicts.any()
        was_skipped = verdicts == SKIPPED_AT_MIN_SCALE
        self._skips = np.where(was_skipped, self._skips + 1, 0)
        if not self._is_fine:
            self._last_bad = (step, verdicts, observed, place)
        if self._most_skips() >= self._max_skips:
            raise NonfiniteError(self._describe_skips(), step)
        if np.any(verdicts == NONFINITE):
            if self._policy in (config_lib.STOP, config_lib.ROLL_BACK):
                raise NonfiniteError(self._describe_last_bad(), step)
            self._warn(step)
        elif self._is_fine and self._stretch_begin is not None:
            if self._num_stretches <= _MAX_STRETCHES:
                self._log(
                    f"step {step}: finite again (not finite since step "
                    f"{self._stretch_begin})"
                )
            self._stretch_begin = None

    def _warn(self, step: int) -> None:
        """Logs a line about the first step of a stretch of steps in trouble."""
        if self._stretch_begin is not None:
            return
        self._stretch_begin = step
        self._num_stretches += 1
        if self._num_stretches > _MAX_STRETCHES:
            return
        warning = (
            f"{self._describe_last_bad()}; the run continues, because "
            f"on_nonfinite={self._policy}"
        )
        if self._num_stretches == _MAX_STRETCHES:
            warning += "; later ones are not reported"
        self._log(warning)

    def _describe_skips(self) -> str:
        skips = (
            f"{self._most_skips()} steps in a row were skipped without lowering a loss "
            "scale"
        )
        if self._last_bad is None:
            # A run that was resumed at its last step knows the count from the
            # checkpoint, but saw none of the steps.
            return skips
        return f"{skips}; the last, {self._describe_last_bad()}"

    def _describe_last_bad(self) -> str:
        """Describes the last bad step; empty if there was none.

        It gathers the step's numbers, so all processes must call it.
        """
        if self._last_bad is None:
            return ""
        step, verdicts, observed, place = self._last_bad
        observed = mesh_lib.replicate(self._mesh, dict(observed))
        names = list(self._paths)
        descriptions = []
        for learner, group in np.argwhere(verdicts):
            name = names[learner]
            losses = np.asarray(observed[name].loss)[place].reshape(-1)
            gradients = np.asarray(observed[name].gradients)[place]
            is_nonfinite = gradients.reshape(self._num_groups, -1)[group]
            description = f"the loss is {formatting.number(float(losses[group]))}"
            paths = self._paths[name]
            nonfinite = [paths[index] for index in np.flatnonzero(is_nonfinite)]
            if nonfinite:
                link = "but" if np.isfinite(losses[group]) else "and"
                description += (
                    f", {link} {len(nonfinite)} of {len(paths)} gradients are not "
                    f"finite: {formatting.listed(nonfinite)}"
                )
            prefix = whose(name, group, self._num_groups)
            descriptions.append(prefix + description)
        return f"step {step}: {'; '.join(descriptions)}"


def fetch(mesh: jax.sharding.Mesh, chunk: step_lib.Chunk, field: str) -> Observed:
    """Starts to copy a field of the observations of steps to the host.

    All processes must call it.

    Args:
      mesh: the run's mesh.
      chunk: steps that have just been dispatched.
      field: the name of a field of `Observed`.

    Returns:
      Their observations, of which the host can read the field.
    """
    observed: Observed = chunk.stepped.observed
    if mesh_lib.num_groups(mesh) > 1:
        # Other processes hold the values of some groups. Without groups the arrays are
        # replicated already.
        readable = {}
        for name, learner in observed.items():
            array = mesh_lib.replicate(mesh, getattr(learner, field))
            readable[name] = learner._replace(**{field: array})
        observed = readable
    deferred.to_host(getattr(learner, field) for learner in observed.values())
    return observed


def read(
    observed: Observed, field: str, place: Any, names: Sequence[str], num_groups: int
) -> np.ndarray:
    """Returns a field of all learners of a step, as float64[learners, groups].

    Args:
      observed: what `fetch` returned.
      field: the field.
      place: the step's index in the arrays, if they are of several steps.
      names: the names of the learners.
      num_groups: the number of groups.
    """
    # A learner that the step does not update, such as a teacher, has no observations.
    # Its 0 is FINE, and no jump.
    values = np.zeros((len(names), num_groups), np.float64)
    for row, name in enumerate(names):
        if name in observed:
            array = np.asarray(getattr(observed[name], field))
            values[row] = array[place].reshape(-1)
    return values


def whose(name: str, group: int, num_groups: int) -> str:
    """Returns a prefix that names a learner and a group, if there are several."""
    prefix = ""
    if name:
        prefix += f"for learner {name} "
    if num_groups > 1:
        prefix += f"in group {group} of {num_groups} "
    return prefix


def of_state(step: int, paths: Sequence[str]) -> str:
    """Describes a state that is not finite after a step, by the paths of its arrays."""
    return f"step {step}: the resulting state is not finite: {formatting.listed(paths)}"


def message(why: str) -> str:
    """Returns the error message of a run that did not end finite."""
    return f"error: {why}. {_ADVICE}"
