"""Callbacks: functions of a run's evaluations that may end the run; early stopping is one."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from xshard import errors

# A row of each evaluation so far: 'step', and the metrics by name; floats, or lists of them for several groups.
History = Sequence[Mapping[str, Any]]
Callback = Callable[[History], str | None]
# How long the other processes wait for what process 0's callbacks do.
SECONDS = 1800.0


@dataclasses.dataclass(frozen=True)
class _EarlyStopping:
    metric: str
    patience: int
    mode: str
    min_delta: float

    def __call__(self, history: History) -> str | None:
        best, best_step, since = math.nan, 0, 0
        for row in history:
            if self.metric not in row:
                continue
            value = row[self.metric]
            if isinstance(value, list):
                raise errors.UserError(_of_groups(self.metric))
            gain = best - value if self.mode == "min" else value - best
            is_first = math.isnan(best) and not math.isnan(value)
            if is_first or gain > self.min_delta:
                best, best_step, since = value, row["step"], 0
            else:
                since += 1
        if since < self.patience:
            return None
        return (
            f"{self.metric} has not improved in {since} evaluations: {best:.4g} at step {best_step}"
        )


def early_stopping(
    metric: str, patience: int = 5, mode: str = "min", min_delta: float = 0.0
) -> Callback:
    """Makes a callback that ends a run when a metric of the evaluation improves no more.

    Source: Prechelt, "Early Stopping - But When?", 1998; the arguments are those of Keras.

    Args:
      metric: its name, such as 'loss' or 'test/accuracy'. With several groups it must be one of all of them together,
        such as 'ensemble/loss'.
      patience: so many evaluations in a row without an improvement end the run.
      mode: 'min' where less is better, or 'max'.
      min_delta: what is less of a gain is no improvement.

    Raises:
      UserError: for an argument other than these.

    >>> stops = early_stopping('loss', patience=2)
    >>> losses = [3.0, 1.0, 2.0, 1.5]
    >>> stops([{'step': 100 * n, 'loss': loss} for n, loss in enumerate(losses)])
    'loss has not improved in 2 evaluations: 1 at step 100'
    """
    if not isinstance(metric, str) or not metric:
        raise errors.UserError(
            f"early_stopping received metric={metric!r}; it must be the name of a metric of the evaluation, as 'loss'."
        )
    if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
        raise errors.UserError(f"patience={patience!r} must be an integer of at least 1.")
    if mode not in ("min", "max"):
        raise errors.UserError(f"mode={mode!r} must be 'min' or 'max'.")
    if not isinstance(min_delta, int | float) or not 0 <= min_delta < math.inf:
        raise errors.UserError(f"min_delta={min_delta!r} must be a number of at least 0.")
    return _EarlyStopping(metric, patience, mode, min_delta)


def _check(where: str, returned: Any, metrics: Mapping[str, bool] | None) -> None:
    if not isinstance(returned, Sequence) or not all(map(callable, returned)):
        raise errors.UserError(
            f"{where} returned {returned!r}. It must return a list of functions of the evaluations so far: "
            "return [xshard.early_stopping('loss')]."
        )
    for callback in returned:
        metric = callback.metric if isinstance(callback, _EarlyStopping) else None
        if metric is None or metrics is None:
            continue
        if metric not in metrics:
            raise errors.UserError(
                f"early_stopping({metric!r}) of {where} must go by a metric of the evaluation: "
                f"{', '.join(sorted(metrics))}."
            )
        if metrics[metric]:
            raise errors.UserError(_of_groups(metric))


def _of_groups(metric: str) -> str:
    return (
        f"early_stopping({metric!r}) goes by one number, and there is one for each of several groups, which train "
        f"and end together. Give 'ensemble/{metric}', which is of all of them; or a function of your own, which sees "
        "the list."
    )


class Evaluations:
    """The evaluations of a run so far, and what its callbacks say of them.

    They are kept, and the callbacks are called, on process 0; what these say counts on all processes.

    Attributes:
      end: why the run is to end; empty while it is to go on.
    """

    def __init__(
        self,
        method: Callable[[], Sequence[Callback]],
        metrics: Mapping[str, bool] | None,
        meet: Callable[[str], Sequence[str]],
    ):
        """Begins without any.

        Args:
          method: an experiment's, which returns its callbacks.
          metrics: the names of the evaluation's metrics, and whether each is a list of groups; None if not known.
          meet: takes what a process has to say, and returns what each has said, that of process 0 first.

        Raises:
          UserError: if they are no functions, or go by a metric that there is not.
        """
        callbacks = method()
        where = f"{getattr(method, '__qualname__', method)} ({errors.place_of(method)})"
        _check(where, callbacks, metrics)
        self._callbacks = callbacks
        self._meet = meet
        self._rows: list[Mapping[str, Any]] = []
        self.end = ""

    def begin(self, rows: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Takes those of earlier parts of the run, which `rows` reads on process 0, and decides."""
        if self._callbacks:
            self._rows = list(rows()) if jax.process_index() == 0 else []
            self._decide()

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes one more, and decides."""
        if self._callbacks:
            self._rows.append({"step": step, **{k: _as_read(x) for k, x in metrics.items()}})
            self._decide()

    def _decide(self) -> None:
        reasons = []
        # A bug in a callback is process 0's, whose end the others hear of.
        if jax.process_index() == 0 and self._rows:
            # Each has the rows for itself.
            reasons = [
                _called(callback, [dict(row) for row in self._rows]) for callback in self._callbacks
            ]
        self.end = self._meet(next(filter(None, reasons), ""))[0]


def _called(callback: Callback, history: History) -> str:
    reason: Any = callback(history)
    if reason is None or (isinstance(reason, str) and reason):
        return reason or ""
    raise errors.UserError(
        f"The callback {getattr(callback, '__qualname__', callback)!r} returned {reason!r}. It must return None, and "
        "the run goes on, or say in a text why the run ends."
    )


def _as_read(value: Any) -> Any:
    """A metric as a row that is read again has it: of what is not finite a file has no more than that."""
    if isinstance(value, list):
        return [_as_read(number) for number in value]
    return value if math.isfinite(value) else math.nan
