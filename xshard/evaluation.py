"""Evaluation of a state: metrics over all evaluation examples, and samples."""

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_collections
import numpy as np

from xshard import data, errors, logical, samples, step, validation
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.data import batches
from xshard.metrics import deferred
from xshard.pod import processes
from xshard.stored import replica_state as stored

# The name prefixes of sums that come from averaged parameters, and from all groups
# together.
_ENSEMBLE = "ensemble/"
_KINDS = ("", "average/", _ENSEMBLE)


class Evaluation:
    """Evaluates states of an experiment."""

    def __init__(
        self,
        experiment: experiment_lib.Experiment,
        mesh: jax.sharding.Mesh,
        batch_size: int,
    ):
        """Checks the batch size and the examples.

        Args:
          experiment: the experiment.
          mesh: the run's mesh.
          batch_size: the number of examples per batch.

        Raises:
          ValueError: if there are no examples, or the replicas do not divide the batch.
        """
        self._experiment = experiment
        self._splits = experiment_lib.checked_eval_data(experiment)
        replicas = logical.of_config(experiment.config, mesh)
        self._batches = {
            split: batches.EvalBatches(examples, mesh, batch_size, replicas)
            for split, examples in self._splits.items()
        }
        self._on = logical.mesh_of(experiment.config, mesh)
        self._jitted = _jitted(experiment, mesh, replicas)
        self._step = processes.compiled_by_all(self._jitted, "the evaluation")

    def summary(self) -> str:
        """Returns a summary of the data, which the processes compare."""
        texts = []
        for name, examples in self._splits.items():
            prefix = f"{name}: " if name else ""
            texts.append(prefix + data.summary(examples))
        return "; ".join(texts)

    def check(
        self, state: state_lib.TrainState, options: ml_collections.ConfigDict
    ) -> dict[str, bool] | None:
        """Traces the evaluation.

        Args:
          state: the shapes of a state.
          options: `config.checkpoint`; its `best_metric` must be one of the metrics if
            best checkpoints are kept.

        Returns:
          The names of the metrics, and whether each is a list with a value per group;
          None if they are unknown.

        Raises:
          UserError: if the experiment's methods do not fit, or no metric is called
            `best_metric`.
        """
        totals = {}
        for split, of_split in self._batches.items():
            traced = self._jitted.trace(state, of_split.shapes(), np.int32(0))
            stored.check_unread(
                self._experiment.eval_step, traced.jaxpr, state, self._on
            )
            sums = traced.out_info
            # Zeros stand in for the sums, since only `summarize` determines the names
            # of the metrics.
            totals[split] = {name: np.zeros(x.shape) for name, x in sums.items()}
            totals[split]["count"] = np.ones(sums["count"].shape)
        names: dict[str, bool] = {}
        try:
            with np.errstate(all="ignore"):
                for split in totals:
                    results = self._results(split, totals[split])
                    names |= {
                        name: isinstance(value, list) for name, value in results.items()
                    }
        except errors.UserError:
            raise
        except (ArithmeticError, ValueError):
            # The sums here are all zeros, and `summarize` may fail on them, for example
            # by dividing by one of them. Then the names stay unknown until the first
            # evaluation.
            return None
        if options.keep_best and options.best_metric not in names:
            raise errors.UserError(
                f"checkpoint.best_metric={options.best_metric!r} must be a metric of the evaluation: "
                f"{', '.join(sorted(names))}."
            )
        return names

    def __call__(
        self, state: state_lib.TrainState, go_on: Callable[[], bool] = lambda: True
    ) -> dict[str, Any] | None:
        """Evaluates a state on all examples.

        Args:
          state: the state.
          go_on: returns whether to continue, after each batch; the same on all
            processes.

        Returns:
          The metrics by name, as lists if there are several groups; None if `go_on`
          returned False.
        """
        results: dict[str, Any] = {}
        for split, of_split in self._batches.items():
            totals: dict[str, np.ndarray] = {}
            pending: collections.deque[dict[str, jax.Array]] = collections.deque()
            for number, batch in enumerate(of_split):
                sums = self._step(state, batch, np.int32(number))
                deferred.to_host(sums.values())
                pending.append(sums)
                # As in training, later batches keep the devices busy while the host
                # reads the sums of earlier ones.
                if len(pending) > deferred.IN_FLIGHT:
                    _add(totals, pending.popleft())
                if not go_on():
                    return None
            for sums in pending:
                _add(totals, sums)
            results |= self._results(split, totals)
        return results

    def _results(self, split: str, totals: dict[str, np.ndarray]) -> dict[str, Any]:
        """Summarizes the sums over a split: for each group, for the averages of
        parameters and for the ensemble.
        """
        count = totals.pop("count")
        prefix = f"{split}/" if split else ""
        results: dict[str, Any] = {}
        for kind in _KINDS:
            sums = {
                name.removeprefix(kind): x
                for name, x in totals.items()
                if _kind(name) == kind
            }
            if not sums:
                continue
            values: dict[str, Any] = {}
            if count.ndim and kind != _ENSEMBLE:
                for group in range(len(count)):
                    of_group = {name: x[group] for name, x in sums.items()}
                    for name, value in self._summary(of_group, count[group]).items():
                        values.setdefault(name, []).append(value)
            else:
                # An ensemble's sums are equal in all groups, and so are the counts.
                values |= self._summary(sums, count.max())
            results |= {
                f"{prefix}{kind}{name}": value for name, value in values.items()
            }
        return results

    def _summary(self, sums: dict[str, np.ndarray], count: Any) -> dict[str, float]:
        summarize = self._experiment.summarize
        return validation.summary(
            validation.describe_method(summarize), summarize(sums, float(count))
        )


