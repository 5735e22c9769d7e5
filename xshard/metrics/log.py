"""The log of a run: sends training metrics, evaluations and samples to the writers and
the terminal.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        services: Mapping[str, writers_lib.Service],
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
          services: the writers that the run's wings bring.
          members: the members of the run, of which the one that leads has writers.
          wings: the run's wings, which may have more to say of its speed.
        """
        config = experiment.config
        self.rows = 0
        self.outcome: writer_lib.Outcome | None = None
        self._directory = directory
        self._config = config
        self._services = services
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
        self._kept: list[tuple[int, Callable[[Row], None], Row]] = []
        self._is_begun = False
        # The number of rows that another process that led has written.
        self._written = 0
        # The process that leads alone has writers, while the log is open.
        self._writers: list[writers_lib.Writer] = []
        self._samples: writers_lib.JsonLines | None = None
        self._norms: writers_lib.JsonLines | None = None
        # The previous row, to report skips and changes of the loss scale since then.
        self._before: rows_lib.Row = {"step": 0}
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
        self._written = 0
        with self._members.while_leading(lambda: self._writing(start)):
            self.rows = self._members.by_leader(
                "the rows so far", lambda: writers_lib.count(self._writers)
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
        last = start
        if self._is_begun:
            # All rows in the files are of this attempt, or of what it began with.
            last = sys.maxsize
            rows = rows_lib.read(self._directory.metrics)
            start = max([start, *(row["step"] for row in rows)])
        part = writers_lib.Part(
            directory=self._directory.path,
            step=start,
            config=identity.plain(self._config),
            rows=lambda: rows_lib.read(self._directory.metrics),
            samples=lambda: rows_lib.read(self._directory.samples),
            norms=lambda: rows_lib.read(self._directory.norms),
            claim=self._directory.claim,
        )
        # These drop the rows of the steps that the run repeats, before a writer reads
        # them.
        self._samples = writers_lib.JsonLines(
            self._directory.samples, last, self._directory.claim
        )
        self._norms = writers_lib.JsonLines(
            self._directory.norms, last, self._directory.claim
        )
        self._writers = writers_lib.open_all(self._config.writers, part, self._services)
        try:
            if self._is_begun:
                self._write_kept()
            yield
        except BaseException as e:
            # The exception that ended the run must not be replaced by one from closing
            # a writer.
            with contextlib.suppress(OSError, ValueError):
                self._close(writer_lib.outcome_of(e))
            raise
        self._close(self.outcome or _ROLLED_BACK)

    def _write_kept(self) -> None:
        """Writes what the process that led before has not written."""
        rows = self.rows
        self._written = writers_lib.count(self._writers)
        for number, write, row in self._kept:
            self.rows = number
            write(row)
        self.rows = rows
        self._kept = []

    def forget(self, rows: int) -> None:
        """Forgets what it keeps of the first rows, which are durable."""
        self._kept = [kept for kept in self._kept if kept[0] >= rows]

    def _write(self, write: Callable[[Row], None], row: Row) -> None:
        """Writes a row, or keeps it as long as another process leads."""
        if self._samples is not None:
            write(row)
        elif self._members.may_lead:
            self._kept.append((self.rows, write, row))

    def fetch(self, chunk: step_lib.Chunk) -> step_lib.Chunk | None:
        """Starts to copy to the host what the rows of steps have, if any has one.

        Returns:
          The steps with no results but these.
        """
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
        fetched = stepped._replace(
            state=None,
            metrics=metrics,
            observed={},
            fingerprints_before=None,
            norms=norms,
        )
        return dataclasses.replace(chunk, stepped=fetched)

    def read(self, step: int, place: Any, fetched: step_lib.Chunk, newest: Any) -> None:
        """Writes the rows of a step, if it has any."""
        del newest
        stepped = fetched.stepped
        if self._has_row(step):
            values = {name: np.asarray(x)[place] for name, x in stepped.metrics.items()}
            if not self._has_fingerprints(step):
                # The program of a step returns zeros where they are not due.
                values = rows_lib.without_fingerprints(values)
            self.write_row(step, values, fetched.last)
        if stepped.norms and self._has_norms(step):
            norms = {}
            for name, of_learner in stepped.norms.items():
                of_step = np.asarray(of_learner.values)[place]
                norms[name] = dataclasses.replace(of_learner, values=of_step)
            self.write_norms(step, norms)

    def _has_row(self, step: int) -> bool:
        return step % self._every == 0 or step == self._last

    def _has_fingerprints(self, step: int) -> bool:
        return bool(self._fingerprints_every) and step % self._fingerprints_every == 0

    def _has_norms(self, step: int) -> bool:
        return bool(self._norms_every) and step % self._norms_every == 0

    def write_norms(
        self, step: int, norms: Mapping[str, learner_state.ArrayNorms]
    ) -> None:
        """Writes the norms of parameters after a step, by the learner's name."""
        if self._members.may_lead:
            self._write(self._write_norms, norms_lib.row(step, norms))

    def _write_norms(self, row: Row) -> None:
        if self._norms is None or row["step"] <= self._norms.last:
            return
        self._norms.write(row)
        for writer in self._writers:
            writer.write_norms(row)

    def write_row(self, step: int, metrics: Mapping[str, Any], last: int) -> None:
        """Writes the row of a step.

        Args:
          step: the number of the step.
          metrics: its metrics by name.
          last: the last of the steps that were dispatched with it.
        """
        row: rows_lib.Row = {"step": step, rows_lib.KIND: rows_lib.TRAIN}
        for name, value in metrics.items():
            row[name] = rows_lib.to_number(value)
        row = with_skips(row)
        if self._epoch_examples is not None:
            # An experiment may log its own 'epoch', which takes precedence.
            examples = step * self._batch_size
            row.setdefault("epoch", examples / self._epoch_examples)
        seconds = self._clock.seconds()
        rate = self._rate(last, seconds)
        self._send(row | self._performance(step, rate, seconds))
        self._terminal.row(rows_lib.numbers(row), rate)
        text = changes(self._before, row)
        if text:
            self._terminal.say(text)
        self._before = row

    def flush(self) -> None:
        """Flushes the rows so far to the writers' files."""
        for writer in self._writers:
            writer.flush()

    def sync(self) -> None:
        """Syncs all flushed rows to disk; may be called from any thread. Raises OSError
        if that fails.
        """
        for rows in (self._samples, self._norms):
            if rows is not None:
                rows.sync()
        for writer in self._writers:
            writer.sync()

    def write_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes an evaluation of the state after a step."""
        row, text = evaluation(step, values)
        self._send(row)
        self._terminal.say(text)

    def write_ahead(self, row: rows_lib.Row) -> None:
        """Writes a row about the step that comes next.

        The caller has written the rows of all earlier steps.
        """
        self._send(row | {"perf/time": _now()})

    def sampled(self) -> int:
        """Returns the last step with samples, as process 0 sees it; -1 if there is
        none.
        """
        return -1 if self._samples is None else self._samples.last

    def write_samples(self, row: rows_lib.Row) -> None:
        """Writes a row from `xshard.samples.row`, unless samples of its step exist
        already.
        """
        self._write(self._write_samples, row)

    def _write_samples(self, row: Row) -> None:
        if self._samples is None or row["step"] <= self._samples.last:
            return
        self._samples.write(row)
        for writer in self._writers:
            writer.write_samples(row)

    def _close(self, outcome: writer_lib.Outcome) -> None:
        writers_lib.close(self._writers, outcome)

    def _send(self, row: rows_lib.Row) -> None:
        if self._members.exchange is not None:
            text = jsonfile.dumps(rows_lib.reproducible(row))
            self._members.note(text.encode())
        self._write(self._write_row, row)
        self.rows += 1

    def _write_row(self, row: Row) -> None:
        # A process that led before may have been ahead of this one.
        if self.rows < self._written:
            return
        # What a service has received cannot be taken back.
        if self._directory.claim is not None:
            self._directory.claim.check()
        writers_lib.write(self._writers, row)

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

    def _performance(
        self, step: int, rate: float, seconds: Mapping[str, float]
    ) -> rows_lib.Row:
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


def with_skips(row: rows_lib.Row) -> rows_lib.Row:
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


def evaluation(step: int, values: Mapping[str, Any]) -> tuple[rows_lib.Row, str]:
    """Returns the row of an evaluation after a step, and a line to print."""
    row: rows_lib.Row = {"step": step, rows_lib.KIND: rows_lib.EVALUATION}
    numbers = []
    for name, value in values.items():
        row[rows_lib.OF_EVALUATION + name] = value
        numbers.append(f"{name} {formatting.number(value)}")
    row["perf/time"] = _now()
    text = "  ".join(numbers) or "no metrics"
    return row, f"step {step}  evaluation: {text}"


def changes(before: rows_lib.Row, row: rows_lib.Row) -> str:
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
