"""The log of a run: sends training metrics, evaluations and samples to the writers and
the terminal.
"""

import contextlib
import functools
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jmp
import numpy as np

from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.data import batches as batches_lib
from xshard.files import identity, workdir
from xshard.metrics import clock as clock_lib
from xshard.metrics import deferred, formatting
from xshard.metrics import flops as flops_lib
from xshard.metrics import rows as rows_lib
from xshard.metrics import terminal as terminal_lib
from xshard.metrics import writers as writers_lib

_COSTS = (clock_lib.START, clock_lib.DATA, clock_lib.CHECKPOINT, clock_lib.EVALUATION)


class Log:
    """The log of a run. As a context, it closes its writers at the end."""

    def __init__(
        self,
        directory: workdir.Workdir,
        start: int,
        experiment: experiment_lib.Experiment,
        mesh: jax.sharding.Mesh,
        batches: batches_lib.TrainBatches,
        clock: clock_lib.Clock,
        terminal: terminal_lib.Terminal,
    ):
        """Opens the config's writers, on process 0.

        Args:
          directory: the work directory; rows of steps after `start` are dropped.
          start: the step that the run starts or resumes from.
          experiment: the run's experiment, with its config.
          mesh: the run's mesh.
          batches: the run's training batches.
          clock: this process's clock.
          terminal: the run's terminal.

        Attributes:
          rows: the number of rows in the log, including earlier parts of the run.
          newest: a metric of the most recently dispatched step; None before the first
            step.
        """
        config = experiment.config
        self._writers: list[writers_lib.Writer] = []
        self._samples: writers_lib.JsonLines | None = None
        if jax.process_index() == 0:
            part = writers_lib.Part(
                directory.path,
                start,
                identity.plain(config),
                rows=lambda: rows_lib.read(directory.metrics),
                samples=lambda: rows_lib.read(directory.samples),
            )
            self._samples = writers_lib.JsonLines(directory.samples, start)
            self._writers = writers_lib.open_all(config.writers, part)
        self.rows = writers_lib.count(self._writers)
        self._config = config
        # Read from the config once, because each look-up takes microseconds.
        self._every, self._last = config.log_every_steps, config.steps
        self._start = start
        self._mesh = mesh
        self._clock = clock
        self._terminal = terminal
        # FLOPs are counted with the first row. By then the devices are busy, so the
        # trace delays nothing.
        self._flops = functools.cache(
            lambda: flops_lib.if_known(experiment, mesh, batches.shapes(), terminal.say)
        )
        self._peak = flops_lib.peak(
            mesh, jmp.get_policy(config.precision).compute_dtype
        )
        self._epoch_examples = batches.epoch_examples
        self._deferred, self._in_flight = deferred.Deferred(), deferred.InFlight()
        # The previous row, to report skips and changes of the loss scale since then.
        self._before: rows_lib.Row = {"step": start}
        self._paced = (start, 0.0)
        self.newest: jax.Array | None = None

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._terminal.close()
        with contextlib.ExitStack() as stack:
            if kind is not None:
                # The exception that ended the run must not be replaced by one from
                # closing a writer.
                stack.enter_context(contextlib.suppress(OSError, ValueError))
            for writer in self._writers:
                stack.callback(writer.close)

    def push(self, step: int, values: Mapping[str, jax.Array]) -> None:
        """Adds the metrics of a step, and writes the rows of earlier steps that have
        reached the host.
        """
        if step == self._start + 1:
            # The first step includes compilation, so timing starts after it.
            self._clock.started()
            self._terminal.start(self._start)
        if step % self._every == 0 or step == self._last:
            # A host can only read arrays on its own devices.
            values = mesh_lib.replicate(self._mesh, values)
            self._deferred.push(step, values)
        self.newest = next(iter(values.values()))
        self._in_flight.push(self.newest)
        self._write(self._deferred.due(step))
        self._terminal.progress(step)

    def flush(self) -> None:
        """Waits for all steps that were pushed, and writes their rows."""
        self._write(self._deferred.flush())
        for writer in self._writers:
            writer.flush()

    def sync(self) -> None:
        """Syncs all flushed rows to disk; may be called from any thread. Raises OSError
        if that fails.
        """
        if self._samples is not None:
            self._samples.sync()
        for writer in self._writers:
            # Custom writers need not have this method.
            if hasattr(writer, "sync"):
                writer.sync()

    def write_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes an evaluation of the state after a step."""
        row, text = evaluation(step, values)
        self._send(row)
        self._terminal.say(text)

    def write_ahead(self, row: rows_lib.Row) -> None:
        """Writes a row about the step that comes next, after the rows of all earlier
        steps.
        """
        self.flush()
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
        if self._samples is None or row["step"] <= self._samples.last:
            return
        self._samples.write(row)
        for writer in self._writers:
            # Custom writers need not have this method.
            if hasattr(writer, "write_samples"):
                writer.write_samples(row)

    def _write(self, rows: Iterable[rows_lib.Row]) -> None:
        for row in map(with_skips, rows):
            steps = row["step"]
            if self._epoch_examples is not None:
                # An experiment may log its own 'epoch', which takes precedence.
                examples = steps * self._config.batch_size
                row.setdefault("epoch", examples / self._epoch_examples)
            seconds = self._clock.seconds()
            rate = self._rate(steps, seconds)
            self._send(row | self._performance(rate, seconds))
            self._terminal.row(rows_lib.numbers(row), rate)
            text = changes(self._before, row)
            if text:
                self._terminal.say(text)
            self._before = row

    def _send(self, row: rows_lib.Row) -> None:
        self.rows += 1
        writers_lib.write(self._writers, row)

    def _rate(self, step: int, seconds: Mapping[str, float]) -> float:
        """Returns the steps per second since the last row, without the time of
        evaluations and saves.
        """
        paced = seconds[clock_lib.TRAINING] + seconds[clock_lib.DATA]
        last_step, last_paced = self._paced
        self._paced = (step, paced)
        # Two rows may reach the host at the same time.
        return (step - last_step) / max(paced - last_paced, 1e-9)

    def _performance(self, rate: float, seconds: Mapping[str, float]) -> rows_lib.Row:
        examples = self._config.batch_size * mesh_lib.num_groups(self._mesh)
        row = {"steps_per_second": rate, "examples_per_second": rate * examples}
        flops = self._flops()
        if flops is not None:
            row["flops_per_second"] = rate * flops
            if self._peak is not None:
                row["utilisation"] = rate * flops / self._peak
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
    """Returns the row of an evaluation of the state after a step, and a line to print."""
    row: rows_lib.Row = {"step": step}
    numbers = []
    for name, value in values.items():
        row[f"eval/{name}"] = value
        numbers.append(f"{name} {formatting.number(value)}")
    row["perf/time"] = _now()
    return row, f"step {step}  evaluation: {'  '.join(numbers)}"


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
