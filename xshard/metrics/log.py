"""The log of a run: training metrics and evaluations, to its writers and to the terminal."""

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jmp
import ml_collections
import numpy as np

from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.files import identity, workdir
from xshard.metrics import clock as clock_lib
from xshard.metrics import deferred, flops, show
from xshard.metrics import rows as rows_lib
from xshard.metrics import terminal as terminal_lib
from xshard.metrics import writers as writers_lib

_COSTS = (clock_lib.START, clock_lib.DATA, clock_lib.CHECKPOINT, clock_lib.EVALUATION)


class Log:
    """Training metrics and evaluations of a run. A context, at whose end all of it is written."""

    def __init__(
        self,
        writers: Sequence[writers_lib.Writer],
        start: int,
        config: ml_collections.ConfigDict,
        mesh: jax.sharding.Mesh,
        clock: clock_lib.Clock,
        terminal: terminal_lib.Terminal,
        *,
        rows: int = 0,
        flops_per_step: int | None = None,
        peak: float | None = None,
    ):
        """Begins.

        Args:
          writers: where rows go; none where that is another process's.
          start: the step that the run goes on from.
          config: the run's config.
          mesh: the run's mesh.
          clock: this process's.
          terminal: where the run shows how it goes.
          rows: how many rows the writers have of earlier parts of the run.
          flops_per_step: the model's floating-point operations in a step, of all groups together, if that is
            known.
          peak: how many such operations all devices together can do in a second, if that is known.
        """
        self._writers = writers
        self.rows = rows
        self._every = config.log_every_steps
        self._last = config.steps
        self._start = start
        self._mesh = mesh
        self._clock = clock
        self._terminal = terminal
        self._flops, self._peak = flops_per_step, peak
        self._examples = config.batch_size * mesh_lib.num_groups(mesh)
        self._deferred = deferred.Deferred()
        # Of the last row, for what has happened since.
        self._before: rows_lib.Row = {"step": start, **({} if start else {"skipped": 0})}
        self._paced = (start, 0.0)
        self.newest: jax.Array | None = None

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._terminal.close()
        with contextlib.ExitStack() as stack:
            if kind is not None:
                # What has made the run fail is what is to be said.
                stack.enter_context(contextlib.suppress(OSError, ValueError))
            for writer in self._writers:
                stack.callback(writer.close)

    def push(self, made: int, values: Mapping[str, jax.Array]) -> None:
        """Takes the metrics of a step, and writes those of earlier ones that have come to the host."""
        if made == self._start + 1:
            # The first call has compiled, which says nothing of the steps to come.
            self._clock.started()
            self._terminal.start(self._start)
        keep = made % self._every == 0 or made == self._last
        if keep:
            values = mesh_lib.replicate(self._mesh, values)
        self.newest = next(iter(values.values()))
        self._write(self._deferred.push(made, values, keep))
        self._terminal.progress(made)

    def flush(self) -> None:
        """Writes what has been taken; waits for it."""
        self._write(self._deferred.flush())
        for writer in self._writers:
            writer.flush()

    def sync(self) -> None:
        """Makes durable what has been flushed; from any thread. Raises OSError if it cannot be."""
        for writer in self._writers:
            getattr(writer, "sync", lambda: None)()

    def write_evaluation(self, made: int, values: Mapping[str, Any]) -> None:
        """Writes an evaluation of the state after a step."""
        row = {"step": made, **{f"eval/{name}": value for name, value in values.items()}}
        self._send(row | {"perf/time": round(time.time(), 3)})
        numbers = "  ".join(f"{name} {show.number(value)}" for name, value in values.items())
        self._terminal.say(f"step {made}  evaluation: {numbers}")

    def _write(self, rows: Iterable[rows_lib.Row]) -> None:
        for row in rows:
            # A total, since a skip between two rows would not show.
            steps, applied = row["step"], np.asarray(row.pop("global_step"))
            row |= {"global_step": applied.tolist(), "skipped": (steps - applied).tolist()}
            seconds = self._clock.seconds()
            rate = self._rate(steps, seconds)
            self._send(row | self._performance(rate, seconds))
            self._terminal.row(row, rate)
            if text := changes(self._before, row):
                self._terminal.say(text)
            self._before = row

    def _send(self, row: rows_lib.Row) -> None:
        self.rows += 1
        for writer in self._writers:
            writer.write(row)

    def _rate(self, step: int, seconds: Mapping[str, float]) -> float:
        """Steps a second since the last row, but for the time that went into evaluations and saving."""
        paced = seconds[clock_lib.TRAINING] + seconds[clock_lib.DATA]
        last_step, last_paced = self._paced
        self._paced = (step, paced)
        return (step - last_step) / max(paced - last_paced, 1e-9)

    def _performance(self, rate: float, seconds: Mapping[str, float]) -> rows_lib.Row:
        total = sum(seconds.values())
        row = {"steps_per_second": rate, "examples_per_second": rate * self._examples}
        if self._flops is not None:
            row["flops_per_second"] = rate * self._flops
            if self._peak is not None:
                row["utilisation"] = rate * self._flops / self._peak
        row |= {"goodput": seconds[clock_lib.TRAINING] / max(total, 1e-9), "seconds": total}
        row |= {f"{name}_seconds": seconds[name] for name in _COSTS}
        # What is measured in milliseconds has no more digits.
        short = {f"perf/{name}": float(f"{value:.6g}") for name, value in row.items()}
        return {**short, "perf/time": round(time.time(), 3)}


def begin(
    directory: workdir.Workdir,
    start: int,
    config: ml_collections.ConfigDict,
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    shapes: Any,
    clock: clock_lib.Clock,
    terminal: terminal_lib.Terminal,
) -> Log:
    """The log of a part of a run, with the writers of the config on process 0.

    Args:
      directory: the work directory; rows of steps after the first are dropped.
      start: the step that the run goes on from.
      config: the run's config.
      experiment: the run's experiment.
      mesh: the run's mesh.
      shapes: those of a batch.
      clock: this process's.
      terminal: where the run shows how it goes.
    """
    writers: list[writers_lib.Writer] = []
    if jax.process_index() == 0:
        history = lambda: writers_lib.read(directory.metrics)
        plain = identity.plain(config)
        part = writers_lib.Part(directory.path, start, plain, history)
        writers = writers_lib.open_all(config.writers, part)
    dtype = jmp.get_policy(config.precision).compute_dtype
    return Log(
        writers,
        start,
        config,
        mesh,
        clock,
        terminal,
        rows=writers_lib.count(writers),
        flops_per_step=flops.if_known(experiment, mesh, shapes, terminal.say),
        peak=flops.peak(mesh, dtype),
    )


def changes(before: rows_lib.Row, row: rows_lib.Row) -> str:
    """Says what has happened between two rows that a person should hear of; empty: nothing.

    Args:
      before: the row before, or what is known of it.
      row: a row of training.
    """
    said = []
    if "skipped" in before:
        skipped = np.asarray(row["skipped"]) - np.asarray(before["skipped"])
        if np.any(skipped):
            steps = row["step"] - before["step"]
            said.append(f"{show.number(skipped.tolist())} of the last {steps} steps skipped")
    scales = [one.get("loss_scale") for one in (before, row)]
    if None not in scales and scales[0] != scales[1]:
        said.append(f"loss scale {show.number(scales[0])} -> {show.number(scales[1])}")
    return f"step {row['step']}: {'; '.join(said)}" if said else ""