def _add(totals: dict[str, np.ndarray], sums: Mapping[str, jax.Array]) -> None:
    """Adds the sums over a batch to those over the batches before."""
    # Summed in float64, since float32 would lose digits over many batches.
    for name, value in sums.items():
        totals[name] = totals.get(name, np.float64(0)) + np.asarray(value).astype(
            np.float64
        )


def _jitted(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    replicas: logical.Replicas | None,
) -> Any:
    """Returns `step.make_eval_step`, jitted. Its sums are replicated, so that each
    process has the sums of all groups.
    """
    everywhere = mesh_lib.sharding(mesh)
    if replicas is None:
        return jax.jit(step.make_eval_step(experiment, mesh), out_shardings=everywhere)
    mapped = lambda state, *_: step.evaluation_of_replica(
        experiment, replicas.mesh, state
    )
    return logical.Program(
        validation.describe_method(experiment.eval_step),
        mapped,
        replicas,
        out_shardings=everywhere,
    )


def _kind(name: str) -> str:
    kind = name.partition("/")[0] + "/"
    return kind if kind in _KINDS else ""


def sample(
    experiment: experiment_lib.Experiment,
    predict: Callable[[state_lib.TrainState, Mapping[str, Any]], Any],
    step: int,
    state: state_lib.TrainState,
) -> tuple[dict[str, Any], str]:
    """Samples the state after a step. Returns the row to log and a text to print; all
    processes must call it.

    Args:
      experiment: the experiment, whose `samples` is called.
      predict: the function that `predictions` returns.
      step: the number of the step.
      state: the state after that step.
    """
    where = validation.describe_method(experiment.samples)
    key = experiment_lib.samples_key(experiment)
    named = samples.named(
        where, experiment.samples(functools.partial(predict, state), key)
    )
    return samples.row(where, step, named), samples.text(named)


def predictions(jitted: Any, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """Returns the function that takes a state, a batch on the host and, if any, a key
    to the predictions on the host.

    Args:
      jitted: the jitted function of `xshard.step.make_predict`, with replicated
        outputs, so that each process has all.
      mesh: the run's mesh.
    """
    outputs = processes.compiled_by_all(jitted, "the prediction")

    def predict(
        state: state_lib.TrainState,
        batch: Mapping[str, Any],
        key: jax.Array | None = None,
    ) -> Any:
        args = [state, mesh_lib.put_whole(mesh, batch)]
        if key is not None:
            args.append(jax.device_put(key, mesh_lib.sharding(mesh)))
        return jax.device_get(outputs(*args))

    return predict
