"""A writer that logs to MLflow."""

import collections
import contextlib
import io
import math
import pathlib
import posixpath
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from xshard import config as config_lib
from xshard import errors, hooks
from xshard.metrics import rows, sent_rows, writer, writers

# MLflow refuses larger requests, and longer names and values of parameters.
_MOST_METRICS = 1000
_MOST_PARAMS = 100
_LONGEST_NAME = 250
_LONGEST_PARAM = 6000
# The pause after rows that could not be stored.
_PAUSE_SECONDS = 10
# The end of a run waits this long for the next answer of the server. A run that is
# preempted has little time.
_LONGEST_WAIT_SECONDS = 20
# MLflow's status of a run. One that is to go on when its command runs again is
# scheduled; KILLED means that a user ended it.
_STATUSES = {
    writer.DONE: "FINISHED",
    writer.STOPPED: "SCHEDULED",
    writer.INTERRUPTED: "KILLED",
    writer.NOT_FINITE: "FAILED",
    writer.FAILED: "FAILED",
    writer.ROLLED_BACK: "RUNNING",
}
# The tags of how the run ended, and of the last roll-back.
_OUTCOME = "xshard.outcome"
_ROLL_BACK = "xshard.roll_back"
_LONGEST_TAG = 5000


class _Waiting(NamedTuple):
    """Metrics of a row that are to be sent.

    Attributes:
      metrics: the metrics.
      row: the place of the row in `SentRows`, if these are its last metrics, or None.
      roll_back: a description of the roll-back that the row is about; or empty.
    """

    metrics: list[Any]
    row: tuple[int, ...] | None
    roll_back: str


