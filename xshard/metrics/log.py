"""The log of a run: sends training metrics, evaluations and samples to the writers and
the terminal.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xshard import experiment as experiment_lib
from xshard import hooks
from xshard import mesh as mesh_lib
from xshard.base import clock as clock_lib
from xshard.base import formatting
from xshard.data import batches as batches_lib
from xshard.files import identity, jsonfile, workdir
from xshard.learners import state as learner_state
from xshard.metrics import deferred
from xshard.metrics import norms as norms_lib
from xshard.metrics import rows as rows_lib
from xshard.metrics import terminal as terminal_lib
from xshard.metrics import writer as writer_lib
from xshard.metrics import writers as writers_lib
from xshard.pod import members as members_lib
from xshard.training import step as step_lib

Row = rows_lib.Row
# The last of some steps, their metrics, and the norms of each learner.
_Fetched = tuple[int, dict[str, jax.Array], dict[str, learner_state.ArrayNorms]]
_ROLLED_BACK = writer_lib.Outcome(writer_lib.ROLLED_BACK)
_COSTS = (clock_lib.START, clock_lib.DATA, clock_lib.CHECKPOINT, clock_lib.EVALUATION)


class Log(hooks.Hook):
    """The log of a run.

    The host reads the metrics of a step some steps later: `fetch` starts to copy them,
    and `read` writes them.

    Attributes:
      rows: the number of rows in the log, including earlier parts of the run.
      outcome: how the run ended, which the writers are told before they are closed;
        None if it goes on in this process, or ends by an exception.
    """

    def __init__(
        self,
        directory: workdir.Workdir,
        experiment: experiment_lib.Experiment,
        mesh: jax.sharding.Mesh,
        batches: batches_lib.TrainBatches,
        clock: clock_lib.Clock,
        terminal: terminal_lib.Terminal,
        members: members_lib.Members,
        wings: Sequence[hooks.Wing] = (),
    ):
        """Creates the log; `opened` opens its writers.

        Args:
          directory: the work directory.
          experiment: the run's experiment, with its config.
          mesh: the run's mesh.
          batches: the run's training batches.
          clock: this process's clock.
          terminal: the run's terminal.
          members: the members of the run, of which the one that leads has writers.
          wings: the run's wings, which may bring writers, and have more to say of its
            speed.
        """
        config = experiment.config
        self.rows = 0
        self.outcome: writer_lib.Outcome | None = None
        self._directory = directory
        self._config = config
        self._wings = wings
        # Read from the config once, because each look-up takes microseconds.
        self._every = config.log_every_steps
        self._norms_every = config.get("log_norms_every_steps", 0)
        self._fingerprints_every = config.get("fingerprint_every_steps", 0)
        self._last = config.steps
        self._mesh = mesh
        self._clock = clock
        self._terminal = terminal
        self._batch_size = batches.batch_size
        self._epoch_examples = batches.epoch_examples
        self._members = members
        # What this process would write if it led, with the number of rows before it,
        # and since when the log is known to have the rows of all before.
        self._kept: list[tuple[int, Row]] = []
        self._is_begun = False
        # The process that leads alone has writers, while the log is open.
        self._writers: writers_lib.Writers | None = None
        # The previous row, to report skips and changes of the loss scale since then.
        self._before: Row = {"step": 0}
        # The last step of the dispatch of the previous row, the seconds that count for
        # its rate, and this.
        self._paced = (0, 0.0, 0.0)

    @contextlib.contextmanager
    def opened(self, start: int) -> Iterator[None]:
        """Opens the config's writers where they write, and closes them at the end.

        Args:
          start: the step that the run starts or resumes from. Rows of later steps are
            dropped.
        """
        self._kept = []
        self._is_begun = False
        with self._members.while_leading(lambda: self._writing(start)):
            self.rows = self._members.by_leader(
                "the rows so far",
                lambda: self._writers.files.count if self._writers else 0,
            )
            self._is_begun = True
            self._before = {"step": start}
            self._paced = (start, 0.0, 0.0)
            try:
                yield
            except BaseException:
                # It must not be replaced by an error of the terminal.
                with contextlib.suppress(OSError, ValueError):
                    self._terminal.close()
                raise
            self._terminal.close()

    @contextlib.contextmanager
    def _writing(self, start: int) -> Iterator[None]:
        """Opens the config's writers, and closes them at the end."""
        part = writers_lib.Part(
            directory=self._directory.path,
            step=start,
            config=identity.plain(self._config),
            claim=self._directory.claim,
        )
        if self._is_begun:
            # All rows in the files are of this attempt, or of what it began with.
            last = max([start, *(row["step"] for row in part.everything())])
            part = part._replace(step=last)
        self._writers = writers_lib.Writers(self._config.writers, part, self._wings)
        try:
            # What the process that led before may not have written.
            for number, row in self._kept:
                self._write_numbered(number, row)
            self._kept = []
            yield
        except BaseException as e:
            self._writers.close(writer_lib.outcome_of(e))
            raise
        self._writers.close(self.outcome or _ROLLED_BACK)

    def forget(self, rows: int) -> None:
        """Forgets what it keeps of the first rows, which are durable."""
        self._kept = [kept for kept in self._kept if kept[0] >= rows]

    def write(self, row: Row) -> None:
        """Writes a row of any kind, or keeps it as long as another process leads.

        Samples and norms of a step are written once: nothing is done if it has some.
        """
        has_numbers = rows_lib.has_numbers(row)
        if has_numbers and self._members.exchange is not None:
            text = jsonfile.dumps(rows_lib.reproducible(row))
            self._members.note(text.encode())
        if self._writers is not None:
            self._write_numbered(self.rows, row)
        elif self._members.may_lead:
            self._kept.append((self.rows, row))
        if has_numbers:
            self.rows += 1

    def _write_numbered(self, number: int, row: Row) -> None:
        """Writes a row that comes after a number of rows, unless its file has it.

        A process that led before may have been ahead of this one.
        """
        assert self._writers is not None
        files = self._writers.files
        if rows_lib.has_numbers(row):
            is_written = number < files.count
        else:
            is_written = row["step"] <= files.last(rows_lib.kind(row))
        if not is_written:
            self._writers.write(row)

    def fetch(self, chunk: step_lib.Chunk) -> _Fetched | None:
        """Starts to copy to the host what the rows of steps have, if any has one."""
        stepped: Any = chunk.stepped
        metrics: dict[str, jax.Array] = {}
        norms: dict[str, learner_state.ArrayNorms] = {}
        # A host can only read arrays on its own devices.
        has_rows = any(map(self._has_row, chunk.steps))
        if has_rows:
            metrics = mesh_lib.replicate(self._mesh, stepped.metrics)
        if has_rows and any(map(self._has_fingerprints, chunk.steps)):
            logged = stepped.fingerprints_before.logged()
            metrics = metrics | mesh_lib.replicate(self._mesh, logged)
        if any(map(self._has_norms, chunk.steps)):
            norms = mesh_lib.replicate(self._mesh, stepped.norms)
        if not has_rows and not norms:
            return None
        deferred.to_host(jax.tree.leaves((metrics, norms)))
        return chunk.last, metrics, norms

    def read(self, step: int, place: Any, fetched: _Fetched, newest: Any) -> None:
        """Writes the rows of a step, if it has any."""
        del newest
        last, metrics, of_learners = fetched
        if self._has_row(step):
            row: Row = {"step": step, rows_lib.KIND: rows_lib.TRAIN}
            for name, values in metrics.items():
                row[name] = rows_lib.to_number(np.asarray(values)[place])
            if not self._has_fingerprints(step):
                # The program of a step returns zeros where they are not due.
                row = rows_lib.without_fingerprints(row)
            self._write_training(row, last)
        if of_learners and self._has_norms(step):
            norms = {}
            for name, of_learner in of_learners.items():
                of_step = np.asarray(of_learner.values)[place]
                norms[name] = dataclasses.replace(of_learner, values=of_step)
            if self._members.may_lead:
                self.write(norms_lib.row(step, norms))

    def _has_row(self, step: int) -> bool:
        return step % self._every == 0 or step == self._last

    def _has_fingerprints(self, step: int) -> bool:
        return bool(self._fingerprints_every) and step % self._fingerprints_every == 0

    def _has_norms(self, step: int) -> bool:
        return bool(self._norms_every) and step % self._norms_every == 0

    def _write_training(self, row: Row, last: int) -> None:
        """Writes the row of a step, and shows it.

        Args:
          row: its metrics by name.
          last: the last of the steps that were dispatched with it.
        """
        step = row["step"]
        row = with_skips(row)
        if self._epoch_examples is not None:
            # An experiment may log its own 'epoch', which takes precedence.
            examples = step * self._batch_size
            row.setdefault("epoch", examples / self._epoch_examples)
        seconds = self._clock.seconds()
        rate = self._rate(last, seconds)
        self.write(row | self._performance(step, rate, seconds))
        self._terminal.row(rows_lib.numbers(row), rate)
        text = changes(self._before, row)
        if text:
            self._terminal.say(text)
        self._before = row

    def flush(self) -> None:
        """Flushes the rows so far to the writers' files."""
        if self._writers is not None:
            self._writers.flush()

    def sync(self) -> None:
        """Syncs all flushed rows to disk; may be called from any thread. Raises OSError
        if that fails.
        """
        if self._writers is not None:
            self._writers.sync()

    def write_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes an evaluation of the state after a step."""
        row, text = evaluation(step, values)
        self.write(row)
        self._terminal.say(text)

    def write_ahead(self, row: Row) -> None:
        """Writes a row about the step that comes next.

        The caller has written the rows of all earlier steps.
        """
        self.write(row | {"perf/time": _now()})

    def sampled(self) -> int:
        """Returns the last step with samples, as process 0 sees it; -1 if there is
        none.
        """
        if self._writers is None:
            return -1
        return self._writers.files.last(rows_lib.SAMPLES)

    def _rate(self, step: int, seconds: Mapping[str, float]) -> float:
        """Returns the steps per second since an earlier row, without the time of
        evaluations and saves.

        The rows of steps that were dispatched together reach the host at the same time,
        and have one rate.

        Args:
          step: the last of the steps that were dispatched with that of the row.
          seconds: the seconds of each phase so far.
        """
        last_step, last_paced, rate = self._paced
        if step != last_step:
            paced = seconds[clock_lib.TRAINING] + seconds[clock_lib.DATA]
            rate = (step - last_step) / max(paced - last_paced, 1e-9)
            self._paced = (step, paced, rate)
        return rate

    def _performance(self, step: int, rate: float, seconds: Mapping[str, float]) -> Row:
        models = experiment_lib.num_models(self._config, self._mesh)
        examples = self._batch_size * models
        row = {"steps_per_second": rate, "examples_per_second": rate * examples}
        # When members are lost must not show among what has the same bits.
        row |= self._members.standing
        for wing in self._wings:
            row |= wing.speed(step, rate)
        total = sum(seconds.values())
        row["goodput"] = seconds[clock_lib.TRAINING] / max(total, 1e-9)
        row["seconds"] = total
        for name in _COSTS:
            row[f"{name}_seconds"] = seconds[name]
        # Times are accurate to about a millisecond, so six digits are enough.
        performance = {
            f"perf/{name}": float(f"{value:.6g}") for name, value in row.items()
        }
        performance["perf/time"] = _now()
        return performance


def with_skips(row: Row) -> Row:
    """Returns a step's row with the skips of each learner so far, since its own would
    miss skips between rows.
    """
    row = dict(row)
    for name in [name for name in row if name.rpartition("/")[2] == "global_step"]:
        learner = name.removesuffix("global_step")
        made = row["step"] * np.asarray(row.get(f"{learner}updates_per_step", 1))
        row.pop(f"{learner}skipped", None)
        # Unknown if a step makes several updates and returns the outcome of only one of
        # them.
        if np.all(made >= row[name]):
            row[f"{learner}skipped"] = (made - row[name]).tolist()
    return row


def evaluation(step: int, values: Mapping[str, Any]) -> tuple[Row, str]:
    """Returns the row of an evaluation after a step, and a line to print."""
    row: Row = {"step": step, rows_lib.KIND: rows_lib.EVALUATION}
    numbers = []
    for name, value in values.items():
        row[rows_lib.OF_EVALUATION + name] = value
        numbers.append(f"{name} {formatting.number(value)}")
    row["perf/time"] = _now()
    text = "  ".join(numbers) or "no metrics"
    return row, f"step {step}  evaluation: {text}"


def changes(before: Row, row: Row) -> str:
    """Describes skipped steps and changes of the loss scale between two rows; empty if
    there are none.

    Args:
      before: the previous row, possibly with only its 'step'.
      row: a row of training.
    """
    parts = []
    for name in row:
        learner, _, kind = name.rpartition("/")
        of_learner = f" by {learner}" if learner else ""
        # After a resume, the number of skips before the first row is unknown.
        if kind == "skipped" and (name in before or before["step"] == 0):
            skipped = np.asarray(row[name]) - np.asarray(before.get(name, 0))
            if np.any(skipped):
                steps = row["step"] - before["step"]
                count = formatting.number(skipped.tolist())
                parts.append(f"{count} of the last {steps} steps skipped{of_learner}")
        if kind == "loss_scale" and name in before and before[name] != row[name]:
            scales = (
                f"{formatting.number(before[name])} -> {formatting.number(row[name])}"
            )
            parts.append(f"loss scale{of_learner} {scales}")
    if not parts:
        return ""
    return f"step {row['step']}: {'; '.join(parts)}"


def _now() -> float:
    return round(time.time(), 3)
