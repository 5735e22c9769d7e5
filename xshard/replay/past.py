"""A run's steps, made again from its checkpoints, and compared with its rows. Nothing is written."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from xshard import checkpoint, data, errors, evaluation, logical
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard import trained as trained_lib
from xshard.files import jsonfile, workdir
from xshard.metrics import rows as rows_lib
from xshard.metrics import writers
from xshard.pod import origin
from xshard.run import history, preflight, resuming, states


class Step(NamedTuple):
    """A step as it was made again.

    Attributes:
      number: the step.
      state: before it.
      batch: its batch.
      row: its metrics, as a row has them.
    """

    number: int
    state: state_lib.TrainState
    batch: Mapping[str, jax.Array]
    row: rows_lib.Row


class Difference(NamedTuple):
    """The first number of a row that is another now."""

    step: int
    column: str
    logged: Any
    now: Any


class Past:
    """A run in a work directory, as it can be made again here."""

    def __init__(self, directory: str):
        """Reads a run, and makes its experiment, mesh and data; UserError if that cannot be done.

        Attributes:
          config: the run's.
          mesh: the run's, of the devices that are here.
          changes: what is other than it was, one text each.
          rows: the rows of training by step.
        """
        self._workdir = workdir.Workdir(directory)
        self.config = trained_lib.config_of(self._workdir)
        self.mesh = experiment_lib.mesh_of(self.config)
        self.experiment = experiment_lib.load(self.config.experiment)(self.config)
        self._batches = preflight.train_batches(self.experiment, self.mesh)
        entries = history.read(self._workdir.roll_backs)
        self._passes = history.passes(entries)
        self._roll_backs = history.standing(entries)
        self._batches.pass_over(self._passes)
        self.changes = self._changes()
        self.rows = writers.of_training(self._workdir.metrics)
        self._why = workdir.not_finite(self._workdir.path)
        self.first_step = 0
        self.step_program = preflight.jitted_step(self.experiment, self.mesh)
        predict = preflight.jitted_predict(self.experiment, self.mesh)
        self._predict = evaluation.predictions(predict, self.mesh)

    def one_program(self) -> Any:
        """The training step as one program, jitted, to be looked into; UserError as of `preflight.one_program`."""
        if isinstance(self.step_program, logical.Program):
            return preflight.one_program(self.experiment, self.mesh)
        return self.step_program

    def _changes(self) -> list[str]:
        old = jsonfile.read_if_exists(self._workdir.origin) or {}
        module = type(self.experiment).__module__
        now = origin.origin(module, self._batches.summary(), "")._asdict()
        if old.get("training") and now["training"] and old["training"] != now["training"]:
            raise errors.UserError(
                f"The run in {self._workdir.path} was trained on {old['training']}; now there are {now['training']}. Its "
                "steps cannot be made again: give it its data back."
            )
        changes = []
        for name in ("commit", "libraries", "devices", "flags"):
            # Of an older version, or where there is no git, it is not known; that there were no flags is.
            is_known = old.get(name) or (name == "flags" and name in old)
            if is_known and old[name] != now[name]:
                changes.append(f"{name}: {old[name] or 'none'} -> {now[name] or 'none'}")
        return changes

    def suspects(self) -> range:
        """The steps of which the first one that is not as it should be is to be found.

        That is those since the row before the first one that is not finite, or by which a step has been skipped.

        Raises:
          UserError: if no step has been so, as far as the rows say.
        """
        before, skipped = 0, dict[str, Any]()
        for step, row in self.rows.items():
            counts = _skipped(row)
            has_skipped = any(
                x != skipped.get(name, np.zeros_like(x).tolist()) for name, x in counts.items()
            )
            if has_skipped or not all(map(_is_finite, row.values())):
                return range(before + 1, step + 1)
            before, skipped = step, counts
        stopped = re.match(r"step (\d+):", self._why)
        if stopped:
            return range(int(stopped[1]), int(stopped[1]) + 1)
        raise errors.UserError(
            f"Of the {len(self.rows)} rows in {self._workdir.metrics} all are finite, and no step was skipped: give "
            "--step, a step that is to be taken apart."
        )

    def check(self, step: int) -> None:
        """Raises UserError if the run has not come to a step, as far as is known."""
        numbers = [int(x) for x in re.findall(r"^step (\d+):", self._why)]
        reached = self._workdir.reached()
        known = max([*self.rows, *numbers, reached.step if reached else 0], default=0)
        # What was made since the last row has none.
        last = min(known + self.config.log_every_steps, self.config.steps)
        if not 1 <= step <= last:
            raise errors.UserError(
                f"--step={step}: the run in {self._workdir.path} has {f'steps 1 to {known}' if known else 'no steps'} by "
                "its rows and checkpoints; give one that it has made."
            )

    def steps(self, keep: range) -> Iterator[Step]:
        """Makes steps again, from the nearest checkpoint before the first that is kept, or from the first state.

        Yields:
          Each step to the last that is kept; of the others than those that are kept the state is used up.
        """
        state = self._begin(keep.start - 1)
        self.first_step = int(state.step)
        for number in range(self.first_step + 1, keep.stop):
            state = history.backed_off(self._roll_backs, number, state)
            batch = self._batches.of_step(number, self._predict, state)
            before = jax.tree.map(lambda x: x.copy(), state) if number in keep else state
            stepped = self.step_program(state, batch)
            state, values = stepped.state, stepped.metrics
            if stepped.begun is not None:
                values = {**values, **stepped.begun.logged()}
            whole = mesh_lib.replicate(self.mesh, values)
            row = {name: rows_lib.to_number(value) for name, value in whole.items()}
            yield Step(number, before, batch, row)

    def _begin(self, last: int) -> state_lib.TrainState:
        """The state of the newest checkpoint until a step, or the first one."""
        example = self._batches.example
        saved = states.States(self.experiment, self.mesh, example, self._workdir)
        for step in reversed([step for step in saved.manager.all_steps() if step <= last]):
            try:
                resuming.check_replicas(saved.manager, saved.target, step)
                restored = saved.restore(step)
            except checkpoint.CheckpointError:
                # Damaged, or deleted meanwhile: an earlier one does as well.
                continue
            self._batches.restore(restored.data)
            return restored.state
        return saved.init()

    def difference(self, step: Step) -> Difference | None:
        """The first number of a step's row that is another than was logged; None if all are as they were, or none was."""
        logged = self.rows.get(step.number, {})
        # In a row it is the total, which the number of updates has in it.
        totals = _skipped(logged)
        for name, now in step.row.items():
            if name in logged and name not in totals and jsonfile.finite(now) != logged[name]:
                return Difference(step.number, name, logged[name], now)
        return None

    def examples(self, step: int, batch: Mapping[str, jax.Array], rows: list[int]) -> list[int]:
        """The numbers of the examples in these rows of a step's batch, if they come in the order of the seed; else none."""
        kind = type(self.experiment)
        if kind.train_data is experiment_lib.Experiment.train_data:
            return []
        examples, size = self.experiment.train_data(), self.config.batch_size
        numbers = data.order(examples, self.config.seed, mesh_lib.num_groups(self.mesh))
        # Batches that the run has passed over count, too.
        before = step - 1 + sum(count for at, count in self._passes.items() if at <= step)
        # With rows that fill places after those of all groups.
        groups, places = np.divmod(np.arange(len(next(iter(batch.values())))), size)
        positions = before * size + places
        order = np.concatenate(
            [numbers(group, positions[groups == group]) for group in np.unique(groups).tolist()]
        )
        # An iterator of the experiment's own may have another order, or change what it reads.
        taken = data.take(examples, order)
        for name in taken.keys() & batch.keys():
            pairs = zip(taken[name], np.asarray(batch[name]), strict=True)
            if np.mean([_same(x, y) for x, y in pairs]) > 0.5:
                return order[rows].tolist()
        return []


def is_as_it_should_be(row: rows_lib.Row) -> bool:
    """Returns whether a step's metrics are finite, and no update was skipped."""
    return not np.any([*_skipped(row).values()]) and all(
        _is_finite(jsonfile.finite(x)) for x in row.values()
    )


def _skipped(row: rows_lib.Row) -> rows_lib.Row:
    """Those of its numbers that count skipped updates, of each learner."""
    return {name: x for name, x in row.items() if name.rpartition("/")[2] == "skipped"}


def _is_finite(value: Any) -> bool:
    """Returns whether a number of a row, or those of several groups, are finite: else they are null."""
    return None not in value if isinstance(value, list) else value is not None


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    return bool(np.array_equal(x.astype(y.dtype), y, equal_nan=y.dtype.kind in "fc"))
