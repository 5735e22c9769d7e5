"""Repeats a run's steps from its checkpoints, and compares them with its rows. Nothing
is written.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from xshard import checkpoint, data, errors, evaluation
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard import step as step_lib
from xshard import trained as trained_lib
from xshard.files import jsonfile, results, workdir
from xshard.metrics import formatting
from xshard.metrics import rows as rows_lib
from xshard.optimizers import trees
from xshard.pod import attempts, origin
from xshard.run import preflight, resuming, roll_backs, states
from xshard.stored import fingerprint


class Step(NamedTuple):
    """A repeated step.

    Attributes:
      number: the step's number.
      state: the state before the step.
      batch: its batch.
      row: its metrics, in the form of a row.
      is_healthy: whether its metrics are finite, and all of its updates were finite and
        applied. With several updates of a learner, the row has the values of the last
        one only.
    """

    number: int
    state: state_lib.TrainState
    batch: Mapping[str, jax.Array]
    row: rows_lib.Row
    is_healthy: bool


class Difference(NamedTuple):
    """The first number of a row that differs in the repeated step."""

    step: int
    column: str
    logged: Any
    now: Any


class Replayer:
    """A run in a work directory, whose steps can be repeated here."""

    def __init__(self, directory: str):
        """Reads a run, and creates its experiment, mesh and data; raises UserError if
        that fails.

        Attributes:
          config: the run's config.
          mesh: the run's mesh, of the devices here.
          changes: descriptions of what differs from the original run: code, libraries,
            devices, flags.
          rows: the rows of training by step.
        """
        self._workdir = workdir.Workdir(directory)
        self.config = trained_lib.config_of(self._workdir)
        self.mesh = experiment_lib.mesh_of(self.config)
        self.experiment = experiment_lib.load(self.config.experiment)(self.config)
        self._batches = preflight.train_batches(self.experiment, self.mesh)
        entries = roll_backs.read(self._workdir.roll_backs)
        self._skips = roll_backs.batches_to_skip(entries)
        self._roll_backs = roll_backs.in_effect(entries)
        self._batches.set_skips(self._skips)
        self.changes = self._changes()
        self.rows, self._evaluations = rows_lib.by_step(self._workdir.metrics)
        stopped = re.search(
            r"\bstep (\d+):", results.nonfinite_reason(self._workdir.path)
        )
        # The step that ended the run, because it was not finite or was skipped; 0 if
        # none did.
        self._stopped = int(stopped[1]) if stopped else 0
        self.first_step = 0
        self.step_program = preflight.jitted_step(self.experiment, self.mesh)
        predict = preflight.jitted_predict(self.experiment, self.mesh)
        self._predict = evaluation.predictions(predict, self.mesh)

    def single_program(self) -> Any:
        """Returns the training step as one jitted program, for analysis; raises
        UserError like `preflight.single_program`.
        """
        return preflight.single_program(self.experiment, self.mesh)

    def _changes(self) -> list[str]:
        old = jsonfile.read_if_exists(self._workdir.origin) or {}
        module = type(self.experiment).__module__
        now = origin.origin(module, self._batches.summary(), "")._asdict()
        if (
            old.get("training")
            and now["training"]
            and old["training"] != now["training"]
        ):
            raise errors.UserError(
                f"The run in {self._workdir.path} was trained on {old['training']}; the data is now {now['training']}. Its "
                "steps cannot be repeated: restore its data."
            )
        changes = []
        for name in ("commit", "libraries", "devices", "flags"):
            # A run of an older version, or without git, did not record the value;
            # recorded empty flags are known.
            is_known = old.get(name) or (name == "flags" and name in old)
            if is_known and old[name] != now[name]:
                changes.append(
                    f"{name}: {old[name] or 'none'} -> {now[name] or 'none'}"
                )
        return changes

    def resumed_from(self) -> int:
        """Returns the step that the run's last start began with: the config and the
        origin are those of this start.
        """
        starts = attempts.read(self._workdir.path)
        if not starts:
            return 0
        # A start that has restored no state yet has already recorded its config.
        first = starts[-1].first
        return self.config.steps if first is None else first

    def suspect_steps(self) -> range:
        """Returns the range of steps that contains the first bad one.

        These are the steps since the last good row: up to the first row that is not
        finite or counts a new skip, or to the step that ended the run.

        Raises:
          UserError: if the rows show no bad step.
        """
        before, skipped = 0, dict[str, Any]()
        for step, row in self.rows.items():
            counts = _skipped(row)
            has_skipped = any(
                x != skipped.get(name, np.zeros_like(x).tolist())
                for name, x in counts.items()
            )
            if has_skipped or not all(map(_is_finite, row.values())):
                return range(before + 1, step + 1)
            before, skipped = step, counts
        if self._stopped:
            # An earlier step may have left a state that is not finite.
            return range(min(before + 1, self._stopped), self._stopped + 1)
        raise errors.UserError(
            f"All {len(self.rows)} rows of training in {self._workdir.metrics} are finite, and no step was skipped: give "
            f"--step, the step to analyze.{self._nonfinite_evaluation()}"
        )

    def _nonfinite_evaluation(self) -> str:
        """Describes the first evaluation that is not finite; empty if there is none."""
        for step, row in self._evaluations.items():
            names = [name for name, x in row.items() if not _is_finite(x)]
            if names:
                return (
                    f" The evaluation after step {step} is not finite ({formatting.listed(names)}), but evaluations "
                    "are not repeated: look for its cause in the experiment's evaluation and its data."
                )
        return ""

    def check(self, step: int) -> None:
        """Raises UserError if the run has not reached a step, as far as is known."""
        reached = self._workdir.reached()
        known = max([*self.rows, self._stopped, reached.step if reached else 0])
        # Steps since the last row are not logged yet.
        last = min(known + self.config.log_every_steps, self.config.steps)
        if not 1 <= step <= last:
            raise errors.UserError(
                f"--step={step}: the run in {self._workdir.path} has made {f'steps 1 to {known}' if known else 'no steps'}, "
                "by its rows and checkpoints. Give a step that it has made."
            )

    def steps(self, keep: range) -> Iterator[Step]:
        """Repeats steps from the nearest checkpoint before the first kept one, or from
        the first state.

        Yields:
          Each step up to the last kept one. The states of steps that are not in `keep`
          are donated and unusable.
        """
        state = self._begin(keep.start - 1)
        self.first_step = int(state.step)
        for number in range(self.first_step + 1, keep.stop):
            state = roll_backs.with_back_off(self._roll_backs, number, state)
            batch = self._batches.batch_for_step(number, self._predict, state)
            before = (
                jax.tree.map(lambda x: x.copy(), state) if number in keep else state
            )
            applied = _applied(state)
            stepped = self.step_program(state, batch)
            state, values = stepped.state, stepped.metrics
            if stepped.fingerprints_before is not None:
                values = {**values, **stepped.fingerprints_before.logged()}
            whole = mesh_lib.replicate(self.mesh, values)
            row = {name: rows_lib.to_number(value) for name, value in whole.items()}
            are_applied = _are_applied(stepped, applied, _applied(state))
            is_healthy = are_applied and all(
                map(_is_finite, map(jsonfile.finite, row.values()))
            )
            yield Step(number, before, batch, row, is_healthy)

    def _begin(self, last: int) -> state_lib.TrainState:
        """Restores the newest checkpoint up to a step, or creates the first state."""
        example = self._batches.example
        saved = states.StateManager(self.experiment, self.mesh, example, self._workdir)
        for step in reversed([step for step in saved.all_steps() if step <= last]):
            try:
                resuming.check_replicas(saved, saved.target, step)
                restored = saved.restore_state(step)
            except checkpoint.CheckpointError:
                # The checkpoint is damaged, or was deleted meanwhile. An earlier one
                # gives the same steps.
                continue
            self._batches.restore(restored.data)
            return restored.state
        return saved.init_state()

    def difference(self, step: Step) -> Difference | None:
        """Returns the first number of a step that differs from its logged row; None if
        none differs or there is no row.
        """
        logged = self.rows.get(step.number, {})
        # A logged 'skipped' is a running total, not the step's own; 'global_step'
        # covers it.
        totals = _skipped(logged)
        # Fingerprints come first, because they tell whether the step began with another
        # state.
        names = sorted(
            step.row, key=lambda name: not name.startswith(fingerprint.PREFIX)
        )
        for name in names:
            now = step.row[name]
            if (
                name in logged
                and name not in totals
                and jsonfile.finite(now) != logged[name]
            ):
                return Difference(step.number, name, logged[name], now)
        return None

    def examples(
        self, step: int, batch: Mapping[str, jax.Array], rows: list[int]
    ) -> list[int]:
        """Returns the numbers of the examples in these rows of a step's batch, if the
        data is in the seed's order; else none.
        """
        if not experiment_lib.overrides(self.experiment, "train_data"):
            return []
        examples, size = self.experiment.train_data(), self.config.batch_size
        numbers = data.order(examples, self.config.seed, mesh_lib.num_groups(self.mesh))
        # Batches that roll-backs passed over count too.
        before = (
            step - 1 + sum(count for at, count in self._skips.items() if at <= step)
        )
        # Padding rows come after the rows of all groups.
        groups, places = np.divmod(np.arange(len(next(iter(batch.values())))), size)
        positions = before * size + places
        order = np.concatenate(
            [
                numbers(group, positions[groups == group])
                for group in np.unique(groups).tolist()
            ]
        )
        # A custom iterator may have another order, or transform examples. So the rows
        # are compared with the examples.
        taken = data.take(examples, order)
        for name in taken.keys() & batch.keys():
            pairs = zip(taken[name], np.asarray(batch[name]), strict=True)
            if np.mean([_same(x, y) for x, y in pairs]) > 0.5:
                return order[rows].tolist()
        return []


def _applied(state: state_lib.TrainState) -> dict[str, np.ndarray]:
    """Returns the number of updates that each learner has applied."""
    return {
        name: np.array(x.global_step) for name, x in state_lib.learners(state).items()
    }


def _are_applied(
    stepped: step_lib.Stepped,
    before: dict[str, np.ndarray],
    after: dict[str, np.ndarray],
) -> bool:
    """Returns whether a step applied all of its updates, and none that was not finite."""
    for name, observed in stepped.observed.items():
        updates = np.asarray(
            stepped.metrics.get(trees.join(name, "updates_per_step"), 1)
        )
        if np.any(after[name] - before[name] < updates) or np.any(
            np.asarray(observed.verdict)
        ):
            return False
    return True


def _skipped(row: rows_lib.Row) -> rows_lib.Row:
    """Returns the row's counts of skipped updates, of each learner."""
    return {name: x for name, x in row.items() if name.rpartition("/")[2] == "skipped"}


def _is_finite(value: Any) -> bool:
    """Returns whether a number of a row, or all numbers of several groups, are finite;
    others are null in a row.
    """
    return None not in value if isinstance(value, list) else value is not None


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    return bool(np.array_equal(x.astype(y.dtype), y, equal_nan=y.dtype.kind in "fc"))
