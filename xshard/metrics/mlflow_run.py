"""A writer that logs to MLflow."""

import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from xshard import config as config_lib
from xshard import errors
from xshard.metrics import rows, sent_rows

# MLflow refuses larger requests, and longer values of parameters.
_MOST_METRICS = 1000
_MOST_PARAMS = 100
_LONGEST_PARAM = 6000


class MlflowRun:
    """One MLflow run for all parts of a run.

    Its name is the work directory's name, and its parameters are the config's keys.
    MLflow finds the server and the experiment itself: MLFLOW_TRACKING_URI,
    MLFLOW_EXPERIMENT_NAME. Its client sends rows in the background. See `SentRows` for
    how parts of a run share one. Samples are not sent.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        config: dict[str, Any],
        history: Callable[[], Iterator[rows.Row]],
    ):
        """Starts or resumes the MLflow run, and sends the rows that it lacks.

        Args:
          directory: the work directory. Its `mlflow/xshard.json` keeps the ID of the
            MLflow run, and the last row known to be stored.
          config: the run's config.
          history: returns the earlier rows.

        Raises:
          UserError: if no server is named, or it does not answer.
        """
        # An extra. `xshard.metrics.writers.check` has checked that it is installed.
        import mlflow

        if not mlflow.is_tracking_uri_set():
            raise errors.UserError(
                "writers has 'mlflow', but no server is named: set "
                "MLFLOW_TRACKING_URI, as in http://localhost:5000 or "
                "sqlite:////home/me/mlflow.db."
            )
        self._mlflow = mlflow
        self._sent = sent_rows.SentRows(directory / "mlflow" / "xshard.json")
        is_first = not self._sent.id
        try:
            run = mlflow.start_run(
                run_id=self._sent.id or None,
                run_name=directory.name,
                log_system_metrics=False,
            )
            # MLflow allows one active run in a process, and a run that rolls back opens
            # its writers again. So this one is only known by its ID.
            mlflow.end_run("RUNNING")
            self._client = mlflow.MlflowClient()
            self._sent.id = run.info.run_id
            if is_first:
                self._log_params(config)
        except mlflow.exceptions.MlflowException as e:
            raise errors.UserError(
                "writers has 'mlflow', but MLflow cannot start at "
                f"{mlflow.get_tracking_uri()}: {e}"
            ) from e
        # The ID is recorded now, so that it survives if this part is killed.
        self._sent.record()
        # What is being sent.
        self._operations: list[Any] = []
        for row in history():
            self.write(row)

    def _log_params(self, config: dict[str, Any]) -> None:
        params = []
        for name, value in config_lib.flatten(config).items():
            text = str(value)[:_LONGEST_PARAM]
            params.append(self._mlflow.entities.Param(name, text))
        for begin in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(
                self._sent.id, params=params[begin : begin + _MOST_PARAMS]
            )

    def write(self, row: rows.Row) -> None:
        """Sends a row of numbers, unless it has been sent."""
        if not self._sent.is_new(row):
            return
        now = int(1000 * row.get("perf/time", time.time()))
        metrics = []
        for name, value in rows.flat(row).items():
            # MLflow has no place for what is not finite.
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if is_number and name != "step":
                metrics.append(
                    self._mlflow.entities.Metric(name, value, now, row["step"])
                )
        for begin in range(0, len(metrics), _MOST_METRICS):
            operation = self._client.log_batch(
                self._sent.id,
                metrics=metrics[begin : begin + _MOST_METRICS],
                synchronous=False,
            )
            self._operations.append(operation)

    def flush(self) -> None:
        """Does nothing: MLflow's client sends the rows in the background."""

    def close(self) -> None:
        """Waits until all rows are stored.

        If some cannot be, a line on stderr says so, and the next part sends them.
        """
        try:
            for operation in self._operations:
                operation.wait()
            self._client.set_terminated(self._sent.id)
        except self._mlflow.exceptions.MlflowException as e:
            print(
                f"MLflow has not stored all rows ({e}); the same command again sends "
                "them.",
                file=sys.stderr,
                flush=True,
            )
            return
        self._sent.record()