class MlflowRun(writer.Writer):
    """One MLflow run for all parts of a run.

    Its name is the work directory's name, and its parameters are the config's keys.
    MLflow finds the server and the experiment itself: MLFLOW_TRACKING_URI,
    MLFLOW_EXPERIMENT_NAME. See `SentRows` for how parts of a run share one. Samples are
    not sent.

    A thread sends the rows, in their order. MLflow's own asynchronous logging does not
    tell which rows are stored before all of them are, and keeps all of them until then.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        config: dict[str, Any],
        history: Callable[[], Iterator[rows.Row]],
        step: int = 0,
    ):
        """Starts or resumes the MLflow run, and sends the rows that it lacks.

        Args:
          directory: the work directory. Its `mlflow/xshard.json` keeps the ID of the
            MLflow run, and the last row known to be stored.
          config: the run's config.
          history: returns the earlier rows.
          step: the step that the run resumes from.

        Raises:
          UserError: if no server is named, or it does not answer.
        """
        # An extra. `xshard.metrics.writers.check` has checked that it is installed.
        import mlflow

        if not mlflow.is_tracking_uri_set():
            raise errors.UserError(
                "writers has 'mlflow', but no server is named: set "
                "MLFLOW_TRACKING_URI, as in http://localhost:5000."
            )
        self._mlflow = mlflow
        self._sent = sent_rows.SentRows(
            directory / "mlflow" / "xshard.json", goes_back=True
        )
        # Without one, the MLflow run ends as if MLflow itself ended it.
        self._outcome: writer.Outcome | None = None
        is_first = not self._sent.id
        # An earlier part that was killed has said nothing about its end.
        tags = {_OUTCOME: "runs" if is_first else f"runs, resumed from step {step}"}
        try:
            # MLflow allows one active run in a process, and a run that rolls back opens
            # its writers again. So this one is only known by its ID.
            with _silence():
                run = mlflow.start_run(
                    run_id=self._sent.id or None,
                    run_name=directory.name,
                    tags=tags,
                    log_system_metrics=False,
                )
                mlflow.end_run("RUNNING")
            self._client = mlflow.MlflowClient()
            self._sent.id = run.info.run_id
            if is_first:
                self._log_params(config)
        # A store other than a server may need packages that mlflow-skinny lacks.
        except (mlflow.exceptions.MlflowException, ImportError) as e:
            raise errors.UserError(
                "writers has 'mlflow', but MLflow cannot start at "
                f"{mlflow.get_tracking_uri()}: {e}"
            ) from e
        # The ID is recorded now, so that it survives if this part is killed.
        self._sent.record()
        # MLflow's name of each number.
        self._names: dict[str, str] = {}
        self._waiting: collections.deque[_Waiting] = collections.deque()
        # Why the server has not stored the first of them; empty if it has not refused.
        self._failure = ""
        self._is_closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()
        for row in history():
            self.write(row)

    def _log_params(self, config: dict[str, Any]) -> None:
        params = []
        for name, value in config_lib.flatten(config).items():
            text = str(value)[:_LONGEST_PARAM]
            params.append(self._mlflow.entities.Param(name, text))
        for begin in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(
                self._sent.id,
                params=params[begin : begin + _MOST_PARAMS],
                synchronous=True,
            )

    def write(self, row: rows.Row, /) -> None:
        """Sends a row of numbers, unless it has been sent."""
        now = int(1000 * row.get("perf/time", time.time()))
        metrics = []
        for name, value in rows.flat(row).items():
            # MLflow has no place for what is not finite.
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if is_number and name != "step":
                # A number's name depends on the rows before, so each part names them
                # all.
                entity = self._mlflow.entities.Metric(
                    self._name(name), value, now, row["step"]
                )
                metrics.append(entity)
        if not self._sent.is_new(row):
            return
        roll_back = ""
        if rows.kind(row) == rows.ROLL_BACK:
            # MLflow deletes no values.
            roll_back = (
                f"before step {row['step']}: each step from there on has values from "
                "before it and, with later times, those that count"
            )
        with self._change:
            for begin in range(0, len(metrics), _MOST_METRICS):
                some = metrics[begin : begin + _MOST_METRICS]
                is_end = begin + _MOST_METRICS >= len(metrics)
                place = None
                if is_end:
                    place = self._sent.last
                self._waiting.append(_Waiting(some, place, roll_back))
            self._change.notify_all()

    def _name(self, name: str) -> str:
        """Returns MLflow's name of a number."""
        if name in self._names:
            return self._names[name]
        # MLflow allows no other characters, and no names that are not those of files.
        base = re.sub(r"[^\w.\- :/]", "_", name)
        base = posixpath.normpath(base.replace("..", "__")).strip("/")
        base = base[: _LONGEST_NAME - 10]
        if base in ("", "."):
            base = "_"
        taken = set(self._names.values())
        unique = base
        number = 2
        while unique in taken:
            unique = f"{base}_{number}"
            number += 1
        self._names[name] = unique
        return unique

    def _send_all(self) -> None:
        """Sends what waits until the writer is closed; the body of a thread."""
        while True:
            with self._change:
                while not self._waiting and not self._is_closed:
                    self._change.wait()
                if self._is_closed:
                    return
                batch = self._first()
            metrics = []
            for waiting in batch:
                metrics += waiting.metrics
            failure = ""
            try:
                self._client.log_batch(self._sent.id, metrics=metrics, synchronous=True)
                for waiting in batch:
                    if waiting.roll_back:
                        self._client.set_tag(
                            self._sent.id, _ROLL_BACK, waiting.roll_back
                        )
            except self._mlflow.exceptions.MlflowException as e:
                failure = str(e)
            with self._change:
                # The writer may have been closed meanwhile, and another one have begun
                # to send the same rows.
                if self._is_closed:
                    return
                if failure:
                    self._pause(failure)
                else:
                    self._stored(batch)

    def _first(self) -> list[_Waiting]:
        """Returns the first of what waits, up to the size of a request."""
        batch: list[_Waiting] = []
        count = 0
        for waiting in self._waiting:
            count += len(waiting.metrics)
            if batch and count > _MOST_METRICS:
                break
            batch.append(waiting)
        return batch

    def _stored(self, batch: list[_Waiting]) -> None:
        self._failure = ""
        for waiting in batch:
            self._waiting.popleft()
            if waiting.row is not None:
                # What a note lacks is sent again, at the same time and so as the same.
                with contextlib.suppress(OSError):
                    self._sent.record(waiting.row)
        self._change.notify_all()

    def _pause(self, failure: str) -> None:
        if not self._failure:
            _say(f"MLflow does not store rows ({failure}); the run goes on.")
        self._failure = failure
        self._change.notify_all()
        self._change.wait_for(lambda: self._is_closed, _PAUSE_SECONDS)

    def write_outcome(self, outcome: writer.Outcome, /) -> None:
        """Notes how the run ended, which `close` tells the server."""
        self._outcome = outcome

    def close(self) -> None:
        """Waits until all rows are stored, and tells the server how the run ended.

        If the server does not answer, a line on stderr says so, and the next part sends
        them.
        """
        with self._change:
            failure = self._wait()
            self._is_closed = True
            self._change.notify_all()
        if not failure:
            self._thread.join()
            try:
                with _silence():
                    self._end()
            except self._mlflow.exceptions.MlflowException as e:
                failure = str(e)
        if failure:
            _say(
                f"MLflow has not stored all rows ({failure}); a resumed run sends them."
            )

    def _end(self) -> None:
        """Gives the MLflow run its status, and the tag that says why."""
        if self._outcome is None:
            self._client.set_terminated(self._sent.id)
            return
        text = self._outcome.in_words()[:_LONGEST_TAG]
        self._client.set_tag(self._sent.id, _OUTCOME, text)
        status = _STATUSES[self._outcome.kind]
        if self._outcome.goes_on:
            self._client.update_run(self._sent.id, status=status)
        else:
            self._client.set_terminated(self._sent.id, status)

    def _wait(self) -> str:
        """Waits until all rows are stored; returns why they are not."""
        while self._waiting:
            if self._failure:
                return self._failure
            count = len(self._waiting)
            self._change.wait(_LONGEST_WAIT_SECONDS)
            if len(self._waiting) == count and not self._failure:
                return f"no answer for {_LONGEST_WAIT_SECONDS} seconds"
        return ""


def _silence() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which nothing is printed: MLflow prints addresses."""
    return contextlib.redirect_stdout(io.StringIO())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def open_writer(part: writers.Part) -> writers.Writer:
    """Opens the writer 'mlflow' for a part of a run."""
    return MlflowRun(part.directory, part.config, part.history, step=part.step)


class Mlflow(hooks.Wing):
    """Brings the writer 'mlflow'."""

    name = "mlflow"
    services = types.MappingProxyType(
        {"mlflow": writers.Service(open_writer, package="mlflow")}
    )
