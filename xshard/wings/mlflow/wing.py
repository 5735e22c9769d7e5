"""A writer that logs to MLflow."""

import contextlib
import io
import math
import posixpath
import queue
import re
import threading
import time
import types
from typing import Any, NamedTuple

from xshard import config as config_lib
from xshard import errors, hooks
from xshard.metrics import rows, sent_rows, writer

# MLflow refuses larger requests, and longer names and values of parameters.
_MOST_METRICS = 1000
_MOST_PARAMS = 100
_LONGEST_NAME = 250
_LONGEST_PARAM = 6000
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
    """A metric that is to be sent.

    Attributes:
      metric: the metric.
      place: the place of its row in `SentRows`, if it is the last one of it, or None.
      tag: a tag that is sent with it, or None.
    """

    metric: Any
    place: tuple[int, ...] | None = None
    tag: Any = None


class MlflowRun(writer.Writer):
    """One MLflow run for all parts of a run.

    Its name is the work directory's name, and its parameters are the config's keys.
    MLflow finds the server and the experiment itself: MLFLOW_TRACKING_URI,
    MLFLOW_EXPERIMENT_NAME. See `SentRows` for how parts of a run share one. Samples are
    not sent.

    A thread sends the rows, in their order, until the server refuses some; the next
    part sends the rest. MLflow's own asynchronous logging keeps a process from ending
    while a server is away: each row in its queue is tried for four minutes.
    """

    package = "mlflow"

    def __init__(self, part: writer.Part):
        """Starts or resumes the MLflow run, and sends the rows that it lacks.

        The file `mlflow/xshard.json` of the work directory keeps the ID of the MLflow
        run, and the last row known to be stored.

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
            part.directory / "mlflow" / "xshard.json", goes_back=True
        )
        # Without one, the MLflow run ends as if MLflow itself ended it.
        self._outcome: writer.Outcome | None = None
        is_first = not self._sent.id
        # An earlier part that was killed has said nothing about its end.
        tags = {_OUTCOME: "runs"}
        if not is_first:
            tags[_OUTCOME] = f"runs, resumed from step {part.step}"
        try:
            # MLflow allows one active run in a process, and a run that rolls back opens
            # its writers again. So this one is only known by its ID.
            with _silence():
                run = mlflow.start_run(
                    run_id=self._sent.id or None,
                    run_name=part.directory.name,
                    tags=tags,
                    log_system_metrics=False,
                )
                mlflow.end_run("RUNNING")
            self._client = mlflow.MlflowClient()
            self._sent.id = run.info.run_id
            if is_first:
                self._log_params(part.config)
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
        # None at the end.
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        # Why no more rows are sent.
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()
        # What fails now is known when the run writes its first row.
        for row in part.rows():
            self._put(row)

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
        if self._failure is not None:
            raise self._failure
        if rows.has_numbers(row):
            self._put(row)

    def _put(self, row: rows.Row) -> None:
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
        tag = None
        if rows.kind(row) == rows.ROLL_BACK:
            # MLflow deletes no values.
            text = (
                f"before step {row['step']}: each step from there on has values from "
                "before it and, with later times, those that count"
            )
            tag = self._mlflow.entities.RunTag(_ROLL_BACK, text)
        for metric in metrics[:-1]:
            self._waiting.put(_Waiting(metric))
        for metric in metrics[-1:]:
            self._waiting.put(_Waiting(metric, self._sent.last, tag))

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
        is_end = False
        while not is_end:
            # What waits, up to the size of a request.
            batch = [self._waiting.get()]
            while len(batch) < _MOST_METRICS and not self._waiting.empty():
                batch.append(self._waiting.get())
            is_end = batch[-1] is None
            waiting = [x for x in batch if x is not None]
            try:
                self._client.log_batch(
                    self._sent.id,
                    metrics=[x.metric for x in waiting],
                    tags=[x.tag for x in waiting if x.tag is not None],
                    synchronous=True,
                )
            except Exception as e:
                self._fail(str(e))
            # The writer may have been closed meanwhile, and another one have begun to
            # send the same rows.
            if self._failure is not None:
                return
            places = [x.place for x in waiting if x.place is not None]
            if places:
                # What a note lacks is sent again, at the same time and so as the same.
                with contextlib.suppress(OSError, ValueError):
                    self._sent.record(places[-1])

    def _fail(self, why: str) -> None:
        text = f"MLflow has not stored all rows ({why}); a resumed run sends them."
        self._failure = OSError(text)

    def write_outcome(self, outcome: writer.Outcome, /) -> None:
        """Notes how the run ended, which `close` tells the server."""
        self._outcome = outcome

    def close(self) -> None:
        """Waits until all rows are stored, and tells the server how the run ended.

        Raises:
          OSError: if the server does not answer; the next part sends the rest.
        """
        self._waiting.put(None)
        while self._thread.is_alive() and self._failure is None:
            count = self._waiting.qsize()
            self._thread.join(_LONGEST_WAIT_SECONDS)
            if self._thread.is_alive() and self._waiting.qsize() == count:
                self._fail(f"no answer for {_LONGEST_WAIT_SECONDS} seconds")
        if self._failure is not None:
            raise self._failure
        with _silence():
            self._end()

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


def _silence() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which nothing is printed: MLflow prints addresses."""
    return contextlib.redirect_stdout(io.StringIO())


class Mlflow(hooks.Wing):
    """Brings the writer 'mlflow'."""

    name = "mlflow"
    writers = types.MappingProxyType({"mlflow": MlflowRun})
