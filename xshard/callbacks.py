"""Functions of a run's evaluations that may end the run, such as early stopping."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xshard import errors
from xshard.base import user_code

# One row per evaluation so far: 'step' and the metrics by name, as floats, or lists of
# floats with several groups.
History = Sequence[Mapping[str, Any]]
Callback = Callable[[History], str | None]
# How long the other processes wait for process 0's callbacks, which may be slow.
SECONDS = 1800.0


@dataclasses.dataclass(frozen=True)
class _EarlyStopping:
    metric: str
    patience: int
    mode: str
    min_delta: float

    def __call__(self, history: History) -> str | None:
        best = math.nan
        best_step = 0
        # The number of evaluations since the best one.
        since = 0
        for row in history:
            if self.metric not in row:
                continue
            value = row[self.metric]
            if isinstance(value, list):
                raise errors.UserError(_of_groups(self.metric))
            gain = value - best
            if self.mode == "min":
                gain = best - value
            # A comparison with nan is never an improvement, so the first number needs a
            # rule of its own.
            is_first = math.isnan(best) and not math.isnan(value)
            if is_first or gain > self.min_delta:
                best = value
                best_step = row["step"]
                since = 0
            else:
                since += 1
        if since < self.patience:
            return None
        return (
            f"{self.metric} has not improved in {since} evaluations: {best:.4g} at "
            f"step {best_step}"
        )


def early_stopping(
    metric: str, patience: int = 5, mode: str = "min", min_delta: float = 0.0
) -> Callback:
    """Returns a callback that ends a run when an evaluation metric stops improving.

    Source: Prechelt, "Early Stopping - But When?", 1998; the arguments are the same as
    Keras's.

    Args:
      metric: the metric's name, such as 'loss' or 'test/accuracy'. With several groups
        it must be one number for all of them, such as 'ensemble/loss'.
      patience: the number of consecutive evaluations without an improvement that ends
        the run.
      mode: 'min' if smaller is better, or 'max'.
      min_delta: the improvement that a value must exceed to count.

    Raises:
      UserError: if an argument is invalid.

    >>> stops = early_stopping('loss', patience=2)
    >>> losses = [3.0, 1.0, 2.0, 1.5]
    >>> stops([{'step': 100 * n, 'loss': loss} for n, loss in enumerate(losses)])
    'loss has not improved in 2 evaluations: 1 at step 100'
    """
    if not isinstance(metric, str) or not metric:
        raise errors.UserError(
            f"early_stopping received metric={metric!r}; it must be the name of a "
            "metric of the evaluation, as 'loss'."
        )
    if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
        raise errors.UserError(
            f"patience={patience!r} must be an integer of at least 1."
        )
    if mode not in ("min", "max"):
        raise errors.UserError(f"mode={mode!r} must be 'min' or 'max'.")
    is_number = isinstance(min_delta, int | float) and not isinstance(min_delta, bool)
    if not is_number or not 0 <= min_delta < math.inf:
        raise errors.UserError(
            f"min_delta={min_delta!r} must be a number of at least 0."
        )
    return _EarlyStopping(metric, patience, mode, min_delta)


def _check(where: str, returned: Any, metrics: Mapping[str, bool] | None) -> None:
    """Raises UserError unless callbacks are functions, of metrics that there are."""
    if not isinstance(returned, Sequence) or not all(map(callable, returned)):
        raise errors.UserError(
            f"{where} returned {returned!r}. It must return a list of functions of the "
            "evaluations so far: return [xshard.early_stopping('loss')]."
        )
    if metrics is None:
        return
    for callback in returned:
        if not isinstance(callback, _EarlyStopping):
            continue
        metric = callback.metric
        if metric not in metrics:
            raise errors.UserError(
                f"early_stopping({metric!r}) of {where} must name a metric of the "
                f"evaluation: {', '.join(sorted(metrics))}."
            )
        if metrics[metric]:
            raise errors.UserError(_of_groups(metric))


def _of_groups(metric: str) -> str:
    return (
        f"early_stopping({metric!r}) needs one number, but this metric has one for "
        f"each group, and groups train and end together. Give 'ensemble/{metric}', one "
        "number for all groups; or write your own callback, which receives the list."
    )


class Evaluations:
    """The evaluations of a run so far, and the decisions of its callbacks.

    One process calls the callbacks; their decision applies to all processes.

    Attributes:
      end: the reason to end the run; empty while it continues.
    """

    def __init__(
        self,
        method: Callable[[], Sequence[Callback]],
        metrics: Mapping[str, bool] | None,
        decide: Callable[[Callable[[], str]], str],
        *,
        may_decide: bool = True,
    ):
        """Creates and checks the callbacks; there are no evaluations yet.

        Args:
          method: `Experiment.callbacks` of an experiment.
          metrics: the names of the metrics, and whether each is a list with a value per
            group; None if unknown.
          decide: runs an action on one process, and returns its result on all.
          may_decide: whether this process may be that one.

        Raises:
          UserError: if a callback is not a function, or uses a metric that does not
            exist.
        """
        callbacks = method()
        name = getattr(method, "__qualname__", method)
        where = f"{name} ({user_code.definition_location(method)})"
        _check(where, callbacks, metrics)
        self._callbacks = callbacks
        self._decided = decide
        self._may_decide = may_decide
        self._rows: list[Mapping[str, Any]] = []
        self.end = ""

    def begin(self, rows: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Loads the evaluations of the run so far, and calls the callbacks.

        Args:
          rows: reads the evaluations; called only if this process may decide.
        """
        if not self._callbacks:
            return
        self._rows = []
        if self._may_decide:
            self._rows = list(rows())
        self.end = self._decided(self._decision)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds an evaluation, and calls the callbacks."""
        if not self._callbacks:
            return
        row = {name: _as_read(value) for name, value in metrics.items()}
        self._rows.append({"step": step, **row})
        self.end = self._decided(self._decision)

    def _decision(self) -> str:
        """Returns what the callbacks of this process decide."""
        end = ""
        if self._rows:
            for callback in self._callbacks:
                # Each callback gets copies, so that it cannot change the rows for the
                # next one. All are called, and the first reason counts.
                reason = _call(callback, [dict(row) for row in self._rows])
                end = end or reason
        return end


def _call(callback: Callback, history: History) -> str:
    """Calls a callback; returns its reason to end the run, empty if it gives none."""
    reason: Any = callback(history)
    if reason is None or (isinstance(reason, str) and reason):
        return reason or ""
    raise errors.UserError(
        f"The callback {getattr(callback, '__qualname__', callback)!r} returned "
        f"{reason!r}. It must return None to continue, or a text with the reason to "
        "end the run."
    )


def _as_read(value: Any) -> Any:
    """Returns a metric as it would be read back from its row.

    So callbacks see the same values in a run that was resumed.
    """
    if isinstance(value, list):
        return [_as_read(number) for number in value]
    # A row has null in place of infinities and NaN.
    return value if math.isfinite(value) else math.nan
