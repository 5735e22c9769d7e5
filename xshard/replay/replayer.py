"""Repeats a run's steps from its checkpoints, and compares them with its rows. Nothing
is written.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np

from xshard import checkpoint, cli, data, errors
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import trained as trained_lib
from xshard.base import formatting
from xshard.files import compile_cache, jsonfile, results, workdir
from xshard.metrics import rows as rows_lib
from xshard.optimizers import trees
from xshard.pod import attempts, origin
from xshard.replay import comparison
from xshard.run import checkpoints, evaluation, preflight, roll_backs
from xshard.training import state as state_lib
from xshard.training import step as step_lib

# The metric that may be unknown in a step.
_NOISE_SCALE = "noise_scale"


class Step(NamedTuple):
    """A repeated step.

    Attributes:
      number: the step's number.
      restored: the step of the checkpoint that the repetition began with; 0 if it began
        with the run's first state.
      state: the state before the step.
      batch: its batch.
      row: its metrics, in the form of a row.
      is_healthy: whether its metrics are finite, and all of its updates were finite and
        applied. With several updates of a learner, the row has the values of the last
        one only.
    """

    number: int
    restored: int
    state: state_lib.TrainState
    batch: Mapping[str, jax.Array]
    row: rows_lib.Row
    is_healthy: bool


class Replayer:
    """A run in a work directory, whose steps can be repeated here.

    Attributes:
      config: the run's config.
      experiment: its experiment.
      mesh: the run's mesh, of the devices here.
      changes: descriptions of what differs from the original run: values of the config,
        code, libraries, devices, flags.
      rows: the rows of training by step.
    """

    def __init__(self, directory: str, flags: Sequence[str] = ()):
        """Reads a run, and creates its experiment, mesh and data.

        Args:
          directory: the run's work directory.
          flags: values of the config that replace those of the run, such as
            '--config.precision=float32'.

        Raises:
          UserError: if the directory holds no run, or if its data or config does not
            fit the code and the devices here.
        """
        self._workdir = workdir.Workdir(directory)
        self.config = trained_lib.config_of(self._workdir)
        self.changes = []
        if flags:
            before = config_lib.flatten(self.config.to_dict())
            cli.override(self.config, flags)
            config_lib.check(self.config)
            for name, value in config_lib.flatten(self.config.to_dict()).items():
                if value != before.get(name):
                    self.changes.append(f"config.{name}: {before.get(name)} -> {value}")
        # Where slots lie changes no value, and these devices may have no other memory.
        self.config.slots_memory = config_lib.DEVICE
        self.mesh = experiment_lib.mesh_of(self.config)
        self.experiment = experiment_lib.of_config(self.config, self._workdir)
        self._batches = preflight.train_batches(self.experiment, self.mesh)
        entries = roll_backs.read(self._workdir.roll_backs)
        self._skips = roll_backs.batches_to_skip(entries)
        self._roll_backs = roll_backs.in_effect(entries)
        self._batches.set_skips(self._skips)
        module = type(self.experiment).__module__
        self._provenance = origin.find_provenance(module, self._batches.summary(), "")
        self.changes += self._find_changes()
        self.rows, self._evaluations = rows_lib.by_step(self._workdir.metrics)
        # The step that ended the run, because it was not finite or was skipped; 0 if
        # none did.
        self._stopped = 0
        reason = results.nonfinite_reason(self._workdir.path)
        stopped = re.search(r"\bstep (\d+):", reason)
        if stopped:
            self._stopped = int(stopped[1])
        self._train_step = preflight.jitted_step_of(
            self.experiment, self.mesh, self._workdir.step_program()
        )
        predict = preflight.jitted_predict(self.experiment, self.mesh)
        self._predict = evaluation.predictions(predict, self.mesh)

    def _find_changes(self) -> list[str]:
        """Describes what differs from the original run.

        Raises:
          UserError: if the training data differs.
        """
        old = jsonfile.read_if_exists(self._workdir.origin) or {}
        now = self._provenance._asdict()
        trained_on = old.get("training")
        if trained_on and now["training"] and trained_on != now["training"]:
            raise errors.UserError(
                f"The run in {self._workdir.path} was trained on {trained_on}; the "
                f"data is now {now['training']}. Its steps cannot be repeated: restore "
                "its data."
            )
        changes = []
        for name in ("commit", "libraries", "devices", "flags"):
            recorded = old.get(name)
            # An empty text is an unknown value, such as the commit without git. Only
            # for the flags it says that there were none.
            is_known = recorded or (recorded is not None and name == "flags")
            if is_known and recorded != now[name]:
                changes.append(f"{name}: {recorded or 'none'} -> {now[name] or 'none'}")
        return changes

    def programs(self) -> AbstractContextManager[None]:
        """Returns a context in which programs are not compiled that the run has."""
        shared = self.config.get("compiled", {}).get("directory", "")
        own = self._workdir.path / compile_cache.FOLDER
        return compile_cache.enabled(
            checkpoint.Store(shared or own, is_optional=True),
            lambda _: None,
            flags=self._provenance.flags,
            chip=self._provenance.chip,
            is_shared=bool(shared),
            is_seen=True,
            is_read_only=True,
        )

    def resumed_from(self) -> int | None:
        """Returns the step that the run's last start began with: the config and the
        origin are those of this start.

        It is None if that start had restored no state yet, but had already recorded its
        config. All steps may then be of an earlier one.
        """
        starts = attempts.read(self._workdir.path)
        if not starts:
            return 0
        return starts[-1].first

    def suspect_steps(self) -> range:
        """Returns the range of steps that contains the first bad one.

        These are the steps since the last good row: up to the first row that is not
        finite or counts a new skip, or to the step that ended the run.

        Raises:
          UserError: if the rows show no bad step.
        """
        last_good = 0
        skipped_before: rows_lib.Row = {}
        for step, row in self.rows.items():
            skipped = _skipped(row)
            has_skipped = False
            for name, count in skipped.items():
                # A list of one count for each group, if there are several.
                none = np.zeros_like(count).tolist()
                before = skipped_before.get(name, none)
                # Other slices than before begin with the counts of the first one.
                if np.shape(before) == np.shape(count) and count != before:
                    has_skipped = True
            if has_skipped or not _are_finite(row):
                return range(last_good + 1, step + 1)
            last_good = step
            skipped_before = skipped
        if self._stopped:
            # An earlier step may have left a state that is not finite.
            return range(min(last_good + 1, self._stopped), self._stopped + 1)
        raise errors.UserError(
            f"All {len(self.rows)} rows of training in {self._workdir.metrics} are "
            "finite, and no step was skipped: give --step, the step to "
            f"analyze.{self._nonfinite_evaluation()}"
        )

    def _nonfinite_evaluation(self) -> str:
        """Describes the first evaluation that is not finite; empty if there is none."""
        for step, row in self._evaluations.items():
            names = [name for name, value in row.items() if not _is_finite(value)]
            if names:
                return (
                    f" The evaluation after step {step} is not finite "
                    f"({formatting.listed(names)}), but evaluations are not repeated: "
                    "look for its cause in the experiment's evaluation and its data."
                )
        return ""

    def check(self, step: int) -> None:
        """Raises UserError if the run has not reached a step, as far as is known."""
        newest = self._workdir.reached()
        in_checkpoints = newest.step if newest else 0
        known = max([*self.rows, self._stopped, in_checkpoints])
        # Steps since the last row are not logged yet.
        last = min(known + self.config.log_every_steps, self.config.steps)
        if not 1 <= step <= last:
            made = f"steps 1 to {known}" if known else "no steps"
            raise errors.UserError(
                f"--step={step}: the run in {self._workdir.path} has made {made}, by "
                "its rows and checkpoints. Give a step that it has made."
            )

    def steps(self, keep: range) -> Iterator[Step]:
        """Repeats steps from the nearest checkpoint before the first kept one, or from
        the first state.

        Args:
          keep: the steps whose states the caller reads.

        Yields:
          Each step up to the last kept one. The states of steps that are not in `keep`
          are donated and unusable.
        """
        state = self._begin(keep.start - 1)
        restored = int(state.step)
        for number in range(restored + 1, keep.stop):
            state = roll_backs.with_update_scale(self._roll_backs, number, state)
            batch = self._batches.batch_for_step(number, self._predict, state)
            before = state
            if number in keep:
                before = jax.tree.map(lambda x: x.copy(), state)
            # Read now, since the step donates the state.
            counts_before = _applied_counts(state)
            stepped = self._train_step(state, batch)
            state = stepped.state
            values = stepped.metrics
            if stepped.fingerprints_before is not None:
                values = {**values, **stepped.fingerprints_before.logged()}
            values = mesh_lib.replicate(self.mesh, values)
            row = {name: rows_lib.to_number(value) for name, value in values.items()}
            are_applied = _are_applied(stepped, counts_before, _applied_counts(state))
            is_healthy = are_applied and _are_finite(jsonfile.finite(row))
            yield Step(number, restored, before, batch, row, is_healthy)

    def _begin(self, last: int) -> state_lib.TrainState:
        """Restores the newest checkpoint up to a step, or creates the first state; sets
        the data to its position.
        """
        example = self._batches.example
        saved = checkpoints.States(self.experiment, self.mesh, example, self._workdir)
        manager = saved.manager
        for step in reversed(manager.all_steps()):
            if step > last:
                continue
            try:
                saved.check_replicas(step)
                restored = saved.restore_state(step)
            except checkpoint.CheckpointError:
                # The checkpoint is damaged, or was deleted meanwhile. An earlier one
                # gives the same steps.
                continue
            self._batches.restore(restored.data)
            return restored.state
        return saved.init_state(self._batches.first_example())

    def difference(self, step: Step) -> comparison.Difference | None:
        """Returns the first number of a step that differs from its logged row; None if
        none differs or there is no row.
        """
        logged = self.rows.get(step.number, {})
        # A logged 'skipped' is a running total, not the step's own; 'global_step'
        # covers it.
        totals = _skipped(logged)
        names = [name for name in step.row if name in logged and name not in totals]
        # A row has null for what is not finite.
        now = jsonfile.finite(step.row)
        if config_lib.separates_slices(self.config):
            for name in names:
                # A value of each slice.
                before = np.size(logged[name])
                if before != np.size(now[name]):
                    raise errors.UserError(
                        f"Step {step.number} was made by {before} slice(s), and the "
                        "run has had other ones since: it cannot be repeated by the "
                        f"{np.size(now[name])} of its config. Give a --step after the "
                        "last such change."
                    )
        for name in comparison.differing(names, logged, now):
            return comparison.Difference(
                step.number, name, logged[name], step.row[name]
            )
        return None

    def examples(
        self, step: int, batch: Mapping[str, jax.Array], rows: list[int]
    ) -> list[int]:
        """Returns the numbers of the examples in these rows of a step's batch, if the
        data is in the seed's order; else none.
        """
        if not experiment_lib.overrides(self.experiment, "train_data"):
            return []
        examples = self.experiment.train_data()
        models = experiment_lib.num_models(self.config, self.mesh)
        numbers = data.order(examples, self.config.seed, models)
        # Batches that roll-backs passed over count too.
        num_skipped = 0
        for first_step, count in self._skips.items():
            if first_step <= step:
                num_skipped += count
        size = self._batches.batch_size
        groups, places = np.divmod(self._batches.rows, size)
        positions = (num_skipped + step - 1) * size + places
        of_groups = []
        for group in np.unique(groups).tolist():
            of_groups.append(numbers(group, positions[groups == group]))
        # The groups follow one another.
        order = np.concatenate(of_groups)
        # A custom iterator may have another order, or transform examples. So the rows
        # are compared with the examples.
        taken = data.take(examples, order)
        for name in taken.keys() & batch.keys():
            pairs = zip(taken[name], np.asarray(batch[name]), strict=True)
            if np.mean([_same(x, y) for x, y in pairs]) > 0.5:
                return order[rows].tolist()
        return []


def _applied_counts(state: state_lib.TrainState) -> dict[str, np.ndarray]:
    """Returns the number of updates that each learner has applied so far, by name."""
    learners = state_lib.learners(state)
    return {name: np.array(learner.global_step) for name, learner in learners.items()}


def _are_applied(
    stepped: step_lib.Stepped,
    before: dict[str, np.ndarray],
    after: dict[str, np.ndarray],
) -> bool:
    """Returns whether a step applied all of its updates, and all were finite."""
    for name, observed in stepped.observed.items():
        updates = stepped.metrics.get(trees.join(name, "updates_per_step"), 1)
        if np.any(after[name] - before[name] < np.asarray(updates)):
            return False
        if np.any(np.asarray(observed.verdict)):
            return False
    return True


def _skipped(row: rows_lib.Row) -> rows_lib.Row:
    """Returns the row's counts of skipped updates, of each learner."""
    return {name: x for name, x in row.items() if name.rpartition("/")[2] == "skipped"}


def _are_finite(row: rows_lib.Row) -> bool:
    """Returns whether all numbers of a row are finite; others are null there.

    A noise scale may be unknown in a step in which all is well.
    """
    for name, value in row.items():
        is_noise_scale = name.rpartition("/")[2] == _NOISE_SCALE
        if not is_noise_scale and not _is_finite(value):
            return False
    return True


def _is_finite(value: Any) -> bool:
    """Returns whether a number of a row is finite; of several groups, all of them."""
    if isinstance(value, list):
        return None not in value
    return value is not None


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    # Only floats can be NaN, and NumPy refuses to look for it in other dtypes.
    has_nan = y.dtype.kind in "fc"
    return bool(np.array_equal(x.astype(y.dtype), y, equal_nan=has_nan))
